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

static int entry_length(int entry) {
    int squares = 0;
    for (int k = 0; k < 4; k++) squares += coli_e8_codebook()[4 * entry + k] * coli_e8_codebook()[4 * entry + k];
    return squares / 4;
}

static void place_entry(int place, int entry) {
    coli_e8_search *table = &searchable_codebook;
    table->entries[place] = entry;
    table->lengths[place] = (float)entry_length(entry);
    for (int k = 0; k < 4; k++) table->weights[k][place] = (float)coli_e8_codebook()[4 * entry + k] * 0.5f;
}

/* Entries by slots: those of one length, at most COLI_E8_ROUNDS in a slot. */
typedef struct {
    int entries[COLI_E8_ROUNDS], count;
} search_slot;

static int fill_slots(search_slot slots[COLI_E8_SLOTS]) {
    int count = 0;
    for (int entry = 0; entry < 256; entry++) {
        int slot = 0;
        while (slot < count &&
               (slots[slot].count == COLI_E8_ROUNDS || entry_length(slots[slot].entries[0]) != entry_length(entry)))
            slot++;
        if (slot == count) count++;
        slots[slot].entries[slots[slot].count++] = entry;
    }
    return count;
}

/* Insertion, so that slots of one length keep their order. */
static void sort_slots_by_length(coli_e8_search *table) {
    for (int slot = 0; slot < COLI_E8_SLOTS; slot++) {
        int place = slot;
        for (; place > 0 && table->lengths[table->by_length[place - 1]] > table->lengths[slot]; place--)
            table->by_length[place] = table->by_length[place - 1];
        table->by_length[place] = slot;
    }
    for (int i = 0; i < COLI_E8_SLOTS; i++) table->sorted_lengths[i] = table->lengths[table->by_length[i]];
}

static void fill_searchable_codebook(void) {
    search_slot slots[COLI_E8_SLOTS] = {{{0}, 0}};
    int order[COLI_E8_SLOTS], slot_count = fill_slots(slots), sorted = 0, place = 0;
    for (int size = COLI_E8_ROUNDS; size > 0; size--) {
        for (int slot = 0; slot < slot_count; slot++) {
            if (slots[slot].count == size) order[sorted++] = slot;
        }
    }
    while (sorted < COLI_E8_SLOTS) order[sorted++] = 0;
    for (int round = 0; round < COLI_E8_ROUNDS; round++) {
        int taking_part = 0;
        while (taking_part < sorted && slots[order[taking_part]].count > round) taking_part++;
        taking_part = (taking_part + 7) / 8 * 8;
        searchable_codebook.round_slots[round] = taking_part;
        for (int i = 0; i < taking_part; i++) {
            const search_slot *slot = &slots[order[i]];
            place_entry(place++, slot->entries[slot->count > round ? round : 0]);
        }
    }
    sort_slots_by_length(&searchable_codebook);
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
