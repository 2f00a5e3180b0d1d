/* check.h - what the C tests share. A failed check says where and what, and fails the program at its end. */
#ifndef CHECK_H
#define CHECK_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SKIPPED 77 /* exit status of a test that cannot run here */

static int failed_checks;

/* CHECK(condition, "format", values...) */
#define CHECK(condition, ...)                                                                                              \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition);                                       \
            fprintf(stderr, __VA_ARGS__);                                                                                  \
            fputc('\n', stderr);                                                                                           \
            failed_checks++;                                                                                               \
        }                                                                                                                  \
    } while (0)

/* Each value within `tolerance` of the expected one. */
static inline void check_close(const char *what, const float *got, const float *expected, int count, double tolerance) {
    for (int i = 0; i < count; i++) {
        CHECK(fabs((double)got[i] - expected[i]) <= tolerance, "%s: value %d is %.9g, expected %.9g", what, i, got[i],
              expected[i]);
    }
}

/* sqrt(sum (got - expected)^2 / sum expected^2) */
static inline double relative_rms(const float *got, const float *expected, size_t count) {
    double error = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        error += pow((double)got[i] - expected[i], 2);
        size += pow(expected[i], 2);
    }
    return sqrt(error / size);
}

/* Repeatable values in [-1, 1). */
static inline void fill_random(float *values, size_t count, unsigned seed) {
    unsigned state = 2 * seed + 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
}

/* NULL removes the variable. */
static inline void set_variable(const char *name, const char *value) {
#ifdef _WIN32
    _putenv_s(name, value ? value : "");
#else
    int setenv(const char *, const char *, int), unsetenv(const char *); /* POSIX, which -std=c11 hides */
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
#endif
}

static inline int finish(const char *name) {
    if (failed_checks) fprintf(stderr, "%s: %d checks failed\n", name, failed_checks);
    return failed_checks ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
