/* placed.c - matrices that compute on a GPU where they can, and on the CPU with a reason where they cannot. */
#define _GNU_SOURCE /* pthread_rwlock_t under -std=c11 */

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../formats/e8.h"
#include "../formats/signs.h"
#include "backend.h"
#include "status.h"
#include "tables.h"

#define WHY_BYTES 1024

struct coli_placed {
    coli_matrix matrix;
    coli_backend *backend;
    ColiCudaTensor *tensor;   /* NULL on the CPU */
    int device;               /* -1 on the CPU */
    const char *why_not_down; /* why the GPU cannot use it as an expert's down matrix; NULL when it can */
    char why_cpu[WHY_BYTES];  /* "" while the GPU does the work */
};

/*------   Tables against calls   ------*/

/* The GPU ABI forbids to set a table while another call runs. A table belongs to the library, whatever the number of its
 * backends, so one lock serves them all: shared by ordinary calls, exclusive for uploads that set a table. */
typedef enum access { SHARED, EXCLUSIVE } access;

#ifdef _WIN32
#include <windows.h>
static SRWLOCK tables = SRWLOCK_INIT;
static void lock_tables(access mode) {
    if (mode == SHARED)
        AcquireSRWLockShared(&tables);
    else
        AcquireSRWLockExclusive(&tables);
}
static void unlock_tables(access mode) {
    if (mode == SHARED)
        ReleaseSRWLockShared(&tables);
    else
        ReleaseSRWLockExclusive(&tables);
}
#else
#include <pthread.h>
static pthread_rwlock_t tables = PTHREAD_RWLOCK_INITIALIZER;
static void lock_tables(access mode) {
    if (mode == SHARED)
        pthread_rwlock_rdlock(&tables);
    else
        pthread_rwlock_wrlock(&tables);
}
static void unlock_tables(access mode) {
    (void)mode;
    pthread_rwlock_unlock(&tables);
}
#endif

/*------   Reasons   ------*/

/* Why a GPU call failed; to be asked by the thread that called. */
static void explain_call(const coli_backend *backend, const char *call, char why[WHY_BYTES]) {
    if (backend->call.last_error)
        snprintf(why, WHY_BYTES, "%s: %s", call, backend->call.last_error());
    else
        snprintf(why, WHY_BYTES, "%s returned 0 (this library does not say why)", call);
}

/* A library without a version carries none of what versions added: its own codebook, rotation blocks above 4096. */
static int is_old(const coli_backend *backend) {
    return !backend->call.abi_version;
}

/* 1 when coli_cuda_init configured the device, or the library cannot tell. */
static int is_configured(const coli_backend *backend, int device, int *configured) {
    if (!backend->call.device_count || !backend->call.device_at) return 1;
    *configured = backend->call.device_count();
    for (int i = 0; i < *configured; i++) {
        if (backend->call.device_at(i) == device) return 1;
    }
    return 0;
}

/* Finds what keeps the matrix from GPU `device`, short of trying; 0 with the reason in `why`. */
static int may_upload(coli_backend *backend, int device, const coli_matrix *matrix, char why[WHY_BYTES]) {
    const char *lacks = coli_backend_why_not(backend, coli_format_get(matrix->format)->name);
    int configured = 0;
    if (device < 0) {
        snprintf(why, WHY_BYTES, "device %d asks for the CPU", device);
    } else if (lacks) {
        snprintf(why, WHY_BYTES, "%s", lacks);
    } else if (matrix->codebook && memcmp(matrix->codebook, coli_e8_codebook(), COLI_E8_CODEBOOK_BYTES)) {
        snprintf(why, WHY_BYTES, "its codebook is not the published one, and a GPU library has one codebook for all");
    } else if (!is_configured(backend, device, &configured)) {
        snprintf(why, WHY_BYTES, "GPU %d is not among the %d that coli_cuda_init configured", device, configured);
    } else {
        return 1;
    }
    return 0;
}

/*------   Upload   ------*/

static int needs_table(const coli_placed *placed) {
    return placed->matrix.format == COLI_FP8_B128 || (placed->matrix.format == COLI_E8 && is_old(placed->backend));
}

