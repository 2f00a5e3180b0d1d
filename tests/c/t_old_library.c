/* t_old_library.c - the loader on GPU libraries as they may be found: one from before E8, one of a later ABI, a file that
 * is none, no file. What an old library can do runs there; the rest runs on the CPU and says why.
 *
 *     t_old_library FOLDER      the folder of the stub libraries */
#include <pthread.h>

#include "coli/coli.h"

#include "check.h"
#include "matrices.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

enum { O = 6, I = 96, S = 3 };

/* Calls of a GPU library that the tests make themselves. */
typedef int (*start)(const int *devices, int count);
typedef void (*stop)(void);
typedef int (*count_devices)(void);
typedef void (*count_tensors)(int device, size_t *tensors, size_t *bytes);

#ifdef _WIN32
#define SUFFIX ".dll"
#define BESIDE_LIBCOLI "\\coli_cuda.dll"
#define BY_NAME "; coli_cuda.dll"
#else
#define SUFFIX ".so"
#define BESIDE_LIBCOLI "/libcoli_cuda.so"
#define BY_NAME "; libcoli_cuda.so"
#endif

static const char *folder;

static const char *stub(const char *name) {
    static _Thread_local char path[4096];
    snprintf(path, sizeof path, "%s/%s" SUFFIX, folder, name);
    return path;
}

static coli_backend *open_stub(const char *name) {
    coli_backend *backend = NULL;
    if (coli_backend_open(stub(name), &backend) == COLI_OK) return backend;
    fprintf(stderr, "%s\n", coli_last_error());
    exit(EXIT_FAILURE);
}

/*------   Opening   ------*/

static void check_refused(const char *path, coli_status expected, const char *part) {
    coli_backend *none = (coli_backend *)&folder;
    coli_status status = coli_backend_open(path, &none);
    CHECK(status == expected, "%s gives %s", path ? path : "no path", coli_status_string(status));
    CHECK(says(coli_last_error(), part), "\"%s\" does not say \"%s\"", coli_last_error(), part);
    CHECK(none == (coli_backend *)&folder, "a refused open wrote its result");
}

static void refusals(void) {
    check_refused(stub("stub_future"), COLI_E_ABI, "ABI 99.3");
    check_refused(stub("stub_empty"), COLI_E_NO_LIBRARY, "coli_cuda_init");
    check_refused(stub("stub_missing"), COLI_E_NO_LIBRARY, "stub_missing" SUFFIX);
    check_refused(__FILE__, COLI_E_NO_LIBRARY, "t_old_library.c");
    check_refused("", COLI_E_ARGUMENT, "empty path");
    CHECK(coli_backend_open(stub("stub_old"), NULL) == COLI_E_ARGUMENT, "opened to nowhere");
}

static void search_order(void) {
    coli_backend *backend = NULL;
    set_variable("COLI_CUDA_LIB", stub("stub_old"));
    CHECK_OK(coli_backend_open(NULL, &backend));
    CHECK(says(coli_backend_path(backend), "stub_old" SUFFIX), "loaded %s", coli_backend_path(backend));
    coli_backend_close(backend);

    set_variable("COLI_CUDA_LIB", stub("stub_missing"));
    check_refused(NULL, COLI_E_NO_LIBRARY, "COLI_CUDA_LIB");
    check_refused(NULL, COLI_E_NO_LIBRARY, "stub_missing" SUFFIX);
    set_variable("COLI_CUDA_LIB", NULL);

    if (coli_backend_open(NULL, &backend) == COLI_OK) {
        coli_backend_close(backend); /* a real library is installed here */
    } else {
        CHECK(says(coli_last_error(), BESIDE_LIBCOLI), "beside libcoli was not tried: %s", coli_last_error());
        CHECK(says(coli_last_error(), BY_NAME), "the system's search was not tried: %s", coli_last_error());
    }
}

