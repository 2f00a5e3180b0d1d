/* simt_intrinsics.h - CUDA's device functions: barriers, warp collectives, atomics, loads with cache hints, arithmetic. */
#ifndef SIMT_INTRINSICS_H
#define SIMT_INTRINSICS_H

#include "simt_execution.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

/* Barriers and fences. Threads run one at a time, so a fence has only the compiler to stop. */

inline void __syncthreads(simt::Location where = simt::Location::here()) {
    simt::barrier(false, where);
}
inline int __syncthreads_count(int predicate, simt::Location where = simt::Location::here()) {
    return (int)simt::barrier(predicate != 0, where);
}
inline int __syncthreads_or(int predicate, simt::Location where = simt::Location::here()) {
    return simt::barrier(predicate != 0, where) != 0;
}
inline int __syncthreads_and(int predicate, simt::Location where = simt::Location::here()) {
    return simt::barrier(predicate == 0, where) == 0;
}
inline void __threadfence() {
    asm volatile("" ::: "memory");
}
inline void __threadfence_block() {
    asm volatile("" ::: "memory");
}
inline void __threadfence_system() {
    asm volatile("" ::: "memory");
}
inline void __nanosleep(unsigned) {
    simt::yield();
}
[[noreturn]] inline void __trap() {
    simt::fail("__trap()");
}

/* Warp collectives. A value from a lane that takes no part is undefined in CUDA; here all its bits are ones (NaN). */

