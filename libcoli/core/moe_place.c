/* moe_place.c - which experts are on which GPU: the hottest, within budgets, swapped when others become hotter. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "matrix.h"
#include "moe.h"
#include "status.h"

/*------   Several layers at once   ------*/

/* An expert among those of all layers of a call. */
typedef struct candidate {
    coli_moe *layer;
    int number;
    double heat; /* the shared expert's is infinite: every row passes it */
    int order;   /* as the caller gave layers and experts, for those that are as hot */
} candidate;

static moe_expert *expert_of(const candidate *c) {
    return &c->layer->experts[c->number];
}

static int compare_layers(const void *a, const void *b) {
    uintptr_t one = (uintptr_t)*(coli_moe *const *)a, two = (uintptr_t)*(coli_moe *const *)b;
    return (one > two) - (one < two);
}

/* Locks all layers, in the order of their addresses, so that two such calls cannot wait for each other; *sorted belongs to
 * the caller, for unlock_all. */
static coli_status lock_all(coli_moe *const *layers, int count, coli_moe ***sorted) {
    RETURN_ERROR_IF(count < 1 || !layers, COLI_E_ARGUMENT, "at least 1 layer is needed, got %d", layers ? count : 0);
    for (int i = 0; i < count; i++) RETURN_ERROR_IF(!layers[i], COLI_E_ARGUMENT, "layer %d of %d is NULL", i, count);
    *sorted = malloc((size_t)count * sizeof **sorted);
    RETURN_ERROR_IF(!*sorted, COLI_E_MEMORY, "no memory for a list of %d layers", count);
    memcpy(*sorted, layers, (size_t)count * sizeof **sorted);
    qsort(*sorted, (size_t)count, sizeof **sorted, compare_layers);
    for (int i = 1; i < count; i++) {
        if ((*sorted)[i] != (*sorted)[i - 1]) continue;
        free(*sorted);
        RETURN_ERROR(COLI_E_ARGUMENT, "a layer is in the list twice");
    }
    for (int i = 0; i < count; i++) coli_mutex_lock(&(*sorted)[i]->mutex);
    return COLI_OK;
}

static void unlock_all(coli_moe **sorted, int count) {
    for (int i = count; i > 0; i--) coli_mutex_unlock(&sorted[i - 1]->mutex);
    free(sorted);
}

static int hotter_first(const void *a, const void *b) {
    const candidate *one = a, *two = b;
    if (one->heat != two->heat) return one->heat < two->heat ? 1 : -1;
    return (one->order > two->order) - (one->order < two->order);
}

/* All experts of the layers, in the caller's order of layers, hottest first. NULL without memory. */
static candidate *list_candidates(coli_moe *const *layers, int layer_count, int *count) {
    *count = 0;
    for (int i = 0; i < layer_count; i++) *count += moe_experts(layers[i]);
    candidate *list = malloc((size_t)*count * sizeof *list), *next = list;
    if (!list) return NULL;
    for (int i = 0; i < layer_count; i++) {
        coli_moe *layer = layers[i];
        for (int e = 0; e < moe_experts(layer); e++) {
            double heat = e < layer->count ? moe_heat_of(layer, &layer->experts[e]) : INFINITY;
            *next = (candidate){layer, e, heat, (int)(next - list)};
            next++;
        }
    }
    qsort(list, (size_t)*count, sizeof *list, hotter_first);
    return list;
}

/*------   Room on devices   ------*/

typedef struct room {
    int device;
    size_t left;
    char why_none[COLI_WHY_BYTES]; /* why an automatic budget is 0; "" where it is more */
} room;

static const coli_matrix *matrix_of(const coli_expert *expert, int i) {
    const coli_matrix *const matrices[3] = {&expert->gate, &expert->up, &expert->down};
    return matrices[i];
}

