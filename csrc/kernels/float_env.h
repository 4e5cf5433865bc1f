// FloatEnv: the floating-point environment in which a kernel runs, restored at the end of the scope.
//
// Round to nearest even, no flush-to-zero, no denormals-are-zero, all traps masked; a caller may have changed
// any of them (torch.set_flush_denormal(True), a game engine, a debugger), and the result of a reduction must
// not depend on that. Reading the control register costs a nanosecond, writing it about five, so it is
// written only when it differs. Only loads, stores and calls are kept on the right side of it: a kernel must
// be a separate function (not inlined), or take its operands from memory.
#pragma once

#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace pycomm {
namespace {

#if defined(__x86_64__)

class FloatEnv {
 public:
  FloatEnv() {
    asm volatile("stmxcsr %0" : "=m"(saved_) : : "memory");
    if ((saved_ & kControl) != kWanted) [[unlikely]] {
      const uint32_t wanted = (saved_ & ~kControl) | kWanted;
      asm volatile("ldmxcsr %0" : : "m"(wanted) : "memory");
    }
  }
  ~FloatEnv() {
    if ((saved_ & kControl) != kWanted) [[unlikely]] {
      asm volatile("ldmxcsr %0" : : "m"(saved_) : "memory");
    }
  }
  FloatEnv(const FloatEnv&) = delete;
  FloatEnv& operator=(const FloatEnv&) = delete;

 private:
  static constexpr uint32_t kControl = 0xffc0;  // FTZ, rounding, the six masks, DAZ; not the sticky flags
  static constexpr uint32_t kWanted = 0x1f80;   // the six masks
  uint32_t saved_;
};

#elif defined(__aarch64__)

class FloatEnv {
 public:
  FloatEnv() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_) : : "memory");
    if (saved_ & kControl) [[unlikely]] {
      asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kControl) : "memory");
    }
  }
  ~FloatEnv() {
    if (saved_ & kControl) [[unlikely]] {
      asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory");
    }
  }
  FloatEnv(const FloatEnv&) = delete;
  FloatEnv& operator=(const FloatEnv&) = delete;

 private:
  // FIZ, AH, NEP (0-2), the traps (8-12, 15), FZ16 (19), rounding mode (22-23), FZ (24)
  static constexpr uint64_t kControl = 0x7 | (0x9full << 8) | (1ull << 19) | (3ull << 22) | (1ull << 24);
  uint64_t saved_;
};

#else

class FloatEnv {  // rounding only: the C library has no word for flush-to-zero
 public:
  FloatEnv() : saved_(std::fegetround()) {
    if (saved_ != FE_TONEAREST) std::fesetround(FE_TONEAREST);
  }
  ~FloatEnv() {
    if (saved_ != FE_TONEAREST) std::fesetround(saved_);
  }
  FloatEnv(const FloatEnv&) = delete;
  FloatEnv& operator=(const FloatEnv&) = delete;

 private:
  int saved_;
};

#endif

// Makes the compiler forget what it knows of v, so that arithmetic on v happens after the environment is set.
inline double opaque(double v) {
  asm volatile("" : "+m"(v) : : "memory");
  return v;
}

}  // namespace
}  // namespace pycomm
