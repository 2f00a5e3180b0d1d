/* simt_execution.h - GPU threads, warps and blocks as the device side of simt.h sees them. */
#ifndef SIMT_EXECUTION_H
#define SIMT_EXECUTION_H

#include "simt_types.h"

#include <functional>

/* Lanes that run together: 32, or 64 as in AMD's waves. With 64, the backend's warps of 32 are halves of a wave
 * (libcoli/hip/device.h), and what NVIDIA alone has is not there: collectives with masks, tensor cores, the copy engine. */
#ifndef SIMT_WAVE
#define SIMT_WAVE 32
#endif

namespace simt {

struct Fiber;
struct Warp;

/* Lanes of a warp or wave, one bit each. */
#if SIMT_WAVE == 64
using Lanes = uint64_t;
#else
using Lanes = uint32_t;
#endif
constexpr Lanes ALL_LANES = ~Lanes{0};

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

/* What kernels may ask of the device. */
struct DeviceModel {
    int capability;      /* 90 for 9.0 */
    size_t shared_bytes; /* of a block, at most */
};

struct Block {
    uint3 index;
    dim3 size, grid;
    void *dynamic_shared;
    unsigned long number; /* of all that ever ran; the first is 1 */
};

extern Thread *current; /* the GPU thread that is running */
extern Block block;
extern DeviceModel device;

/* Runs body() once for every thread of the grid, blocks one after another. `kernel` is the name used in reports. One host
 * thread at a time. */
void run_grid(const DeviceModel &device_model, dim3 grid, dim3 block_size, size_t dynamic_shared_bytes, const char *kernel,
              const std::function<void()> &body);

/* Waits for all threads of the block. Returns for how many `predicate` was true. */
unsigned barrier(bool predicate, Location where);

/* Lanes that met in a collective, and the value that each of them brought. */
struct Meeting {
    const uint64_t *values;
    Lanes lanes;
};

/* Waits for the lanes of this warp that `mask` names and that have not returned. `operation` is the collective's name;
 * `orders_memory` says whether what a lane wrote before is visible to the others after. */
Meeting meet(Lanes mask, uint64_t value, const char *operation, bool orders_memory, Location where);

/* Waits for `threads` threads of the block, whole warps, at one of the barriers 1 to 15. */
void named_barrier_sync(int id, int threads, Location where = Location::here());

/* Threads first ... first + count - 1, whole warps, meet and show each other what each of them brought, until the last of
 * them lets go: for the CPU twins of instructions that a warp or a warpgroup executes as one. Orders no memory, so that the
 * twins are SIMT_UNTRACED. */
void converge(unsigned first, unsigned count, const void *mine, const char *operation, Location where);
extern const void *offers[1024];
template <class T> class Gathering {
  public:
    SIMT_UNTRACED Gathering(unsigned first, unsigned count, const T &mine, const char *operation, Location where)
        : first_(first), count_(count), operation_(operation), where_(where) {
        converge(first, count, &mine, operation, where);
    }
    SIMT_UNTRACED ~Gathering() { converge(first_, count_, offers[current->number], operation_, where_); }
    Gathering(const Gathering &) = delete;
    Gathering &operator=(const Gathering &) = delete;
    SIMT_UNTRACED const T &operator[](unsigned i) const { return *static_cast<const T *>(offers[first_ + i]); }

  private:
    unsigned first_, count_;
    const char *operation_;
    Location where_;
};

/* Threads that wait, one bit a lane; wake() lets them all go on. */
struct Waiting {
    Lanes lanes[32];
};
void wait_among(Waiting &waiting, const char *operation, Location where);
void wake(Waiting &waiting);

/* Lets the other threads of the block run first. */
void yield();

/* The same, now and then, where threads run in random order. */
void dawdle();

/* Lanes of this warp that have not returned. */
Lanes live_lanes();

/* Prints the message, with kernel, block and thread, and aborts. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Reports an operation that the device has not, and goes no further. */
void require_capability(int capability, const char *operation, Location where);

/* Bytes as nothing has written them: shared memory of a new block, and where a copy is under way. */
void poison(void *memory, size_t bytes);

/* Whether all of it is shared memory of the block. */
bool is_shared(const void *memory, size_t bytes);

/* What a static __shared__ variable remembers: the block that saw it last. */
struct SharedVariable {
    unsigned long block_number;
};
void add_shared(void *memory, size_t bytes);
SIMT_UNTRACED inline void enter_shared(SharedVariable &variable, void *memory, size_t bytes) {
    if (variable.block_number == block.number) return;
    variable.block_number = block.number;
    add_shared(memory, bytes);
}

} // namespace simt

#define threadIdx (simt::current->index)
#define blockIdx (simt::block.index)
/* Not macros, since cudaLaunchConfig_t has members of these names. */
inline const dim3 &blockDim = simt::block.size, &gridDim = simt::block.grid;
constexpr int warpSize = SIMT_WAVE;

/* cu2cpp.py writes this behind the declaration of a static __shared__ variable. */
#define SIMT_SHARED(variable)                                                                                              \
    static simt::SharedVariable simt_shared_##variable;                                                                    \
    simt::enter_shared(simt_shared_##variable, (void *)&variable, sizeof(variable))

#endif
