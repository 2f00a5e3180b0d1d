/* t_placed.c - placed matrices on this release's GPU library, opened at run time: every format where the ABI has it,
 * experts, unrotated E8, other codebooks, fallbacks. Where there is no GPU it exits with 77.
 *
 *     t_placed LIBRARY */
#include <pthread.h>

#include "coli/coli.h"

#include "check.h"
#include "matrices.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

enum { D = 256, H = 96, S = 3 };

static coli_backend *backend;

static coli_placed *place(const coli_matrix *matrix) {
    coli_placed *placed = NULL;
    CHECK_OK(coli_place(backend, 0, matrix, &placed));
    return placed;
}

static void check_reason(const coli_placed *placed, const char *what, const char *part) {
    const char *why = coli_placed_why_cpu(placed);
    CHECK(part ? says(why, part) : !why, "%s: \"%s\" does not say \"%s\"", what, why ? why : "", part ? part : "");
}

/*------   Matrices   ------*/

static void check_matmul(const char *format, int flags, const char *why) {
    coli_matrix m = random_matrix(format, H, D, flags, 3);
    coli_placed *placed = place(&m);
    float x[S * D], y[S * H], expected[S * H];
    fill_random(x, S * D, 4);
    CHECK_OK(coli_placed_matmul(placed, x, S, y));
    CHECK_OK(coli_matmul(&m, x, S, expected));
    double error = relative_rms(y, expected, S * H);
    CHECK(error < 5e-6, "%s is off by %.3g", format, error);
    CHECK(coli_placed_device(placed) == (why ? -1 : 0), "%s is on device %d", format, coli_placed_device(placed));
    check_reason(placed, format, why);
    coli_placed_free(placed);
    release_matrix(&m);
}

static void matrices(void) {
    for (int i = 0; i < coli_format_count(); i++) {
        const coli_format_info *format = coli_format_get(i);
        CHECK(format->on_gpu == !coli_backend_why_not(backend, format->name), "%s", format->name);
        check_matmul(format->name, 0, format->on_gpu ? NULL : "no int3-g64");
    }
    check_matmul("int4-g16", 0, NULL);
    check_matmul("e8", COLI_UNROTATED, NULL);
}

/* The published table, given in so many words, is no other table. */
static void codebooks(void) {
    unsigned char table[1024];
    memcpy(table, coli_e8_codebook(), sizeof table);
    coli_matrix m = random_matrix("e8", H, D, 0, 5);
    m.codebook = table;
    coli_placed *placed = place(&m);
    check_reason(placed, "the published codebook", NULL);
    coli_placed_free(placed);

    table[1023] ^= 1;
    placed = place(&m);
    check_reason(placed, "another codebook", "codebook is not the published one");
    coli_placed_free(placed);
    release_matrix(&m);
}

/*------   Experts   ------*/

static void check_expert(const char *gate_format, const char *down_format, int down_flags) {
    coli_matrix m[3] = {random_matrix(gate_format, H, D, 0, 1), random_matrix(gate_format, H, D, 0, 2),
                        random_matrix(down_format, D, H, down_flags, 3)};
    coli_placed *placed[3] = {place(&m[0]), place(&m[1]), place(&m[2])};
    float x[S * D], y[S * D], expected[S * D];
    fill_random(x, S * D, 4);
    CHECK_OK(coli_placed_expert_mlp(placed[0], placed[1], placed[2], x, S, y));
    CHECK_OK(coli_expert_mlp(&m[0], &m[1], &m[2], x, S, expected));
    double error = relative_rms(y, expected, S * D);
    CHECK(error < 1e-5, "gate %s, down %s, flags %d: off by %.3g", gate_format, down_format, down_flags, error);
    for (int i = 0; i < 3; i++) check_reason(placed[i], "expert", NULL);

    set_variable("COLI_GPU_FAIL_AFTER", "0");
    CHECK_OK(coli_placed_expert_mlp(placed[0], placed[1], placed[2], x, S, y));
    set_variable("COLI_GPU_FAIL_AFTER", NULL);
    CHECK(!memcmp(y, expected, sizeof y), "the fallback is not the CPU's result");
    for (int i = 0; i < 3; i++) {
        check_reason(placed[i], "fallback", "coli_cuda_expert_mlp: ");
        coli_placed_free(placed[i]);
        release_matrix(&m[i]);
    }
}

