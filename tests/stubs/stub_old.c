/* stub_old.c - a GPU library from before E8, as hosts have installed: the 46 names that every host demanded then and no
 * later one. "Device memory" is host memory, so that results can be checked: f32, int8, int4, int2 and grouped int4 are
 * computed for real, one weight at a time. It includes no coli header, because such a library knows none.
 *
 * With WITH_E8 it is one from the first days of E8 and fp8, with the defects of those days, none of which it reports:
 * without a codebook it computes E8 with zeros; it takes every E8 down matrix for a rotated one, and rotates hidden rows in
 * blocks of at most 4096; in groups it takes E8 for int2. fp8 it refuses until it has a table.
 *
 * WITHOUT_ISSUE takes issue and take out, as in still older ones; WITHOUT_MATMUL a name that no host can do without. NEWER
 * is a library of a later minor version of this ABI, with a name that nobody knows yet.
 *
 * STUB_NO_DEVICE=1 in the environment: coli_cuda_init refuses. STUB_REFUSES_UPLOADS=1: uploads do. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct ColiCudaTensor {
    int format, I, O, device, group_size;
    size_t bytes;
    float *weights; /* decoded, [O, I] */
} ColiCudaTensor;

enum { F32, INT8, INT4, INT2, INT4_GROUPED, E8 = 6, FP8 = 8 };
enum { MAX_DEVICES = 16, MAX_EXPERTS = 64, MAX_ISSUE_ROWS = 8 };

static int devices[MAX_DEVICES], device_count;
static size_t tensor_count[MAX_DEVICES], tensor_bytes[MAX_DEVICES];
static uint64_t group_calls, group_experts, group_rows;
static float *issued[MAX_DEVICES];
#ifdef WITH_E8
static uint8_t grid[1024];
static float fp8_table[256];
static int fp8_tables; /* since the process began */
static int fp8_ready;
#endif

/*------   Devices   ------*/

static int position(int device) {
    for (int i = 0; i < device_count; i++) {
        if (devices[i] == device) return i;
    }
    return -1;
}

int coli_cuda_init(const int *list, int count) {
    if (getenv("STUB_NO_DEVICE") || !list || count < 1 || count > MAX_DEVICES) return 0;
    memcpy(devices, list, (size_t)count * sizeof *list);
    device_count = count;
    return 1;
}

void coli_cuda_shutdown(void) {
    for (int i = 0; i < device_count; i++) {
        free(issued[i]);
        issued[i] = NULL;
    }
    device_count = 0;
#ifdef WITH_E8
    memset(grid, 0, sizeof grid);
    fp8_ready = 0;
#endif
}

int coli_cuda_device_count(void) {
    return device_count;
}

int coli_cuda_device_at(int index) {
    return index >= 0 && index < device_count ? devices[index] : -1;
}

int coli_cuda_mem_info(int device, size_t *free_bytes, size_t *total_bytes) {
    if (position(device) < 0 || !free_bytes || !total_bytes) return 0;
    *free_bytes = *total_bytes = (size_t)1 << 30;
    return 1;
}

void coli_cuda_stats(int device, size_t *count, size_t *bytes) {
    size_t counted = 0, size = 0;
    for (int i = 0; i < device_count; i++) {
        if (device >= 0 && devices[i] != device) continue;
        counted += tensor_count[i];
        size += tensor_bytes[i];
    }
    if (count) *count = counted;
    if (bytes) *bytes = size;
}

void coli_cuda_group_stats(uint64_t *calls, uint64_t *experts, uint64_t *rows, double *h2d_ms, double *kernel_ms,
                           double *d2h_ms) {
    if (calls) *calls = group_calls;
    if (experts) *experts = group_experts;
    if (rows) *rows = group_rows;
    if (h2d_ms) *h2d_ms = 0;
    if (kernel_ms) *kernel_ms = 0;
    if (d2h_ms) *d2h_ms = 0;
}

/*------   E8, fp8   ------*/

#ifdef WITH_E8
int coli_cuda_e8_set_grid(const void *table) {
    if (!table || !device_count) return 0;
    memcpy(grid, table, sizeof grid);
    return 1;
}

int coli_cuda_fp8_set_lut(const float *table) {
    if (!table || !device_count) return 0;
    memcpy(fp8_table, table, sizeof fp8_table);
    fp8_ready = 1;
    fp8_tables++;
    return 1;
}

