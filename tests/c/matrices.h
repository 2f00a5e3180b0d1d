/* matrices.h - encoded random matrices for the C tests. */
#ifndef MATRICES_H
#define MATRICES_H

#include "coli/coli.h"

#include "check.h"

/* A random matrix in the format of that name, in memory that release_matrix() frees. E8 rows are rotated first unless
 * `flags` says COLI_UNROTATED. */
static inline coli_matrix random_matrix(const char *format, int rows, int columns, int flags, unsigned seed) {
    coli_matrix m = {.rows = rows, .columns = columns, .flags = flags};
    float *w = malloc((size_t)rows * (size_t)columns * sizeof *w);
    fill_random(w, (size_t)rows * (size_t)columns, seed);
    coli_status status = coli_format_parse(format, &m.format, &m.group_size);
    void *weights = malloc(coli_weight_bytes(m.format, rows, columns));
    void *scales = malloc(coli_scale_bytes(m.format, rows, columns, m.group_size) + 1);
    if (m.format == COLI_E8 && !(flags & COLI_UNROTATED)) coli_rotate_rows(w, w, (size_t)rows, columns);
    if (status == COLI_OK) status = coli_encode(m.format, w, rows, columns, m.group_size, weights, scales);
    CHECK(status == COLI_OK, "%s", coli_last_error());
    m.weights = weights;
    m.scales = scales;
    free(w);
    return m;
}

static inline void release_matrix(coli_matrix *m) {
    free((void *)m->weights);
    free((void *)m->scales);
}

/* Whether a text is there and contains a part. */
static inline int says(const char *text, const char *part) {
    return text && strstr(text, part);
}

#endif
