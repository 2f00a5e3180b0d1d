/* moe_memory.c - what calls of MoE layers work in, kept for the next call of any layer.
 *
 * The system clears memory page by page as it is first touched: rows of many tokens cost more in that than in the work on
 * them. Layers of a model run one after the other, so they share what is kept. */
#include <stdlib.h>

#include "moe.h"

#define SPARES 16
#define KEPT_BYTES ((size_t)512 << 20) /* in all: two buffers of a call of 4096 rows; what is more is freed at once */
#define SMALL_BYTES ((size_t)1 << 20)

static coli_mutex mutex = COLI_MUTEX_INITIALIZER;
static moe_memory spares[SPARES];
static int spare_count, layers;
static size_t kept_bytes;

#ifndef _WIN32
static void lock_spares(void) {
    coli_mutex_lock(&mutex);
}

static void unlock_spares(void) {
    coli_mutex_unlock(&mutex);
}

/* A fork copies the lock as it is, but not the thread that would open it again. */
__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(lock_spares, unlock_spares, unlock_spares);
}
#endif

static moe_memory remove_spare(int i) {
    moe_memory result = spares[i];
    spares[i] = spares[--spare_count];
    kept_bytes -= result.bytes;
    return result;
}

/* A spare may be larger than what is asked for, but not so much that a larger request would miss it. */
static int serves(const moe_memory *spare, size_t bytes) {
    return spare->bytes >= bytes && (spare->bytes <= SMALL_BYTES || spare->bytes / 8 <= bytes);
}

/* The smallest that serves; -1 for none. */
static int best_spare(size_t bytes) {
    int best = -1;
    for (int i = 0; i < spare_count; i++) {
        if (serves(&spares[i], bytes) && (best < 0 || spares[i].bytes < spares[best].bytes)) best = i;
    }
    return best;
}

/* Whether the memory can be kept, if need be instead of smaller spares, which are freed. */
static int make_room(const moe_memory *memory) {
    while (spare_count == SPARES || kept_bytes + memory->bytes > KEPT_BYTES) {
        int smallest = 0;
        for (int i = 1; i < spare_count; i++) {
            if (spares[i].bytes < spares[smallest].bytes) smallest = i;
        }
        if (!spare_count || spares[smallest].bytes >= memory->bytes) return 0;
        free(remove_spare(smallest).start);
    }
    return 1;
}

/* So that a call with a few rows more finds it large enough. */
static size_t rounded_up(size_t bytes) {
    size_t step = 4096;
    while (step < bytes / 8) step *= 2;
    return (bytes + step - 1) / step * step;
}

static void free_spares(void) {
    while (spare_count) free(remove_spare(0).start);
}

moe_memory moe_memory_take(size_t bytes) {
    moe_memory result = {NULL, rounded_up(bytes ? bytes : 1)};
    coli_mutex_lock(&mutex);
    int spare = best_spare(bytes);
    if (spare >= 0) result = remove_spare(spare);
    coli_mutex_unlock(&mutex);
    if (!result.start) result.start = malloc(result.bytes);
    if (!result.start) { /* what is kept may be what is lacking */
        coli_moe_trim();
        result.start = malloc(result.bytes);
    }
    return result;
}

void moe_memory_give(moe_memory memory) {
    if (!memory.start) return;
    coli_mutex_lock(&mutex);
    if (make_room(&memory)) {
        spares[spare_count++] = memory;
        kept_bytes += memory.bytes;
        memory.start = NULL;
    }
    coli_mutex_unlock(&mutex);
    free(memory.start);
}

void moe_memory_count_layer(int more) {
    coli_mutex_lock(&mutex);
    layers += more;
    if (!layers) free_spares();
    coli_mutex_unlock(&mutex);
}

void coli_moe_trim(void) {
    coli_mutex_lock(&mutex);
    free_spares();
    coli_mutex_unlock(&mutex);
}
