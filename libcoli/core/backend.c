/* backend.c - finds and loads the GPU library, and tells what it can do and what it cannot.
 *
 * Every entry point is looked up by itself, so that a library which lacks some still serves with the others. */
#define _GNU_SOURCE /* dladdr */

#include "backend.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

#define TEXT(macro) TEXT_OF(macro)
#define TEXT_OF(value) #value

/*------   What the operating system does   ------*/

#define PATH_BYTES 4096

#ifdef _WIN32
#include <windows.h>

static const char *const library_names[] = {"coli_cuda.dll", "libcoli_cuda.dll"};
#define DIRECTORY_ENDS "/\\"

static void *library_open(const char *path, char *reason, size_t reason_size) {
    DWORD flags = strpbrk(path, DIRECTORY_ENDS) ? LOAD_WITH_ALTERED_SEARCH_PATH : 0;
    void *library = (void *)LoadLibraryExA(path, NULL, flags);
    if (!library) snprintf(reason, reason_size, "%s: error %lu of LoadLibrary", path, (unsigned long)GetLastError());
    return library;
}

static void *library_symbol(void *library, const char *name) {
    return (void *)(uintptr_t)GetProcAddress((HMODULE)library, name);
}

static void library_close(void *library) {
    FreeLibrary((HMODULE)library);
}

/* Path of the file that an address was loaded from; "" when unknown. */
static void library_path_of(const void *address, char path[PATH_BYTES]) {
    HMODULE library = NULL;
    DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    path[0] = '\0';
    if (!GetModuleHandleExA(flags, (LPCSTR)address, &library)) return;
    if (GetModuleFileNameA(library, path, PATH_BYTES) >= PATH_BYTES) path[0] = '\0';
}

#else
#include <dlfcn.h>
#include <unistd.h>

static const char *const library_names[] = {"libcoli_cuda.so." TEXT(COLI_CUDA_ABI_MAJOR), "libcoli_cuda.so"};
#define DIRECTORY_ENDS "/"

static void *library_open(const char *path, char *reason, size_t reason_size) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
    if (strchr(path, '/') && access(path, F_OK) != 0)
        snprintf(reason, reason_size, "%s: no such file", path);
    else
        snprintf(reason, reason_size, "%s", dlerror());
    return NULL;
}

static void *library_symbol(void *library, const char *name) {
    return dlsym(library, name);
}

static void library_close(void *library) {
    dlclose(library);
}

/* Path of the file that an address was loaded from; "" when unknown. */
static void library_path_of(const void *address, char path[PATH_BYTES]) {
    Dl_info info;
    int known = dladdr(address, &info) && info.dli_fname && strlen(info.dli_fname) < PATH_BYTES;
    strcpy(path, known ? info.dli_fname : "");
}
#endif

/*------   Features   ------*/

#define TENSOR_CALLS "coli_cuda_tensor_upload", "coli_cuda_tensor_free"
#define FORMAT_CALLS TENSOR_CALLS, "coli_cuda_matmul"

/* What a library must export for each feature. */
static const struct feature {
    const char *name;
    const char *needs[5];
    const char *never; /* why no library can offer it */
} features[] = {
    {"f32", {FORMAT_CALLS}, NULL},
    {"int8", {FORMAT_CALLS}, NULL},
    {"int4", {FORMAT_CALLS}, NULL},
    {"int2", {FORMAT_CALLS}, NULL},
    {"int4-g64", {FORMAT_CALLS, "coli_cuda_tensor_upload_g"}, NULL},
    {"int3-g64", {NULL}, "the GPU ABI has no int3-g64"},
    {"e8", {FORMAT_CALLS, "coli_cuda_e8_set_grid"}, NULL},
    {"mxfp4", {FORMAT_CALLS}, NULL},
    {"fp8-e4m3-b128", {FORMAT_CALLS, "coli_cuda_fp8_set_lut"}, NULL},
    {"devices", {"coli_cuda_init", "coli_cuda_shutdown", "coli_cuda_device_count", "coli_cuda_device_at"}, NULL},
    {"matmul", {TENSOR_CALLS, "coli_cuda_matmul"}, NULL},
    {"expert_mlp", {TENSOR_CALLS, "coli_cuda_expert_mlp"}, NULL},
    {"expert_group", {TENSOR_CALLS, "coli_cuda_expert_group"}, NULL},
    {"issue_take", {TENSOR_CALLS, "coli_cuda_expert_group_issue", "coli_cuda_expert_group_take"}, NULL},
    {"update", {TENSOR_CALLS, "coli_cuda_tensor_update"}, NULL},
    {"download", {TENSOR_CALLS, "coli_cuda_tensor_download"}, NULL},
};

