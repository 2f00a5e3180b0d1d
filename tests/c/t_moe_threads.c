/* t_moe_threads.c - four threads call four layers at once on one GPU, while others place, repin and read counters; then
 * all again with a GPU that fails. To be run under ThreadSanitizer.
 *
 *     t_moe_threads LIBRARY      a libcoli_cuda; exit status 77 where it has no device */
#include <pthread.h>

#include "coli/coli_moe.h"

#include "check.h"
#include "matrices.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

enum { D = 64, H = 32, E = 6, K = 3, S = 2, LAYERS = 4, TURNS = 6 };

static coli_backend *backend;
static coli_expert experts[E];
static coli_moe *layers[LAYERS];
static int wrong[LAYERS];

static void forward(coli_moe *layer, const float *x, unsigned seed, float *y) {
    int ids[S * K];
    const float weights[S * K] = {1, 0.5f, 0.25f, 1, 1, 0};
    for (unsigned i = 0; i < S * K; i++) ids[i] = (int)((seed + 5 * i) % E);
    CHECK_OK(coli_moe_forward(layer, x, S, ids, weights, K, NULL, y));
}

static void *work(void *argument) {
    int number = *(int *)argument;
    coli_moe *plain = NULL;
    CHECK_OK(coli_moe_create(experts, E, NULL, NULL, &plain));
    for (unsigned turn = 0; turn < TURNS; turn++) {
        float x[S * D], y[S * D], wanted[S * D];
        fill_random(x, S * D, turn);
        forward(layers[number], x, turn, y);
        forward(plain, x, turn, wanted);
        wrong[number] += relative_rms(y, wanted, S * D) > 5e-6;
    }
    coli_moe_free(plain);
    return NULL;
}

static void *disturb(void *unused) {
    const coli_moe_device device = {0, (size_t)1 << 20, 0};
    coli_moe *turned[LAYERS]; /* ThreadSanitizer reports locks that are taken in two orders */
    for (int i = 0; i < LAYERS; i++) turned[i] = layers[LAYERS - 1 - i];
    for (int turn = 0; turn < TURNS; turn++) {
        char why[256];
        coli_moe_stats total;
        CHECK_OK(coli_moe_repin(turn % 2 ? turned : layers, LAYERS, 0, 2, NULL));
        CHECK_OK(coli_moe_get_stats(layers[turn % LAYERS], &total, NULL, sizeof total));
        coli_moe_why_failed(layers[turn % LAYERS], COLI_MOE_STEP_GROUP, why, sizeof why);
        coli_moe_trim();
        coli_moe_unplace(layers[turn % LAYERS]);
        CHECK_OK(coli_moe_place(layers, LAYERS, backend, &device, 1));
    }
    return unused;
}

static void run_all(void) {
    pthread_t threads[LAYERS + 1];
    int numbers[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, work, &numbers[i]);
    }
    pthread_create(&threads[LAYERS], NULL, disturb, NULL);
    for (int i = 0; i <= LAYERS; i++) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
    CHECK(argc == 2, "usage: t_moe_threads LIBRARY");
    CHECK_OK(coli_set_threads(1)); /* ThreadSanitizer does not know OpenMP's barriers */
    if (coli_backend_open(argv[1], &backend) != COLI_OK || coli_backend_init(backend, (const int[]){0}, 1) != COLI_OK) {
        fprintf(stderr, "%s\n", coli_last_error());
        return SKIPPED;
    }
    for (unsigned e = 0; e < E; e++) {
        experts[e].gate = random_matrix("e8", H, D, 0, 3 * e);
        experts[e].up = random_matrix("e8", H, D, 0, 3 * e + 1);
        experts[e].down = random_matrix("e8", D, H, 0, 3 * e + 2);
    }
    const coli_moe_device device = {0, 20000, 0};
    for (int i = 0; i < LAYERS; i++) CHECK_OK(coli_moe_create(experts, E, NULL, NULL, &layers[i]));
    CHECK_OK(coli_moe_place(layers, LAYERS, backend, &device, 1));

    run_all();
    set_variable("COLI_GPU_FAIL_AFTER", "2");
    run_all();
    set_variable("COLI_GPU_FAIL_AFTER", NULL);

    uint64_t failed = 0;
    for (int i = 0; i < LAYERS; i++) {
        coli_moe_stats total;
        CHECK_OK(coli_moe_get_stats(layers[i], &total, NULL, sizeof total));
        for (int step = 0; step < COLI_MOE_STEPS; step++) failed += total.failed[step];
        CHECK(!wrong[i], "%d results of layer %d are wrong", wrong[i], i);
        coli_moe_free(layers[i]);
    }
    CHECK(failed > 0, "no call of a failing GPU was counted");
    for (int e = 0; e < E; e++) {
        release_matrix(&experts[e].gate);
        release_matrix(&experts[e].up);
        release_matrix(&experts[e].down);
    }
    ((void (*)(void))coli_backend_symbol(backend, "coli_cuda_shutdown"))();
    coli_backend_close(backend);
    return finish("t_moe_threads");
}
