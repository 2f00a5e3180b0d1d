/* t_host_loop.c - the MoE loop of a C host that keeps its own, made of the pieces of coli_moe.h, beside coli_moe_forward.
 *
 * moe() is what such a host has: sort the pairs, rotate x at most once, pack the rows of experts, issue those on the GPU,
 * compute the others on the CPU meanwhile, take; where issue or take fail, or rows are too many for them, one group; where
 * that fails, expert by expert. At last everything is added up.
 *
 *     t_host_loop LIBRARY      a libcoli_cuda; exit status 77 where it has no device */
#include "coli/coli_moe.h"

#include "check.h"
#include "matrices.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

enum { D = 256, H = 96, E = 6, ON_GPU = 4, K = 3, S = 5, DEVICE = 0 };

/* The kept ABI, resolved by name. */
typedef int (*upload_call)(ColiCudaTensor **tensor, const void *weights, const float *scales, int fmt, int I, int O,
                           int device);
typedef void (*free_call)(ColiCudaTensor *tensor);
typedef int (*group_call)(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                          const int *rows, int count, float *y, const float *x);
typedef int (*issue_call)(ColiCudaTensor *const *gates, ColiCudaTensor *const *ups, ColiCudaTensor *const *downs,
                          const int *rows, int count, const float *x);
typedef const float *(*take_call)(int device);

typedef struct host {
    coli_backend *backend;
    group_call group; /* NULL where the library lacks it, like the next two */
    issue_call issue;
    take_call take;
    coli_expert experts[E];
    coli_expert_tensors tensors[E]; /* of the first ON_GPU */
    uint64_t rows_by[COLI_MOE_PATHS];
    int rotated; /* whether the last call made the rotated copy */
} host;

/* The experts on the GPU that have rows. */
typedef struct gpu_group {
    ColiCudaTensor *gates[ON_GPU], *ups[ON_GPU], *downs[ON_GPU];
    int rows[ON_GPU], count;
} gpu_group;

static gpu_group make_group(const host *h, const size_t *first) {
    gpu_group g = {.count = 0};
    for (int e = 0; e < ON_GPU; e++) {
        if (first[e] == first[e + 1]) continue;
        g.gates[g.count] = h->tensors[e].gate;
        g.ups[g.count] = h->tensors[e].up;
        g.downs[g.count] = h->tensors[e].down;
        g.rows[g.count++] = (int)(first[e + 1] - first[e]);
    }
    return g;
}

/* 1 where the GPU is at work now. Rows are those of the group, side by side. */
static int issue(const host *h, const gpu_group *g, size_t rows, const float *x) {
    if (!h->issue || !h->take || !rows || rows > COLI_CUDA_MAX_ISSUE_ROWS) return 0;
    return h->issue(g->gates, g->ups, g->downs, g->rows, g->count, x);
}

/* 1 where the rows have come. What take gives belongs to the library, which may use it again at the next issue. */
static int take(const host *h, size_t rows, float *y) {
    const float *taken = h->take(DEVICE);
    if (taken) memcpy(y, taken, rows * D * sizeof *y);
    return taken != NULL;
}

