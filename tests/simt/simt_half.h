/* simt_half.h - the part of CUDA's fp16 that the backend may use. Every operation rounds its result to nearest, once. */
#ifndef SIMT_HALF_H
#define SIMT_HALF_H

#include "simt_types.h"

#include <cstring>

struct __half {
    _Float16 value;
};
struct alignas(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;

inline float __half2float(__half h) {
    return (float)h.value;
}
inline __half __float2half_rn(float f) {
    return {(_Float16)f};
}
inline __half __float2half(float f) {
    return __float2half_rn(f);
}
inline float __low2float(__half2 pair) {
    return __half2float(pair.x);
}
inline float __high2float(__half2 pair) {
    return __half2float(pair.y);
}
inline float2 __half22float2(__half2 pair) {
    return {__low2float(pair), __high2float(pair)};
}
inline __half2 __floats2half2_rn(float low, float high) {
    return {__float2half_rn(low), __float2half_rn(high)};
}
inline __half2 __float22half2_rn(float2 pair) {
    return __floats2half2_rn(pair.x, pair.y);
}
inline __half2 __halves2half2(__half low, __half high) {
    return {low, high};
}
inline __half2 __half2half2(__half h) {
    return {h, h};
}
inline __half __low2half(__half2 pair) {
    return pair.x;
}
inline __half __high2half(__half2 pair) {
    return pair.y;
}

/* A float holds the exact product of two halves, and enough of their sum for the second rounding to do no harm; a double
 * does so for the sum of a product and a half. */
inline __half __hadd(__half a, __half b) {
    return __float2half_rn(__half2float(a) + __half2float(b));
}
inline __half __hsub(__half a, __half b) {
    return __float2half_rn(__half2float(a) - __half2float(b));
}
inline __half __hmul(__half a, __half b) {
    return __float2half_rn(__half2float(a) * __half2float(b));
}
inline __half __hfma(__half a, __half b, __half c) {
    return {(_Float16)((double)a.value * (double)b.value + (double)c.value)};
}
inline __half __hneg(__half a) {
    return {(_Float16)-a.value};
}
inline __half2 __hadd2(__half2 a, __half2 b) {
    return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return {__hsub(a.x, b.x), __hsub(a.y, b.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hneg2(__half2 a) {
    return {__hneg(a.x), __hneg(a.y)};
}

inline __half __ushort_as_half(unsigned short bits) {
    __half h;
    memcpy(&h, &bits, sizeof h);
    return h;
}
inline unsigned short __half_as_ushort(__half h) {
    unsigned short bits;
    memcpy(&bits, &h, sizeof bits);
    return bits;
}

#endif
