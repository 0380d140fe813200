// A fiber: a stack and the place on it where it goes on.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
// Saves the registers that a call preserves on the old stack and takes up the new one.
extern "C" void gpu_model_switch(void** save, void* load);

struct Fiber {
  void* top = nullptr;
  void start(char* stack, size_t bytes, void (*entry)()) {
    auto* s = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
    *--s = nullptr;  // keeps the stack aligned at entry, and ends a backtrace
    *--s = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--s = nullptr;
    top = s;
  }
  static void swap(Fiber& from, Fiber& to) { gpu_model_switch(&from.top, to.top); }
};
#else
#include <ucontext.h>

struct Fiber {
  ucontext_t context;
  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = bytes, context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void swap(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
};
#endif