/* One x cannot be both rotated and plain. */
static void gate_and_up_that_differ(void) {
    coli_matrix m[3] = {random_matrix("e8", H, D, 0, 1), random_matrix("int8", H, D, 0, 2),
                        random_matrix("int8", D, H, 0, 3)};
    coli_placed *placed[3] = {place(&m[0]), place(&m[1]), place(&m[2])};
    float x[D] = {1}, y[D] = {7};
    CHECK(says(coli_backend_why_not_expert(backend, "expert_group", &m[0], &m[1], &m[2]), "different inputs"), "group");
    CHECK(coli_placed_expert_mlp(placed[0], placed[1], placed[2], x, 1, y) == COLI_E_ARGUMENT, "one x was taken for both");
    CHECK(says(coli_last_error(), "different inputs") && y[0] == 7, "%s", coli_last_error());
    CHECK(coli_expert_mlp(&m[1], &m[0], &m[2], x, 1, y) == COLI_E_ARGUMENT && y[0] == 7, "on the CPU neither");
    for (int i = 0; i < 3; i++) {
        coli_placed_free(placed[i]);
        release_matrix(&m[i]);
    }
}

static void experts(void) {
    check_expert("int8", "f32", 0);
    check_expert("e8", "e8", 0);
    check_expert("e8", "e8", COLI_UNROTATED);
    check_expert("int4-g64", "mxfp4", 0);
    gate_and_up_that_differ();
}

/*------   Devices   ------*/

static void check_not_started(const int *devices, int count, const char *why) {
    coli_status status = coli_backend_init(backend, devices, count);
    CHECK(status == COLI_E_ARGUMENT, "%d devices give %s", count, coli_status_string(status));
    CHECK(says(coli_last_error(), why), "\"%s\" does not say \"%s\"", coli_last_error(), why);
}

static void devices(void) {
    check_not_started((const int[]){0, 0}, 2, "coli_cuda_init: device 0 is listed twice");
    check_not_started((const int[]){0}, 0, "coli_cuda_init: a list of 0 devices"); /* not the earlier reason */
    CHECK(coli_backend_init(backend, (const int[]){999}, 1) == COLI_E_NO_DEVICE, "device 999 has started");
    CHECK_OK(coli_backend_init(backend, NULL, 0));
    CHECK_OK(coli_backend_init(backend, NULL, 0));
}

/*------   Threads and shutdown   ------*/

/* Placing fp8 sets a table, which may not happen while another thread computes. */
static void *place_fp8(void *unused) {
    for (int i = 0; i < 5; i++) check_matmul("fp8-e4m3-b128", 0, NULL);
    return unused;
}

static void *start_again(void *unused) {
    const int device = 0;
    for (int i = 0; i < 100; i++) CHECK_OK(coli_backend_init(backend, &device, 1));
    return unused;
}

static void threads(void) {
    void *(*const tasks[])(void *) = {place_fp8, place_fp8, start_again};
    pthread_t other[3];
    for (int i = 0; i < 3; i++) pthread_create(&other[i], NULL, tasks[i], NULL);
    for (int i = 0; i < 5; i++) check_matmul("e8", 0, NULL);
    for (int i = 0; i < 3; i++) pthread_join(other[i], NULL);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
        return EXIT_FAILURE;
    }
    if (coli_backend_open(argv[1], &backend) != COLI_OK) {
        fprintf(stderr, "%s\n", coli_last_error());
        return EXIT_FAILURE;
    }
    int (*visible)(void) = (int (*)(void))coli_backend_symbol(backend, "coli_cuda_available_device_count");
    int (*init)(const int *, int) = (int (*)(const int *, int))coli_backend_symbol(backend, "coli_cuda_init");
    void (*shut_down)(void) = (void (*)(void))coli_backend_symbol(backend, "coli_cuda_shutdown");
    if (visible() < 1) {
        fprintf(stderr, "skipped: no GPU\n");
        return SKIPPED;
    }
    check_matmul("int8", 0, "GPU 0 is not among the 0 that coli_backend_init or coli_cuda_init configured");

    devices();
    shut_down();
    const int device = 0;
    for (int round = 0; round < 2; round++) { /* the second after a shutdown, which forgets tables */
        CHECK(init(&device, 1) == 1, "no start");
        matrices();
        shut_down();
    }
    CHECK(init(&device, 1) == 1, "no start");
    codebooks();
    experts();
    threads();

    coli_matrix m = random_matrix("int8", H, D, 0, 6);
    coli_placed *placed = place(&m);
    shut_down();
    float x[D] = {1}, y[H], expected[H];
    CHECK_OK(coli_matmul(&m, x, 1, expected));
    CHECK_OK(coli_placed_matmul(placed, x, 1, y));
    CHECK(!memcmp(y, expected, sizeof y), "a tensor of a shut-down library gave another result");
    check_reason(placed, "after shutdown", "coli_cuda_matmul: ");
    coli_placed_free(placed);
    release_matrix(&m);
    coli_backend_close(backend);
    return finish("t_placed");
}
