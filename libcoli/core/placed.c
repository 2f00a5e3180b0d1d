/* placed.c - matrices that compute on a GPU where they can, and on the CPU with a reason where they cannot. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../formats/e8.h"
#include "backend.h"
#include "expert.h"
#include "matrix.h"
#include "placed.h"
#include "status.h"
#include "tables.h"

struct coli_placed {
    coli_matrix matrix;
    coli_backend *backend;
    ColiCudaTensor *tensor;       /* NULL on the CPU */
    int device;                   /* -1 on the CPU */
    char why_cpu[COLI_WHY_BYTES]; /* "" while the GPU does the work */
};

/*------   Upload   ------*/

/* 1 when coli_cuda_init configured the device, or the library cannot tell. */
static int is_configured(const coli_backend *backend, int device, int *configured) {
    if (!backend->call.device_count || !backend->call.device_at) return 1;
    int found = 0;
    coli_access access = coli_backend_access(backend);
    coli_backend_lock(access);
    *configured = backend->call.device_count();
    for (int i = 0; i < *configured && !found; i++) found = backend->call.device_at(i) == device;
    coli_backend_unlock(access);
    return found;
}

static void explain_not_configured(const coli_backend *backend, int device, int configured, char why[COLI_WHY_BYTES]) {
    coli_backend_lock(COLI_SHARED);
    snprintf(why, COLI_WHY_BYTES, "GPU %d is not among the %d that coli_backend_init or coli_cuda_init configured%s%s",
             device, configured, backend->init_error[0] ? "; the last coli_backend_init failed: " : "",
             backend->init_error);
    coli_backend_unlock(COLI_SHARED);
}

const char *coli_placed_why_never(const coli_backend *backend, const coli_matrix *matrix) {
    const char *lacks = coli_backend_why_not(backend, coli_format_get(matrix->format)->name);
    if (lacks) return lacks;
    if (matrix->codebook && memcmp(matrix->codebook, coli_e8_codebook(), COLI_E8_CODEBOOK_BYTES))
        return "its codebook is not the published one, and a GPU library has one codebook for all";
    return NULL;
}

/* Finds what keeps the matrix from GPU `device`, short of trying; 0 with the reason in `why`. */
static int may_upload(coli_backend *backend, int device, const coli_matrix *matrix, char why[COLI_WHY_BYTES]) {
    const char *never = coli_placed_why_never(backend, matrix);
    int configured = 0;
    if (device < 0) {
        snprintf(why, COLI_WHY_BYTES, "device %d asks for the CPU", device);
    } else if (never) {
        snprintf(why, COLI_WHY_BYTES, "%s", never);
    } else if (!is_configured(backend, device, &configured)) {
        explain_not_configured(backend, device, configured, why);
    } else {
        return 1;
    }
    return 0;
}

/* Each of these gives the name of the call that failed, or NULL. */

static const char *upload(coli_placed *placed, int device) {
    const coli_matrix *m = &placed->matrix;
    const coli_backend_calls *call = &placed->backend->call;
    if (m->format == COLI_INT4_GROUPED) {
        return call->tensor_upload_g(&placed->tensor, m->weights, m->scales, m->format, m->columns, m->rows, device,
                                     m->group_size)
                   ? NULL
                   : "coli_cuda_tensor_upload_g";
    }
    return call->tensor_upload(&placed->tensor, m->weights, m->scales, m->format, m->columns, m->rows, device)
               ? NULL
               : "coli_cuda_tensor_upload";
}

/* Publishes the table that the matrix is decoded with. */
static const char *publish_table(const coli_placed *placed) {
    if (placed->matrix.format == COLI_E8) {
        return placed->backend->call.e8_set_grid(coli_e8_codebook()) ? NULL : "coli_cuda_e8_set_grid";
    }
    return placed->backend->call.fp8_set_lut(coli_e4m3_table()) ? NULL : "coli_cuda_fp8_set_lut";
}

static const char *upload_with_table(coli_placed *placed, int device) {
    const char *failed = publish_table(placed);
    return failed ? failed : upload(placed, device);
}

/* Makes the library leave the hidden rows of an expert alone where this is its unrotated down matrix. Where the library has
 * no call for that, coli_backend_why_not_expert() keeps such experts on the CPU. */
static const char *declare_rotation(coli_placed *placed) {
    const coli_backend_calls *call = &placed->backend->call;
    if (!(placed->matrix.flags & COLI_UNROTATED) || !call->tensor_set_rotated) return NULL;
    if (call->tensor_set_rotated(placed->tensor, 0)) return NULL;
    return "coli_cuda_tensor_set_rotated";
}

/* An old library decodes E8 with whatever table it has and does not tell when it has none: it gets one with every matrix,
 * since coli_cuda_shutdown, which the caller may use at any time, may forget tables. */
static int table_goes_first(const coli_placed *placed) {
    return placed->matrix.format == COLI_E8 && coli_backend_is_old(placed->backend);
}

