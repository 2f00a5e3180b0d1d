/* encode.h - what the encoders of the formats share. */
#ifndef COLI_CORE_ENCODE_H
#define COLI_CORE_ENCODE_H

#include <math.h>
#include <string.h>

#include "../include/coli/coli.h"

/* An encoding in progress: finite weights w [rows, columns], and the checked memory that receives the result. */
typedef struct coli_encoding {
    int format, rows, columns, group_size;
    const float *w;
    uint8_t *weights;
    uint8_t *scales; /* of any alignment, so they are stored with coli_store_scale() */
    const coli_e8_options *e8;
} coli_encoding;

static inline void coli_store_scale(const coli_encoding *encoding, size_t index, float scale) {
    memcpy(encoding->scales + index * sizeof scale, &scale, sizeof scale);
}

/* Largest magnitude of n finite weights. */
static inline float coli_largest(const float *w, int n) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = fmaxf(largest, fabsf(w[i]));
    return largest;
}

/* Each encodes one row; that of fp8 all rows that share its scales, 128 or what is left of them. */
void coli_encode_int_row(const coli_encoding *encoding, int row);
void coli_encode_e8_row(const coli_encoding *encoding, int row);
void coli_encode_mxfp4_row(const coli_encoding *encoding, int row);
void coli_encode_fp8_rows(const coli_encoding *encoding, int row);

/* All rows by COLI_E8_CALIBRATED. */
coli_status coli_encode_e8_calibrated(const coli_encoding *encoding);

#endif