static void sharing(void) {
    coli_backend *one = open_stub("stub_old"), *two = open_stub("stub_old");
    CHECK(one != two, "two opens gave one handle");
    void *init = coli_backend_symbol(one, "coli_cuda_init");
    CHECK(init && init == coli_backend_symbol(two, "coli_cuda_init"), "two handles, two libraries");
    coli_backend_close(one);
    CHECK(init == coli_backend_symbol(two, "coli_cuda_init"), "closing one handle unloaded the other's library");
    CHECK(!coli_backend_symbol(two, "coli_cuda_last_error"), "an old library has a later call");
    CHECK(!coli_backend_symbol(NULL, "coli_cuda_init") && !coli_backend_symbol(two, NULL), "NULL has a symbol");
    coli_backend_close(two);
    coli_backend_close(NULL);
}

static void *open_and_close(void *unused) {
    for (int i = 0; i < 20; i++) coli_backend_close(open_stub("stub_old"));
    return unused;
}

static void many_threads(void) {
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, open_and_close, NULL);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
}

/*------   Features   ------*/

static void features(const coli_backend *backend) {
    static const char *const offered[] = {"f32",     "int8",   "int4",       "int2",         "int4-g64",   "int4-g32",
                                          "devices", "matmul", "expert_mlp", "expert_group", "issue_take", "update"};
    static const char *const absent[][2] = {{"e8", "coli_cuda_e8_set_grid"},
                                            {"mxfp4", "coli_cuda_matmul_mxfp4"},
                                            {"fp8-e4m3-b128", "coli_cuda_fp8_set_lut"},
                                            {"download", "coli_cuda_tensor_download"},
                                            {"encode_e8", "coli_cuda_encode_e8"},
                                            {"int3-g64", "no int3-g64"},
                                            {"teleport", "no such feature"}};
    for (size_t i = 0; i < sizeof offered / sizeof *offered; i++) {
        const char *why = coli_backend_why_not(backend, offered[i]);
        CHECK(!why, "%s: %s", offered[i], why);
    }
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        const char *why = coli_backend_why_not(backend, absent[i][0]);
        CHECK(says(why, absent[i][1]), "%s: %s", absent[i][0], why ? why : "offered");
    }
    CHECK(says(coli_backend_why_not(backend, "e8"), "stub_old" SUFFIX), "%s", coli_backend_why_not(backend, "e8"));
    CHECK(says(coli_backend_why_not(NULL, "int8"), "no GPU library"), "%s", coli_backend_why_not(NULL, "int8"));
    CHECK(coli_backend_why_not(backend, NULL), "NULL is a feature");

    for (int i = 0; i < coli_format_count(); i++) {
        const coli_format_info *format = coli_format_get(i);
        int listed = 0;
        for (int k = 0; k < coli_backend_feature_count(); k++) {
            listed += !strcmp(coli_backend_feature_name(k), format->name);
        }
        CHECK(listed == 1, "%s is %d features", format->name, listed);
    }
    CHECK(!coli_backend_feature_name(-1) && !coli_backend_feature_name(coli_backend_feature_count()),
          "a name past the end");
}

/*------   Devices   ------*/

static void check_not_started(coli_backend *backend, const int *devices, int count, coli_status expected, const char *why) {
    coli_status status = coli_backend_init(backend, devices, count);
    CHECK(status == expected, "%d devices give %s", count, coli_status_string(status));
    CHECK(says(coli_last_error(), why), "\"%s\" does not say \"%s\"", coli_last_error(), why);
}

/* What a matrix for device 0 says while no device is configured. */
static void check_not_configured(coli_backend *backend, const char *why) {
    coli_placed *placed = NULL;
    coli_matrix m = random_matrix("int8", O, I, 0, 9);
    CHECK_OK(coli_place(backend, 0, &m, &placed));
    const char *reason = coli_placed_why_cpu(placed);
    CHECK(reason && !strcmp(reason, why), "\"%s\" is not \"%s\"", reason ? reason : "", why);
    coli_placed_free(placed);
    release_matrix(&m);
}

