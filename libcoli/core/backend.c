/* backend.c - opens the GPU library, and tells what it can do and what it cannot. Finding and loading it is coli_loader.c.
 *
 * Every entry point is looked up by itself, so that a library which lacks some still serves with the others. */
#define _GNU_SOURCE /* pthread_rwlock_t */

#include "backend.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../formats/signs.h"
#include "expert.h"
#include "status.h"

/*------   The lock of the library   ------*/

#ifdef _WIN32
#include <windows.h>

static SRWLOCK calls = SRWLOCK_INIT;

void coli_backend_lock(coli_access access) {
    if (access == COLI_SHARED)
        AcquireSRWLockShared(&calls);
    else
        AcquireSRWLockExclusive(&calls);
}

void coli_backend_unlock(coli_access access) {
    if (access == COLI_SHARED)
        ReleaseSRWLockShared(&calls);
    else
        ReleaseSRWLockExclusive(&calls);
}

#else
#include <pthread.h>

static pthread_rwlock_t calls = PTHREAD_RWLOCK_INITIALIZER;

void coli_backend_lock(coli_access access) {
    if (access == COLI_SHARED)
        pthread_rwlock_rdlock(&calls);
    else
        pthread_rwlock_wrlock(&calls);
}

void coli_backend_unlock(coli_access access) {
    (void)access;
    pthread_rwlock_unlock(&calls);
}
#endif

/*------   Messages that grow   ------*/

typedef struct message {
    char text[2048];
    size_t length;
} message;

COLI_PRINTF(2, 3) static void append(message *m, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof m->text - m->length;
    int written = vsnprintf(m->text + m->length, room, format, arguments);
    va_end(arguments);
    if (written > 0) m->length += (size_t)written < room ? (size_t)written : room - 1;
}

static char *copy_string(const char *string) {
    size_t size = strlen(string) + 1;
    char *copy = malloc(size);
    return copy ? memcpy(copy, string, size) : NULL;
}

/*------   Features   ------*/

#define TENSOR_CALLS "coli_cuda_tensor_upload", "coli_cuda_tensor_free"

/* What a library must export for every format. */
static const char *const format_calls[] = {TENSOR_CALLS, "coli_cuda_matmul"};

/* And for one of them besides; NULL for nothing. Where no call is for the format alone, one that came with it. */
static const char *format_call(int format) {
    switch (format) {
    case COLI_INT4_GROUPED:
        return "coli_cuda_tensor_upload_g";
    case COLI_E8:
        return "coli_cuda_e8_set_grid";
    case COLI_MXFP4:
        return "coli_cuda_matmul_mxfp4";
    case COLI_FP8_B128:
        return "coli_cuda_fp8_set_lut";
    default:
        return NULL;
    }
}

/* The features that are no formats, and what a library must export for each. */
static const struct call_feature {
    const char *name;
    const char *calls[5];
} call_features[COLI_BACKEND_CALL_FEATURES] = {
    {"devices", {"coli_cuda_init", "coli_cuda_shutdown", "coli_cuda_device_count", "coli_cuda_device_at"}},
    {"matmul", {TENSOR_CALLS, "coli_cuda_matmul"}},
    {"expert_mlp", {TENSOR_CALLS, "coli_cuda_expert_mlp"}},
    {"expert_group", {TENSOR_CALLS, "coli_cuda_expert_group"}},
    {"issue_take", {TENSOR_CALLS, "coli_cuda_expert_group_issue", "coli_cuda_expert_group_take"}},
    {"update", {TENSOR_CALLS, "coli_cuda_tensor_update"}},
    {"download", {TENSOR_CALLS, "coli_cuda_tensor_download"}},
    {"encode_e8", {"coli_cuda_encode_e8"}},
};

static int feature_index(const char *name) {
    for (int i = 0; i < COLI_BACKEND_CALL_FEATURES; i++) {
        if (!strcmp(call_features[i].name, name)) return COLI_FORMAT_COUNT + i;
    }
    int format; /* "int4-g32" and its like share a feature with "int4-g64" */
    return coli_format_parse(name, &format, NULL) == COLI_OK ? format : -1;
}

int coli_backend_feature_count(void) {
    return COLI_BACKEND_FEATURES;
}

const char *coli_backend_feature_name(int index) {
    if (index < 0 || index >= COLI_BACKEND_FEATURES) return NULL;
    return index < COLI_FORMAT_COUNT ? coli_format_get(index)->name : call_features[index - COLI_FORMAT_COUNT].name;
}

