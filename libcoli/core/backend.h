/* backend.h - a loaded GPU library, as backend.c opens it and placed.c calls it. */
#ifndef COLI_CORE_BACKEND_H
#define COLI_CORE_BACKEND_H

#include "../include/coli/coli.h"
#include "../include/coli/coli_cuda.h"

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
    X(tensor_free)                                                                                                         \
    X(tensor_set_rotated)                                                                                                  \
    X(matmul)                                                                                                              \
    X(expert_mlp)                                                                                                          \
    X(last_error)

/* Pointers with the types that coli_cuda.h declares; NULL where the library lacks the entry point. */
typedef struct coli_backend_calls {
#define MEMBER(name) __typeof__(coli_cuda_##name) *name;
    COLI_BACKEND_CALLS(MEMBER)
#undef MEMBER
} coli_backend_calls;

#define COLI_BACKEND_FEATURES 16

struct coli_backend {
    void *library; /* what the system calls the loaded file */
    char *path;
    char *why_not[COLI_BACKEND_FEATURES]; /* in the order of the features; NULL: offered */
    coli_backend_calls call;
};

#endif
