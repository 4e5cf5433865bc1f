// Switching stacks, and what the sanitizers must be told about it. See fiber.h.
//
// On x86-64 a switch saves the six callee-saved registers and the stack pointer (System V ABI); nothing here
// changes MXCSR or the x87 control word, so they are left alone. Elsewhere ucontext serves, which also saves
// the signal mask, with a system call each time.
#include "fiber.h"

#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CUDA_ON_CPU_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(CUDA_ON_CPU_UCONTEXT)
extern "C" void cuda_on_cpu_swap(void** save, void* load);
asm(R"(
  .text
  .p2align 4
  .globl cuda_on_cpu_swap
  .hidden cuda_on_cpu_swap
  .type cuda_on_cpu_swap, @function
cuda_on_cpu_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_on_cpu_swap, .-cuda_on_cpu_swap
)");
#endif

namespace cuda_on_cpu {

Fiber::~Fiber() {
#if defined(CUDA_ON_CPU_TSAN)
  if (owns_tsan_fiber_) __tsan_destroy_fiber(tsan_fiber_);
#endif
}

void Fiber::prepare(char* stack, size_t n_bytes, void (*entry)()) {
  stack_ = stack;
  n_stack_bytes_ = n_bytes;
  fake_stack_ = nullptr;
#if defined(CUDA_ON_CPU_UCONTEXT)
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack;
  context_.uc_stack.ss_size = n_bytes;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#else
  // What cuda_on_cpu_swap pops: six registers and the return address; above it a zero, so that entry finds
  // the stack aligned as after a call.
  void** top = reinterpret_cast<void**>(stack + n_bytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  stack_pointer_ = top;
#endif
#if defined(CUDA_ON_CPU_TSAN)
  if (owns_tsan_fiber_) __tsan_destroy_fiber(tsan_fiber_);
  tsan_fiber_ = __tsan_create_fiber(0);
  owns_tsan_fiber_ = true;
#endif
}

void Fiber::adopt_os_thread() {
  stack_ = nullptr;
#if defined(CUDA_ON_CPU_TSAN)
  tsan_fiber_ = __tsan_get_current_fiber();
#endif
}

void Fiber::arrived(Fiber& os_thread) {
#if defined(__SANITIZE_ADDRESS__)
  if (os_thread.stack_ == nullptr) {  // the first switch away from it tells where its stack lies
    __sanitizer_finish_switch_fiber(nullptr, &os_thread.stack_, &os_thread.n_stack_bytes_);
  } else {
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
  }
#else
  (void)os_thread;
#endif
}

void Fiber::jump(Fiber& next, bool for_good) {
#if defined(CUDA_ON_CPU_TSAN)
  __tsan_switch_to_fiber(next.tsan_fiber_, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, next.stack_, next.n_stack_bytes_);
#else
  (void)for_good;
#endif
#if defined(CUDA_ON_CPU_UCONTEXT)
  swapcontext(&context_, &next.context_);
#else
  cuda_on_cpu_swap(&stack_pointer_, next.stack_pointer_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::switch_to(Fiber& next) { jump(next, false); }

void Fiber::finish_to(Fiber& next) {
  jump(next, true);
  std::abort();  // nobody switches to a fiber that has finished
}

void order_release(void* address) {
#if defined(CUDA_ON_CPU_TSAN)
  __tsan_release(address);
#else
  (void)address;
#endif
}

void order_acquire(void* address) {
#if defined(CUDA_ON_CPU_TSAN)
  __tsan_acquire(address);
#else
  (void)address;
#endif
}

}  // namespace cuda_on_cpu