static void devices(coli_backend *backend) {
#define NOT_CONFIGURED "GPU 0 is not among the 0 that coli_backend_init or coli_cuda_init configured"
    static const char silent[] = "stub_old" SUFFIX ": coli_cuda_init returned 0 (this library does not say why)";
    count_devices configured = (count_devices)coli_backend_symbol(backend, "coli_cuda_device_count");
    stop shut_down = (stop)coli_backend_symbol(backend, "coli_cuda_shutdown");
    check_not_configured(backend, NOT_CONFIGURED);
    check_not_started(backend, (const int[]){0}, 0, COLI_E_NO_DEVICE, silent);
    check_not_started(backend, (const int[]){0}, 99, COLI_E_NO_DEVICE, silent);
    check_not_started(NULL, NULL, 0, COLI_E_ARGUMENT, "needs a backend");
    set_variable("STUB_NO_DEVICE", "1");
    check_not_started(backend, NULL, 0, COLI_E_NO_DEVICE, silent);
    set_variable("STUB_NO_DEVICE", NULL);
    check_not_configured(backend, NOT_CONFIGURED "; the last coli_backend_init failed: coli_cuda_init returned 0 (this "
                                                 "library does not say why)");
    CHECK_OK(coli_backend_init(backend, NULL, 0));
    CHECK(configured() == 1, "a library that cannot count devices has started %d", configured());
    shut_down();
    check_not_configured(backend, NOT_CONFIGURED);
    CHECK_OK(coli_backend_init(backend, (const int[]){0, 3}, 2));
    CHECK(configured() == 2, "%d devices have started", configured());
}

/*------   Placement   ------*/

/* Places a matrix, multiplies, compares with the CPU. `why` is a part of the reason, or NULL where the GPU must do it. */
static void check_placement(coli_backend *backend, int device, const coli_matrix *matrix, const char *why) {
    coli_placed *placed = NULL;
    float x[S * I], y[S * O], expected[S * O];
    const char *format = coli_format_get(matrix->format)->name;
    fill_random(x, S * I, 5);
    CHECK_OK(coli_place(backend, device, matrix, &placed));
    CHECK(coli_placed_device(placed) == (why ? -1 : device), "%s is on device %d", format, coli_placed_device(placed));
    CHECK_OK(coli_placed_matmul(placed, x, S, y));
    CHECK_OK(coli_matmul(matrix, x, S, expected));
    double error = relative_rms(y, expected, S * O);
    CHECK(error < 1e-5, "%s is off by %.3g", format, error);
    const char *reason = coli_placed_why_cpu(placed);
    CHECK(why ? says(reason, why) : !reason, "%s: \"%s\" does not say \"%s\"", format, reason ? reason : "",
          why ? why : "");
    coli_placed_free(placed);
}

static void placements(coli_backend *backend) {
    static const char *const on_gpu[] = {"f32", "int8", "int4", "int2", "int4-g64", "int4-g16"};
    for (size_t i = 0; i < sizeof on_gpu / sizeof *on_gpu; i++) {
        coli_matrix m = random_matrix(on_gpu[i], O, I, 0, 7);
        check_placement(backend, 0, &m, NULL);
        check_placement(backend, 3, &m, NULL);
        check_placement(backend, 7, &m, "GPU 7 is not among the 2");
        check_placement(backend, -1, &m, "asks for the CPU");
        check_placement(NULL, 0, &m, "no GPU library is loaded");
        release_matrix(&m);
    }
    static const char *const on_cpu[][2] = {{"e8", "coli_cuda_e8_set_grid"},
                                            {"fp8-e4m3-b128", "coli_cuda_fp8_set_lut"},
                                            {"int3-g64", "no int3-g64"},
                                            {"mxfp4", "coli_cuda_matmul_mxfp4"}};
    for (size_t i = 0; i < sizeof on_cpu / sizeof *on_cpu; i++) {
        coli_matrix m = random_matrix(on_cpu[i][0], O, I, 0, 8);
        check_placement(backend, 0, &m, on_cpu[i][1]);
        release_matrix(&m);
    }

    coli_matrix refused = random_matrix("int8", O, I, 0, 8);
    set_variable("STUB_REFUSES_UPLOADS", "1");
    check_placement(backend, 0, &refused, "coli_cuda_tensor_upload returned 0 (this library does not say why)");
    set_variable("STUB_REFUSES_UPLOADS", NULL);
    release_matrix(&refused);

    coli_matrix bad = {.format = COLI_INT8, .rows = O, .columns = I};
    coli_placed *untouched = (coli_placed *)&folder;
    CHECK(coli_place(backend, 0, &bad, &untouched) != COLI_OK, "a matrix without weights was placed");
    CHECK(untouched == (coli_placed *)&folder, "a refused placement wrote its result");
    coli_placed_free(NULL);
}

