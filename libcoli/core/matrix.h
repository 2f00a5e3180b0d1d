/* matrix.h - what the core asks of a coli_matrix. */
#ifndef COLI_CORE_MATRIX_H
#define COLI_CORE_MATRIX_H

#include "../include/coli/coli.h"

#define COLI_MATRIX_TEXT_BYTES 64

/* "int4-g32 matrix [4, 256]", for messages. Returns `text`. The format must exist. */
const char *coli_matrix_text(const coli_matrix *matrix, char text[COLI_MATRIX_TEXT_BYTES]);

/* coli_matmul without the check of the matrix. */
coli_status coli_matmul_checked(const coli_matrix *w, const float *x, size_t S, float *y);

#endif
