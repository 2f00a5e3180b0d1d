/* parallel.c - how many threads a call uses. */
#include <stdatomic.h>

#include "parallel.h"
#include "status.h"

#define MAX_THREADS 1024
#define OPERATIONS_WORTH_A_THREAD 32768 /* some ten microseconds, the cost of waking a thread */

static atomic_int chosen_threads; /* 0: the default */

coli_status coli_set_threads(int threads) {
    RETURN_ERROR_IF(threads < 0 || threads > MAX_THREADS, COLI_E_ARGUMENT, "threads must be 0 ... %d, got %d", MAX_THREADS,
                    threads);
    atomic_store(&chosen_threads, threads);
    return COLI_OK;
}

int coli_threads(void) {
#ifdef _OPENMP
    int threads = atomic_load(&chosen_threads);
    return threads ? threads : omp_get_max_threads();
#else
    return 1;
#endif
}

int coli_team(size_t tasks, size_t operations) {
    size_t team = (size_t)coli_threads();
    size_t worth_starting = tasks / (OPERATIONS_WORTH_A_THREAD / (operations + 1) + 1);
    if (team > worth_starting) team = worth_starting;
    return team > 1 ? (int)team : 1;
}
