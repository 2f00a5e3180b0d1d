/* tables.c - lookup tables, each filled by the first thread that asks for it. */
#include <stdatomic.h>

#include "../formats/e8_codebook.h"
#include "../formats/floats.h"
#include "../formats/signs.h"
#include "../include/coli/coli.h"
#include "tables.h"

enum { EMPTY, FILLING, FULL };

/* Calls `fill` once. The other threads wait, at most the fraction of a millisecond that the longest table takes. */
static void fill_once(atomic_int *state, void (*fill)(void)) {
    int expected = EMPTY;
    if (atomic_load_explicit(state, memory_order_acquire) == FULL) return;
    if (atomic_compare_exchange_strong(state, &expected, FILLING)) {
        fill();
        atomic_store_explicit(state, FULL, memory_order_release);
    }
    while (atomic_load_explicit(state, memory_order_acquire) != FULL) {
    }
}

static uint8_t codebook[COLI_E8_CODEBOOK_BYTES];
static void fill_codebook(void) {
    coli_e8_codebook_expand(codebook);
}
const uint8_t *coli_e8_codebook(void) {
    static atomic_int state;
    fill_once(&state, fill_codebook);
    return codebook;
}

static _Alignas(64) coli_e8_search search;
static void fill_search(void) {
    for (int entry = 0; entry < 256; entry++) {
        const uint8_t *bytes = coli_e8_codebook() + 4 * entry;
        double squares = 0;
        for (int k = 0; k < 4; k++) {
            search.weights[k][entry] = bytes[k] * 0.5;
            squares += search.weights[k][entry] * search.weights[k][entry];
        }
        search.lengths[entry] = squares;
    }
}
const coli_e8_search *coli_e8_search_table(void) {
    static atomic_int state;
    fill_once(&state, fill_search);
    return &search;
}

static uint8_t signs[COLI_SIGN_TABLE_BYTES];
static void fill_signs(void) {
    coli_sign_table_fill(signs);
}
const uint8_t *coli_sign_table(void) {
    static atomic_int state;
    fill_once(&state, fill_signs);
    return signs;
}

static float e4m3[256];
static void fill_e4m3(void) {
    for (uint32_t byte = 0; byte < 256; byte++) e4m3[byte] = coli_e4m3_to_f32(byte);
}
const float *coli_e4m3_table(void) {
    static atomic_int state;
    fill_once(&state, fill_e4m3);
    return e4m3;
}