/* A call that the GPU refuses is computed on the CPU, is logged, says why, and the next one goes to the GPU again. */
static void keep_line(int level, const char *line, void *user) {
    CHECK(level == 1, "the fallback was logged at level %d", level);
    snprintf(user, 512, "%s", line);
}

static void fallback(coli_backend *backend) {
    coli_matrix m = random_matrix("int8", O, I, 0, 9);
    coli_placed *placed = NULL;
    float x[I], y[O], expected[O];
    char logged[512] = "";
    fill_random(x, I, 5);
    CHECK_OK(coli_place(backend, 0, &m, &placed));
    CHECK_OK(coli_matmul(&m, x, 1, expected));

    coli_set_log(keep_line, logged);
    set_variable("COLI_GPU_FAIL_AFTER", "0");
    CHECK_OK(coli_placed_matmul(placed, x, 1, y));
    set_variable("COLI_GPU_FAIL_AFTER", NULL);
    coli_set_log(NULL, NULL);
    CHECK(!memcmp(y, expected, sizeof y), "the fallback is not the CPU's result");
    CHECK(coli_placed_device(placed) == 0, "a failed call moved the matrix to %d", coli_placed_device(placed));
    CHECK(says(coli_placed_why_cpu(placed), "coli_cuda_matmul returned 0"), "%s", coli_placed_why_cpu(placed));
    CHECK(says(logged, "coli_cuda_matmul returned 0"), "logged: %s", logged);

    CHECK_OK(coli_placed_matmul(placed, x, 1, y));
    CHECK(!coli_placed_why_cpu(placed), "%s", coli_placed_why_cpu(placed));
    CHECK_OK(coli_placed_matmul(placed, NULL, 0, NULL));
    CHECK(coli_placed_matmul(placed, NULL, 1, y) == COLI_E_ARGUMENT, "x = NULL was accepted");
    CHECK(coli_placed_matmul(NULL, x, 1, y) == COLI_E_ARGUMENT, "w = NULL was accepted");
    coli_placed_free(placed);
    release_matrix(&m);
}

/*------   Experts   ------*/

static void check_expert(coli_placed *gate, coli_placed *up, coli_placed *down, const coli_matrix m[3], const char *why) {
    float x[S * I], y[S * I], expected[S * I];
    fill_random(x, S * I, 5);
    CHECK_OK(coli_placed_expert_mlp(gate, up, down, x, S, y));
    CHECK_OK(coli_expert_mlp(&m[0], &m[1], &m[2], x, S, expected));
    double error = relative_rms(y, expected, S * I);
    CHECK(error < 1e-5, "an expert is off by %.3g", error);
    if (why) CHECK(!memcmp(y, expected, sizeof y), "an expert on the CPU is not the CPU's expert");
    coli_placed *const placed[] = {gate, up, down};
    for (int i = 0; i < 3; i++) {
        const char *reason = coli_placed_why_cpu(placed[i]);
        if (why)
            CHECK(says(reason, why), "\"%s\" does not say \"%s\"", reason ? reason : "", why);
        else
            CHECK(!reason, "%s", reason);
    }
}