/* Name of the call that failed, or NULL. Tables are published for each upload anew, because coli_cuda_shutdown, which the
 * caller may use at any time, forgets them. */
static const char *publish_table(const coli_placed *placed) {
    if (placed->matrix.format == COLI_E8) {
        return placed->backend->call.e8_set_grid(coli_e8_codebook()) ? NULL : "coli_cuda_e8_set_grid";
    }
    return placed->backend->call.fp8_set_lut(coli_e4m3_table()) ? NULL : "coli_cuda_fp8_set_lut";
}

/* Name of the call that failed, or NULL. */
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

static int largest_rotation_block(int columns) {
    int largest = 0;
    for (int rest = columns; rest > 0;) {
        int block = coli_rotation_block(rest);
        if (block > largest) largest = block;
        rest -= block;
    }
    return largest;
}

/* Settles how the hidden rows of an expert reach this E8 matrix: rotated, as the GPU does by itself, or as they are. */
static const char *prepare_as_down(coli_placed *placed) {
    const coli_backend_calls *call = &placed->backend->call;
    if (placed->matrix.flags & COLI_UNROTATED) {
        if (call->tensor_set_rotated && call->tensor_set_rotated(placed->tensor, 0)) return NULL;
        return "its down matrix is unrotated e8, and the GPU library rotates what meets it";
    }
    if (is_old(placed->backend) && largest_rotation_block(placed->matrix.columns) > 4096) {
        return "its down matrix needs rotation blocks above 4096, and the GPU library is too old for them";
    }
    return NULL;
}

static void move_to_gpu(coli_placed *placed, int device) {
    access mode = needs_table(placed) ? EXCLUSIVE : SHARED;
    lock_tables(mode);
    const char *failed = mode == EXCLUSIVE ? publish_table(placed) : NULL;
    if (!failed) failed = upload(placed, device);
    if (failed) {
        explain_call(placed->backend, failed, placed->why_cpu);
        coli_log(1, "matrix [%d, %d] stays on the CPU: %s", placed->matrix.rows, placed->matrix.columns, placed->why_cpu);
    } else {
        placed->device = device;
        if (placed->matrix.format == COLI_E8) placed->why_not_down = prepare_as_down(placed);
    }
    unlock_tables(mode);
}

coli_status coli_place(coli_backend *backend, int device, const coli_matrix *matrix, coli_placed **placed) {
    RETURN_ERROR_IF(!placed, COLI_E_ARGUMENT, "coli_place needs a place for its result, got placed = NULL");
    FORWARD_ERROR(coli_matrix_check(matrix));
    coli_placed *new = calloc(1, sizeof *new);
    RETURN_ERROR_IF(!new, COLI_E_MEMORY, "no memory for a placed matrix of %zu bytes", sizeof *new);
    new->matrix = *matrix;
    new->backend = backend;
    new->device = -1;
    if (may_upload(backend, device, matrix, new->why_cpu)) move_to_gpu(new, device);
    *placed = new;
    return COLI_OK;
}

void coli_placed_free(coli_placed *placed) {
    if (!placed) return;
    if (placed->tensor) {
        lock_tables(SHARED);
        placed->backend->call.tensor_free(placed->tensor);
        unlock_tables(SHARED);
    }
    free(placed);
}

int coli_placed_device(const coli_placed *placed) {
    return placed ? placed->device : -1;
}

const char *coli_placed_why_cpu(const coli_placed *placed) {
    if (!placed) return "there is no matrix: placed = NULL";
    return placed->why_cpu[0] ? placed->why_cpu : NULL;
}

/*------   Products   ------*/

/* Remembers why the last call was not the GPU's; "" when it was. A matrix on the CPU keeps the reason of its placement. */
static void remember(coli_placed *placed, const char why[WHY_BYTES]) {
    if (placed->tensor) memcpy(placed->why_cpu, why, strlen(why) + 1);
}

static int fits_gpu_call(size_t S, char why[WHY_BYTES]) {
    if (S <= INT_MAX) return 1;
    snprintf(why, WHY_BYTES, "%zu rows are more than the %d that a GPU call takes", S, INT_MAX);
    return 0;
}

static void report_failure(const coli_backend *backend, const char *call, char why[WHY_BYTES]) {
    explain_call(backend, call, why);
    coli_log(1, "computed on the CPU instead: %s", why);
}

