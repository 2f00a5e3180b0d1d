/* parallel.c - how many threads a call uses. */
#include <stdatomic.h>

#include "parallel.h"
#include "status.h"

#define MAX_THREADS 1024
/* Some hundred microseconds. Waking a thread takes ten where cores are idle; where other programs keep them busy, the call
 * waits for a turn of that thread, milliseconds, and the OpenMP runtime spins meanwhile. */
#define OPERATIONS_WORTH_A_THREAD (1 << 20)

static atomic_int chosen_threads; /* 0: the default */

#if defined(_OPENMP) && !defined(_WIN32)
#include <pthread.h>

/* The OpenMP runtime's threads stay behind in a fork. Its next parallel loop would wait for them for ever, so a child
 * computes alone. */
static atomic_int in_forked_child;

static void enter_child(void) {
    atomic_store(&in_forked_child, 1);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, enter_child);
}
#elif defined(_OPENMP)
static const int in_forked_child = 0;
#endif

coli_status coli_set_threads(int threads) {
    RETURN_ERROR_IF(threads < 0 || threads > MAX_THREADS, COLI_E_ARGUMENT, "threads must be 0 ... %d, got %d", MAX_THREADS,
                    threads);
    atomic_store(&chosen_threads, threads);
    return COLI_OK;
}

int coli_threads(void) {
#ifdef _OPENMP
    if (in_forked_child) return 1;
    int threads = atomic_load(&chosen_threads);
    return threads ? threads : omp_get_max_threads();
#else
    return 1;
#endif
}

int coli_team(size_t tasks, size_t operations) {
    size_t team = (size_t)coli_threads();
    size_t worth_starting = tasks / (OPERATIONS_WORTH_A_THREAD / (operations ? operations : 1) + 1);
    if (team > worth_starting) team = worth_starting;
    return team > 1 ? (int)team : 1;
}
