/* tables.c - lookup tables, each filled by the first thread that asks for it. */
#include "tables.h"
#include "../formats/e8_codebook.h"
#include "../formats/floats.h"
#include "../formats/signs.h"
#include "../include/coli/coli.h"

/*------   What the operating system does   ------*/

/* fill_once(&once, fill) calls `fill` in the first thread that comes by; the others wait until it is done. */
#ifdef _WIN32
#include <windows.h>
typedef INIT_ONCE once_state;
#define ONCE INIT_ONCE_STATIC_INIT
static BOOL CALLBACK call_fill(PINIT_ONCE once, PVOID fill, PVOID *unused) {
    (void)once, (void)unused;
    (*(void (**)(void))fill)();
    return TRUE;
}
static void fill_once(INIT_ONCE *once, void (*fill)(void)) {
    InitOnceExecuteOnce(once, call_fill, &fill, NULL);
}
#else
#include <pthread.h>
typedef pthread_once_t once_state;
#define ONCE PTHREAD_ONCE_INIT
static void fill_once(pthread_once_t *once, void (*fill)(void)) {
    pthread_once(once, fill);
}
#endif

/*------   Tables   ------*/

static uint8_t codebook[COLI_E8_CODEBOOK_BYTES];
static void fill_codebook(void) {
    coli_e8_codebook_expand(codebook);
}
const uint8_t *coli_e8_codebook(void) {
    static once_state once = ONCE;
    fill_once(&once, fill_codebook);
    return codebook;
}

static _Alignas(64) float magnitudes[COLI_E8_CODEBOOK_BYTES];
static void fill_magnitudes(void) {
    for (int i = 0; i < COLI_E8_CODEBOOK_BYTES; i++) magnitudes[i] = (float)coli_e8_codebook()[i] * 0.5f;
}
const float *coli_e8_magnitudes(void) {
    static once_state once = ONCE;
    fill_once(&once, fill_magnitudes);
    return magnitudes;
}

static _Alignas(64) coli_e8_search searchable_codebook;
static void fill_searchable_codebook(void) {
    for (int entry = 0; entry < 256; entry++) {
        const uint8_t *bytes = coli_e8_codebook() + 4 * entry;
        double squares = 0;
        for (int k = 0; k < 4; k++) {
            searchable_codebook.weights[k][entry] = bytes[k] * 0.5;
            squares += searchable_codebook.weights[k][entry] * searchable_codebook.weights[k][entry];
        }
        searchable_codebook.lengths[entry] = squares;
    }
}
const coli_e8_search *coli_e8_search_table(void) {
    static once_state once = ONCE;
    fill_once(&once, fill_searchable_codebook);
    return &searchable_codebook;
}

static uint8_t signs[COLI_SIGN_TABLE_BYTES];
static void fill_signs(void) {
    coli_sign_table_fill(signs);
}
const uint8_t *coli_sign_table(void) {
    static once_state once = ONCE;
    fill_once(&once, fill_signs);
    return signs;
}

static float e4m3[256];
static void fill_e4m3(void) {
    for (uint32_t byte = 0; byte < 256; byte++) e4m3[byte] = coli_e4m3_to_f32(byte);
}
const float *coli_e4m3_table(void) {
    static once_state once = ONCE;
    fill_once(&once, fill_e4m3);
    return e4m3;
}
