/* expert.c - one expert on the CPU: y = down(silu(gate x) * (up x)). */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "expert.h"
#include "matrix.h"
#include "parallel.h"
#include "status.h"

static coli_status check_named(const char *name, const coli_matrix *matrix, coli_status (*check)(const coli_matrix *)) {
    coli_status status = check(matrix);
    RETURN_ERROR_IF(status != COLI_OK, status, "%s: %s", name, coli_last_error());
    return COLI_OK;
}

coli_status coli_expert_check(const coli_matrix *gate, const coli_matrix *up, const coli_matrix *down,
                              coli_status (*check)(const coli_matrix *)) {
    FORWARD_ERROR(check_named("gate", gate, check));
    FORWARD_ERROR(check_named("up", up, check));
    FORWARD_ERROR(check_named("down", down, check));
    RETURN_ERROR_IF(up->rows != gate->rows || up->columns != gate->columns, COLI_E_SHAPE,
                    "up must have the shape of gate, [%d, %d], got [%d, %d]", gate->rows, gate->columns, up->rows,
                    up->columns);
    RETURN_ERROR_IF(down->rows != gate->columns || down->columns != gate->rows, COLI_E_SHAPE,
                    "down must be [%d, %d] for a gate of [%d, %d], got [%d, %d]", gate->columns, gate->rows, gate->rows,
                    gate->columns, down->rows, down->columns);
    return COLI_OK;
}

const char *coli_expert_why_two_inputs(const coli_matrix *gate, const coli_matrix *up) {
    if (coli_matrix_rotated(gate) == coli_matrix_rotated(up)) return NULL;
    return "its gate and up matrices need different inputs: one is stored rotated, the other is not";
}

/* gate = silu(gate) * up */
static void silu_multiply(float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void silu_multiply_rows(float *gate, const float *up, size_t S, size_t H) {
    int team = coli_team(S, H * 16);
    COLI_PARALLEL_FOR(team, s, S, silu_multiply(gate + s * H, up + s * H, (int)H));
}

coli_status coli_expert_compute(const coli_matrix *gate, const coli_matrix *up, const coli_matrix *down,
                                const float *x_gate, const float *x_up, size_t S, float *y) {
    int H = gate->rows, D = gate->columns, widest = H > D ? H : D;
    int threads = coli_team((size_t)widest, (size_t)widest * (1 + S)); /* the most that any of the products uses */
    size_t hidden_bytes = (size_t)H * sizeof(float), scratch_bytes = (size_t)threads * (size_t)widest * sizeof(float);
    float *scratch = S > PTRDIFF_MAX / hidden_bytes / 2 ? NULL : malloc(scratch_bytes + 2 * S * hidden_bytes);
    RETURN_ERROR_IF(!scratch, COLI_E_MEMORY, "no memory for 2 x %zu hidden rows of %zu bytes and %zu bytes of scratch", S,
                    hidden_bytes, scratch_bytes);
    float *hidden = scratch + (size_t)threads * (size_t)widest, *up_rows = hidden + S * (size_t)H;
    coli_matmul_in(scratch, threads, gate, x_gate, S, hidden);
    coli_matmul_in(scratch, threads, up, x_up, S, up_rows);
    silu_multiply_rows(hidden, up_rows, S, (size_t)H);
    coli_status status = coli_matrix_rotated(down) ? coli_rotate_rows(hidden, hidden, S, H) : COLI_OK;
    if (status == COLI_OK) coli_matmul_in(scratch, threads, down, hidden, S, y);
    free(scratch);
    return status;
}

coli_status coli_expert_mlp(const coli_matrix *gate, const coli_matrix *up, const coli_matrix *down, const float *x,
                            size_t S, float *y) {
    FORWARD_ERROR(coli_expert_check(gate, up, down, coli_matrix_check));
    const char *two_inputs = coli_expert_why_two_inputs(gate, up);
    RETURN_ERROR_IF(two_inputs, COLI_E_ARGUMENT, "one x does not serve the expert: %s", two_inputs);
    if (S == 0) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s, [%zu, %d], is NULL", x ? "y" : "x", S, gate->columns);
    FORWARD_ERROR(coli_check_rows("x", S, gate->columns));
    return coli_expert_compute(gate, up, down, x, x, S, y);
}
