// Fiber: a stack and a saved register set; the CUDA threads of one block take turns on one OS thread.
//
// switch_to() is the only scheduling there is: it saves the running fiber, continues another and returns when
// somebody switches back. A Fiber that never ran is prepared with an entry; the OS thread's own stack is a
// Fiber without one. AddressSanitizer is told of every change of stack. ThreadSanitizer takes each fiber for
// a thread and a switch for no synchronisation, so that it sees a missing barrier as a race. This file and
// block.cc are compiled without ThreadSanitizer's instrumentation (they are its scheduler): no standard
// container in them, since the linker may pick the instrumented copy of a template.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#define CUDA_ON_CPU_UCONTEXT 1
#endif
#if defined(CUDA_ON_CPU_UCONTEXT)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

class Fiber {
 public:
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber calls entry() on the given stack; entry never returns (finish_to).
  void prepare(char* stack, size_t n_bytes, void (*entry)());
  // Makes this the fiber of the calling OS thread's own stack.
  void adopt_os_thread();
  // To be called first thing in entry: tells the sanitizer that the switch has happened.
  static void arrived(Fiber& os_thread);

  void switch_to(Fiber& next);
  [[noreturn]] void finish_to(Fiber& next);

 private:
  void jump(Fiber& next, bool for_good);

#if defined(CUDA_ON_CPU_UCONTEXT)
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
  const void* stack_ = nullptr;  // lowest address, for AddressSanitizer
  size_t n_stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* tsan_fiber_ = nullptr;
  bool owns_tsan_fiber_ = false;
};

// The happens-before edges that ThreadSanitizer is told of; nothing without it.
void order_release(void* address);
void order_acquire(void* address);

}  // namespace cuda_on_cpu
