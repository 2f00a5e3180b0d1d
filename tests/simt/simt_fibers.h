/* simt_fibers.h - stacks to run GPU threads on, and the switch from one to another.
 *
 * On x86-64 a switch is a dozen instructions; elsewhere it is swapcontext. AddressSanitizer and ThreadSanitizer are told of
 * every switch. Code here and in simt_execution.cpp is hidden from ThreadSanitizer (SIMT_UNTRACED): the scheduler's own
 * data are handed from fiber to fiber with no ordering that it could know of. */
#ifndef SIMT_FIBERS_H
#define SIMT_FIBERS_H

#include "simt_types.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace simt {

struct Fiber {
    char *stack_bottom = nullptr;
    size_t stack_bytes = 0;
#if defined(__x86_64__)
    void *stack_pointer = nullptr; /* of a suspended fiber; its callee-saved registers lie there */
#else
    ucontext_t context;
#endif
    void *fake_stack = nullptr; /* AddressSanitizer's */
    void *tsan_fiber = nullptr;
};

#if defined(__x86_64__)
extern "C" void simt_switch_stacks(void **save_stack_pointer, void *load_stack_pointer);
asm(R"(
    .text
    .type simt_switch_stacks, @function
simt_switch_stacks:
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
    .size simt_switch_stacks, . - simt_switch_stacks
)");
#endif

/* The fiber that runs the caller, and the one that ran before it. */
static Fiber *running, *suspended_last;

/* The first thing that a fiber does whenever it runs again, and when it begins. */
SIMT_UNTRACED inline void finish_switch() {
#if defined(__SANITIZE_ADDRESS__)
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(running->fake_stack, &bottom, &bytes);
    suspended_last->stack_bottom = (char *)bottom; /* news only of the stack that the kernel was launched from */
    suspended_last->stack_bytes = bytes;
#endif
}

SIMT_UNTRACED inline void switch_to(Fiber &next) {
    Fiber &self = *running;
    suspended_last = &self;
    running = &next;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&self.fake_stack, next.stack_bottom, next.stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(next.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__)
    simt_switch_stacks(&self.stack_pointer, next.stack_pointer);
#else
    swapcontext(&self.context, &next.context);
#endif
    finish_switch();
}

/* Makes the calling thread's own stack a fiber, to switch away from and back to. */
SIMT_UNTRACED inline void adopt_this_stack(Fiber &fiber) {
#if defined(__SANITIZE_THREAD__)
    fiber.tsan_fiber = __tsan_get_current_fiber();
#endif
    running = &fiber;
}

/* A new suspended fiber, never freed. The first switch to it calls `entry`, which calls finish_switch(), never returns. */
SIMT_UNTRACED inline void create_fiber(Fiber &fiber, void (*entry)()) {
    constexpr size_t guard = 4096, bytes = 256 << 10;
    char *memory =
        (char *)mmap(nullptr, guard + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
        fprintf(stderr, "simt: no memory for the stack of a GPU thread (%zu bytes)\n", guard + bytes);
        abort();
    }
    fiber.stack_bottom = memory + guard;
    fiber.stack_bytes = bytes;
#if defined(__SANITIZE_THREAD__)
    fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
    /* Equal offsets in page-aligned stacks would fall into the same few sets of the cache. */
    static unsigned created;
    void **top = (void **)(fiber.stack_bottom + bytes - created++ % 32 * 128);
    *--top = nullptr;       /* return address of `entry`: ends stack traces and keeps the alignment that the ABI asks for */
    *--top = (void *)entry; /* where the first switch returns to */
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack_bottom;
    fiber.context.uc_stack.ss_size = bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
}

} // namespace simt

#endif
