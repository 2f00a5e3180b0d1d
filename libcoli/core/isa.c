/* isa.c - which kernels run: the best that the processor has, unless the environment or the caller names others. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "status.h"

/* Best first. */
static const coli_kernels *const built[] = {
#if COLI_KERNELS_X86
    &coli_kernels_avx512,
    &coli_kernels_avx2,
#endif
    &coli_kernels_scalar,
};
enum { BUILT = sizeof built / sizeof *built };

#define NOT_RUNNABLE "this build has " COLI_KERNELS_BUILT ", and the processor must run them too"

static _Atomic(const coli_kernels *) current;

static int processor_runs(const coli_kernels *kernels) {
#if COLI_KERNELS_X86
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (kernels == &coli_kernels_avx2) return avx2;
    if (kernels == &coli_kernels_avx512) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    }
#endif
    return kernels == &coli_kernels_scalar;
}

/* NULL where the build or the processor lacks them. */
static const coli_kernels *find(const char *name) {
    for (int i = 0; i < BUILT; i++) {
        if (strcmp(built[i]->name, name) == 0 && processor_runs(built[i])) return built[i];
    }
    return NULL;
}

static const coli_kernels *default_kernels(void) {
    const char *wanted = getenv("COLI_ISA");
    if (wanted && *wanted) {
        const coli_kernels *kernels = find(wanted);
        if (kernels) return kernels;
        coli_log(1, "COLI_ISA=%s is ignored: " NOT_RUNNABLE, wanted);
    }
    for (int i = 0; i < BUILT; i++) {
        if (processor_runs(built[i])) return built[i];
    }
    return &coli_kernels_scalar;
}

const coli_kernels *coli_kernels_current(void) {
    const coli_kernels *kernels = atomic_load(&current);
    if (!kernels) {
        kernels = default_kernels();
        atomic_store(&current, kernels);
    }
    return kernels;
}

const char *coli_isa(void) {
    return coli_kernels_current()->name;
}

coli_status coli_set_isa(const char *name) {
    const coli_kernels *kernels = name ? find(name) : NULL;
    RETURN_ERROR_IF(name && !kernels, COLI_E_NOT_PROVIDED, "kernels \"%s\": " NOT_RUNNABLE, name);
    atomic_store(&current, kernels);
    return COLI_OK;
}
