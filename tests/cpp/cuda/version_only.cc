// A libnccl.so.2 that says its version and has nothing else, for nccl_library_test.cc.
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 21903;
  return 0;
}
