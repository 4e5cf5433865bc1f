// What the fuzz targets share: the input as a stream of choices, and a check that ends the run.
//
// A *target* is one file with LLVMFuzzerTestOneInput; its kept inputs lie in corpus/<target>. `make fuzz`
// builds and runs them all, with AddressSanitizer and UndefinedBehaviorSanitizer. Besides the sanitizers'
// findings, FUZZ_CHECK finds what must not be: a stranger let in, a broken record delivered.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define FUZZ_CHECK(condition)                                                      \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

namespace pycomm {

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t n_bytes) : data_(data), n_left_(n_bytes) {}
  bool empty() const { return n_left_ == 0; }
  size_t n_left() const { return n_left_; }
  // The next byte; 0 at the end.
  uint8_t byte() {
    if (n_left_ == 0) return 0;
    n_left_--;
    return *data_++;
  }
  // Up to n_bytes of the next ones into `to`.
  size_t bytes(uint8_t* to, size_t n_bytes) {
    const size_t n = std::min(n_bytes, n_left_);
    if (n > 0) std::memcpy(to, data_, n);
    data_ += n;
    n_left_ -= n;
    return n;
  }

 private:
  const uint8_t* data_;
  size_t n_left_;
};

}  // namespace pycomm
