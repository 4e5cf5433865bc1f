# Kernel sources are compiled once per instruction set. -O3 for their unrolled loops, also when the rest of a
# build is slower; under a sanitizer the compiler's choice stands. No FMA anywhere: a fused multiply-add rounds
# once where the number contract (docs/numerics.md) rounds twice.
set(kernel_flags -ffp-contract=off -fno-exceptions -Wno-psabi)
if(NOT PYCOMM_SANITIZE)
  list(APPEND kernel_flags -O3)
endif()
set_source_files_properties(csrc/kernels/isa_baseline.cc PROPERTIES COMPILE_OPTIONS "${kernel_flags}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set_source_files_properties(csrc/kernels/isa_avx2.cc PROPERTIES
    COMPILE_OPTIONS "${kernel_flags};-mavx2;-mf16c;-mno-fma")
  set_source_files_properties(csrc/kernels/isa_avx512.cc PROPERTIES
    COMPILE_OPTIONS "${kernel_flags};-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mf16c;-mprefer-vector-width=512")
endif()