/* Device memory that an expert is going to take. */
static size_t expected_bytes(const coli_backend *backend, const coli_expert *expert) {
    size_t sum = 0;
    coli_access access = coli_backend_access(backend);
    coli_backend_lock(access);
    for (int i = 0; i < 3; i++) {
        size_t bytes = coli_matrix_bytes(matrix_of(expert, i));
        sum += backend->call.alloc_footprint ? backend->call.alloc_footprint(bytes) : bytes;
    }
    coli_backend_unlock(access);
    return sum;
}

/* And what it takes. */
static size_t taken_bytes(const moe_expert *expert) {
    const coli_backend_calls *call = &expert->backend->call;
    size_t sum = 0;
    coli_access access = coli_backend_access(expert->backend);
    coli_backend_lock(access);
    for (int i = 0; i < 3; i++) {
        sum += call->tensor_vram ? call->tensor_vram(coli_placed_tensor(expert->placed[i]))
                                 : coli_matrix_bytes(matrix_of(&expert->matrices, i));
    }
    coli_backend_unlock(access);
    return sum;
}

/* Whether coli_cuda_shutdown has released its tensors, as far as the library tells. */
static int was_released(const moe_expert *expert) {
    const coli_backend_calls *call = &expert->backend->call;
    int released = 0;
    coli_access access = coli_backend_access(expert->backend);
    coli_backend_lock(access);
    for (int i = 0; i < 3 && call->tensor_device; i++)
        released |= call->tensor_device(coli_placed_tensor(expert->placed[i])) < 0;
    coli_backend_unlock(access);
    return released;
}

static size_t without(size_t bytes, size_t part) {
    return bytes > part ? bytes - part : 0;
}

/* Free bytes of the device; 0 with the reason where they are not known. */
static int ask_free_bytes(const coli_backend *backend, int device, size_t *free_bytes, char *why, size_t size) {
    size_t total;
    coli_access access = coli_backend_access(backend);
    coli_backend_lock(access);
    int known = backend->call.mem_info && backend->call.mem_info(device, free_bytes, &total);
    if (!backend->call.mem_info)
        snprintf(why, size, "the library lacks coli_cuda_mem_info, so give a budget in bytes");
    else if (!known)
        coli_backend_explain(backend, "coli_cuda_mem_info", why, size);
    coli_backend_unlock(access);
    return known;
}

/* What an automatic budget allows. */
static size_t free_room(const coli_backend *backend, room *r, size_t reserve) {
    size_t free_bytes = 0;
    char why[COLI_WHY_BYTES - 256];
    if (!ask_free_bytes(backend, r->device, &free_bytes, why, sizeof why))
        snprintf(r->why_none, sizeof r->why_none, "what is free on GPU %d is not known: %s", r->device, why);
    else if (free_bytes <= reserve)
        snprintf(r->why_none, sizeof r->why_none, "of GPU %d, %zu bytes are free, and the reserve is %zu", r->device,
                 free_bytes, reserve);
    return without(free_bytes, reserve);
}

static room room_of(const coli_backend *backend, const coli_moe_device *wanted, const candidate *all, int count) {
    room result = {.device = wanted->device, .left = wanted->budget};
    if (wanted->budget == COLI_MOE_AUTO) {
        result.left = free_room(backend, &result, wanted->reserve);
        return result;
    }
    for (int i = 0; i < count; i++) {
        const moe_expert *expert = expert_of(&all[i]);
        if (expert->backend && expert->device == wanted->device) result.left = without(result.left, taken_bytes(expert));
    }
    return result;
}

/* The device with the most room, if it is enough. */
static room *roomiest(room *rooms, int count, size_t needed) {
    room *most = NULL;
    for (int i = 0; i < count; i++) {
        if (rooms[i].left >= needed && (!most || rooms[i].left > most->left)) most = &rooms[i];
    }
    return most;
}

/*------   Placing   ------*/