/* Whether the upload that has just failed may have failed for want of the fp8 table. */
static int table_may_be_missing(const coli_placed *placed) {
    if (placed->matrix.format != COLI_FP8_B128) return 0;
    return !placed->backend->call.last_status || placed->backend->call.last_status() == COLI_E_STATE;
}

static void move_to_gpu(coli_placed *placed, int device) {
    coli_backend *backend = placed->backend;
    coli_access access = coli_backend_access(backend);
    coli_backend_lock(access);
    const char *failed = table_goes_first(placed) ? upload_with_table(placed, device) : upload(placed, device);
    if (failed && table_may_be_missing(placed)) {
        coli_backend_unlock(access);
        access = COLI_EXCLUSIVE;
        coli_backend_lock(access);
        failed = upload_with_table(placed, device);
    }
    if (!failed) failed = declare_rotation(placed);
    if (failed) {
        coli_backend_explain(backend, failed, placed->why_cpu, sizeof placed->why_cpu);
        if (placed->tensor) backend->call.tensor_free(placed->tensor);
        placed->tensor = NULL;
        coli_log(1, "matrix [%d, %d] stays on the CPU: %s", placed->matrix.rows, placed->matrix.columns, placed->why_cpu);
    } else {
        placed->device = device;
    }
    coli_backend_unlock(access);
}

coli_status coli_place(coli_backend *backend, int device, const coli_matrix *matrix, coli_placed **placed) {
    RETURN_ERROR_IF(!placed, COLI_E_ARGUMENT, "coli_place needs a place for its result, got placed = NULL");
    FORWARD_ERROR(coli_matrix_check(matrix));
    coli_placed *result = calloc(1, sizeof *result);
    RETURN_ERROR_IF(!result, COLI_E_MEMORY, "no memory for a placed matrix of %zu bytes", sizeof *result);
    result->matrix = *matrix;
    result->backend = backend;
    result->device = -1;
    if (may_upload(backend, device, matrix, result->why_cpu)) move_to_gpu(result, device);
    *placed = result;
    return COLI_OK;
}

void coli_placed_free(coli_placed *placed) {
    if (!placed) return;
    if (placed->tensor) {
        coli_access access = coli_backend_access(placed->backend);
        coli_backend_lock(access);
        placed->backend->call.tensor_free(placed->tensor);
        coli_backend_unlock(access);
    }
    free(placed);
}

int coli_placed_device(const coli_placed *placed) {
    return placed ? placed->device : -1;
}

ColiCudaTensor *coli_placed_tensor(const coli_placed *placed) {
    return placed ? placed->tensor : NULL;
}

/*------   Update   ------*/

static coli_status check_same_kind(const coli_matrix *old, const coli_matrix *new) {
    char was[COLI_DESCRIPTION_BYTES], is[COLI_DESCRIPTION_BYTES];
    RETURN_ERROR_IF(!coli_matrix_same_kind(old, new), COLI_E_SHAPE,
                    "the new contents of a placed %s must be of its kind, got %s%s", coli_matrix_describe(old, was),
                    coli_matrix_describe(new, is), old->flags == new->flags ? "" : ", rotated otherwise");
    return COLI_OK;
}

/* Overwrites the tensor; 0 with the reason in `why`. */
static int update_on_gpu(coli_placed *placed, const coli_matrix *matrix, char why[COLI_WHY_BYTES]) {
    const coli_backend *backend = placed->backend;
    if (!may_upload(placed->backend, placed->device, matrix, why)) return 0;
    if (!backend->call.tensor_update) {
        snprintf(why, COLI_WHY_BYTES, "%s", coli_backend_why_not(backend, "update"));
        return 0;
    }
    coli_access access = coli_backend_access(backend);
    coli_backend_lock(access);
    int done = backend->call.tensor_update(placed->tensor, matrix->weights, matrix->scales);
    if (!done) coli_backend_explain(backend, "coli_cuda_tensor_update", why, COLI_WHY_BYTES);
    coli_backend_unlock(access);
    return done;
}

/* Leaves the matrix to the CPU. */
static void leave_gpu(coli_placed *placed, const char why[COLI_WHY_BYTES]) {
    coli_access access = coli_backend_access(placed->backend);
    coli_backend_lock(access);
    placed->backend->call.tensor_free(placed->tensor);
    coli_backend_unlock(access);
    placed->tensor = NULL;
    placed->device = -1;
    memcpy(placed->why_cpu, why, strlen(why) + 1);
    coli_log(1, "matrix [%d, %d] leaves the GPU: %s", placed->matrix.rows, placed->matrix.columns, why);
}

coli_status coli_placed_update(coli_placed *placed, const coli_matrix *matrix) {
    RETURN_ERROR_IF(!placed, COLI_E_ARGUMENT, "coli_placed_update needs a placed matrix, got placed = NULL");
    FORWARD_ERROR(coli_matrix_check(matrix));
    FORWARD_ERROR(check_same_kind(&placed->matrix, matrix));
    char why[COLI_WHY_BYTES] = "";
    if (placed->tensor && !update_on_gpu(placed, matrix, why)) leave_gpu(placed, why);
    placed->matrix = *matrix;
    return COLI_OK;
}