_Static_assert(sizeof features / sizeof *features == COLI_BACKEND_FEATURES, "one reason for each feature");

static int feature_index(const char *name) {
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) {
        if (!strcmp(features[i].name, name)) return i;
    }
    int format; /* "int4-g32" and its like share a feature with "int4-g64" */
    return coli_format_parse(name, &format, NULL) == COLI_OK ? feature_index(coli_format_get(format)->name) : -1;
}

int coli_backend_feature_count(void) {
    return COLI_BACKEND_FEATURES;
}

const char *coli_backend_feature_name(int index) {
    return index >= 0 && index < COLI_BACKEND_FEATURES ? features[index].name : NULL;
}

const char *coli_backend_why_not(const coli_backend *backend, const char *feature) {
    int index = feature ? feature_index(feature) : -1;
    if (index < 0) return "there is no such feature; coli_backend_feature_name() lists them";
    if (!backend) return "no GPU library is loaded";
    return backend->why_not[index];
}

/*------   Texts that grow   ------*/

typedef struct text {
    char bytes[2048];
    size_t length;
} text;

COLI_PRINTF(2, 3) static void append(text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof t->bytes - t->length;
    int written = vsnprintf(t->bytes + t->length, room, format, arguments);
    va_end(arguments);
    if (written > 0) t->length += (size_t)written < room ? (size_t)written : room - 1;
}

static char *copy_string(const char *string) {
    size_t size = strlen(string) + 1;
    char *copy = malloc(size);
    return copy ? memcpy(copy, string, size) : NULL;
}

/*------   Opening   ------*/

static void resolve_calls(coli_backend *backend) {
#define RESOLVE(name)                                                                                                      \
    backend->call.name = (__typeof__(backend->call.name))library_symbol(backend->library, "coli_cuda_" #name);
    COLI_BACKEND_CALLS(RESOLVE)
#undef RESOLVE
}

/* Writes down why the library lacks a feature; "" when it has it. */
static void explain_feature(const coli_backend *backend, const struct feature *feature, text *why) {
    if (feature->never) {
        append(why, "%s", feature->never);
        return;
    }
    for (const char *const *name = feature->needs; *name; name++) {
        if (library_symbol(backend->library, *name)) continue;
        if (why->length)
            append(why, ", %s", *name);
        else
            append(why, "%s lacks what %s needs: %s", backend->path, feature->name, *name);
    }
}

static coli_status fill_in(coli_backend *backend, const char *path) {
    backend->path = copy_string(path);
    RETURN_ERROR_IF(!backend->path, COLI_E_MEMORY, "no memory for the description of %s", path);
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) {
        text why = {.length = 0};
        explain_feature(backend, &features[i], &why);
        if (!why.length) continue;
        backend->why_not[i] = copy_string(why.bytes);
        RETURN_ERROR_IF(!backend->why_not[i], COLI_E_MEMORY, "no memory for the description of %s", path);
    }
    return COLI_OK;
}

/* Loads one file. When it will not do, its reason is appended to `tried`. COLI_E_MEMORY sets the error itself. */
static coli_status try_file(const char *path, coli_backend **result, text *tried) {
    char reason[1024], loaded_path[PATH_BYTES];
    const char *separator = tried->length ? "; " : "";
    coli_backend *backend = calloc(1, sizeof *backend);
    RETURN_ERROR_IF(!backend, COLI_E_MEMORY, "no memory to load %s", path);

    coli_status status = COLI_E_NO_LIBRARY;
    backend->library = library_open(path, reason, sizeof reason);
    if (!backend->library) {
        append(tried, "%s%s", separator, reason);
        goto refuse;
    }
    const void *init = library_symbol(backend->library, "coli_cuda_init");
    if (!init) {
        append(tried, "%s%s is not a libcoli_cuda: it lacks coli_cuda_init", separator, path);
        goto refuse;
    }
    resolve_calls(backend);
    /* A library without a version is older than versions, and has the calls of this ABI major. */
    int abi = backend->call.abi_version ? backend->call.abi_version() : COLI_CUDA_ABI_MAJOR * 1000;
    if (abi / 1000 != COLI_CUDA_ABI_MAJOR) {
        append(tried, "%s%s speaks libcoli_cuda ABI %d.%d, this libcoli speaks %d.x", separator, path, abi / 1000,
               abi % 1000, COLI_CUDA_ABI_MAJOR);
        status = COLI_E_ABI;
        goto refuse;
    }
    library_path_of(init, loaded_path);
    status = fill_in(backend, loaded_path[0] ? loaded_path : path);
    if (status != COLI_OK) goto refuse;
    *result = backend;
    return COLI_OK;

refuse:
    coli_backend_close(backend);
    return status;
}

