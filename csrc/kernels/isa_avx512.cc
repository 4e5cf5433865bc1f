// The kernels for AVX-512 F, BW, VL and DQ (Skylake-SP, Zen 4 and later); empty elsewhere than on x86-64.
#if defined(__x86_64__)
#define PYCOMM_ISA_NS avx512
#include "kernels/table_body.h"

static_assert(pycomm::avx512::kVecBytes == 64, "isa.cmake must compile this file with AVX-512 F, BW, VL, DQ");

namespace pycomm {
constexpr KernelTable kAvx512Table = avx512::make_table("avx512");
}
#endif