static int run_group(const host *h, const gpu_group *g, const float *x, float *y) {
    return !g->count || (h->group && h->group(g->gates, g->ups, g->downs, g->rows, g->count, y, x));
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

/* Experts begin ... end - 1, one by one. */
static void each_expert(host *h, int begin, int end, const size_t *first, const float *x, float *y) {
    for (int e = begin; e < end; e++) one_expert(h, e, x + first[e] * D, first[e + 1] - first[e], y + first[e] * D);
}

static void moe(host *h, const float *x, size_t tokens_in, const int *ids, const float *weights, float *out) {
    size_t first[E + 1];
    int tokens[S * K];
    float pair_weights[S * K], rotated[S * D], packed[S * K * D], y[S * K * D];
    coli_rows rows = {.x = x, .S = tokens_in, .D = D, .rotated = rotated};

    CHECK_OK(coli_sort_pairs(ids, weights, tokens_in, K, E, first, tokens, pair_weights));
    for (int e = 0; e < E; e++) {
        const float *meets;
        if (first[e] == first[e + 1]) continue; /* nobody may want the rotated copy */
        CHECK_OK(coli_rows_for(&rows, &h->experts[e].gate, &meets));
        coli_pack_rows(meets, D, tokens + first[e], first[e + 1] - first[e], packed + first[e] * D);
    }
    h->rotated = rows.has_rotated;
    size_t gpu_rows = first[ON_GPU];
    gpu_group group = make_group(h, first);
    int issued = issue(h, &group, gpu_rows, packed);
    each_expert(h, ON_GPU, E, first, packed, y);
    if (issued && take(h, gpu_rows, y))
        h->rows_by[COLI_MOE_ISSUE] += gpu_rows;
    else if (run_group(h, &group, packed, y))
        h->rows_by[COLI_MOE_GROUP] += gpu_rows;
    else
        each_expert(h, 0, ON_GPU, first, packed, y);
    memset(out, 0, tokens_in * D * sizeof *out);
    coli_add_rows(y, D, tokens, pair_weights, first[E], out);
}

/*------   The host around it   ------*/

static const char *const formats[E] = {"e8", "int8", "e8", "int4", "e8", "mxfp4"};

static void upload(host *h, const coli_matrix *m, ColiCudaTensor **tensor) {
    upload_call call = (upload_call)coli_backend_symbol(h->backend, "coli_cuda_tensor_upload");
    CHECK(call && call(tensor, m->weights, m->scales, m->format, m->columns, m->rows, DEVICE), "%s",
          coli_format_get(m->format)->name);
}

static void start(host *h) {
    h->group = (group_call)coli_backend_symbol(h->backend, "coli_cuda_expert_group");
    h->issue = (issue_call)coli_backend_symbol(h->backend, "coli_cuda_expert_group_issue");
    h->take = (take_call)coli_backend_symbol(h->backend, "coli_cuda_expert_group_take");
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

/* The first `tokens` of x, computed by a host and by a layer on the CPU. `expected` is the path of the experts on the GPU.
 */
static void check_moe(host *h, coli_moe *layer, size_t tokens, coli_moe_path expected) {
    static const int ids[S * K] = {0, 1, 4, 5, 5, 2, 3, -1, 0, 2, 4, 1, 1, 0, 3};
    float x[S * D], weights[S * K], wanted[S * D], out[S * D];
    fill_random(x, S * D, 7);
    fill_random(weights, S * K, 8);
    CHECK_OK(coli_moe_forward(layer, x, tokens, ids, weights, K, NULL, wanted));
    memset(h->rows_by, 0, sizeof h->rows_by);
    moe(h, x, tokens, ids, weights, out);
    double error = relative_rms(out, wanted, tokens * D);
    CHECK(error < 5e-6, "%zu tokens are off by %.3g", tokens, error);
    for (int path = 0; path < COLI_MOE_CPU; path++)
        CHECK((h->rows_by[path] > 0) == (path == (int)expected), "%zu tokens by path %d, not %d", tokens, path, expected);
    CHECK(h->rows_by[COLI_MOE_CPU] > 0, "the CPU had no share");
}

static void check_rotation(host *h) {
    static const int ids[2][K] = {{1, 3, 5}, {1, 3, 4}}; /* of these, 4 alone is E8 */
    const float weights[K] = {1, 1, 1};
    float x[D], out[D];
    fill_random(x, D, 7);
    for (int e8 = 0; e8 < 2; e8++) {
        moe(h, x, 1, ids[e8], weights, out);
        CHECK(h->rotated == e8, "x was%s rotated", h->rotated ? "" : " not");
    }
}

/* 2 tokens have 3 rows on the GPU, 5 have 10: more than an issue takes. */
static void check_paths(host *h, coli_moe *layer) {
    check_moe(h, layer, 2, COLI_MOE_ISSUE);
    check_moe(h, layer, S, COLI_MOE_GROUP);
    issue_call issue = h->issue;
    h->issue = NULL; /* a library that lacks it */
    check_moe(h, layer, 2, COLI_MOE_GROUP);
    h->group = NULL;
    check_moe(h, layer, 2, COLI_MOE_SINGLE);
    h->issue = issue;
    h->group = (group_call)coli_backend_symbol(h->backend, "coli_cuda_expert_group");
}

/* The tensors of expert 1 are freed by their owner, between two calls: the GPU refuses what it had a part in. */
static void check_freed_tensors(host *h, coli_moe *layer) {
    coli_expert_tensors *t = &h->tensors[1];
    free_call release = (free_call)coli_backend_symbol(h->backend, "coli_cuda_tensor_free");
    release(t->gate);
    release(t->up);
    release(t->down);
    *t = (coli_expert_tensors){NULL, NULL, NULL};
    check_moe(h, layer, S, COLI_MOE_SINGLE);
    upload(h, &h->experts[1].gate, &t->gate);
    upload(h, &h->experts[1].up, &t->up);
    upload(h, &h->experts[1].down, &t->down);
    check_paths(h, layer);
}

int main(int argc, char **argv) {
    static host h;
    CHECK(argc == 2, "usage: t_host_loop LIBRARY");
    if (coli_backend_open(argv[1], &h.backend) != COLI_OK ||
        coli_backend_init(h.backend, (const int[]){DEVICE}, 1) != COLI_OK) {
        fprintf(stderr, "%s\n", coli_last_error());
        return SKIPPED;
    }
    start(&h);
    coli_moe *layer = NULL;
    CHECK_OK(coli_moe_create(h.experts, E, NULL, NULL, &layer));

    check_rotation(&h);
    check_paths(&h, layer);
    static const char *const working_calls[] = {"0", "1"}; /* the issue fails; it is good and the take fails */
    for (int i = 0; i < 2; i++) {
        set_variable("COLI_GPU_FAIL_AFTER", working_calls[i]);
        check_moe(&h, layer, 2, COLI_MOE_CPU);
        set_variable("COLI_GPU_FAIL_AFTER", NULL);
        check_moe(&h, layer, 2, COLI_MOE_ISSUE);
    }
    check_freed_tensors(&h, layer);

    coli_moe_free(layer);
    stop(&h);
    ((void (*)(void))coli_backend_symbol(h.backend, "coli_cuda_shutdown"))();
    coli_backend_close(h.backend);
    return finish("t_host_loop");
}