/* What the backend can do with the expert; 0 with the reason where it can do nothing, or there is none. */
static int find_paths(moe_expert *expert, const coli_backend *backend, const char **why) {
    static const char *const features[] = {"issue_take", "expert_group", "expert_mlp"}; /* in the order of coli_moe_path */
    const coli_expert *m = &expert->matrices;
    int any = 0;
    for (int i = 0; i < 3 && !*why; i++) *why = coli_placed_why_never(backend, matrix_of(m, i));
    if (*why) return 0; /* a refused upload would be held against the GPU */
    for (int path = 0; path < COLI_MOE_CPU; path++) {
        const char *lacks = coli_backend_why_not_expert(backend, features[path], &m->gate, &m->up, &m->down);
        expert->can[path] = !lacks;
        any |= !lacks;
        if (lacks && !*why) *why = lacks;
    }
    return any;
}

/* Uploads the three matrices. 0 with the reason, and nothing left behind. */
static int upload(moe_expert *expert, coli_backend *backend, int device, char *why, size_t why_size) {
    const char *failed = NULL;
    for (int i = 0; i < 3 && !failed; i++) {
        coli_status status = coli_place(backend, device, matrix_of(&expert->matrices, i), &expert->placed[i]);
        failed = status == COLI_OK ? coli_placed_why_cpu(expert->placed[i]) : coli_last_error();
    }
    if (failed) {
        snprintf(why, why_size, "%s", failed);
        moe_drop(expert, why);
        return 0;
    }
    expert->backend = backend;
    expert->device = device;
    moe_set_why(expert, NULL);
    return 1;
}

static void explain_no_room(const room *rooms, int count, size_t needed, char *why, size_t size) {
    const room *none = rooms;
    while (none < rooms + count && !none->why_none[0]) none++;
    if (none < rooms + count)
        snprintf(why, size, "%s", none->why_none);
    else
        snprintf(why, size, "no GPU of the call has the %zu bytes of room that it needs", needed);
}

/* Tries the devices with room, roomiest first; one that fails has none any more. What an expert takes, the padding of small
 * matrices included, shows when it is there: it leaves again where that is too much. */
static void place_one(const candidate *c, coli_backend *backend, room *rooms, int count) {
    moe_expert *expert = expert_of(c);
    const char *lacks = NULL;
    if (!find_paths(expert, backend, &lacks)) {
        moe_set_why(expert, lacks);
        return;
    }
    size_t needed = expected_bytes(backend, &expert->matrices);
    char why[COLI_WHY_BYTES];
    explain_no_room(rooms, count, needed, why, sizeof why);
    if (!roomiest(rooms, count, needed)) {
        moe_set_why(expert, why);
        return;
    }
    if (moe_need_host(c->layer, c->number) != COLI_OK) {
        moe_set_why(expert, coli_last_error());
        return;
    }
    for (room *target; (target = roomiest(rooms, count, needed));) {
        if (!upload(expert, backend, target->device, why, sizeof why)) {
            target->left = 0;
            coli_log(1, "GPU %d gets no more experts in this placement: %s", target->device, why);
            continue;
        }
        size_t taken = taken_bytes(expert);
        if (taken <= target->left) {
            target->left -= taken;
            moe_release_host(c->layer, c->number);
            return;
        }
        snprintf(why, sizeof why, "it takes %zu bytes of GPU %d, padding included, and %zu are left", taken, target->device,
                 target->left);
        moe_drop(expert, why);
        target->left = needed - 1; /* for smaller ones */
    }
    moe_set_why(expert, why);
}

/* Experts that stay on the CPU for one reason. */
typedef struct stay {
    const char *why;
    int experts;
} stay;

#define STAYS 4 /* reasons in the log; many experts have the same */

/* Counts an expert with its reason, or with the other reasons behind the first STAYS. Gives the new number of entries. */
static int add_stay(stay stays[STAYS + 1], int count, const char *why) {
    int i = 0;
    while (i < count && i < STAYS && strcmp(stays[i].why, why)) i++;
    if (i == count) stays[count++] = (stay){i < STAYS ? why : "other reasons, which coli_moe_why_cpu tells", 0};
    stays[i].experts++;
    return count;
}

