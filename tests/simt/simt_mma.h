/* simt_mma.h - twins of ptx/mma.cuh and ptx/bits.cuh.
 *
 * Products of halves are exact; their sum and c are added up in double, column by column, and rounded to float once. A real
 * tensor core keeps fewer bits on the way. */
#ifndef SIMT_MMA_H
#define SIMT_MMA_H

#include "simt_execution.h"
#include "simt_half.h"
#include "simt_intrinsics.h"

namespace simt {

/* What a lane holds of a [16, K] and b [K, 8]: REGISTERS of ELEMENTS each, for either half of a's rows and for b. */
template <class Element, int REGISTERS, int ELEMENTS> struct Operands {
    Element a[REGISTERS][2][ELEMENTS], b[REGISTERS][ELEMENTS];
};

SIMT_UNTRACED inline void unpack(float (&values)[2], uint32_t word, bool) {
    for (int i = 0; i < 2; i++) values[i] = __half2float(__ushort_as_half((unsigned short)(word >> 16 * i)));
}
SIMT_UNTRACED inline void unpack(int (&values)[4], uint32_t word, bool is_signed) {
    for (int i = 0; i < 4; i++) {
        int byte = (int)(word >> 8 * i & 0xff);
        values[i] = is_signed && byte > 127 ? byte - 256 : byte;
    }
}

/* c += a b by the whole warp: K = 4 lanes x REGISTERS x ELEMENTS. */
template <class Sum, class Element, int REGISTERS, int ELEMENTS, class Result>
SIMT_UNTRACED void multiply(Result (&c)[4], const uint32_t (&a)[2 * REGISTERS], const uint32_t (&b)[REGISTERS],
                            bool a_is_signed, const char *operation, Location where) {
    require_capability(80, operation, where);
    Operands<Element, REGISTERS, ELEMENTS> mine;
    for (int r = 0; r < REGISTERS; r++) {
        for (int half = 0; half < 2; half++) unpack(mine.a[r][half], a[2 * r + half], a_is_signed);
        unpack(mine.b[r], b[r], true);
    }
    Gathering<Operands<Element, REGISTERS, ELEMENTS>> lanes(current->number - current->lane, 32, mine, operation, where);
    const unsigned g = current->lane / 4, t = current->lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned half = i / 2, column = 2 * t + i % 2;
        Sum sum = (Sum)c[i];
        for (int r = 0; r < REGISTERS; r++) {
            for (unsigned k = 0; k < 4; k++) {
                const auto &row_part = lanes[4 * g + k].a[r][half];
                const auto &column_part = lanes[4 * column + k].b[r];
                for (int e = 0; e < ELEMENTS; e++) sum += (Sum)row_part[e] * (Sum)column_part[e];
            }
        }
        c[i] = (Result)sum;
    }
}

SIMT_UNTRACED inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       Location where = Location::here()) {
    multiply<double, float, 2, 2>(c, a, {b0, b1}, true, "mma_m16n8k16", where);
}
SIMT_UNTRACED inline void mma_m16n8k8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                      Location where = Location::here()) {
    multiply<double, float, 1, 2>(c, {a0, a1}, {b0}, true, "mma_m16n8k8", where);
}
SIMT_UNTRACED inline void mma_m16n8k32_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                          Location where = Location::here()) {
    multiply<int64_t, int, 2, 4>(c, a, {b0, b1}, true, "mma_m16n8k32_s8", where);
}
SIMT_UNTRACED inline void mma_m16n8k16_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                            Location where = Location::here()) {
    multiply<int64_t, int, 1, 4>(c, {a0, a1}, {b0}, false, "mma_m16n8k16_u8s8", where);
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

} // namespace simt

#endif
