/* ptx/copy.cuh - copies from global to shared memory that go on while threads compute.
 *
 * copy_async: each thread copies 16 bytes at a time, gathers its copies in groups and waits for the groups. What arrived is
 * visible to the thread that waited; to others behind a barrier.
 *
 * copy_bulk, sm_90: one thread starts a copy of any size, and a barrier in shared memory tells everybody that it arrived.
 * A phase of the barrier ends when all its arrivals have come and all bytes that they announced; then the next begins.
 * Phases are told apart by parity, the first being 0: barrier_wait(b, 0) waits for the end of the first, barrier_wait(b, 1)
 * on a fresh barrier returns at once. */
#ifndef COLI_CUDA_PTX_COPY_CUH
#define COLI_CUDA_PTX_COPY_CUH

#include <cstdint>

#include "../gpu.h"

namespace coli {

#if defined(COLI_HIP)
/* hip/ptx.h */
#elif defined(COLI_SIMT)

using simt::barrier_arrive;
using simt::barrier_done;
using simt::barrier_expect;
using simt::barrier_init;
using simt::barrier_init_fence;
using simt::barrier_wait;
using simt::copy_async_16;
using simt::copy_async_commit;
using simt::copy_async_wait;
using simt::copy_bulk;
using simt::proxy_fence;

#else

__device__ __forceinline__ uint32_t shared_address(const void *shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/* Both addresses are multiples of 16. L1 is passed by. */
__device__ __forceinline__ void copy_async_16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
/* Ends a group of this thread's copies, which may be empty. */
__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most the last N groups of this thread are under way. */
template <int N> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Nobody calls what follows on older GPUs; it compiles for them, so that one kernel source serves all. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define COLI_SM90(...) asm volatile(__VA_ARGS__)
#else
#define COLI_SM90(...) __trap()
#endif

/* By one thread, then barrier_init_fence() by the same one, then a barrier of the threads that use it. */
__device__ __forceinline__ void barrier_init(uint64_t *barrier, unsigned arrivals) {
    COLI_SM90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/* Makes barriers that this thread initialised visible to copies. */
__device__ __forceinline__ void barrier_init_fence() {
    COLI_SM90("fence.mbarrier_init.release.cluster;" :: : "memory");
}
/* Arrives, and announces bytes that belong to the phase. */
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    COLI_SM90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
              "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
    COLI_SM90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/* Waits for the end of the phase of that parity, the current one or the one before. */
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, unsigned parity) {
    uint32_t ended = 1;
    do {
        COLI_SM90("{\n"
                  ".reg .pred ended;\n"
                  "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
                  "selp.u32 %0, 1, 0, ended;\n"
                  "}" : "=r"(ended) : "r"(shared_address(barrier)),
                  "r"(parity) : "memory");
    } while (!ended);
}

/* Whether that phase has ended; does not wait. */
__device__ __forceinline__ bool barrier_done(uint64_t *barrier, unsigned parity) {
    uint32_t passed = 1;
    COLI_SM90("{\n"
              ".reg .pred ended;\n"
              "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
              "selp.u32 %0, 1, 0, ended;\n"
              "}" : "=r"(passed) : "r"(shared_address(barrier)),
              "r"(parity) : "memory");
    return passed;
}

/* Both addresses and the size are multiples of 16. The bytes are the first to leave L2: nobody reads weights twice. */
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
    COLI_SM90(
        "{\n"
        ".reg .b64 once;\n"
        "createpolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once;\n"
        "}" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
/* Makes what this thread wrote to shared memory visible to copies and to the warpgroup's matrix unit. */
__device__ __forceinline__ void proxy_fence() {
    COLI_SM90("fence.proxy.async.shared::cta;" :: : "memory");
}

#undef COLI_SM90

#endif

} // namespace coli

#endif
