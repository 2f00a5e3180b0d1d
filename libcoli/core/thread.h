/* thread.h - a lock, a thread and a clock, by whichever system there is. */
#ifndef COLI_CORE_THREAD_H
#define COLI_CORE_THREAD_H

#include <stdlib.h>

#if defined(_WIN32)
#include <windows.h>

typedef SRWLOCK coli_mutex;
#define COLI_MUTEX_INITIALIZER SRWLOCK_INIT
static inline void coli_mutex_init(coli_mutex *mutex) {
    InitializeSRWLock(mutex);
}
static inline void coli_mutex_destroy(coli_mutex *mutex) {
    (void)mutex;
}
static inline void coli_mutex_lock(coli_mutex *mutex) {
    AcquireSRWLockExclusive(mutex);
}
static inline void coli_mutex_unlock(coli_mutex *mutex) {
    ReleaseSRWLockExclusive(mutex);
}

typedef struct coli_thread {
    HANDLE handle;
    void (*work)(void *);
    void *argument;
} coli_thread;

static inline DWORD WINAPI coli_thread_main(LPVOID thread) {
    coli_thread *self = (coli_thread *)thread;
    self->work(self->argument);
    return 0;
}
static inline int coli_thread_begin(coli_thread *thread) {
    thread->handle = CreateThread(NULL, 0, coli_thread_main, thread, 0, NULL);
    return thread->handle != NULL;
}
static inline void coli_thread_join(coli_thread *thread) {
    WaitForSingleObject(thread->handle, INFINITE);
    CloseHandle(thread->handle);
}

static inline double coli_seconds(void) {
    LARGE_INTEGER now, frequency;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return (double)now.QuadPart / (double)frequency.QuadPart;
}

#else
#include <pthread.h>
#include <time.h>

typedef pthread_mutex_t coli_mutex;
#define COLI_MUTEX_INITIALIZER PTHREAD_MUTEX_INITIALIZER
static inline void coli_mutex_init(coli_mutex *mutex) {
    pthread_mutex_init(mutex, NULL);
}
static inline void coli_mutex_destroy(coli_mutex *mutex) {
    pthread_mutex_destroy(mutex);
}
static inline void coli_mutex_lock(coli_mutex *mutex) {
    pthread_mutex_lock(mutex);
}
static inline void coli_mutex_unlock(coli_mutex *mutex) {
    pthread_mutex_unlock(mutex);
}

typedef struct coli_thread {
    pthread_t handle;
    void (*work)(void *);
    void *argument;
} coli_thread;

static inline void *coli_thread_main(void *thread) {
    coli_thread *self = (coli_thread *)thread;
    self->work(self->argument);
    return NULL;
}
static inline int coli_thread_begin(coli_thread *thread) {
    return pthread_create(&thread->handle, NULL, coli_thread_main, thread) == 0;
}
static inline void coli_thread_join(coli_thread *thread) {
    pthread_join(thread->handle, NULL);
}

static inline double coli_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
#endif

/* Runs work(argument) on a thread; 0 where none can be had. `thread` stays in place until coli_thread_join. */
static inline int coli_thread_start(coli_thread *thread, void (*work)(void *), void *argument) {
    thread->work = work;
    thread->argument = argument;
    return coli_thread_begin(thread);
}

#endif
