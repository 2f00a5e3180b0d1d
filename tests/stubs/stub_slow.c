/* stub_slow.c - a GPU library whose experts give back their rows after a while: y = x after STUB_DELAY_US microseconds,
 * slept, so that the processor is free meanwhile. Its two devices work at once. For measurements of what a host does around
 * its calls. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coli/coli_cuda.h"

struct ColiCudaTensor {
    int device, rows, columns;
    size_t bytes;
};

enum { DEVICES = 2 };

/* What a device was issued. */
static struct issue {
    struct timespec ready_at;
    float *rows;
    size_t capacity; /* floats */
} issues[DEVICES];
static int configured[DEVICES], configured_count;

static long delay_ns(void) {
    const char *text = getenv("STUB_DELAY_US");
    return text ? 1000 * atol(text) : 0;
}

static struct timespec after_delay(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += delay_ns();
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    return at;
}

static void sleep_until(struct timespec at) {
    if (delay_ns()) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

int coli_cuda_abi_version(void) {
    return COLI_CUDA_ABI_MAJOR * 1000 + COLI_CUDA_ABI_MINOR;
}
const char *coli_cuda_last_error(void) {
    return "";
}
coli_status coli_cuda_last_status(void) {
    return COLI_OK;
}
int coli_cuda_init(const int *devices, int count) {
    if (!devices || count < 1 || count > DEVICES) return 0;
    memcpy(configured, devices, (size_t)count * sizeof *devices);
    configured_count = count;
    return 1;
}
void coli_cuda_shutdown(void) {
    configured_count = 0;
}
int coli_cuda_available_device_count(void) {
    return DEVICES;
}
int coli_cuda_device_count(void) {
    return configured_count;
}
int coli_cuda_device_at(int index) {
    return index >= 0 && index < configured_count ? configured[index] : -1;
}
int coli_cuda_mem_info(int device, size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = (size_t)1 << 40;
    return device >= 0 && device < DEVICES;
}
void coli_cuda_stats(int device, size_t *count, size_t *bytes) {
    (void)device;
    *count = *bytes = 0;
}
int coli_cuda_e8_set_grid(const void *grid) {
    return grid != NULL;
}
int coli_cuda_tensor_set_rotated(ColiCudaTensor *tensor, int rotated) {
    return tensor != NULL && rotated >= 0;
}
int coli_cuda_tensor_upload(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                            int device) {
    (void)scales, (void)fmt;
    *tensor = malloc(sizeof **tensor);
    if (*tensor) **tensor = (ColiCudaTensor){device, O, I, (size_t)O * (size_t)I};
    return *tensor != NULL && weights != NULL;
}
int coli_cuda_tensor_upload_g(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                              int device, int gs) {
    return gs > 0 && coli_cuda_tensor_upload(tensor, weights, scales, fmt, I, O, device);
}
int coli_cuda_tensor_update(ColiCudaTensor *tensor, const void *weights, const float *scales) {
    (void)scales;
    return tensor && weights;
}
void coli_cuda_tensor_free(ColiCudaTensor *tensor) {
    free(tensor);
}
int coli_cuda_matmul(ColiCudaTensor **tensor, float *y, const float *x, const void *weights, const float *scales, int fmt,
                     int S, int I, int O, int device, int gs) {
    (void)tensor, (void)y, (void)x, (void)weights, (void)scales, (void)fmt, (void)S, (void)I, (void)O, (void)device,
        (void)gs;
    return 0;
}

static size_t floats_of(ColiCudaTensor *const *gates, const int *rows, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += (size_t)rows[i];
    return sum * (size_t)gates[0]->columns;
}

int coli_cuda_expert_group(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                           const int *rows, int count, float *y, const float *x) {
    (void)ups, (void)downs;
    struct timespec at = after_delay();
    memcpy(y, x, floats_of(gates, rows, count) * sizeof *y);
    sleep_until(at);
    return 1;
}
int coli_cuda_expert_mlp(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x, int S) {
    ColiCudaTensor *const gates[] = {gate}, *const ups[] = {up}, *const downs[] = {down};
    return coli_cuda_expert_group(gates, ups, downs, &S, 1, y, x);
}
/* Room for so many floats, to be taken after the delay. */
static float *give_after_delay(int device, size_t floats) {
    struct issue *i = &issues[device];
    i->ready_at = after_delay();
    if (floats > i->capacity) i->rows = realloc(i->rows, (i->capacity = floats) * sizeof *i->rows);
    return i->rows;
}

int coli_cuda_expert_group_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                 const int *rows, int count, const float *x) {
    (void)ups, (void)downs;
    size_t floats = floats_of(gates, rows, count);
    float *issued = give_after_delay(gates[0]->device, floats);
    if (!issued) return 0;
    memcpy(issued, x, floats * sizeof *issued);
    return 1;
}
int coli_cuda_expert_group_issue_sum(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                     const int *rows, int count, const float *x, int x_rows, const int *x_index, int tokens,
                                     const int *row_tokens, const float *row_weights) {
    (void)ups, (void)downs, (void)x_rows;
    size_t D = (size_t)gates[0]->columns, total = floats_of(gates, rows, count) / D;
    float *issued = give_after_delay(gates[0]->device, (size_t)tokens * D);
    if (!issued) return 0;
    memset(issued, 0, (size_t)tokens * D * sizeof *issued);
    for (size_t r = 0; r < total; r++) {
        for (size_t i = 0; i < D; i++)
            issued[(size_t)row_tokens[r] * D + i] += row_weights[r] * x[(size_t)x_index[r] * D + i];
    }
    return 1;
}
const float *coli_cuda_expert_group_take(int device) {
    if (device < 0 || device >= DEVICES) return NULL;
    sleep_until(issues[device].ready_at);
    return issues[device].rows;
}
