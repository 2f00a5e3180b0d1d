/* ptx/wgmma.cuh - products on Hopper's matrix unit: c [64, N] += a [64, 16] b [16, N], by a warpgroup: four warps, the
 * first one's number a multiple of 4. sm_90a alone has it.
 *
 * a and c lie in registers. Each warp has 16 of the 64 rows, in the places of mma_m16n8k16 (mma.cuh): c[j] is the columns
 * 8 j ... 8 j + 7. b lies in shared memory. A row below is one of its columns, 64 halves of it:
 *
 *     row 0      128 bytes: eight pieces of 16 bytes, piece i at place i ^ 0
 *     row 1      ...                                          at place i ^ 1
 *     ...        eight rows are 1024 bytes, aligned to that, and places are i ^ (row % 8)
 *
 * so that eight rows' pieces of the same number, which are read together, meet in no bank. A product takes 32 bytes of each
 * row; the four products of a row differ by 32 bytes in where they start.
 *
 * Products run behind the threads. wgmma_fence() comes between any other access to registers of a or c and the products
 * that take them; wgmma_commit() ends a group of products; wgmma_wait<N>() waits until at most N groups are under way.
 * Until then a must stay, c must not be touched, and b must not be overwritten. */
#ifndef COLI_CUDA_PTX_WGMMA_CUH
#define COLI_CUDA_PTX_WGMMA_CUH

#include "copy.cuh"
#if defined(COLI_SIMT) && !defined(COLI_HIP)
#include "simt_wgmma.h"
#endif

namespace coli {

/* Whether warps can hand registers over: other targets have no such instruction. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(COLI_SIMT)
constexpr bool kHandsRegistersOver = true;
#else
constexpr bool kHandsRegistersOver = false;
#endif

constexpr int kWgmmaRowBytes = 128;
constexpr int kWgmmaRows = 8;

#if defined(COLI_HIP)
/* hip/ptx.h */
#elif defined(COLI_SIMT)

using simt::wgmma;
using simt::wgmma_commit;
using simt::wgmma_fence;
using simt::wgmma_operand;
using simt::wgmma_settle;
using simt::wgmma_wait;

__device__ __forceinline__ void copy_bulk_kept(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
    copy_bulk(shared, global, bytes, barrier);
}
template <int N> __device__ __forceinline__ void take_registers() {}
template <int N> __device__ __forceinline__ void give_registers() {}

#else

/* Nobody calls what follows on other GPUs; it compiles for them. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define COLI_SM90A(...) asm volatile(__VA_ARGS__)
#else
#define COLI_SM90A(...) __trap()
#endif

/* The descriptor of rows that start there: 1024 bytes from eight to eight, 128-byte swizzle. Bytes / 16 may be added. */
__device__ __forceinline__ uint64_t wgmma_operand(const void *rows) {
    const uint64_t address = shared_address(rows) >> 4 & 0x3fffu, pitch = kWgmmaRows * kWgmmaRowBytes / 16;
    return address | uint64_t{1} << 16 | pitch << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void wgmma_fence() {
    COLI_SM90A("wgmma.fence.sync.aligned;" :: : "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    COLI_SM90A("wgmma.commit_group.sync.aligned;" :: : "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
    COLI_SM90A("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keeps the compiler from moving accesses to c across this place, as it does not know that products write it late. */
template <int TILES> __device__ __forceinline__ void wgmma_settle(float (&c)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(c[j][i])::"memory");
    }
}

/* All warps of a warpgroup: from now on each thread has N registers, more or fewer than before. Taking waits until others
 * have given. */
template <int N> __device__ __forceinline__ void take_registers() {
    COLI_SM90A("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void give_registers() {
    COLI_SM90A("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* As copy_bulk, of bytes that others will read too. */
__device__ __forceinline__ void copy_bulk_kept(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
    COLI_SM90A("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

#define COLI_SUM(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define COLI_SUMS(j) COLI_SUM(j), COLI_SUM(j + 1), COLI_SUM(j + 2), COLI_SUM(j + 3)

/* c += a b, or c = a b unless `add`. */
__device__ __forceinline__ void wgmma(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    COLI_SM90A("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
               "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}" : COLI_SUMS(0) : "r"(a[0]),
               "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    COLI_SM90A("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}" : COLI_SUMS(0),
               COLI_SUMS(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
__device__ __forceinline__ void wgmma(float (&c)[12][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    COLI_SM90A("{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
               "}, {%48, %49, %50, %51}, %52, add, 1, 1, 0;\n}" : COLI_SUMS(0),
               COLI_SUMS(4), COLI_SUMS(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef COLI_SUM
#undef COLI_SUMS
#undef COLI_SM90A

#endif

} // namespace coli

#endif
