/* rotate_kernels.h - the two halves of a rotation: random signs, and the fast Walsh-Hadamard transform. Part of
 * kernels_impl.h.
 *
 * A stage of stride s replaces x[i] and x[i + s] by their sum and difference. Stages within a vector register shuffle its
 * lanes; the others add and subtract whole vectors. Several stages are done between a load and a store: 4096 elements take
 * two passes over memory where registers hold 16 vectors of 16. Every element goes through the same additions whatever the
 * width, so all instruction sets give the same bits. */
#ifndef COLI_CORE_ROTATE_KERNELS_H
#define COLI_CORE_ROTATE_KERNELS_H

/* RADIX vectors are transformed together, in half of the registers. */
#if defined(__AVX512F__)
#define LANES 16
#define RADIX 16
#elif defined(__AVX2__)
#define LANES 8
#define RADIX 8
#else
#define LANES 4
#define RADIX 8
#endif

typedef float float_vector __attribute__((vector_size(4 * LANES)));
typedef int32_t int_vector __attribute__((vector_size(4 * LANES)));

/* Lane i is negated where bit i of `signs` is set. */
static inline float_vector flip_vector(float_vector v, int32_t signs) {
    int_vector bit, all = (int_vector){0} + signs;
    for (int i = 0; i < LANES; i++) bit[i] = 1 << i;
    return (float_vector)((int_vector)v ^ (((all & bit) == bit) & INT32_MIN));
}

static inline float_vector load_vector(const float *x) {
    float_vector v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void store_vector(float *x, float_vector v) {
    memcpy(x, &v, sizeof v);
}

/* One stage within a vector: lane i meets lane i ^ stride, and the one with that bit is subtracted. */
static inline __attribute__((always_inline)) float_vector stage_in_vector(float_vector v, int stride) {
    float_vector other;
    int_vector sign;
    for (int i = 0; i < LANES; i++) {
        other[i] = v[i ^ stride];
        sign[i] = i & stride ? INT32_MIN : 0;
    }
    return other + (float_vector)((int_vector)v ^ sign);
}

static inline float_vector stages_in_vector(float_vector v) {
    v = stage_in_vector(v, 1);
    v = stage_in_vector(v, 2);
#if LANES > 4
    v = stage_in_vector(v, 4);
#endif
#if LANES > 8
    v = stage_in_vector(v, 8);
#endif
    return v;
}

/* Stages of strides 1 ... radix / 2 between vectors. */
static inline __attribute__((always_inline)) void stages_between(float_vector *v, int radix) {
#pragma GCC unroll 4
    for (int stride = 1; stride < radix; stride *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < radix; i++) {
            if (i & stride) continue;
            float_vector sum = v[i] + v[i + stride], difference = v[i] - v[i + stride];
            v[i] = sum;
            v[i + stride] = difference;
        }
    }
}

/* Stages of strides `stride` ... stride * radix / 2 of x [n]; with first = 1 those within vectors before, where stride is
 * LANES. */
static inline __attribute__((always_inline)) void pass_of(float *x, int n, int stride, int radix, int first, float scale) {
    float_vector v[RADIX];
    for (int block = 0; block < n; block += stride * radix) {
        for (int j = block; j < block + stride; j += LANES) {
#pragma GCC unroll 16
            for (int k = 0; k < radix; k++) {
                v[k] = load_vector(x + j + k * stride);
                if (first) v[k] = stages_in_vector(v[k]);
            }
            stages_between(v, radix);
#pragma GCC unroll 16
            for (int k = 0; k < radix; k++) store_vector(x + j + k * stride, v[k] * scale);
        }
    }
}

static inline __attribute__((always_inline)) void pass(float *x, int n, int stride, int radix, int first, float scale) {
    switch (radix) { /* so that each has its vectors in registers */
    case 1:
        pass_of(x, n, stride, 1, first, scale);
        break;
    case 2:
        pass_of(x, n, stride, 2, first, scale);
        break;
    case 4:
        pass_of(x, n, stride, 4, first, scale);
        break;
    case 8:
        pass_of(x, n, stride, 8, first, scale);
        break;
#if RADIX > 8
    case 16:
        pass_of(x, n, stride, 16, first, scale);
        break;
#endif
    }
}

static void flip_signs(const float *x, float *y, int n, const uint8_t *signs) {
    if (n < LANES) { /* 8 of 16 lanes */
        for (int i = 0; i < n; i++) y[i] = signs[0] >> i & 1 ? -x[i] : x[i];
        return;
    }
    for (int i = 0; i < n; i += LANES) {
        uint32_t bits = signs[i / 8];
        if (LANES == 16) bits |= (uint32_t)signs[i / 8 + 1] << 8;
        if (LANES == 4) bits >>= i % 8;
        store_vector(y + i, flip_vector(load_vector(x + i), (int32_t)bits));
    }
}

static void hadamard_of_few(float *x, int n, float scale) {
    for (int stride = 1; stride < n; stride *= 2) {
        for (int i = 0; i < n; i++) {
            if (i & stride) continue;
            float sum = x[i] + x[i + stride], difference = x[i] - x[i + stride];
            x[i] = sum;
            x[i + stride] = difference;
        }
    }
    for (int i = 0; i < n; i++) x[i] *= scale;
}

static void hadamard(float *x, int n, float scale) {
    if (n < LANES) {
        hadamard_of_few(x, n, scale);
        return;
    }
    for (int stride = LANES, radix; stride <= n; stride *= radix) {
        radix = n / stride < RADIX ? n / stride : RADIX;
        int first = stride == LANES, last = stride * radix >= n;
        if (first) /* constants, so that the loops are compiled without the other's work */
            pass(x, n, LANES, radix, 1, last ? scale : 1);
        else
            pass(x, n, stride, radix, 0, last ? scale : 1);
        if (last) break;
    }
}

#undef LANES
#undef RADIX

#endif