static int matmul_on_gpu(coli_placed *w, const float *x, size_t S, float *y, char why[WHY_BYTES]) {
    if (!w->tensor || !fits_gpu_call(S, why)) return 0;
    const coli_matrix *m = &w->matrix;
    lock_tables(SHARED);
    int done = w->backend->call.matmul(&w->tensor, y, x, NULL, NULL, m->format, (int)S, m->columns, m->rows, w->device,
                                       m->group_size);
    if (!done) report_failure(w->backend, "coli_cuda_matmul", why);
    unlock_tables(SHARED);
    return done;
}

coli_status coli_placed_matmul(coli_placed *w, const float *x, size_t S, float *y) {
    RETURN_ERROR_IF(!w, COLI_E_ARGUMENT, "coli_placed_matmul needs a placed matrix, got w = NULL");
    if (!S) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s of %zu rows is NULL", x ? "y" : "x", S);
    char why[WHY_BYTES] = "";
    int done = matmul_on_gpu(w, x, S, y, why);
    remember(w, why);
    return done ? COLI_OK : coli_matmul(&w->matrix, x, S, y);
}

/* Finds what keeps an expert from the GPU, short of trying; 0 with the reason in `why`. */
static int may_run_expert(coli_placed *const matrices[3], size_t S, char why[WHY_BYTES]) {
    static const char *const names[3] = {"gate", "up", "down"};
    for (int i = 0; i < 3; i++) {
        if (matrices[i]->tensor) continue;
        snprintf(why, WHY_BYTES, "its %s matrix is on the CPU: %.900s", names[i], matrices[i]->why_cpu);
        return 0;
    }
    const coli_placed *gate = matrices[0], *up = matrices[1], *down = matrices[2];
    if (gate->backend != up->backend || gate->backend != down->backend) {
        snprintf(why, WHY_BYTES, "its matrices were placed through different backends");
        return 0;
    }
    if (gate->device != up->device || gate->device != down->device) {
        snprintf(why, WHY_BYTES, "its matrices are on different GPUs: gate on %d, up on %d, down on %d", gate->device,
                 up->device, down->device);
        return 0;
    }
    const char *lacks = coli_backend_why_not(gate->backend, "expert_mlp");
    if (!lacks) lacks = down->why_not_down;
    if (lacks) snprintf(why, WHY_BYTES, "%s", lacks);
    return !lacks && fits_gpu_call(S, why);
}

static int expert_on_gpu(coli_placed *const matrices[3], const float *x, size_t S, float *y, char why[WHY_BYTES]) {
    if (!may_run_expert(matrices, S, why)) return 0;
    const coli_backend *backend = matrices[0]->backend;
    lock_tables(SHARED);
    int done = backend->call.expert_mlp(matrices[0]->tensor, matrices[1]->tensor, matrices[2]->tensor, y, x, (int)S);
    if (!done) report_failure(backend, "coli_cuda_expert_mlp", why);
    unlock_tables(SHARED);
    return done;
}

coli_status coli_placed_expert_mlp(coli_placed *gate, coli_placed *up, coli_placed *down, const float *x, size_t S,
                                   float *y) {
    RETURN_ERROR_IF(!gate || !up || !down, COLI_E_ARGUMENT, "an expert needs three placed matrices, got %s = NULL",
                    !gate ? "gate"
                    : !up ? "up"
                          : "down");
    coli_placed *const matrices[3] = {gate, up, down};
    /* without rows it is only the check of the shapes */
    FORWARD_ERROR(coli_expert_mlp(&gate->matrix, &up->matrix, &down->matrix, NULL, 0, NULL));
    if (!S) return COLI_OK;
    RETURN_ERROR_IF(!x || !y, COLI_E_ARGUMENT, "%s of %zu rows is NULL", x ? "y" : "x", S);
    char why[WHY_BYTES] = "";
    int done = expert_on_gpu(matrices, x, S, y, why);
    for (int i = 0; i < 3; i++) remember(matrices[i], why);
    return done ? COLI_OK : coli_expert_mlp(&gate->matrix, &up->matrix, &down->matrix, x, S, y);
}
