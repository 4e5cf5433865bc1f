#include "kernels/random.h"

#include <array>

#include "kernels/isa.h"

namespace pycomm {

void keep_mask(uint8_t* keep, std::span<const uint64_t> sizes, std::span<const uint64_t> strides,
               uint64_t first, uint64_t seed, uint64_t threshold) {
  const auto keep_run = active_table()->keep_run;
  if (sizes.empty()) return keep_run(keep, first, 1, seed, threshold);
  uint64_t n_rows = 1;
  for (size_t d = 0; d + 1 < sizes.size(); ++d) n_rows *= sizes[d];
  const size_t n = sizes.back();
  for (uint64_t row = 0; row < n_rows; ++row) {
    uint64_t number = first, rest = row;
    for (size_t d = sizes.size() - 1; d-- > 0; rest /= sizes[d]) number += rest % sizes[d] * strides[d];
    keep_run(keep + row * n, number, n, seed, threshold);
  }
}

}  // namespace pycomm