/* Tries the usual names in `directory`; with NULL, wherever the system looks. */
static coli_status try_directory(const char *directory, coli_backend **result, text *tried) {
    coli_status status = COLI_E_NO_LIBRARY;
    for (size_t i = 0; i < sizeof library_names / sizeof *library_names; i++) {
        char path[PATH_BYTES + 32];
        snprintf(path, sizeof path, "%s%s", directory ? directory : "", library_names[i]);
        coli_status one = try_file(path, result, tried);
        if (one == COLI_OK || one == COLI_E_MEMORY) return one;
        if (one == COLI_E_ABI) status = one;
    }
    return status;
}

/* The folder that this code was loaded from, with its final separator; "" when unknown. */
static void own_directory(char directory[PATH_BYTES]) {
    library_path_of(&features, directory);
    size_t length = strlen(directory);
    while (length && !strchr(DIRECTORY_ENDS, directory[length - 1])) length--;
    directory[length] = '\0';
}

static coli_status search(coli_backend **result, text *tried) {
    char directory[PATH_BYTES];
    own_directory(directory);
    coli_status beside = directory[0] ? try_directory(directory, result, tried) : COLI_E_NO_LIBRARY;
    if (beside == COLI_OK || beside == COLI_E_MEMORY) return beside;
    coli_status anywhere = try_directory(NULL, result, tried);
    return anywhere == COLI_E_NO_LIBRARY ? beside : anywhere;
}

coli_status coli_backend_open(const char *path, coli_backend **backend) {
    RETURN_ERROR_IF(!backend, COLI_E_ARGUMENT, "coli_backend_open needs a place for its result, got backend = NULL");
    RETURN_ERROR_IF(path && !path[0], COLI_E_ARGUMENT, "coli_backend_open needs a path or NULL, got an empty path");
    text tried = {.length = 0};
    const char *from_environment = path ? NULL : getenv("COLI_CUDA_LIB");
    if (from_environment && !from_environment[0]) from_environment = NULL;
    if (from_environment) path = from_environment;

    coli_status status = path ? try_file(path, backend, &tried) : search(backend, &tried);
    if (status == COLI_OK || status == COLI_E_MEMORY) return status;
    RETURN_ERROR(status, "no usable GPU library%s: %s%s", from_environment ? " at COLI_CUDA_LIB" : "", tried.bytes,
                 path ? "" : "; COLI_CUDA_LIB can name one");
}

void coli_backend_close(coli_backend *backend) {
    if (!backend) return;
    for (int i = 0; i < COLI_BACKEND_FEATURES; i++) free(backend->why_not[i]);
    free(backend->path);
    if (backend->library) library_close(backend->library);
    free(backend);
}

const char *coli_backend_path(const coli_backend *backend) {
    return backend ? backend->path : NULL;
}

void *coli_backend_symbol(const coli_backend *backend, const char *name) {
    return backend && name ? library_symbol(backend->library, name) : NULL;
}

/*------   Devices   ------*/

/* Ordinals 0 ... count - 1 of the visible devices; 0 when the library cannot tell. */
static int visible_devices(const coli_backend *backend, int devices[COLI_CUDA_MAX_DEVICES]) {
    int count = backend->call.available_device_count ? backend->call.available_device_count() : 1;
    if (count > COLI_CUDA_MAX_DEVICES) count = COLI_CUDA_MAX_DEVICES;
    for (int i = 0; i < count; i++) devices[i] = i;
    return count;
}

coli_status coli_backend_init(coli_backend *backend, const int *devices, int count) {
    RETURN_ERROR_IF(!backend, COLI_E_ARGUMENT, "coli_backend_init needs a backend, got NULL");
    const char *lacks = coli_backend_why_not(backend, "devices");
    RETURN_ERROR_IF(lacks, COLI_E_NOT_PROVIDED, "%s", lacks);
    int visible[COLI_CUDA_MAX_DEVICES];
    if (!devices) {
        count = visible_devices(backend, visible);
        devices = visible;
    }
    if (count > 0 && backend->call.init(devices, count)) return COLI_OK;
    RETURN_ERROR(COLI_E_NO_DEVICE, "%s: %s", backend->path,
                 backend->call.last_error ? backend->call.last_error()
                                          : "coli_cuda_init returned 0 (this library does not say why)");
}
