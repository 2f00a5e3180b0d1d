/* backend.h - a loaded GPU library, as backend.c opens it, and placed.c and the MoE layer call it. */
#ifndef COLI_CORE_BACKEND_H
#define COLI_CORE_BACKEND_H

#include "../formats/geometry.h"
#include "../include/coli/coli.h"
#include "../include/coli/coli_cuda.h"
#include "../loader/coli_loader.h"

/* The entry points that libcoli itself calls, without their prefix coli_cuda_. */
#define COLI_BACKEND_CALLS(X)                                                                                              \
    X(abi_version)                                                                                                         \
    X(init)                                                                                                                \
    X(available_device_count)                                                                                              \
    X(device_count)                                                                                                        \
    X(device_at)                                                                                                           \
    X(e8_set_grid)                                                                                                         \
    X(fp8_set_lut)                                                                                                         \
    X(tensor_upload)                                                                                                       \
    X(tensor_upload_g)                                                                                                     \
    X(mem_info)                                                                                                            \
    X(alloc_footprint)                                                                                                     \
    X(tensor_update)                                                                                                       \
    X(tensor_free)                                                                                                         \
    X(tensor_vram)                                                                                                         \
    X(tensor_device)                                                                                                       \
    X(tensor_set_rotated)                                                                                                  \
    X(matmul)                                                                                                              \
    X(expert_mlp)                                                                                                          \
    X(expert_group)                                                                                                        \
    X(expert_group_issue)                                                                                                  \
    X(expert_group_issue_sum)                                                                                              \
    X(expert_group_take)                                                                                                   \
    X(last_error)                                                                                                          \
    X(last_status)

/* Pointers with the types that coli_cuda.h declares; NULL where the library lacks the entry point. */
typedef struct coli_backend_calls {
#define MEMBER(name) __typeof__(coli_cuda_##name) *name;
    COLI_BACKEND_CALLS(MEMBER)
#undef MEMBER
} coli_backend_calls;

/* Room for the reason why a GPU does not do something; longer ones are cut. */
#define COLI_WHY_BYTES 1024

/* Each format is a feature; the others are groups of calls. */
#define COLI_BACKEND_CALL_FEATURES 8
#define COLI_BACKEND_FEATURES (COLI_FORMAT_COUNT + COLI_BACKEND_CALL_FEATURES)

struct coli_backend {
    coli_loader_library library;
    char *why_not[COLI_BACKEND_FEATURES]; /* in the order of the features; NULL: offered */
    char init_error[COLI_WHY_BYTES -
                    256]; /* why the last coli_backend_init failed, "" when it did not; becomes part of reasons */
    coli_backend_calls call;
};

/* The GPU ABI forbids to configure devices or to set a table while another call runs. Both belong to the library, whatever
 * the number of its backends, so one lock serves them all: shared by ordinary calls, exclusive for these. */
typedef enum coli_access { COLI_SHARED, COLI_EXCLUSIVE } coli_access;
void coli_backend_lock(coli_access access);
void coli_backend_unlock(coli_access access);

/* 1 for a library without a version. It carries none of what versions added: a codebook of its own, rotation blocks above
 * 4096, groups with other formats than f32, int8, int4 and int2. */
int coli_backend_is_old(const coli_backend *backend);

/* How a call that reads nothing but its own tensors is locked: shared, but an old library does not keep the calls of
 * several threads apart. */
coli_access coli_backend_access(const coli_backend *backend);

/* Why one GPU call cannot take so many rows, and why coli_cuda_expert_mlp cannot compute this expert for them; NULL when it
 * can. */
const char *coli_backend_why_not_rows(size_t rows);
const char *coli_backend_why_not_expert_mlp(const coli_backend *backend, const coli_matrix *gate, const coli_matrix *up,
                                            const coli_matrix *down, size_t rows);

/* Writes why the entry point `name` has just returned 0 to this thread. */
void coli_backend_explain(const coli_backend *backend, const char *name, char *why, size_t size);

#endif