static void log_placement(const candidate *all, int count) {
    int on_gpu = 0, stay_count = 0;
    stay stays[STAYS + 1];
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        const moe_expert *expert = expert_of(&all[i]);
        if (expert->backend) {
            on_gpu++;
            bytes += taken_bytes(expert);
        } else if (expert->why_cpu) {
            stay_count = add_stay(stays, stay_count, expert->why_cpu);
        }
    }
    coli_log(2, "%d of %d experts are on GPUs, in %.1f GB", on_gpu, count, (double)bytes / 1e9);
    for (int i = 0; i < stay_count; i++)
        coli_log(1, "%d of %d experts stay on the CPU: %s", stays[i].experts, count, stays[i].why);
}

static coli_status place_all(coli_moe *const *layers, int layer_count, coli_backend *backend,
                             const coli_moe_device *devices, int device_count) {
    int count;
    candidate *all = list_candidates(layers, layer_count, &count);
    room *rooms = malloc((size_t)device_count * sizeof *rooms);
    if (all && rooms) {
        for (int i = 0; i < count; i++) {
            moe_expert *expert = expert_of(&all[i]);
            if (expert->backend && was_released(expert)) moe_drop(expert, "coli_cuda_shutdown released its tensors");
        }
        for (int i = 0; backend && i < device_count; i++) rooms[i] = room_of(backend, &devices[i], all, count);
        for (int i = 0; i < count; i++) {
            if (!expert_of(&all[i])->backend) place_one(&all[i], backend, rooms, device_count);
        }
        log_placement(all, count);
    }
    coli_status status = all && rooms ? COLI_OK : COLI_E_MEMORY;
    free(all);
    free(rooms);
    RETURN_ERROR_IF(status != COLI_OK, status, "no memory to place the experts of %d layers", layer_count);
    return COLI_OK;
}

coli_status coli_moe_place(coli_moe *const *layers, int layer_count, coli_backend *backend, const coli_moe_device *devices,
                           int device_count) {
    RETURN_ERROR_IF(device_count < 1 || !devices, COLI_E_ARGUMENT, "coli_moe_place needs at least 1 device, got %d",
                    devices ? device_count : 0);
    for (int i = 0; i < device_count; i++) {
        RETURN_ERROR_IF(devices[i].device < 0, COLI_E_ARGUMENT, "device %d of the list must be a CUDA ordinal, got %d", i,
                        devices[i].device);
        for (int k = 0; k < i; k++) {
            RETURN_ERROR_IF(devices[k].device == devices[i].device, COLI_E_ARGUMENT, "device %d is in the list twice",
                            devices[i].device);
        }
    }
    coli_moe **locked;
    FORWARD_ERROR(lock_all(layers, layer_count, &locked));
    coli_status status = place_all(layers, layer_count, backend, devices, device_count);
    unlock_all(locked, layer_count);
    return status;
}

void coli_moe_unplace(coli_moe *layer) {
    if (!layer) return;
    coli_mutex_lock(&layer->mutex);
    for (int e = 0; e < moe_experts(layer); e++) {
        if (layer->experts[e].backend) moe_drop(&layer->experts[e], "it was taken off the GPU by coli_moe_unplace");
    }
    coli_mutex_unlock(&layer->mutex);
}

/*------   Repinning   ------*/

static int may_swap(const candidate *hot, const candidate *cold) {
    return moe_same_kind(&expert_of(hot)->matrices, &expert_of(cold)->matrices);
}

/* Overwrites the tensors of `cold` by the matrices of `hot`; 0 with the reason. */
static int overwrite(moe_expert *cold, const coli_expert *hot, char *why, size_t why_size) {
    for (int i = 0; i < 3; i++) {
        const char *failed = coli_placed_update(cold->placed[i], matrix_of(hot, i)) == COLI_OK
                                 ? coli_placed_why_cpu(cold->placed[i])
                                 : coli_last_error();
        if (!failed) continue;
        snprintf(why, why_size, "its place on GPU %d was lost: %s", cold->device, failed);
        return 0;
    }
    return 1;
}

