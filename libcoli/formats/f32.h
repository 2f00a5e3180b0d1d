/* f32.h - "f32": plain floats, no scales. Row: 4 I bytes. */
#ifndef COLI_FORMATS_F32_H
#define COLI_FORMATS_F32_H

#include "portable.h"

COLI_FN size_t coli_f32_row_bytes(int columns) {
    return (size_t)columns * 4;
}

#endif