const char *coli_backend_why_not(const coli_backend *backend, const char *feature) {
    int index = feature ? feature_index(feature) : -1;
    if (index < 0) return "there is no such feature; coli_backend_feature_name() lists them";
    if (!backend) return "no GPU library is loaded";
    return backend->why_not[index];
}

/* Adds an entry point that the library lacks to the reason against a feature. */
static void check_call(const coli_backend *backend, int feature, const char *call, message *why) {
    if (!call || coli_backend_symbol(backend, call)) return;
    if (why->length)
        append(why, ", %s", call);
    else
        append(why, "%s lacks what %s needs: %s", backend->library.path, coli_backend_feature_name(feature), call);
}

/* Writes down why the library cannot offer a feature; "" when it can. */
static void explain_feature(const coli_backend *backend, int feature, message *why) {
    if (feature >= COLI_FORMAT_COUNT) {
        const char *const *call = call_features[feature - COLI_FORMAT_COUNT].calls;
        for (; *call; call++) check_call(backend, feature, *call, why);
    } else if (!coli_format_get(feature)->on_gpu) {
        append(why, "the GPU ABI has no %s", coli_format_get(feature)->name);
    } else {
        for (size_t i = 0; i < sizeof format_calls / sizeof *format_calls; i++)
            check_call(backend, feature, format_calls[i], why);
        check_call(backend, feature, format_call(feature), why);
    }
}

/*------   Experts   ------*/

int coli_backend_is_old(const coli_backend *backend) {
    return !backend->call.abi_version;
}

coli_access coli_backend_access(const coli_backend *backend) {
    return coli_backend_is_old(backend) ? COLI_EXCLUSIVE : COLI_SHARED;
}

static int largest_rotation_block(int columns) {
    int largest = 0;
    for (int rest = columns, block; rest > 0; rest -= block) {
        block = coli_rotation_block(rest);
        if (block > largest) largest = block;
    }
    return largest;
}

/* How the hidden rows of an expert would reach its down matrix: the library rotates them where that is E8. */
static const char *why_not_down(const coli_backend *backend, const coli_matrix *down) {
    if (down->format != COLI_E8) return NULL;
    if (down->flags & COLI_UNROTATED) {
        return backend->call.tensor_set_rotated
                   ? NULL
                   : "its down matrix is unrotated e8, and the GPU library rotates what meets it";
    }
    if (coli_backend_is_old(backend) && largest_rotation_block(down->columns) > 4096) {
        return "its down matrix needs rotation blocks above 4096, and the GPU library is too old for them";
    }
    return NULL;
}

const char *coli_backend_why_not_expert(const coli_backend *backend, const char *feature, const coli_matrix *gate,
                                        const coli_matrix *up, const coli_matrix *down) {
    const char *lacks = coli_backend_why_not(backend, feature);
    if (lacks) return lacks;
    const char *inputs = coli_expert_why_two_inputs(gate, up);
    if (inputs) return inputs;
    int grouped = strcmp(feature, "expert_mlp") != 0;
    if (grouped && coli_backend_is_old(backend)) {
        const coli_matrix *const matrices[] = {gate, up, down};
        for (int i = 0; i < 3; i++) {
            if (matrices[i]->format > COLI_INT4_GROUPED)
                return "a GPU library without coli_cuda_abi_version may misread e8, mxfp4 and fp8 matrices in a group";
        }
    }
    return why_not_down(backend, down);
}

const char *coli_backend_why_not_rows(size_t rows) {
    return rows > INT_MAX ? "it has more rows than a GPU call takes" : NULL;
}

const char *coli_backend_why_not_expert_mlp(const coli_backend *backend, const coli_matrix *gate, const coli_matrix *up,
                                            const coli_matrix *down, size_t rows) {
    const char *lacks = coli_backend_why_not_expert(backend, "expert_mlp", gate, up, down);
    return lacks ? lacks : coli_backend_why_not_rows(rows);
}

void coli_backend_explain(const coli_backend *backend, const char *name, char *why, size_t size) {
    if (backend->call.last_error)
        snprintf(why, size, "%s: %s", name, backend->call.last_error());
    else
        snprintf(why, size, "%s returned 0 (this library does not say why)", name);
}

/*------   Opening   ------*/

