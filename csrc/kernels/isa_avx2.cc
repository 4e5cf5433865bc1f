// The kernels for AVX2 with F16C (Haswell, Zen and later); empty elsewhere than on x86-64.
#if defined(__x86_64__)
#define PYCOMM_ISA_NS avx2
#include "kernels/table_body.h"

static_assert(pycomm::avx2::kVecBytes == 32, "isa.cmake must compile this file with AVX2 and F16C");

namespace pycomm {
constexpr KernelTable kAvx2Table = avx2::make_table("avx2");
}
#endif
