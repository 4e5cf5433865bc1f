// Random bits by position: which elements of a tensor a dropout keeps.
//
// Words: a tensor's *whole* is what one process would have; a *box* is the part of it that this rank has, a
// position in the box has a *number*, its row-major index in the whole. Element number g is kept when word
// g mod 4 of Philox4x32-10 with counter g div 4 (64 bits, the upper 64 are zero) and key `seed` is at least
// `threshold`, probability times 2^32. So a mask is a function of seed and numbers: it does not depend on how
// the whole is cut, nor on the order of calls, threads or instruction set. pycomm/tensor_parallel/philox.py
// gives the same bits with torch's operations on any device.
//
// Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Cost: 10 rounds of two
// multiplications for four elements, 16 to 64 elements at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace pycomm {

inline constexpr uint64_t kAllThreshold = uint64_t{1} << 32;  // nothing is kept

// keep: one byte, 0 or 1, for each element of the box, in row-major order. `sizes` of the box and `strides`
// in the whole have a dimension each; the last stride is 1. `first` is the number of the box's first element.
void keep_mask(uint8_t* keep, std::span<const uint64_t> sizes, std::span<const uint64_t> strides,
               uint64_t first, uint64_t seed, uint64_t threshold);

}  // namespace pycomm
