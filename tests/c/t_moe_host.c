/* t_moe_host.c - what a host's acquire may do wrong, and that host copies go back whatever fails; rows that do not fit.
 *
 *     t_moe_host LIBRARY      a libcoli_cuda; exit status 77 where it has no device */
#include "coli/coli_moe.h"

#include "check.h"
#include "matrices.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

enum { D = 64, H = 32, E = 3, K = 3 };

typedef enum behaviour { GOOD, OTHER_KIND, SCRIBBLES_AND_FAILS, NO_LAST_ONE, NO_WEIGHTS, OTHER_CODEBOOK } behaviour;

static coli_expert experts[E], others[E];
static behaviour does;
static const unsigned char other_codebook[1024] = {1};
static int held; /* acquired and not released */

static int acquire(void *user, int expert, coli_expert *matrices) {
    (void)user;
    if (does == SCRIBBLES_AND_FAILS) memset(matrices, 0xff, sizeof *matrices);
    if (does == SCRIBBLES_AND_FAILS || (does == NO_LAST_ONE && expert == E - 1)) return 0;
    *matrices = does == OTHER_KIND ? others[expert] : experts[expert];
    if (does == NO_WEIGHTS) matrices->up.weights = NULL;
    if (does == OTHER_CODEBOOK) matrices->down.codebook = other_codebook;
    held++;
    return 1;
}

static void release(void *user, int expert) {
    (void)user;
    (void)expert;
    held--;
}

static coli_expert random_expert(const char *format, int columns, unsigned seed) {
    return (coli_expert){random_matrix(format, H, columns, 0, seed), random_matrix(format, H, columns, 0, seed + 1),
                         random_matrix(format, columns, H, 0, seed + 2)};
}

static void release_expert(coli_expert *expert) {
    release_matrix(&expert->gate);
    release_matrix(&expert->up);
    release_matrix(&expert->down);
}

static const int ids[K] = {2, 0, 1};
static const float weights[K] = {1, 0.5f, 2};

/* Refused in words, y as it was, and nothing held but what was given well before. */
static void check_refused(coli_moe *layer, behaviour wrong, const char *says_why, int still_held) {
    float x[D], y[D] = {7};
    fill_random(x, D, 1);
    does = wrong;
    CHECK(coli_moe_forward(layer, x, 1, ids, weights, K, NULL, y) != COLI_OK, "behaviour %d was not refused", wrong);
    CHECK(says(coli_last_error(), says_why), "%s", coli_last_error());
    CHECK(y[0] == 7 && y[1] == 0, "y was written");
    CHECK(held == still_held, "%d copies are held after behaviour %d", held, wrong);
}

static void check_acquire(const coli_moe_host *host) {
    coli_moe *layer = NULL, *plain = NULL;
    CHECK_OK(coli_moe_create(experts, E, NULL, host, &layer));
    CHECK_OK(coli_moe_create(experts, E, NULL, NULL, &plain));
    check_refused(layer, OTHER_KIND, "acquire gave other matrices for expert 0", 0);
    check_refused(layer, SCRIBBLES_AND_FAILS, "expert 0 cannot be had back", 0);
    check_refused(layer, NO_WEIGHTS, "what acquire gave for expert 0: up", 0);
    check_refused(layer, OTHER_CODEBOOK, "acquire gave other matrices for expert 0", 0);
    check_refused(layer, NO_LAST_ONE, "expert 2 cannot be had back", 2);
    does = GOOD;
    float x[D], y[D], wanted[D];
    fill_random(x, D, 1);
    CHECK_OK(coli_moe_forward(layer, x, 1, ids, weights, K, NULL, y));
    CHECK_OK(coli_moe_forward(plain, x, 1, ids, weights, K, NULL, wanted));
    CHECK(!memcmp(y, wanted, sizeof y), "the layer does not recover from an acquire that failed");
    CHECK_OK(coli_moe_forward(plain, x, 1, ids, weights, K, NULL, x));
    CHECK(!memcmp(x, wanted, sizeof x), "y = x gives something else");
    coli_moe_free(layer);
    coli_moe_free(plain);
    CHECK(held == 0, "%d copies are held by a layer that was freed", held);
}

static void check_rows(void) {
    float x[D] = {1}, rotated[D] = {7};
    const float *meets = NULL;
    coli_rows rows = {.x = x, .S = 1, .D = D, .rotated = rotated};
    CHECK(coli_rows_for(&rows, &others[0].gate, &meets) == COLI_E_SHAPE && !meets, "rows of %d for %d columns", D, 4 * D);
    CHECK(says(coli_last_error(), "256 columns does not meet rows of 64"), "%s", coli_last_error());
    CHECK(coli_rows_for(&rows, &experts[0].down, &meets) == COLI_E_SHAPE && !rows.has_rotated, "down met x");
    CHECK_OK(coli_rows_for(&rows, &experts[0].gate, &meets));
    CHECK(meets == rotated && rows.has_rotated && rotated[0] != 7, "x was not rotated");
}

/* Not an error, and not in silence. */
static void check_no_backend(void) {
    const coli_moe_device device = {0, COLI_MOE_AUTO, 0};
    coli_moe *layer = NULL;
    char why[64];
    CHECK_OK(coli_moe_create(experts, E, NULL, NULL, &layer));
    CHECK_OK(coli_moe_place(&layer, 1, NULL, &device, 1));
    coli_moe_why_cpu(layer, E - 1, why, sizeof why);
    CHECK(!strcmp(why, "no GPU library is loaded"), "%s", why);
    coli_moe_free(layer);
}

static void check_unplace(const coli_moe_host *host, coli_backend *backend) {
    const coli_moe_device device = {0, (size_t)1 << 20, 0};
    coli_moe *layer = NULL;
    CHECK_OK(coli_moe_create(experts, E, NULL, host, &layer));
    CHECK_OK(coli_moe_place(&layer, 1, backend, &device, 1));
    CHECK(held == 0 && coli_moe_device_of(layer, E - 1) == 0, "placed, and %d copies are held", held);
    coli_moe_unplace(layer);
    CHECK(held == 0 && coli_moe_device_of(layer, 0) == -1, "%d copies are held before they are needed", held);
    check_refused(layer, NO_LAST_ONE, "expert 2 cannot be had back", 2);
    does = GOOD;
    coli_moe_free(layer);
    CHECK(held == 0, "%d copies are held by a layer that was freed", held);
}

int main(int argc, char **argv) {
    const coli_moe_host host = {acquire, release, NULL};
    coli_backend *backend;
    CHECK(argc == 2, "usage: t_moe_host LIBRARY");
    for (int e = 0; e < E; e++) {
        experts[e] = random_expert("e8", D, 3 * (unsigned)e);
        others[e] = random_expert("f32", 4 * D, 3 * (unsigned)e);
    }
    check_rows();
    check_no_backend();
    check_acquire(&host);
    if (coli_backend_open(argv[1], &backend) != COLI_OK || coli_backend_init(backend, (const int[]){0}, 1) != COLI_OK) {
        fprintf(stderr, "%s\n", coli_last_error());
        return SKIPPED;
    }
    check_unplace(&host, backend);
    for (int e = 0; e < E; e++) {
        release_expert(&experts[e]);
        release_expert(&others[e]);
    }
    ((void (*)(void))coli_backend_symbol(backend, "coli_cuda_shutdown"))();
    coli_backend_close(backend);
    return finish("t_moe_host");
}
