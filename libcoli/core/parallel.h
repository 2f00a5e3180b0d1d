/* parallel.h - loops over rows on several threads: OpenMP where the compiler has it, one thread where it has not. */
#ifndef COLI_CORE_PARALLEL_H
#define COLI_CORE_PARALLEL_H

#include <stddef.h>

/* COLI_PARALLEL_FOR(team) before a for loop spreads its turns over so many threads; coli_thread_index() inside it is 0 ...
 * team - 1. */
#ifdef _OPENMP
#include <omp.h>
#define COLI_PRAGMA(text) _Pragma(#text)
#define COLI_PARALLEL_FOR(team) COLI_PRAGMA(omp parallel for num_threads(team) schedule(dynamic, 4))
static inline int coli_thread_index(void) {
    return omp_get_thread_num();
}
#else
#define COLI_PARALLEL_FOR(team) (void)(team);
static inline int coli_thread_index(void) {
    return 0;
}
#endif

/* Threads for a loop of `tasks` independent tasks, each of about `operations` simple steps: no more than coli_threads(),
 * and none that would cost more to start than it saves. At least 1. */
int coli_team(size_t tasks, size_t operations);

#endif
