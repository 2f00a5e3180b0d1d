/* e8_lines.h - the inner loops of the E8 encoder, part of kernels_impl.h.
 *
 * The score of an entry under a scale is scale * length - product, product being 2 m g: a line over the scale. All of it
 * is products and sums without fusing, and minima, so that results do not depend on the instruction set. */

/* The largest product of each slot. Rounds are whole groups of 8. Round by round, so that no maximum is read right after it
 * was written. */
static inline void e8_slot_maxima(const coli_e8_search *codebook, const float *products, float maxima[COLI_E8_SLOTS]) {
    const float *round = products, *before = products;
    for (int r = 1; r < COLI_E8_ROUNDS; r++, before = maxima) {
        round += codebook->round_slots[r - 1];
        for (int start = 0; start < codebook->round_slots[r]; start += 8) {
            COLI_SIMD()
            for (int i = start; i < start + 8; i++) maxima[i] = round[i] > before[i] ? round[i] : before[i];
        }
    }
    for (int start = codebook->round_slots[1]; start < COLI_E8_SLOTS; start += 8)
        memcpy(maxima + start, products + start, 8 * sizeof *maxima);
}

/* Of the slots' maxima, the lines that can be lowest anywhere: a longer one is below a shorter one under no scale unless
 * its product is larger. About a third are left. Returns their number, filled up to an even one. */
static inline int e8_needed_lines(const coli_e8_search *codebook, const float *maxima, float *products, float *lengths) {
    float largest = -HUGE_VALF;
    int count = 0;
    for (int i = 0; i < COLI_E8_SLOTS; i++) {
        float product = maxima[codebook->by_length[i]];
        products[count] = product;
        lengths[count] = codebook->sorted_lengths[i];
        count += product > largest; /* without a branch, which nobody could predict */
        largest = product > largest ? product : largest;
    }
    if (count % 2) {
        products[count] = products[count - 1];
        lengths[count] = lengths[count - 1];
    }
    return count + count % 2;
}

/* scores[i] = the lowest of `count` lines, an even number, under scales[i]. In vectors by hand: compilers keep the minima
 * in memory. Lines of even and odd number have minima of their own, so that one need not wait for the other. */
static inline void e8_lowest(const float *products, const float *lengths, int count, const float scales[16],
                             float scores[16]) {
    enum { VECTORS = 16 * sizeof(float) / VECTOR_BYTES };
    vector scale[VECTORS], even[VECTORS], odd[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scale[v] = const_vectors(scales)[v];
        even[v] = scale[v] * lengths[0] - products[0];
        odd[v] = scale[v] * lengths[1] - products[1];
    }
    for (int line = 2; line < count; line += 2) {
        for (int v = 0; v < VECTORS; v++) {
            even[v] = vector_min(scale[v] * lengths[line] - products[line], even[v]);
            odd[v] = vector_min(scale[v] * lengths[line + 1] - products[line + 1], odd[v]);
        }
    }
    for (int v = 0; v < VECTORS; v++) vectors(scores)[v] = vector_min(even[v], odd[v]);
}

/* Slots, from `first` to `last` at most, whose score is within `margin` of the lowest, which is returned. */
static inline float e8_lowest_slots(const coli_e8_search *codebook, const float maxima[COLI_E8_SLOTS], float scale,
                                    float margin, float scores[COLI_E8_SLOTS], int *first, int *last) {
    float low = HUGE_VALF;
    int from = COLI_E8_SLOTS, to = -1;
    COLI_SIMD(reduction(min : low))
    for (int slot = 0; slot < COLI_E8_SLOTS; slot++) {
        scores[slot] = scale * codebook->lengths[slot] - maxima[slot];
        low = scores[slot] < low ? scores[slot] : low;
    }
    float limit = low + margin;
    COLI_SIMD(reduction(min : from) reduction(max : to))
    for (int slot = 0; slot < COLI_E8_SLOTS; slot++) {
        int low_from = scores[slot] <= limit ? slot : COLI_E8_SLOTS, low_to = scores[slot] <= limit ? slot : -1;
        from = low_from < from ? low_from : from;
        to = low_to > to ? low_to : to;
    }
    *first = from;
    *last = to;
    return low;
}