static void experts(coli_backend *backend) {
    coli_matrix m[3] = {random_matrix("int8", O, I, 0, 1), random_matrix("int4-g16", O, I, 0, 2),
                        random_matrix("f32", I, O, 0, 3)};
    coli_matrix with_e8[3] = {m[0], m[1], random_matrix("e8", I, O, 0, 4)};
    coli_placed *gate = NULL, *up = NULL, *up_elsewhere = NULL, *down = NULL, *e8 = NULL;
    CHECK_OK(coli_place(backend, 0, &m[0], &gate));
    CHECK_OK(coli_place(backend, 0, &m[1], &up));
    CHECK_OK(coli_place(backend, 3, &m[1], &up_elsewhere));
    CHECK_OK(coli_place(backend, 0, &m[2], &down));
    CHECK_OK(coli_place(backend, 0, &with_e8[2], &e8));

    check_expert(gate, up, down, m, NULL);
    check_expert(gate, up_elsewhere, down, m, "gate on 0, up on 3, down on 0");
    check_expert(gate, up, down, m, NULL);
    check_expert(gate, up, e8, with_e8, "coli_cuda_e8_set_grid");
    CHECK(says(coli_placed_why_cpu(gate), "its down matrix is on the CPU"), "%s", coli_placed_why_cpu(gate));
    set_variable("COLI_GPU_FAIL_AFTER", "0");
    check_expert(gate, up, down, m, "coli_cuda_expert_mlp returned 0");
    set_variable("COLI_GPU_FAIL_AFTER", NULL);

    float x[I], y[I] = {0};
    CHECK(coli_placed_expert_mlp(gate, up, gate, x, 1, y) == COLI_E_SHAPE, "a gate was taken for a down matrix");
    CHECK(coli_placed_expert_mlp(gate, NULL, down, x, 1, y) == COLI_E_ARGUMENT, "up = NULL was accepted");
    CHECK(says(coli_last_error(), "up = NULL"), "%s", coli_last_error());

    coli_placed *const placed[] = {gate, up, up_elsewhere, down, e8};
    for (int i = 0; i < 5; i++) coli_placed_free(placed[i]);
    for (int i = 0; i < 3; i++) release_matrix(&m[i]);
    release_matrix(&with_e8[2]);
}

/*------   The first libraries with E8   ------*/

/* An expert of `hidden` hidden columns with an E8 down matrix. `why` is a part of the reason for the CPU, or NULL where the
 * GPU must compute it. */
static void check_down(coli_backend *backend, int hidden, int flags, const char *why) {
    coli_matrix m[3] = {random_matrix("int8", hidden, I, 0, 1), random_matrix("int8", hidden, I, 0, 2),
                        random_matrix("e8", I, hidden, flags, 3)};
    coli_placed *placed[3] = {NULL};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(coli_place(backend, 0, &m[i], &placed[i]));
        const char *reason = coli_placed_why_cpu(placed[i]);
        CHECK(coli_placed_device(placed[i]) == 0, "%s", reason ? reason : "no reason");
    }
    check_expert(placed[0], placed[1], placed[2], m, why);
    for (int i = 0; i < 3; i++) {
        coli_placed_free(placed[i]);
        release_matrix(&m[i]);
    }
}

static const char *why_not(const coli_backend *backend, const char *feature, const char *format, int hidden, int flags) {
    coli_matrix int8 = {.format = COLI_INT8, .rows = hidden, .columns = I};
    coli_matrix down = {.rows = I, .columns = hidden, .flags = flags};
    CHECK_OK(coli_format_parse(format, &down.format, &down.group_size));
    return coli_backend_why_not_expert(backend, feature, &int8, &int8, &down);
}

