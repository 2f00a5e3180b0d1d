/* expert.h - what the MoE layer asks of an expert on the CPU. */
#ifndef COLI_CORE_EXPERT_H
#define COLI_CORE_EXPERT_H

#include "../include/coli/coli.h"

/* COLI_OK when the shapes make an expert and each matrix passes `check`: coli_matrix_check, or coli_matrix_check_fields
 * where the weights are not at hand. */
coli_status coli_expert_check(const coli_matrix *gate, const coli_matrix *up, const coli_matrix *down,
                              coli_status (*check)(const coli_matrix *));

/* Why gate and up cannot meet the same x; NULL when they can. */
const char *coli_expert_why_two_inputs(const coli_matrix *gate, const coli_matrix *up);

/* coli_expert_mlp without its checks, with rows of their own for gate and up, which differ where one of the two is rotated.
 */
coli_status coli_expert_compute(const coli_matrix *gate, const coli_matrix *up, const coli_matrix *down,
                                const float *x_gate, const float *x_up, size_t S, float *y);

#endif