static void resolve_calls(coli_backend *backend) {
#define RESOLVE(name) backend->call.name = (__typeof__(backend->call.name))coli_backend_symbol(backend, "coli_cuda_" #name);
    COLI_BACKEND_CALLS(RESOLVE)
#undef RESOLVE
}

static coli_status explain_features(coli_backend *backend) {
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) {
        message why = {.length = 0};
        explain_feature(backend, i, &why);
        if (!why.length) continue;
        backend->why_not[i] = copy_string(why.text);
        RETURN_ERROR_IF(!backend->why_not[i], COLI_E_MEMORY, "no memory for the description of %s", backend->library.path);
    }
    return COLI_OK;
}

coli_status coli_backend_open(const char *path, coli_backend **backend) {
    static const char *const mandatory[] = {"coli_cuda_init", NULL}; /* what a GPU library is known by */
    RETURN_ERROR_IF(!backend, COLI_E_ARGUMENT, "coli_backend_open needs a place for its result, got backend = NULL");
    RETURN_ERROR_IF(path && !path[0], COLI_E_ARGUMENT, "coli_backend_open needs a path or NULL, got an empty path");
    coli_backend *opened = calloc(1, sizeof *opened);
    RETURN_ERROR_IF(!opened, COLI_E_MEMORY, "no memory to load a GPU library");

    char why[2048];
    coli_loader_result result = coli_loader_open(path, mandatory, &opened->library, why, sizeof why);
    coli_status status = COLI_OK;
    if (result == COLI_LOADER_OK) {
        resolve_calls(opened);
        status = explain_features(opened);
    } else {
        status =
            coli_fail(result == COLI_LOADER_OTHER_ABI ? COLI_E_ABI : COLI_E_NO_LIBRARY, "no usable GPU library: %s", why);
    }
    if (status == COLI_OK)
        *backend = opened;
    else
        coli_backend_close(opened);
    return status;
}

void coli_backend_close(coli_backend *backend) {
    if (!backend) return;
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) free(backend->why_not[i]);
    coli_loader_close(&backend->library);
    free(backend);
}

const char *coli_backend_path(const coli_backend *backend) {
    return backend ? backend->library.path : NULL;
}

void *coli_backend_symbol(const coli_backend *backend, const char *name) {
    if (!backend || !name) return NULL;
    return (void *)(uintptr_t)coli_loader_symbol(&backend->library, name, NULL, 0);
}

/*------   Devices   ------*/

/* Ordinals 0 ... count - 1 of the visible devices; device 0, to be tried, when the library cannot count them. */
static int visible_devices(const coli_backend *backend, int devices[COLI_CUDA_MAX_DEVICES]) {
    int count = backend->call.available_device_count ? backend->call.available_device_count() : 1;
    if (count > COLI_CUDA_MAX_DEVICES) count = COLI_CUDA_MAX_DEVICES;
    for (int i = 0; i < count; i++) devices[i] = i;
    return count;
}

/* Name of the call that failed, or NULL. */
static const char *configure(const coli_backend *backend, const int *devices, int count) {
    int visible[COLI_CUDA_MAX_DEVICES];
    if (!devices) {
        devices = visible;
        count = visible_devices(backend, visible);
        if (count < 1) return "coli_cuda_available_device_count";
    }
    return backend->call.init(devices, count) ? NULL : "coli_cuda_init";
}

coli_status coli_backend_init(coli_backend *backend, const int *devices, int count) {
    RETURN_ERROR_IF(!backend, COLI_E_ARGUMENT, "coli_backend_init needs a backend, got NULL");
    const char *lacks = coli_backend_why_not(backend, "devices");
    RETURN_ERROR_IF(lacks, COLI_E_NOT_PROVIDED, "%s", lacks);
    char why[sizeof backend->init_error] = "";
    coli_backend_lock(COLI_EXCLUSIVE);
    const char *failed = configure(backend, devices, count);
    if (failed) coli_backend_explain(backend, failed, why, sizeof why);
    memcpy(backend->init_error, why, sizeof why);
    coli_backend_unlock(COLI_EXCLUSIVE);
    if (!failed) return COLI_OK;
    coli_status status = backend->call.last_status ? backend->call.last_status() : COLI_OK;
    RETURN_ERROR(status == COLI_OK ? COLI_E_NO_DEVICE : status, "%s: %s", backend->library.path, why);
}
