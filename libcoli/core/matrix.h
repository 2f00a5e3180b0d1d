/* matrix.h - what the core asks of a coli_matrix. */
#ifndef COLI_CORE_MATRIX_H
#define COLI_CORE_MATRIX_H

#include "../include/coli/coli.h"

#define COLI_DESCRIPTION_BYTES 64

/* "int4-g32 matrix [4, 256]", for messages. Returns `description`. The format must exist. */
const char *coli_matrix_describe(const coli_matrix *matrix, char description[COLI_DESCRIPTION_BYTES]);

/* coli_matrix_check without a look at the pointers. */
coli_status coli_matrix_check_fields(const coli_matrix *matrix);

/* 1 for a matrix that must meet rotated rows. */
int coli_matrix_rotated(const coli_matrix *matrix);

/* 1 when two matrices are alike in all but weights and codebook: format, shape, group size, flags. */
int coli_matrix_same_kind(const coli_matrix *a, const coli_matrix *b);
/* 1 when they are decoded with the same table. */
int coli_matrix_same_codebook(const coli_matrix *a, const coli_matrix *b);

/* Bytes of weights and scales. */
size_t coli_matrix_bytes(const coli_matrix *matrix);

/* COLI_OK when so many rows of `dim` floats can exist in memory; otherwise an error that names them. */
coli_status coli_check_rows(const char *name, size_t rows, int dim);

/* coli_matmul without its checks, on at most so many threads, in `scratch` [threads, w->columns]. */
void coli_matmul_in(float *scratch, int threads, const coli_matrix *w, const float *x, size_t S, float *y);

#endif
