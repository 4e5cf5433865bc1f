// The arithmetic of the loopback's reductions: as NCCL's, rounded to the element type at every step.
//
// Ranks are added in their order, on all ranks alike. avg multiplies by 1/n first for floats, and divides the
// sum for integers; pre-mul-sum multiplies by its factor first. Operations wrap for integers; min and max of
// floats are those of C's comparison, which says nothing about NaN.
#pragma once

#include <cstddef>

#include "transport/cuda/nccl_api.h"

namespace loopback {

namespace nccl = pycomm::nccl;

// A reduction, ready to run: op is one of the built-in ones, or kSum after a factor.
struct Reduction {
  nccl::RedOp op = nccl::kSum;
  bool has_factor = false;
  double factor = 1;  // exactly a number of the type
};

double read_scalar(const void* p, nccl::DataType type);
// dst = src, times the factor where there is one (avg of floats has 1/n); gives the reduction that is left.
Reduction begin(void* dst, const void* src, size_t count, nccl::DataType type, const Reduction& r,
                int n_ranks);
// acc = acc (op) x.
void add(void* acc, const void* x, size_t count, nccl::DataType type, const Reduction& r);
// avg of integers divides here.
void finish(void* acc, size_t count, nccl::DataType type, const Reduction& r, int n_ranks);

}  // namespace loopback
