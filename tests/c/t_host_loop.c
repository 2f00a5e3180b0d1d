/* t_host_loop.c - the MoE loop of a C host that keeps its own, made of the pieces of coli_moe.h, beside coli_moe_forward.
 *
 * moe() is what such a host has: sort the pairs, rotate x at most once, pack the rows of the experts on the GPU, compute
 * them in one group, fall back expert by expert where that fails, compute the others on the CPU, add everything up.
 *
 *     t_host_loop LIBRARY      a libcoli_cuda; exit status 77 where it has no device */
#define _GNU_SOURCE /* setenv */

#include "coli/coli_moe.h"

#include "check.h"
#include "matrices.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

enum { D = 256, H = 96, E = 6, ON_GPU = 4, K = 3, S = 5 };

typedef struct host {
    coli_backend *backend;
    coli_expert experts[E];
    coli_expert_tensors tensors[E]; /* of the first ON_GPU */
    uint64_t rows_by[COLI_MOE_PATHS];
} host;

/* The kept ABI, resolved by name. */
typedef int (*group_call)(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                          const int *rows, int count, float *y, const float *x);
typedef int (*upload_call)(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                           int device);
typedef void (*free_call)(ColiCudaTensor *tensor);

/* One group of all experts on the GPU that have rows, side by side in x and y; 0 where the GPU does not do it. */
static int gpu_group(host *h, const size_t *first, const float *x, float *y) {
    ColiCudaTensor *gates[ON_GPU], *ups[ON_GPU], *downs[ON_GPU];
    int rows[ON_GPU], count = 0;
    for (int e = 0; e < ON_GPU; e++) {
        if (first[e] == first[e + 1]) continue;
        gates[count] = h->tensors[e].gate;
        ups[count] = h->tensors[e].up;
        downs[count] = h->tensors[e].down;
        rows[count++] = (int)(first[e + 1] - first[e]);
    }
    group_call group = (group_call)coli_backend_symbol(h->backend, "coli_cuda_expert_group");
    return !count || (group && group(gates, ups, downs, rows, count, y, x));
}

/* An expert by itself, on the GPU if it is there, else on the CPU. */
static void one_expert(host *h, int e, const float *x, size_t n, float *y) {
    coli_moe_path path;
    char why[256];
    const coli_expert_tensors *tensors = e < ON_GPU ? &h->tensors[e] : NULL;
    CHECK_OK(coli_expert_fallback(h->backend, tensors, &h->experts[e], x, x, n, y, &path, why, sizeof why));
    CHECK((path == COLI_MOE_SINGLE) == !why[0], "path %d because \"%s\"", path, why);
    h->rows_by[path] += n;
}

static void moe(host *h, const float *x, const int *ids, const float *weights, float *out) {
    size_t first[E + 1];
    int tokens[S * K];
    float pair_weights[S * K], rotated[S * D], packed[S * K * D], y[S * K * D];
    coli_rows rows = {.x = x, .S = S, .D = D, .rotated = rotated};

    CHECK_OK(coli_sort_pairs(ids, weights, S, K, E, first, tokens, pair_weights));
    for (int e = 0; e < E; e++) {
        const float *meets;
        CHECK_OK(coli_rows_for(&rows, &h->experts[e].gate, &meets));
        coli_pack_rows(meets, D, tokens + first[e], first[e + 1] - first[e], packed + first[e] * D);
    }
    int grouped = gpu_group(h, first, packed, y);
    if (grouped) h->rows_by[COLI_MOE_GROUP] += first[ON_GPU];
    for (int e = grouped ? ON_GPU : 0; e < E; e++)
        one_expert(h, e, packed + first[e] * D, first[e + 1] - first[e], y + first[e] * D);
    memset(out, 0, S * D * sizeof *out);
    coli_add_rows(y, D, tokens, pair_weights, first[E], out);
}

/*------   The host around it   ------*/

static const char *const formats[E] = {"e8", "int8", "e8", "int4", "e8", "mxfp4"};

static void upload(host *h, const coli_matrix *m, ColiCudaTensor **tensor) {
    upload_call call = (upload_call)coli_backend_symbol(h->backend, "coli_cuda_tensor_upload");
    CHECK(call && call(tensor, m->weights, m->scales, m->format, m->columns, m->rows, 0), "%s",
          coli_format_get(m->format)->name);
}

static void start(host *h) {
    for (int e = 0; e < E; e++) {
        h->experts[e].gate = random_matrix(formats[e], H, D, 0, 3 * (unsigned)e);
        h->experts[e].up = random_matrix(formats[e], H, D, 0, 3 * (unsigned)e + 1);
        h->experts[e].down = random_matrix(formats[e], D, H, 0, 3 * (unsigned)e + 2);
    }
    for (int e = 0; e < ON_GPU; e++) {
        upload(h, &h->experts[e].gate, &h->tensors[e].gate);
        upload(h, &h->experts[e].up, &h->tensors[e].up);
        upload(h, &h->experts[e].down, &h->tensors[e].down);
    }
}

static void stop(host *h) {
    free_call release = (free_call)coli_backend_symbol(h->backend, "coli_cuda_tensor_free");
    for (int e = 0; e < E; e++) {
        release(h->tensors[e].gate);
        release(h->tensors[e].up);
        release(h->tensors[e].down);
        release_matrix(&h->experts[e].gate);
        release_matrix(&h->experts[e].up);
        release_matrix(&h->experts[e].down);
    }
}

static void check_moe(host *h, const coli_moe_path expected, const float *wanted, const float *x, const int *ids,
                      const float *weights) {
    float out[S * D];
    memset(h->rows_by, 0, sizeof h->rows_by);
    moe(h, x, ids, weights, out);
    double error = relative_rms(out, wanted, S * D);
    CHECK(error < 5e-6, "off by %.3g", error);
    CHECK(h->rows_by[expected] > 0, "path %d was not taken", expected);
}

int main(int argc, char **argv) {
    static host h;
    CHECK(argc == 2, "usage: t_host_loop LIBRARY");
    if (coli_backend_open(argv[1], &h.backend) != COLI_OK || coli_backend_init(h.backend, (const int[]){0}, 1) != COLI_OK) {
        fprintf(stderr, "%s\n", coli_last_error());
        return SKIPPED;
    }
    start(&h);
    float x[S * D], weights[S * K], wanted[S * D];
    const int ids[S * K] = {0, 1, 4, 5, 5, 2, 3, -1, 0, 2, 4, 1, 1, 0, 3};
    fill_random(x, S * D, 7);
    fill_random(weights, S * K, 8);
    coli_moe *layer = NULL;
    CHECK_OK(coli_moe_create(h.experts, E, NULL, NULL, &layer));
    CHECK_OK(coli_moe_forward(layer, x, S, ids, weights, K, NULL, wanted));

    check_moe(&h, COLI_MOE_GROUP, wanted, x, ids, weights);
    setenv("COLI_GPU_FAIL_AFTER", "0", 1);
    check_moe(&h, COLI_MOE_CPU, wanted, x, ids, weights);
    CHECK(h.rows_by[COLI_MOE_SINGLE] == 0, "a failing GPU computed");
    unsetenv("COLI_GPU_FAIL_AFTER");
    check_moe(&h, COLI_MOE_GROUP, wanted, x, ids, weights);

    coli_moe_free(layer);
    stop(&h);
    ((void (*)(void))coli_backend_symbol(h.backend, "coli_cuda_shutdown"))();
    coli_backend_close(h.backend);
    return finish("t_host_loop");
}