/* For tests: how often the table of fp8 has been set. */
int stub_fp8_tables(void) {
    return fp8_tables;
}

static float e8_weight(const uint8_t *row, int column) {
    const uint8_t *block = row + column / 256 * 98, *word_bytes = block + 64 + column % 256 / 32 * 4;
    int at = column % 256, in_lane = at % 8, d = block[96] | block[97] << 8;
    uint32_t word;
    memcpy(&word, word_bytes, sizeof word);
    uint32_t signs = word >> 7 * (at / 8 % 4) & 127;
    int negative = in_lane < 7 ? signs >> in_lane & 1 : __builtin_parity(signs);
    float scale = ldexpf((float)(1024 | (d & 1023)), (d >> 10 & 31) - 25) * (0.5f + (float)(word >> 28)) * 0.5f;
    float magnitude = grid[4 * block[at / 4] + at % 4] * 0.5f * scale;
    return negative ? -magnitude : magnitude;
}

/* One block: random signs, Walsh-Hadamard transform, 1 / sqrt(n). */
static void rotate_block(float *x, int n) {
    uint64_t state = 417 + (uint64_t)n;
    unsigned signs = 0;
    for (int i = 0; i < n; i++) {
        if (i % 8 == 0) {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            signs = (unsigned)(state * 2685821657736338717u >> 56);
        }
        if (signs >> i % 8 & 1) x[i] = -x[i];
    }
    for (int half = 1; half < n; half *= 2) {
        for (int i = 0; i < n; i++) {
            if (i & half) continue;
            float a = x[i], b = x[i + half];
            x[i] = a + b;
            x[i + half] = a - b;
        }
    }
    for (int i = 0; i < n; i++) x[i] /= sqrtf((float)n);
}

static void rotate(float *row, int columns) {
    for (int start = 0, n; start < columns; start += n) {
        n = (columns - start) & -(columns - start);
        if (n > 4096) n = 4096;
        rotate_block(row + start, n);
    }
}
#endif

/*------   Tensors   ------*/

static int has_scales(int format) {
    return format != F32 && format != E8;
}

static size_t row_bytes(int format, int I) {
    size_t columns = (size_t)I;
    switch (format) {
    case F32:
        return 4 * columns;
    case INT8:
        return columns;
    case INT4:
    case INT4_GROUPED:
        return (columns + 1) / 2;
    case INT2:
        return (columns + 3) / 4;
#ifdef WITH_E8
    case E8:
        return (columns + 255) / 256 * 98;
    case FP8:
        return fp8_ready ? columns : 0;
#endif
    default:
        return 0;
    }
}

static float code(int format, const uint8_t *row, int column) {
    float f;
    switch (format) {
    case F32:
        memcpy(&f, row + 4 * (size_t)column, sizeof f);
        return f;
    case INT8:
        return (int8_t)row[column];
    case INT2:
        return (float)((row[column / 4] >> 2 * (column % 4) & 3) - 2);
#ifdef WITH_E8
    case E8:
        return e8_weight(row, column);
    case FP8:
        return fp8_table[row[column]];
#endif
    default:
        return (float)((row[column / 2] >> 4 * (column % 2) & 15) - 8);
    }
}

/* Columns and rows that share a scale. */
static int scale_columns(const ColiCudaTensor *t) {
    return t->format == INT4_GROUPED ? t->group_size : t->format == FP8 ? 128 : t->I;
}

static int scale_rows(const ColiCudaTensor *t) {
    return t->format == FP8 ? 128 : 1;
}

static int scales_across(const ColiCudaTensor *t) {
    return (t->I + scale_columns(t) - 1) / scale_columns(t);
}

static int scale_count(const ColiCudaTensor *t) {
    return has_scales(t->format) ? (t->O + scale_rows(t) - 1) / scale_rows(t) * scales_across(t) : 0;
}

static void decode(ColiCudaTensor *t, const void *weights, const float *scales) {
    for (int o = 0; o < t->O; o++) {
        const uint8_t *row = (const uint8_t *)weights + (size_t)o * row_bytes(t->format, t->I);
        for (int i = 0; i < t->I; i++) {
            int at = o / scale_rows(t) * scales_across(t) + i / scale_columns(t);
            float scale = has_scales(t->format) ? scales[at] : 1;
            t->weights[(size_t)o * (size_t)t->I + (size_t)i] = code(t->format, row, i) * scale;
        }
    }
}

