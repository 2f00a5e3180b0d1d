/* moe.h - an MoE layer as moe_layer.c makes it, moe_place.c puts it on GPUs and moe_forward.c runs it. */
#ifndef COLI_CORE_MOE_H
#define COLI_CORE_MOE_H

#include "../include/coli/coli_moe.h"
#include "backend.h"
#include "placed.h"
#include "thread.h"

/* An expert of a layer: in host memory, on a GPU, or both. */
typedef struct moe_expert {
    coli_expert matrices; /* pointers to weights are NULL while the host copy is not here */
    int has_host;
    coli_placed *placed[3];  /* gate, up, down on `device`; NULL on the CPU */
    coli_backend *backend;   /* NULL on the CPU */
    int device;              /* -1 on the CPU */
    int can[COLI_MOE_PATHS]; /* the paths that the backend offers for it */
    double heat;             /* in units of coli_moe.heat_unit */
    char *why_cpu;           /* NULL: the GPU does the work */
} moe_expert;

/* Memory of a call. */
typedef struct moe_memory {
    void *start; /* aligned for anything */
    size_t bytes;
} moe_memory;

struct coli_moe {
    coli_mutex mutex; /* one call at a time */
    int count;        /* routed experts; the shared one follows them where there is one */
    int has_shared;
    int D;
    coli_moe_host host; /* acquire = NULL: host copies are kept */
    moe_expert *experts;
    double heat_unit; /* grows by every row, which makes what was added before count less */
    double half_life; /* rows; 0: never */
    coli_moe_stats total, last;
    coli_mutex failure_mutex; /* of what follows, and of counts of failures: jobs fail on threads of their own */
    char *why_failed[COLI_MOE_STEPS];
    uint64_t failures; /* that were noted */
};

/* Whether two experts are alike in all but their weights: formats, shapes, group sizes, flags, codebooks. */
int moe_same_kind(const coli_expert *a, const coli_expert *b);
/* Bytes of its weights and scales. */
size_t moe_expert_bytes(const coli_expert *expert);
/* Whether gate and up must meet different rows, one rotated ones and the other plain ones. */
int moe_needs_two_inputs(const coli_expert *expert);

/* Number of experts, the shared one included. */
int moe_experts(const coli_moe *layer);

/* The host copy of an expert, asked for where it is not here. COLI_E_STATE where it cannot be had. */
coli_status moe_need_host(coli_moe *layer, int expert);
/* Gives it back where there is a way to get it again. */
void moe_release_host(coli_moe *layer, int expert);

/* Keeps a copy of the text as the reason of an expert; NULL for none. Out of memory, the reason is a static text. */
void moe_set_why(moe_expert *expert, const char *why);

/* Takes the three tensors of an expert off its GPU. */
void moe_drop(moe_expert *expert, const char *why);

/* Counts experts that a step failed on in `stats`, which are the layer's, keeps the reason, and logs the 1st, 2nd, 4th,
 * 8th, ... failure of a layer, so that a dead device does not flood. */
void moe_note_failure(coli_moe *layer, coli_moe_stats *stats, coli_moe_step step, int experts, const char *reason);

/* At least so many bytes, of what an earlier call has given back or new; start = NULL without memory. */
moe_memory moe_memory_take(size_t bytes);
/* Back, for calls to come or to be freed; start may be NULL. */
void moe_memory_give(moe_memory memory);
/* A layer more or (-1) less: what is kept goes with the last. */
void moe_memory_count_layer(int more);

void moe_add_stats(coli_moe_stats *sum, const coli_moe_stats *more);
void moe_add_repinned(coli_moe_repinned *sum, const coli_moe_repinned *more);

double moe_heat_of(const coli_moe *layer, const moe_expert *expert);
/* Adds the rows of a call; first[e + 1] - first[e] of expert e. */
void moe_add_heat(coli_moe *layer, const size_t *first, size_t S);

#endif
