/* e8_lines.h - the inner loops of the E8 encoder, for one floating-point type REAL; kernels_impl.h includes it for two.
 *
 * The score of an entry under a scale is scale * length - product, product being 2 m g: a line over the scale. All of it
 * is products and sums without fusing, and minima, so that results do not depend on the instruction set. */

/* The largest product of each slot. `maxima` may be `products`. */
static inline void NAMED(e8_slot_maxima)(const coli_e8_search *codebook, const REAL *products, REAL *maxima) {
    const REAL *round = products + codebook->round_slots[0];
    if (maxima != products) memcpy(maxima, products, COLI_E8_SLOTS * sizeof *maxima);
    for (int r = 1; r < COLI_E8_ROUNDS; r++) {
        COLI_SIMD()
        for (int slot = 0; slot < codebook->round_slots[r]; slot++) {
            maxima[slot] = round[slot] > maxima[slot] ? round[slot] : maxima[slot];
        }
        round += codebook->round_slots[r];
    }
}

/* scores[i] = the lowest of `count` lines, an even number, under scales[i]. In vectors by hand: compilers keep the minima
 * in memory. Lines of even and odd number have minima of their own, so that one need not wait for the other. */
static inline void NAMED(e8_lowest)(const REAL *products, const REAL *lengths, int count, const REAL scales[16],
                                    REAL scores[16]) {
    enum { VECTORS = 16 * sizeof(REAL) / VECTOR_BYTES };
    NAMED(vector) scale[VECTORS], even[VECTORS], odd[VECTORS];
    memcpy(scale, scales, sizeof scale);
    for (int v = 0; v < VECTORS; v++) {
        even[v] = scale[v] * lengths[0] - products[0];
        odd[v] = scale[v] * lengths[1] - products[1];
    }
    for (int line = 2; line < count; line += 2) {
        for (int v = 0; v < VECTORS; v++) {
            even[v] = NAMED(vector_min)(scale[v] * lengths[line] - products[line], even[v]);
            odd[v] = NAMED(vector_min)(scale[v] * lengths[line + 1] - products[line + 1], odd[v]);
        }
    }
    for (int v = 0; v < VECTORS; v++) even[v] = NAMED(vector_min)(even[v], odd[v]);
    memcpy(scores, even, sizeof even);
}

/* The entry with the lowest score, the lowest of equals; products and lengths [COLI_E8_PLACES]. */
static inline int NAMED(e8_entry)(const coli_e8_search *codebook, const REAL *products, const REAL *lengths, REAL scale,
                                  REAL *lowest) {
    REAL scores[COLI_E8_PLACES], low = (REAL)HUGE_VAL;
    int entry = 256;
    COLI_SIMD(reduction(min : low))
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        scores[place] = scale * lengths[place] - products[place];
        low = scores[place] < low ? scores[place] : low;
    }
    COLI_SIMD(reduction(min : entry))
    for (int place = 0; place < COLI_E8_PLACES; place++) {
        int candidate = scores[place] == low ? codebook->entries[place] : 256;
        entry = candidate < entry ? candidate : entry;
    }
    *lowest = low;
    return entry < 256 ? entry : 0; /* there is none when all scores are NaN */
}
