// DeviceBuffer: device memory in tests, filled from the host and read back after the device is idle.
#pragma once

#include <cstdlib>
#include <vector>

#include "cuda_runtime_api.h"

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(const std::vector<T>& values) : n_(values.size()) {
    if (cudaMalloc(reinterpret_cast<void**>(&p_), n_ * sizeof(T)) != cudaSuccess) std::abort();
    set(values);
  }
  DeviceBuffer(size_t n, T value) : DeviceBuffer(std::vector<T>(n, value)) {}
  ~DeviceBuffer() {
    if (cudaFree(p_) != cudaSuccess) std::abort();
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return p_; }
  size_t size() const { return n_; }
  void set(const std::vector<T>& values) {
    if (cudaMemcpy(p_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) std::abort();
  }
  std::vector<T> get() const {
    std::vector<T> out(n_);
    if (cudaDeviceSynchronize() != cudaSuccess ||
        cudaMemcpy(out.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost) != cudaSuccess) {
      std::abort();
    }
    return out;
  }

 private:
  T* p_ = nullptr;
  size_t n_;
};
