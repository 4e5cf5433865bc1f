// The kernels for the compiler's default target: SSE2 on x86-64, NEON on arm64.
#define PYCOMM_ISA_NS baseline
#include "kernels/table_body.h"

namespace pycomm {
constexpr KernelTable kBaselineTable = baseline::make_table("baseline");
}