static void move_tensors(moe_expert *from, moe_expert *to) {
    memcpy(to->placed, from->placed, sizeof to->placed);
    memcpy(to->can, from->can, sizeof to->can);
    to->backend = from->backend;
    to->device = from->device;
    memset(from->placed, 0, sizeof from->placed);
    from->backend = NULL;
    from->device = -1;
}

static void note_failed_update(coli_moe *layer, const char *why) {
    moe_note_failure(layer, &layer->total, COLI_MOE_STEP_UPDATE, 1, why);
}

/* 1 when `hot` has the place of `cold`; 0 with both on the CPU, or with nothing changed where `hot` has no host copy. */
static int swap(const candidate *hot, const candidate *cold) {
    moe_expert *comes = expert_of(hot), *leaves = expert_of(cold);
    char why[COLI_WHY_BYTES];
    if (moe_need_host(hot->layer, hot->number) != COLI_OK) {
        moe_set_why(comes, coli_last_error());
        note_failed_update(hot->layer, coli_last_error());
        return 0;
    }
    if (!overwrite(leaves, &comes->matrices, why, sizeof why)) {
        moe_drop(leaves, why);
        moe_set_why(comes, why);
        note_failed_update(hot->layer, why);
        return 0;
    }
    move_tensors(leaves, comes);
    moe_set_why(comes, NULL);
    moe_set_why(leaves, "a hotter expert took its place on the GPU");
    moe_release_host(hot->layer, hot->number);
    return 1;
}

static void swap_and_count(const candidate *hot, const candidate *cold, coli_moe_repinned *result) {
    coli_moe_repinned one = {0};
    double start = coli_seconds();
    if (swap(hot, cold)) {
        one.swaps = 1;
        one.bytes = moe_expert_bytes(&expert_of(hot)->matrices);
    } else {
        one.failed = 1;
    }
    one.seconds = coli_seconds() - start;
    moe_add_repinned(result, &one);
    moe_add_repinned(&hot->layer->total.repinned, &one);
}

/* The coldest routed expert on a GPU among all[0 ... end - 1], or, with `hot`, one whose place that can take; -1 for none.
 */
static int coldest(const candidate *all, int end, const candidate *hot) {
    for (int i = end - 1; i >= 0; i--) {
        int routed = all[i].number < all[i].layer->count;
        if (routed && expert_of(&all[i])->backend && (!hot || may_swap(hot, &all[i]))) return i;
    }
    return -1;
}

static void repin_all(const candidate *all, int count, double hysteresis, int max_swaps, coli_moe_repinned *result) {
    int last = coldest(all, count, NULL); /* nothing that is colder can win a place */
    for (int i = 0; i < last; i++) {
        const candidate *hot = &all[i];
        if (max_swaps && result->swaps + result->failed >= (uint64_t)max_swaps) return;
        if (hot->heat < 1) return;
        if (expert_of(hot)->backend) continue;
        int cold = coldest(all, last + 1, hot);
        if (cold < 0 || !(hot->heat > all[cold].heat * (1 + hysteresis))) continue;
        swap_and_count(hot, &all[cold], result);
        last = coldest(all, last + 1, NULL);
    }
}

coli_status coli_moe_repin(coli_moe *const *layers, int layer_count, double hysteresis, int max_swaps,
                           coli_moe_repinned *result) {
    RETURN_ERROR_IF(!(hysteresis >= 0), COLI_E_ARGUMENT, "hysteresis must be 0 or more, got %g", hysteresis);
    RETURN_ERROR_IF(max_swaps < 0, COLI_E_ARGUMENT, "max_swaps must be 0 or more, got %d", max_swaps);
    coli_moe **locked;
    FORWARD_ERROR(lock_all(layers, layer_count, &locked));
    int count;
    coli_moe_repinned done = {0};
    candidate *all = list_candidates(layers, layer_count, &count);
    if (all) repin_all(all, count, hysteresis, max_swaps, &done);
    unlock_all(locked, layer_count);
    RETURN_ERROR_IF(!all, COLI_E_MEMORY, "no memory to list the experts of %d layers", layer_count);
    free(all);
    if (result) *result = done;
    return COLI_OK;
}
