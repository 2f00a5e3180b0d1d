/* t_loader.c - a host that has coli_loader.c in its own tree and nothing else of libcoli. It reports what the loader found
 * and what came of calls, a line "key<TAB>value" each; tests/test_loader.py compares.
 *
 *     t_loader                    the GPU ABI as the host calls it. T_LOADER_LATER=PATH: once more with COLI_CUDA_LIB=PATH
 *     t_loader LIBCOLI [PATH]     coli_backend_open(PATH) of that libcoli, loaded by the same code */
#define COLI_STATIC
#include "coli/coli_cuda.h"

#include "../../libcoli/loader/coli_loader.h"
#include "coli/coli.h"

#include <pthread.h>
#ifdef _WIN32
#include <windows.h>

#include <shellapi.h>
#endif

#include "check.h"

static void say(const char *key, const char *value) {
    printf("%s\t%s\n", key, value ? value : "NULL");
}

static void say_number(const char *key, double value) {
    printf("%s\t%g\n", key, value);
}

/*------   As a host calls it   ------*/

static void *init(void *result) {
    *(int *)result = coli_cuda_init((const int[]){0}, 1);
    return NULL;
}

/* The first call of several threads at once: one attempt, and all of them see what came of it. */
static int init_by_threads(void) {
    pthread_t threads[8];
    int results[8], done = 0;
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, init, &results[i]);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 8; i++) done += results[i];
    return done;
}

static void say_loader(const char *prefix) {
    char key[64];
    snprintf(key, sizeof key, "%spath", prefix);
    say(key, coli_loader_path());
    snprintf(key, sizeof key, "%swhy", prefix);
    say(key, coli_loader_why());
    for (int i = 0; coli_loader_miss(i); i++) printf("%smiss\t%s\n", prefix, coli_loader_miss(i));
}

static void products(void) {
    static const float w[] = {1, 2, 3, 4}, x[] = {1, 10};
    float y[2] = {-7, -7};
    ColiCudaTensor *t = NULL;
    say_number("upload", coli_cuda_tensor_upload(&t, w, NULL, COLI_F32, 2, 2, 0));
    say_number("matmul", coli_cuda_matmul(&t, y, x, NULL, NULL, COLI_F32, 1, 2, 2, 0, 0));
    say_number("y0", y[0]);
    say_number("y1", y[1]);
    say_number("tensor_bytes", (double)coli_cuda_tensor_bytes(t));
    say_number("tensor_vram", (double)coli_cuda_tensor_vram(t));
    say_number("tensor_device", coli_cuda_tensor_device(t));

    const int rows = 1;
    ColiCudaTensor *const tensors[] = {t};
    say_number("issue", coli_cuda_expert_group_issue(tensors, tensors, tensors, &rows, 1, x));
    say_number("take", coli_cuda_expert_group_take(0) != NULL);
    say_number("group", coli_cuda_expert_group(tensors, tensors, tensors, &rows, 1, y, x));
    say_number("group_unpinned", coli_cuda_expert_group_pinned(tensors, tensors, tensors, &rows, 1, y, x, 0));
    say_number("group_pinned", coli_cuda_expert_group_pinned(tensors, tensors, tensors, &rows, 1, y, x, 1));
    coli_cuda_tensor_free(t);
}

static void counts(void) {
    size_t tensors = 99, bytes = 99;
    uint64_t calls = 99;
    double ms = 99;
    coli_cuda_stats(-1, &tensors, &bytes);
    coli_cuda_group_stats_device(0, &calls, NULL, NULL, &ms, NULL, NULL);
    say_number("live_tensors", (double)tensors);
    say_number("group_calls", (double)calls);
    say_number("group_ms", ms);
}

static void host(void) {
    say_number("init", init_by_threads());
    say_loader("");
    say("why_not_e8", coli_loader_why_not("coli_cuda_e8_set_grid"));
    say("why_not_init", coli_loader_why_not("coli_cuda_init"));
    say("why_not_teleport", coli_loader_why_not("coli_cuda_teleport"));
    say_number("abi_version", coli_cuda_abi_version());
    say_number("available_device_count", coli_cuda_available_device_count());
    say_number("device_at", coli_cuda_device_at(0));
    say_number("alloc_footprint", (double)coli_cuda_alloc_footprint(100));
    uint8_t grid[1024] = {0};
    say_number("e8_set_grid", coli_cuda_e8_set_grid(grid));
    products();
    counts();
    say("last_error", coli_cuda_last_error());
    say_number("last_status", coli_cuda_last_status());
    say_number("chain_ops", coli_cuda_chain_ops() != NULL);
    coli_cuda_shutdown();
    const char *later = getenv("T_LOADER_LATER");
    if (!later) return;
    set_variable("COLI_CUDA_LIB", later);
    say_number("later_init", coli_cuda_init((const int[]){0}, 1));
    say_loader("later_");
}

/*------   libcoli, loaded by the same code   ------*/

static void backend(const char *libcoli, const char *path) {
    static const char *const mandatory[] = {"coli_backend_open",
                                            "coli_backend_path",
                                            "coli_backend_feature_count",
                                            "coli_backend_feature_name",
                                            "coli_backend_why_not",
                                            "coli_last_error",
                                            NULL};
    coli_loader_library library;
    char why[4096];
    if (coli_loader_open(libcoli, mandatory, &library, why, sizeof why) != COLI_LOADER_OK) {
        say("libcoli", why);
        return;
    }
    say("libcoli", library.path);
#define CALL(name) ((__typeof__(name) *)coli_loader_symbol(&library, #name, NULL, 0))
    coli_backend *opened = NULL;
    say_number("status", CALL(coli_backend_open)(path, &opened));
    say("path", CALL(coli_backend_path)(opened));
    say("why", opened ? NULL : CALL(coli_last_error)());
    for (int i = 0; opened && i < CALL(coli_backend_feature_count)(); i++) {
        const char *feature = CALL(coli_backend_feature_name)(i);
        say(feature, CALL(coli_backend_why_not)(opened, feature));
    }
    CALL(coli_backend_close)(opened);
    coli_loader_close(&library);
}

#ifdef _WIN32
/* main's own are in the code page of the machine. */
static const char *argument(int index) {
    static char utf8[4][4096];
    int count;
    WCHAR **wide = CommandLineToArgvW(GetCommandLineW(), &count);
    WideCharToMultiByte(CP_UTF8, 0, wide[index], -1, utf8[index], sizeof *utf8, NULL, NULL);
    LocalFree(wide);
    return utf8[index];
}
#else
#define argument(index) argv[index]
#endif

int main(int argc, char **argv) {
    (void)argv;
    if (argc > 1)
        backend(argument(1), argc > 2 ? argument(2) : NULL);
    else
        host();
    return EXIT_SUCCESS;
}
