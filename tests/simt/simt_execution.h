/* simt_execution.h - GPU threads, warps and blocks as the device side of simt.h sees them. */
#ifndef SIMT_EXECUTION_H
#define SIMT_EXECUTION_H

#include "simt_types.h"

#include <functional>

namespace simt {

struct Fiber;
struct Warp;

/* A place in a source. As a default argument, `Location::here()` is the place of the call. */
struct Location {
    const char *file;
    int line;
    static constexpr Location here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

struct Thread {
    uint3 index;
    unsigned number; /* in its block, x fastest */
    unsigned lane;
    Warp *warp;
    Fiber *fiber;            /* null before it starts and after it returns */
    const char *waiting_for; /* null while it can run */
    Location where;
};

struct Block {
    uint3 index;
    dim3 size, grid;
    void *dynamic_shared;
    unsigned long number; /* of all that ever ran; the first is 1 */
};

extern Thread *current; /* the GPU thread that is running */
extern Block block;

/* Runs body() once for every thread of the grid, blocks one after another. `kernel` is the name used in reports. One host
 * thread at a time. */
void run_grid(dim3 grid, dim3 block_size, size_t dynamic_shared_bytes, const char *kernel,
              const std::function<void()> &body);

/* Waits for all threads of the block. Returns for how many `predicate` was true. */
unsigned barrier(bool predicate, Location where);

/* Lanes that met in a collective, and the value that each of them brought. */
struct Meeting {
    const uint64_t *values;
    unsigned lanes;
};

/* Waits for the lanes of this warp that `mask` names and that have not returned. `operation` is the collective's name;
 * `orders_memory` says whether what a lane wrote before is visible to the others after. */
Meeting meet(unsigned mask, uint64_t value, const char *operation, bool orders_memory, Location where);

/* Lets the other threads of the block run first. */
void yield();

/* Lanes of this warp that have not returned. */
unsigned live_lanes();

/* Prints the message, with kernel, block and thread, and aborts. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What a static __shared__ variable remembers: the block that saw it last. */
struct SharedVariable {
    unsigned long block_number;
};
void poison_shared(void *memory, size_t bytes);
inline __attribute__((no_sanitize("thread"))) void enter_shared(SharedVariable &variable, void *memory, size_t bytes) {
    if (variable.block_number == block.number) return;
    variable.block_number = block.number;
    poison_shared(memory, bytes);
}

} // namespace simt

#define threadIdx (simt::current->index)
#define blockIdx (simt::block.index)
#define blockDim (simt::block.size)
#define gridDim (simt::block.grid)
constexpr int warpSize = 32;

/* cu2cpp.py writes this behind the declaration of a static __shared__ variable. */
#define SIMT_SHARED(variable)                                                                                              \
    static simt::SharedVariable simt_shared_##variable;                                                                    \
    simt::enter_shared(simt_shared_##variable, (void *)&variable, sizeof(variable))

#endif