int coli_cuda_tensor_upload_g(ColiCudaTensor **tensor, const void *weights, const float *scales, int format, int I, int O,
                              int device, int group_size) {
    if (!tensor || getenv("STUB_REFUSES_UPLOADS")) return 0;
    if (format != INT4_GROUPED) group_size = 0;
    ColiCudaTensor *t = *tensor;
    if (t) return t->format == format && t->I == I && t->O == O && t->device == device && t->group_size == group_size;
    if (!weights || I < 1 || O < 1 || position(device) < 0 || !row_bytes(format, I)) return 0;
    if ((!scales && has_scales(format)) || (format == INT4_GROUPED && group_size < 1)) return 0;
    t = malloc(sizeof *t);
    float *decoded = malloc((size_t)O * (size_t)I * sizeof *decoded);
    if (!t || !decoded) {
        free(t);
        free(decoded);
        return 0;
    }
    *t = (ColiCudaTensor){format, I, O, device, group_size, (size_t)O * row_bytes(format, I), decoded};
    t->bytes += (size_t)scale_count(t) * sizeof *scales;
    decode(t, weights, scales);
    tensor_count[position(device)]++;
    tensor_bytes[position(device)] += t->bytes;
    *tensor = t;
    return 1;
}

int coli_cuda_tensor_upload(ColiCudaTensor **tensor, const void *weights, const float *scales, int format, int I, int O,
                            int device) {
    return coli_cuda_tensor_upload_g(tensor, weights, scales, format, I, O, device, 0);
}

int coli_cuda_tensor_update(ColiCudaTensor *t, const void *weights, const float *scales) {
    if (!t || !weights || (!scales && has_scales(t->format))) return 0;
    decode(t, weights, scales);
    return 1;
}

void coli_cuda_tensor_free(ColiCudaTensor *t) {
    if (!t) return;
    int at = position(t->device);
    if (at >= 0) {
        tensor_count[at]--;
        tensor_bytes[at] -= t->bytes;
    }
    free(t->weights);
    free(t);
}

size_t coli_cuda_tensor_bytes(const ColiCudaTensor *t) {
    return t ? t->bytes : 0;
}

int coli_cuda_tensor_device(const ColiCudaTensor *t) {
    return t ? t->device : -1;
}

/*------   Products   ------*/

/* COLI_GPU_FAIL_AFTER=N lets N products pass and refuses the later ones. */
static int refuses(void) {
    static int calls;
    const char *after = getenv("COLI_GPU_FAIL_AFTER");
    return after && calls++ >= atoi(after);
}

static void multiply(const ColiCudaTensor *t, const float *x, int S, float *y) {
    for (int s = 0; s < S; s++) {
        for (int o = 0; o < t->O; o++) {
            double sum = 0;
            for (int i = 0; i < t->I; i++) sum += (double)t->weights[(size_t)o * t->I + i] * x[(size_t)s * t->I + i];
            y[(size_t)s * t->O + o] = (float)sum;
        }
    }
}

#ifndef WITHOUT_MATMUL
int coli_cuda_matmul(ColiCudaTensor **tensor, float *y, const float *x, const void *weights, const float *scales,
                     int format, int S, int I, int O, int device, int group_size) {
    if (refuses() || S < 1 || !coli_cuda_tensor_upload_g(tensor, weights, scales, format, I, O, device, group_size))
        return 0;
    multiply(*tensor, x, S, y);
    return 1;
}
#endif

static int is_expert(const ColiCudaTensor *gate, const ColiCudaTensor *up, const ColiCudaTensor *down) {
    return gate && up && down && gate->device == up->device && gate->device == down->device && gate->I == up->I &&
           gate->O == up->O && down->I == gate->O && down->O == gate->I;
}

