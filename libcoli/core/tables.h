/* tables.h - lookup tables that formats/ describes and the core fills once, on first use. All are safe to ask for from any
 * thread. coli_e8_codebook() and coli_e4m3_table(), in coli.h, are two of them. */
#ifndef COLI_CORE_TABLES_H
#define COLI_CORE_TABLES_H

#include "kernels.h"

/* Random signs of the rotation blocks: see formats/signs.h. */
const uint8_t *coli_sign_table(void);
/* The published codebook's magnitudes, byte * 0.5: one entry of four after another. */
const float *coli_e8_magnitudes(void);
/* The published codebook as the encoder searches it. */
const coli_e8_search *coli_e8_search_table(void);

#endif