const char *coli_placed_why_cpu(const coli_placed *placed) {
    if (!placed) return "there is no matrix: placed = NULL";
    return placed->why_cpu[0] ? placed->why_cpu : NULL;
}

/*------   Products   ------*/

/* Remembers why the last call was not the GPU's; "" when it was. A matrix on the CPU keeps the reason of its placement. */
static void remember(coli_placed *placed, const char why[COLI_WHY_BYTES]) {
    if (placed->tensor) memcpy(placed->why_cpu, why, strlen(why) + 1);
}

static int can_call(const char *lacks, char why[COLI_WHY_BYTES]) {
    if (lacks) snprintf(why, COLI_WHY_BYTES, "%s", lacks);
    return !lacks;
}

static void report_failure(const coli_backend *backend, const char *call, char why[COLI_WHY_BYTES]) {
    coli_backend_explain(backend, call, why, COLI_WHY_BYTES);
    coli_log(1, "computed on the CPU instead: %s", why);
}

static int matmul_on_gpu(coli_placed *w, const float *x, size_t S, float *y, char why[COLI_WHY_BYTES]) {
    if (!w->tensor || !can_call(coli_backend_why_not_rows(S), why)) return 0;
    const coli_matrix *m = &w->matrix;
    coli_access access = coli_backend_access(w->backend);
    coli_backend_lock(access);
    int done = w->backend->call.matmul(&w->tensor, y, x, NULL, NULL, m->format, (int)S, m->columns, m->rows, w->device,
                                       m->group_size);
    if (!done) report_failure(w->backend, "coli_cuda_matmul", why);
    coli_backend_unlock(access);
    return done;
}

coli_status coli_placed_matmul(coli_placed *w, const float *x, size_t S, float *y) {
    RETURN_ERROR_IF(!w, COLI_E_ARGUMENT, "coli_placed_matmul needs a placed matrix, got w = NULL");
    if (!S) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s of %zu rows is NULL", x ? "y" : "x", S);
    char why[COLI_WHY_BYTES] = "";
    int done = matmul_on_gpu(w, x, S, y, why);
    remember(w, why);
    return done ? COLI_OK : coli_matmul(&w->matrix, x, S, y);
}

/* Finds what keeps an expert from the GPU, short of trying; 0 with the reason in `why`. */
static int may_run_expert(coli_placed *const matrices[3], size_t S, char why[COLI_WHY_BYTES]) {
    static const char *const names[3] = {"gate", "up", "down"};
    for (int i = 0; i < 3; i++) {
        if (matrices[i]->tensor) continue;
        snprintf(why, COLI_WHY_BYTES, "its %s matrix is on the CPU: %.900s", names[i], matrices[i]->why_cpu);
        return 0;
    }
    const coli_placed *gate = matrices[0], *up = matrices[1], *down = matrices[2];
    if (gate->backend != up->backend || gate->backend != down->backend) {
        snprintf(why, COLI_WHY_BYTES, "its matrices were placed through different backends");
        return 0;
    }
    if (gate->device != up->device || gate->device != down->device) {
        snprintf(why, COLI_WHY_BYTES, "its matrices are on different GPUs: gate on %d, up on %d, down on %d", gate->device,
                 up->device, down->device);
        return 0;
    }
    const coli_backend *backend = gate->backend;
    return can_call(coli_backend_why_not_expert_mlp(backend, &gate->matrix, &up->matrix, &down->matrix, S), why);
}

static int expert_on_gpu(coli_placed *const matrices[3], const float *x, size_t S, float *y, char why[COLI_WHY_BYTES]) {
    if (!may_run_expert(matrices, S, why)) return 0;
    const coli_backend *backend = matrices[0]->backend;
    coli_access access = coli_backend_access(backend);
    coli_backend_lock(access);
    int done = backend->call.expert_mlp(matrices[0]->tensor, matrices[1]->tensor, matrices[2]->tensor, y, x, (int)S);
    if (!done) report_failure(backend, "coli_cuda_expert_mlp", why);
    coli_backend_unlock(access);
    return done;
}

coli_status coli_placed_expert_mlp(coli_placed *gate, coli_placed *up, coli_placed *down, const float *x, size_t S,
                                   float *y) {
    RETURN_ERROR_IF(!gate || !up || !down, COLI_E_ARGUMENT, "an expert needs three placed matrices, got %s = NULL",
                    !gate ? "gate"
                    : !up ? "up"
                          : "down");
    coli_placed *const matrices[3] = {gate, up, down};
    FORWARD_ERROR(coli_expert_check(&gate->matrix, &up->matrix, &down->matrix, coli_matrix_check));
    if (!S) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s of %zu rows is NULL", x ? "y" : "x", S);
    char why[COLI_WHY_BYTES] = "";
    int done = expert_on_gpu(matrices, x, S, y, why);
    for (int i = 0; i < 3; i++) remember(matrices[i], why);
    return done ? COLI_OK : coli_expert_mlp(&gate->matrix, &up->matrix, &down->matrix, x, S, y);
}
