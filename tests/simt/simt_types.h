/* simt_types.h - CUDA's qualifiers and vector types in plain C++. */
#ifndef SIMT_TYPES_H
#define SIMT_TYPES_H

#include <cstddef>
#include <cstdint>

/* Kernels get internal linkage: AddressSanitizer guards static arrays only where no other file may define them too. */
#define __global__ static
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

/* Blocks run one at a time, so one copy serves all; SIMT_SHARED below gives each block a fresh one. */
#define __shared__ static

/* What is the model's own, and no access of a GPU thread. */
#define SIMT_UNTRACED __attribute__((no_sanitize("thread")))

#define SIMT_VECTORS(T, base, align2, align4)                                                                              \
    struct T##1 {                                                                                                          \
        base x;                                                                                                            \
    };                                                                                                                     \
    struct alignas(align2) T##2 {                                                                                          \
        base x, y;                                                                                                         \
    };                                                                                                                     \
    struct T##3 {                                                                                                          \
        base x, y, z;                                                                                                      \
    };                                                                                                                     \
    struct alignas(align4) T##4 {                                                                                          \
        base x, y, z, w;                                                                                                   \
    };                                                                                                                     \
    inline T##1 make_##T##1(base x) {                                                                                      \
        return {x};                                                                                                        \
    }                                                                                                                      \
    inline T##2 make_##T##2(base x, base y) {                                                                              \
        return {x, y};                                                                                                     \
    }                                                                                                                      \
    inline T##3 make_##T##3(base x, base y, base z) {                                                                      \
        return {x, y, z};                                                                                                  \
    }                                                                                                                      \
    inline T##4 make_##T##4(base x, base y, base z, base w) {                                                              \
        return {x, y, z, w};                                                                                               \
    }

SIMT_VECTORS(char, signed char, 2, 4)
SIMT_VECTORS(uchar, unsigned char, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(ushort, unsigned short, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(uint, unsigned, 8, 16)
SIMT_VECTORS(longlong, long long, 16, 16)
SIMT_VECTORS(ulonglong, unsigned long long, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef SIMT_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#endif
