/* simt_wgmma.h - twins of ptx/wgmma.cuh.
 *
 * A product happens as late as it may: when its group is waited for. Until then its sums read as NaN, so that reading them
 * too early shows, and b is read only then, so that overwriting it too early shows. b is found as the matrix unit finds it,
 * by the descriptor's fields and the swizzle of addresses. Products of halves are exact, their sum with c is added up in
 * double and rounded to float once. */
#ifndef SIMT_WGMMA_H
#define SIMT_WGMMA_H

#include "simt_execution.h"
#include "simt_half.h"

#include <cmath>
#include <cstring>
#include <map>
#include <vector>

namespace simt {

constexpr unsigned WARPGROUP = 128;

/* A product that a thread takes part in: its two rows of a, and its sums. */
struct WgmmaProduct {
    float a[2][16];
    uint64_t b;
    float *c;
    int tiles;
    bool add;
};

struct WgmmaThread {
    std::vector<WgmmaProduct> products; /* under way, oldest first */
    std::vector<size_t> groups;         /* how many of them each committed group has */
    size_t uncommitted = 0;
    bool fenced = false;
    std::map<float *, std::vector<float>> sums; /* true values of those under way */
};

inline WgmmaThread wgmma_threads[1024];

SIMT_UNTRACED inline uint64_t wgmma_operand(const void *rows, Location where = Location::here()) {
    const size_t offset = (const char *)rows - (const char *)block.dynamic_shared;
    if (offset % 1024 || !is_shared(rows, 1024))
        fail("wgmma_operand at %s:%d: expected shared memory, aligned to 1024 bytes", where.file, where.line);
    return (offset >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* Element k of row n of b. */
SIMT_UNTRACED inline float wgmma_element(uint64_t b, int n, int k) {
    size_t address = ((b & 0x3fff) << 4) + n / 8 * ((b >> 32 & 0x3fff) << 4) + n % 8 * 128 + 2 * k;
    if (b >> 62 == 1) address ^= (address >> 7 & 7) << 4;
    unsigned short bits;
    memcpy(&bits, (const char *)block.dynamic_shared + address, sizeof bits);
    return __half2float(__ushort_as_half(bits));
}

SIMT_UNTRACED inline void wgmma_fence(Location where = Location::here()) {
    require_capability(90, "wgmma_fence", where);
    wgmma_threads[current->number].fenced = true;
}

template <int TILES>
SIMT_UNTRACED void wgmma(float (&c)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add,
                         Location where = Location::here()) {
    struct Fragment {
        uint32_t words[4];
        uint64_t b;
    };
    WgmmaThread &thread = wgmma_threads[current->number];
    if (!thread.fenced) fail("wgmma at %s:%d: no wgmma_fence before it", where.file, where.line);
    if (!is_shared((const char *)block.dynamic_shared + ((b & 0x3fff) << 4), 32))
        fail("wgmma at %s:%d: b is not shared memory of the block", where.file, where.line);
    Fragment mine{{a[0], a[1], a[2], a[3]}, b};
    WgmmaProduct product{{}, b, &c[0][0], TILES, add};
    {
        const unsigned first = current->number / WARPGROUP * WARPGROUP;
        Gathering<Fragment> all(first, WARPGROUP, mine, "wgmma", where);
        const unsigned quad = current->number - first - current->lane % 4;
        for (unsigned t = 0; t < 4; t++) {
            const Fragment &other = all[quad + t];
            if (other.b != b) fail("wgmma at %s:%d: threads bring different descriptors", where.file, where.line);
            for (unsigned i = 0; i < 4; i++) {
                for (unsigned e = 0; e < 2; e++) {
                    const unsigned short bits = (unsigned short)(other.words[i] >> 16 * e);
                    product.a[i % 2][8 * (i / 2) + 2 * t + e] = __half2float(__ushort_as_half(bits));
                }
            }
        }
    }
    if (!thread.sums.count(product.c)) thread.sums[product.c].assign(product.c, product.c + 4 * TILES);
    for (int i = 0; i < 4 * TILES; i++) product.c[i] = NAN;
    thread.products.push_back(product);
    thread.uncommitted++;
}

SIMT_UNTRACED inline void wgmma_commit() {
    WgmmaThread &thread = wgmma_threads[current->number];
    thread.groups.push_back(thread.uncommitted);
    thread.uncommitted = 0;
    thread.fenced = false;
}

SIMT_UNTRACED inline void wgmma_compute(const WgmmaProduct &product, std::vector<float> &sums) {
    const unsigned t = current->lane % 4;
    for (int i = 0; i < 4 * product.tiles; i++) {
        const int n = 8 * (i / 4) + 2 * t + i % 2, row = i / 2 % 2;
        double sum = product.add ? sums[i] : 0.0;
        for (int k = 0; k < 16; k++) sum += (double)product.a[row][k] * wgmma_element(product.b, n, k);
        sums[i] = (float)sum;
    }
}

/* Waits until at most `under_way` groups of this thread are. */
SIMT_UNTRACED inline void wait_for_products(size_t under_way) {
    WgmmaThread &thread = wgmma_threads[current->number];
    while (thread.groups.size() > under_way) {
        for (size_t i = 0; i < thread.groups.front(); i++) {
            const WgmmaProduct product = thread.products.front();
            thread.products.erase(thread.products.begin());
            wgmma_compute(product, thread.sums[product.c]);
            bool more = false;
            for (const WgmmaProduct &other : thread.products) more |= other.c == product.c;
            if (more) continue;
            const std::vector<float> &sums = thread.sums[product.c];
            memcpy(product.c, sums.data(), sums.size() * sizeof(float));
            thread.sums.erase(product.c);
        }
        thread.groups.erase(thread.groups.begin());
    }
}
template <int N> SIMT_UNTRACED void wgmma_wait() {
    wait_for_products(N);
}
template <int TILES> void wgmma_settle(float (&)[TILES][4]) {}

} // namespace simt

#endif
