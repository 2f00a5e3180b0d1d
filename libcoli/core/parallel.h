/* parallel.h - what OpenMP does where the compiler has it: loops over rows on several threads, and loops over columns in
 * vector registers. Elsewhere the same loops are only slower. */
#ifndef COLI_CORE_PARALLEL_H
#define COLI_CORE_PARALLEL_H

#include <stddef.h>

#define COLI_PRAGMA(directive) _Pragma(#directive)
#ifdef _OPENMP
#include <omp.h>
#define COLI_OPENMP_FOR(team) COLI_PRAGMA(omp parallel for num_threads(team) schedule(dynamic, 4))
#define COLI_OPENMP_THREAD omp_get_thread_num()
#else
#define COLI_OPENMP_FOR(team)
#define COLI_OPENMP_THREAD 0
#endif

/* COLI_PARALLEL_FOR(team, i, count, statement) runs the statement for size_t i = 0 ... count - 1 on so many threads, of
 * which coli_worker, 0 ... team - 1, is the one at work. One thread goes without OpenMP, which takes as long to be asked
 * for one as a row takes to be rotated. */
#define COLI_PARALLEL_FOR(team, i, count, ...)                                                                             \
    do {                                                                                                                   \
        const size_t coli_count = (count);                                                                                 \
        if ((team) == 1) {                                                                                                 \
            COLI_LOOP(i, coli_count, 0, __VA_ARGS__)                                                                       \
        } else {                                                                                                           \
            COLI_OPENMP_FOR(team) COLI_LOOP(i, coli_count, COLI_OPENMP_THREAD, __VA_ARGS__)                                \
        }                                                                                                                  \
    } while (0)
#define COLI_LOOP(i, count, thread, ...)                                                                                   \
    for (size_t i = 0; i < count; i++) {                                                                                   \
        const size_t coli_worker = (size_t)(thread);                                                                       \
        (void)coli_worker;                                                                                                 \
        __VA_ARGS__;                                                                                                       \
    }

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
