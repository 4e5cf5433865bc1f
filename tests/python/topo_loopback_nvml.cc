// A libnvidia-ml.so.1 of machines that are not here, for tests/python/test_topo_nvml.py: what NVML answers is
// written down below, so that the calls of pycomm.topology_nvml, their arguments, their struct layouts and
// their errors are those that go through the real nvidia-ml-py.
//
// The environment variable LOOPBACK_NVML names the machine:
//   dgx       8 GPUs, each with 18 NVLinks to switches; one link of GPU 7 is down
//   mesh      4 GPUs, 4 NVLinks between any two, straight; one of those between GPU 0 and GPU 1 is down
//   pcie      4 GPUs without NVLink, two below each of two processors; some questions are not supported
//   lost      2 GPUs, of which the second has no handle
//   empty     the driver without a device
//   unloaded  nvmlInit fails, as where the kernel has no driver
//
// Layouts and numbers: NVML API Reference (nvmlPciInfo_t, nvmlMemory_t, nvmlReturn_t, nvmlGpuTopologyLevel_t
// …).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kSuccess = 0, kInvalid = 2, kNotSupported = 3, kDriverNotLoaded = 9, kLost = 15;
constexpr unsigned kToGpu = 0, kToSwitch = 2;

struct PciInfo {
  char bus_id_legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

struct Memory {
  unsigned long long total, free, used;
};

struct Gpu {
  unsigned index;
};
Gpu gpus[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

std::string box() {
  const char* name = std::getenv("LOOPBACK_NVML");
  return name != nullptr ? name : "";
}

unsigned count() {
  const std::string b = box();
  return b == "dgx" ? 8 : b == "lost" ? 2 : b == "empty" ? 0 : 4;
}

void fill(PciInfo* pci, unsigned index) {
  std::memset(pci, 0, sizeof *pci);
  pci->bus = 0x10 + index;
  std::snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "0000:%02X:00.0", pci->bus);
  std::snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
}

// The GPU at the other end in the mesh: links 0-3 to the first of the other three, 4-7 to the second …
unsigned far_in_mesh(unsigned from, unsigned link) {
  const unsigned nth = link / 4;
  return nth < from ? nth : nth + 1;
}

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) { return box() == "unloaded" ? kDriverNotLoaded : kSuccess; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int code) {
  return code == kNotSupported ? "Not Supported" : code == kLost ? "GPU is lost" : "another error";
}

int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  std::snprintf(text, length, "580.65.06");
  return kSuccess;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13010;
  return kSuccess;
}
int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = count();
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
  if (index >= count()) return kInvalid;
  if (box() == "lost" && index == 1) return kLost;
  *gpu = &gpus[index];
  return kSuccess;
}

int nvmlDeviceGetName(Gpu*, char* text, unsigned length) {
  std::snprintf(text, length, "Loopback GPU");
  return kSuccess;
}
int nvmlDeviceGetUUID(Gpu* gpu, char* text, unsigned length) {
  std::snprintf(text, length, "GPU-0000000%u-1111-2222-3333-444444444444", gpu->index);
  return kSuccess;
}
int nvmlDeviceGetPciInfo_v3(Gpu* gpu, PciInfo* pci) {
  fill(pci, gpu->index);
  return kSuccess;
}
int nvmlDeviceGetMemoryInfo(Gpu* gpu, Memory* memory) {
  if (box() == "pcie" && gpu->index >= 2) return kNotSupported;
  *memory = {80ull << 30, 0, 0};
  return kSuccess;
}
int nvmlDeviceGetCudaComputeCapability(Gpu*, int* major, int* minor) {
  *major = 9, *minor = 0;
  return kSuccess;
}

int nvmlDeviceGetTopologyCommonAncestor(Gpu* a, Gpu* b, int* level) {
  if (a == b) return kInvalid;
  *level = a->index / 2 != b->index / 2 ? 50 : a->index < 2 ? 10 : 30;  // SYSTEM, SINGLE, HOSTBRIDGE
  return kSuccess;
}
int nvmlDeviceGetP2PStatus(Gpu* a, Gpu* b, int index, int* status) {
  if (index != 0 && index != 1) return kInvalid;
  const bool apart = box() == "pcie" && a->index / 2 != b->index / 2;
  if (apart && a->index == 3) return kNotSupported;
  *status = !apart ? 0 : index == 1 && a->index == 2 ? 5 : 3;  // OK, NOT_SUPPORTED, IOH_TOPOLOGY
  return kSuccess;
}

int nvmlDeviceGetNvLinkState(Gpu* gpu, unsigned link, unsigned* active) {
  if (link >= (box() == "mesh" ? 12u : 18u)) return kInvalid;
  if (box() == "pcie" || box() == "lost") return kNotSupported;
  const bool down = box() == "mesh" ? gpu->index < 2 && link == 3 : gpu->index == 7 && link == 17;
  *active = down ? 0 : 1;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Gpu*, unsigned, unsigned* type) {
  *type = box() == "mesh" ? kToGpu : kToSwitch;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu* gpu, unsigned link, PciInfo* pci) {
  fill(pci, far_in_mesh(gpu->index, link));
  return kSuccess;
}

}  // extern "C"
