/* simt_half.h - the part of CUDA's fp16 that consists of conversions and bits; arithmetic goes through float. */
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