int coli_cuda_expert_mlp(ColiCudaTensor *gate, ColiCudaTensor *up, ColiCudaTensor *down, float *y, const float *x, int S) {
    if (refuses() || !is_expert(gate, up, down) || !y || !x || S < 1) return 0;
    size_t hidden = (size_t)S * (size_t)gate->O;
    float *g = malloc(2 * hidden * sizeof *g);
    if (!g) return 0;
    float *u = g + hidden;
    multiply(gate, x, S, g);
    multiply(up, x, S, u);
    for (size_t i = 0; i < hidden; i++) g[i] = g[i] / (1 + expf(-g[i])) * u[i];
#ifdef WITH_E8
    for (int s = 0; down->format == E8 && s < S; s++) rotate(g + (size_t)s * (size_t)gate->O, gate->O);
#endif
    multiply(down, g, S, y);
    free(g);
    return 1;
}

/* What comes of E8 blocks that are taken for int2: numbers that have nothing to do with the weights. */
static void misread(float *y, int count) {
    for (int i = 0; i < count; i++) y[i] = (float)(i % 7 - 3);
}

int coli_cuda_expert_group(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                           const int *rows, int count, float *y, const float *x) {
    if (!gates || !ups || !downs || !rows || !y || !x || count < 1 || count > MAX_EXPERTS) return 0;
    int total = 0;
    for (int c = 0; c < count; c++) {
        if (!gates[c] || gates[c]->device != gates[0]->device || rows[c] < 1) return 0;
        int D = gates[c]->I, at = total * D;
        if (!coli_cuda_expert_mlp(gates[c], ups[c], downs[c], y + at, x + at, rows[c])) return 0;
        if (gates[c]->format == E8 || ups[c]->format == E8 || downs[c]->format == E8) misread(y + at, rows[c] * D);
        total += rows[c];
    }
    group_calls++;
    group_experts += (uint64_t)count;
    group_rows += (uint64_t)total;
    return 1;
}

#ifndef WITHOUT_ISSUE
int coli_cuda_expert_group_issue(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                                 const int *rows, int count, const float *x) {
    int total = 0;
    for (int c = 0; rows && c < count; c++) total += rows[c];
    if (!gates || !gates[0] || total < 1 || total > MAX_ISSUE_ROWS) return 0;
    int at = position(gates[0]->device);
    if (at < 0 || issued[at]) return 0;
    float *y = malloc((size_t)total * (size_t)gates[0]->I * sizeof *y);
    if (!y || !coli_cuda_expert_group(gates, ups, downs, rows, count, y, x)) {
        free(y);
        return 0;
    }
    issued[at] = y;
    return 1;
}

const float *coli_cuda_expert_group_take(int device) {
    static float *taken[MAX_DEVICES];
    int at = position(device);
    if (at < 0 || !issued[at]) return NULL;
    free(taken[at]);
    taken[at] = issued[at];
    issued[at] = NULL;
    return taken[at];
}
#endif

#ifdef NEWER
int coli_cuda_abi_version(void) {
    return 1007;
}

int coli_cuda_teleport(void) {
    return 42;
}
#endif

/*------   Names that hosts demand and that this library does not offer   ------*/

#define ABSENT(name)                                                                                                       \
    int coli_cuda_##name(void) {                                                                                           \
        return 0;                                                                                                          \
    }
#define ABSENT_POINTER(name)                                                                                               \
    void *coli_cuda_##name(void) {                                                                                         \
        return NULL;                                                                                                       \
    }

ABSENT(shared_mlp_w4a16)
ABSENT(attention_absorb)
ABSENT(attention_absorb_batch)
ABSENT(attention_absorb_batch_dev)
ABSENT(attention_absorb_kvdev)
ABSENT(attention_project_batch)
ABSENT(attention_project_ragged)
ABSENT(attention_project_batch_dev)
ABSENT(attention_project_batch_dev_out)
ABSENT(expert_group_resident_issue)
ABSENT(expert_group_resident_take)
ABSENT(pipe_add)
ABSENT(pipe_copy2d)
ABSENT(pipe_download)
ABSENT(pipe_free)
ABSENT(pipe_gemm)
ABSENT(pipe_peer_copy)
ABSENT(pipe_rmsnorm)
ABSENT(pipe_rmsnorm_s)
ABSENT(pipe_router)
ABSENT(pipe_rope)
ABSENT(pipe_rope_base)
ABSENT(pipe_rows_add)
ABSENT(pipe_silu_mul)
ABSENT(pipe_sync)
ABSENT(pipe_upload)
ABSENT_POINTER(pipe_alloc)
ABSENT_POINTER(pipe_scratch)
