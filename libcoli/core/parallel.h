/* parallel.h - what OpenMP does where the compiler has it: loops over rows on several threads, and loops over columns in
 * vector registers. Elsewhere the same loops are only slower. */
#ifndef COLI_CORE_PARALLEL_H
#define COLI_CORE_PARALLEL_H

#include <stddef.h>

/* COLI_PARALLEL_FOR(team) before a for loop spreads its turns over so many threads; coli_thread_index() inside it is 0 ...
 * team - 1. */
#define COLI_PRAGMA(directive) _Pragma(#directive)
#ifdef _OPENMP
#include <omp.h>
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

/* COLI_SIMD() before a for loop vectorises it, with the reduction that it may be given: COLI_SIMD(reduction(min : low)).
 * The build defines COLI_OPENMP_SIMD where it gives the compiler the flag for that. */
#ifdef COLI_OPENMP_SIMD
#define COLI_SIMD(...) COLI_PRAGMA(omp simd __VA_ARGS__)
#else
#define COLI_SIMD(...)
#endif

/* Threads for a loop of `tasks` independent tasks, each of about `operations` simple steps: no more than coli_threads(),
 * and none that would cost more to start than it saves. At least 1. */
int coli_team(size_t tasks, size_t operations);

#endif