namespace simt {

template <class T> uint64_t to_bits(T value) {
    static_assert((sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2) && std::is_trivially_copyable<T>::value,
                  "a shuffle moves values of 2, 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> T from_lane(const Meeting &meeting, unsigned lane) {
    uint64_t bits = meeting.lanes >> lane & 1 ? meeting.values[lane] : ~0ull;
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* First lane of the group of `width` lanes that the current lane belongs to. */
inline unsigned group_start(int width) {
    return current->lane & ~(unsigned)(width - 1);
}

} // namespace simt

#if SIMT_WAVE == 64

/* As HIP has them: lanes of a group of `width` lanes of the wave, without masks. On hardware those that are active run in
 * step; here all lanes of the group meet. */

namespace simt {

inline Lanes group_lanes(int width) {
    return (width == SIMT_WAVE ? ALL_LANES : (Lanes{1} << width) - 1) << group_start(width);
}
inline void sync_lanes(int width, Location where = Location::here()) {
    meet(group_lanes(width), 0, "sync_lanes", true, where);
}

} // namespace simt

template <class T> T __shfl(T value, int source, int width = SIMT_WAVE, simt::Location where = simt::Location::here()) {
    unsigned lane = simt::group_start(width) + ((unsigned)source & (unsigned)(width - 1));
    return simt::from_lane<T>(simt::meet(simt::group_lanes(width), simt::to_bits(value), "__shfl", false, where), lane);
}
template <class T>
T __shfl_xor(T value, int lane_mask, int width = SIMT_WAVE, simt::Location where = simt::Location::here()) {
    unsigned lane = simt::current->lane ^ (unsigned)lane_mask;
    if (lane >= simt::group_start(width) + width) lane = simt::current->lane;
    return simt::from_lane<T>(simt::meet(simt::group_lanes(width), simt::to_bits(value), "__shfl_xor", false, where), lane);
}

#else

inline void __syncwarp(unsigned mask = ~0u, simt::Location where = simt::Location::here()) {
    simt::meet(mask, 0, "__syncwarp", true, where);
}

namespace simt {

/* Every lane of `mask` sees what each of the others brought in, whatever its size: for the CPU twins of tensor-core and
 * matrix-load instructions. `all` has one place for each of the 32 lanes; places of lanes outside `mask` are left alone. */
template <class T> void gather_warp(unsigned mask, const T &mine, T (&all)[32], Location where = Location::here()) {
    Meeting meeting = meet(mask, (uint64_t)(uintptr_t)&mine, "gather_warp", true, where);
    for (unsigned lane = 0; lane < 32; lane++) {
        if (meeting.lanes >> lane & 1) all[lane] = *(const T *)(uintptr_t)meeting.values[lane];
    }
    meet(mask, 0, "gather_warp", true, where); /* `mine` must stay until all have read it */
}

/* fold(sum, value) over the values of all lanes, in ascending order. */
template <class T, class Fold> T reduce_warp(unsigned mask, T value, const char *operation, Location where, Fold fold) {
    Meeting meeting = meet(mask, to_bits(value), operation, false, where);
    unsigned rest = meeting.lanes;
    T sum = from_lane<T>(meeting, __builtin_ctz(rest));
    while (rest &= rest - 1) sum = fold(sum, from_lane<T>(meeting, __builtin_ctz(rest)));
    return sum;
}

} // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, simt::Location where = simt::Location::here()) {
    unsigned lane = simt::group_start(width) + ((unsigned)source & (unsigned)(width - 1));
    return simt::from_lane<T>(simt::meet(mask, simt::to_bits(value), "__shfl_sync", false, where), lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, simt::Location where = simt::Location::here()) {
    unsigned lane = simt::current->lane ^ (unsigned)lane_mask;
    if (lane >= simt::group_start(width) + width) lane = simt::current->lane;
    return simt::from_lane<T>(simt::meet(mask, simt::to_bits(value), "__shfl_xor_sync", false, where), lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Location where = simt::Location::here()) {
    unsigned lane = simt::current->lane + delta;
    if (lane >= simt::group_start(width) + width) lane = simt::current->lane;
    return simt::from_lane<T>(simt::meet(mask, simt::to_bits(value), "__shfl_down_sync", false, where), lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Location where = simt::Location::here()) {
    unsigned lane = simt::current->lane;
    if (lane >= simt::group_start(width) + delta) lane -= delta;
    return simt::from_lane<T>(simt::meet(mask, simt::to_bits(value), "__shfl_up_sync", false, where), lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Location where = simt::Location::here()) {
    simt::Meeting meeting = simt::meet(mask, predicate != 0, "__ballot_sync", false, where);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        ballot |= (meeting.lanes >> lane & 1 & (unsigned)meeting.values[lane]) << lane;
    return ballot;
}
inline int __any_sync(unsigned mask, int predicate, simt::Location where = simt::Location::here()) {
    return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Location where = simt::Location::here()) {
    return __ballot_sync(mask, !predicate, where) == 0;
}
inline unsigned __activemask() {
    return simt::live_lanes();
}
template <class T> T __reduce_add_sync(unsigned mask, T value, simt::Location where = simt::Location::here()) {
    return simt::reduce_warp(mask, value, "__reduce_add_sync", where,
                             [](T a, T b) { return (T)((unsigned)a + (unsigned)b); });
}
template <class T> T __reduce_max_sync(unsigned mask, T value, simt::Location where = simt::Location::here()) {
    return simt::reduce_warp(mask, value, "__reduce_max_sync", where, [](T a, T b) { return a > b ? a : b; });
}
template <class T> T __reduce_min_sync(unsigned mask, T value, simt::Location where = simt::Location::here()) {
    return simt::reduce_warp(mask, value, "__reduce_min_sync", where, [](T a, T b) { return a < b ? a : b; });
}

#endif

/* Atomics, relaxed as in CUDA. All return the value before. */

namespace simt {

template <class T, class Change> T atomic_update(T *address, Change change) {
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do after = change(before);
    while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

template <class T> struct Same {
    using type = T; /* keeps a parameter out of template deduction, so that it converts */
};

} // namespace simt

template <class T> T atomicAdd(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return (T)(before + value); });
}
template <class T> T atomicSub(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return (T)(before - value); });
}
template <class T> T atomicMax(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return before > value ? before : value; });
}
template <class T> T atomicMin(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return before < value ? before : value; });
}
template <class T> T atomicAnd(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return (T)(before & value); });
}
template <class T> T atomicOr(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return (T)(before | value); });
}
template <class T> T atomicXor(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T before) { return (T)(before ^ value); });
}
template <class T> T atomicExch(T *address, typename simt::Same<T>::type value) {
    return simt::atomic_update(address, [&](T) { return value; });
}
inline unsigned atomicInc(unsigned *address, unsigned limit) {
    return simt::atomic_update(address, [&](unsigned before) { return before >= limit ? 0 : before + 1; });
}
template <class T>
T atomicCAS(T *address, typename simt::Same<T>::type expected, typename simt::Same<T>::type replacement) {
    __atomic_compare_exchange(address, &expected, &replacement, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

/* Loads and stores with cache hints. */

#define SIMT_LOAD(name)                                                                                                    \
    template <class T> T name(const T *address) {                                                                          \
        return *address;                                                                                                   \
    }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_LOAD(__ldcv)
#undef SIMT_LOAD

#define SIMT_STORE(name)                                                                                                   \
    template <class T> void name(T *address, typename simt::Same<T>::type value) {                                         \
        *address = value;                                                                                                  \
    }
SIMT_STORE(__stwb)
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwt)
#undef SIMT_STORE

/* Bits. */

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline float __int_as_float(int bits) {
    return __uint_as_float((unsigned)bits);
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline int __float_as_int(float value) {
    return (int)__float_as_uint(value);
}

inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
    return __builtin_popcountll(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz((unsigned)x) : 32;
}
inline int __clzll(long long x) {
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((uint64_t)a * b >> 32);
}
inline int __mulhi(int a, int b) {
    return (int)((int64_t)a * b >> 32);
}

/* Result byte i is byte (selector nibble i, low 3 bits) of y:x; with the nibble's high bit, that byte's sign eight times.
 */
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (nibble & 7)) & 0xff;
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}