/* What these libraries would get wrong without a word. */
static void experts_they_misread(const coli_backend *backend) {
    static const char *const grouped[] = {"expert_group", "issue_take"};
    static const char *const later[] = {"e8", "mxfp4", "fp8-e4m3-b128"};
    CHECK(!why_not(backend, "expert_mlp", "e8", 4096, 0), "%s", why_not(backend, "expert_mlp", "e8", 4096, 0));
    CHECK(says(why_not(backend, "expert_mlp", "e8", 8192, 0), "rotation blocks above 4096"), "blocks of 8192");
    CHECK(says(why_not(backend, "expert_mlp", "e8", 8192 + 64, 0), "rotation blocks above 4096"), "blocks of 64 and 8192");
    CHECK(!why_not(backend, "expert_mlp", "int8", 8192, 0), "int8 is never rotated");
    CHECK(says(why_not(backend, "expert_mlp", "e8", 256, COLI_UNROTATED), "unrotated e8"), "unrotated");
    for (int i = 0; i < 2; i++) {
        CHECK(!why_not(backend, grouped[i], "int4-g16", 256, 0), "%s of int4-g16", grouped[i]);
        for (int k = 0; k < 3; k++) {
            const char *why = why_not(backend, grouped[i], later[k], 256, 0);
            CHECK(says(why, "without coli_cuda_abi_version"), "%s of %s: %s", grouped[i], later[k], why ? why : "offered");
        }
    }
    CHECK(says(why_not(NULL, "expert_mlp", "e8", 256, 0), "no GPU library"), "no library runs an expert");
    CHECK(says(why_not(backend, "download", "e8", 256, 0), "coli_cuda_tensor_download"), "a feature that is not there");
    CHECK(says(why_not(backend, "teleport", "e8", 256, 0), "no such feature"), "no feature");
}

/* The table of fp8 is published when it is missing, not at every upload. */
static void fp8_tables(coli_backend *backend, start init, stop shut_down) {
    int (*tables)(void) = (int (*)(void))coli_backend_symbol(backend, "stub_fp8_tables");
    coli_matrix m = random_matrix("fp8-e4m3-b128", O, I, 0, 4);
    for (int round = 1; round <= 2; round++) {
        CHECK(init((const int[]){0}, 1) == 1, "the stub did not start");
        for (int i = 0; i < 3; i++) check_placement(backend, 0, &m, NULL);
        CHECK(tables() == round, "the table was published %d times in %d rounds", tables(), round);
        if (round == 2) {
            set_variable("STUB_REFUSES_UPLOADS", "1");
            check_placement(backend, 0, &m, "coli_cuda_tensor_upload returned 0");
            set_variable("STUB_REFUSES_UPLOADS", NULL);
        }
        shut_down();
    }
    release_matrix(&m);
}

/* They forget the codebook with coli_cuda_shutdown and compute with zeros until it is published. */
static void first_e8(void) {
    coli_backend *backend = open_stub("stub_old_e8");
    start init = (start)coli_backend_symbol(backend, "coli_cuda_init");
    stop shut_down = (stop)coli_backend_symbol(backend, "coli_cuda_shutdown");
    coli_matrix rotated = random_matrix("e8", O, I, 0, 1), unrotated = random_matrix("e8", O, I, COLI_UNROTATED, 2);
    for (int round = 0; round < 2; round++) {
        CHECK(init((const int[]){0}, 1) == 1, "the stub did not start");
        check_placement(backend, 0, &rotated, NULL);
        check_placement(backend, 0, &unrotated, NULL);
        shut_down();
    }
    CHECK(init((const int[]){0}, 1) == 1, "the stub did not start");
    check_down(backend, I, 0, NULL);
    check_down(backend, I, COLI_UNROTATED, "unrotated e8");
    check_down(backend, 8192, 0, "rotation blocks above 4096");
    check_down(backend, 4096, 0, NULL);
    shut_down();
    experts_they_misread(backend);
    fp8_tables(backend, init, shut_down);
    coli_backend_close(backend);
    release_matrix(&rotated);
    release_matrix(&unrotated);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return EXIT_FAILURE;
    }
    folder = argv[1];
    refusals();
    search_order();
    sharing();
    many_threads();

    coli_backend *backend = open_stub("stub_old");
    features(backend);
    count_tensors stats = (count_tensors)coli_backend_symbol(backend, "coli_cuda_stats");
    devices(backend);
    placements(backend);
    fallback(backend);
    experts(backend);
    size_t tensors = 99;
    stats(-1, &tensors, NULL);
    CHECK(tensors == 0, "%zu tensors are left", tensors);
    coli_backend_close(backend);
    first_e8();
    return finish("t_old_library");
}