/* Four bytes at once. */

namespace simt {

template <class Byte> Byte byte_of(unsigned x, int i) {
    return (Byte)(x >> 8 * i & 0xff);
}
template <class Each> unsigned for_each_byte(unsigned a, unsigned b, Each each) {
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(uint8_t)each(byte_of<uint8_t>(a, i), byte_of<uint8_t>(b, i)) << 8 * i;
    return result;
}
template <class Byte> unsigned dot4(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 4; i++) sum += (unsigned)(byte_of<Byte>(a, i) * byte_of<Byte>(b, i));
    return sum;
}

} // namespace simt

inline int __dp4a(int a, int b, int sum) {
    return (int)simt::dot4<int8_t>((unsigned)a, (unsigned)b, (unsigned)sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    return simt::dot4<uint8_t>(a, b, sum);
}
inline unsigned __vadd4(unsigned a, unsigned b) {
    return simt::for_each_byte(a, b, [](int x, int y) { return x + y; });
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    return simt::for_each_byte(a, b, [](int x, int y) { return x - y; });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
    return simt::for_each_byte(a, b, [](int x, int y) { return x == y ? 0xff : 0; });
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
    return simt::for_each_byte(a, b, [](int x, int y) { return x != y ? 0xff : 0; });
}

/* Arithmetic. Needs -ffp-contract=off, so that only what says fma is one. */

template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    static_assert(std::is_arithmetic<A>::value && std::is_arithmetic<B>::value, "min is for numbers");
    using T = std::common_type_t<A, B>;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    static_assert(std::is_arithmetic<A>::value && std::is_arithmetic<B>::value, "max is for numbers");
    using T = std::common_type_t<A, B>;
    return (T)a < (T)b ? (T)b : (T)a;
}

inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float __frcp_rn(float x) {
    return 1.0f / x;
}
inline float __fsqrt_rn(float x) {
    return sqrtf(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
/* Macros, because the C library has functions of these names. */
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __powf powf
inline float __saturatef(float x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; /* NaN becomes 0 */
}
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
inline double rsqrt(double x) {
    return 1.0 / sqrt(x);
}
inline float __int2float_rn(int x) {
    return (float)x;
}
inline float __uint2float_rn(unsigned x) {
    return (float)x;
}

/* Float to integer saturates, and NaN becomes 0. */
namespace simt {
template <class Integer> Integer saturate(double x) {
    constexpr double low = (double)std::numeric_limits<Integer>::min(), high = (double)std::numeric_limits<Integer>::max();
    if (x != x) return 0;
    return x <= low ? std::numeric_limits<Integer>::min() : x >= high ? std::numeric_limits<Integer>::max() : (Integer)x;
}
} // namespace simt

inline int __float2int_rn(float x) {
    return simt::saturate<int>(rint((double)x));
}
inline int __float2int_rz(float x) {
    return simt::saturate<int>(trunc((double)x));
}
inline int __float2int_rd(float x) {
    return simt::saturate<int>(floor((double)x));
}
inline int __float2int_ru(float x) {
    return simt::saturate<int>(ceil((double)x));
}
inline unsigned __float2uint_rn(float x) {
    return simt::saturate<unsigned>(rint((double)x));
}
inline unsigned __float2uint_rz(float x) {
    return simt::saturate<unsigned>(trunc((double)x));
}

#endif
