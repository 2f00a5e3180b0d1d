/* formats.c - the table of weight formats: names, sizes, what can be done with each. */
#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "../formats/geometry.h"
#include "status.h"

static const coli_format_info formats[COLI_FORMAT_COUNT] = {
    {COLI_F32, "f32", "none", 32, 0, 1, 1, "plain floats"},
    {COLI_INT8, "int8", "float32", 8, 0, 1, 1, "8-bit integers, one scale a row"},
    {COLI_INT4, "int4", "float32", 4, 0, 1, 1, "4-bit integers, one scale a row"},
    {COLI_INT2, "int2", "float32", 2, 0, 1, 1, "2-bit integers, one scale a row"},
    {COLI_INT4_GROUPED, "int4-g64", "float32", 4.5, 0, 1, 1,
     "4-bit integers, one scale for a group of columns of any size"},
    {COLI_INT3_G64, "int3-g64", "float32", 3.5, COLI_INT3_GROUP, 1, 0, "3-bit integers, one scale for 64 columns"},
    {COLI_E8, "e8", "none", 3.0625, 0, 1, 1, "E8-lattice codebook on rotated weights, scales inside blocks of 256 columns"},
    {COLI_MXFP4, "mxfp4", "uint8", 4.25, COLI_MXFP4_GROUP, 1, 1, "4-bit floats (e2m1), a power of two for 32 columns"},
    {COLI_FP8_B128, "fp8-e4m3-b128", "float32", 8 + 32.0 / (128 * 128), COLI_FP8_BLOCK, 1, 1,
     "8-bit floats (e4m3), one scale for a block of 128 x 128"},
};

#define GROUPED_PREFIX "int4-g"

int coli_format_count(void) {
    return COLI_FORMAT_COUNT;
}

const coli_format_info *coli_format_get(int format) {
    return format >= 0 && format < COLI_FORMAT_COUNT ? &formats[format] : NULL;
}

/* The number that `digits` spells, all of it digits; 0 when it is no number from 1 to INT_MAX. */
static int parse_positive(const char *digits) {
    int number = 0;
    for (; *digits; digits++) {
        int digit = *digits - '0';
        if (digit < 0 || digit > 9 || number > (INT_MAX - digit) / 10) return 0;
        number = number * 10 + digit;
    }
    return number;
}

/* Whether `name` is `lower` but for capital letters. */
static int same_letters(const char *name, const char *lower) {
    while (*name && tolower((unsigned char)*name) == *lower) name++, lower++;
    return !*name && !*lower;
}

static coli_status unknown_name(const char *name) {
    for (int format = 0; format < COLI_FORMAT_COUNT; format++) {
        RETURN_ERROR_IF(same_letters(name, formats[format].name), COLI_E_FORMAT,
                        "no format is named \"%s\": names are in lower case, \"%s\"", name, formats[format].name);
    }
    char names[256] = "";
    for (int format = 0; format < COLI_FORMAT_COUNT; format++) {
        size_t length = strlen(names);
        const char *shown = format == COLI_INT4_GROUPED ? GROUPED_PREFIX "<columns a group>" : formats[format].name;
        snprintf(names + length, sizeof names - length, "%s%s", format ? ", " : "", shown);
    }
    RETURN_ERROR(COLI_E_FORMAT, "no format is named \"%s\"; there are: %s", name, names);
}

coli_status coli_format_parse(const char *name, int *format, int *group_size) {
    int found = -1, columns = 0;
    RETURN_ERROR_IF(!name, COLI_E_ARGUMENT, "the format's name is NULL");
    if (strncmp(name, GROUPED_PREFIX, strlen(GROUPED_PREFIX)) == 0) {
        columns = parse_positive(name + strlen(GROUPED_PREFIX));
        RETURN_ERROR_IF(!columns, COLI_E_FORMAT, GROUPED_PREFIX "<columns> needs a group of at least 1 column, got \"%s\"",
                        name);
        found = COLI_INT4_GROUPED;
    } else {
        for (int i = 0; i < COLI_FORMAT_COUNT; i++) {
            if (strcmp(name, formats[i].name) == 0) found = i;
        }
    }
    if (found < 0) return unknown_name(name);
    if (format) *format = found;
    if (group_size) *group_size = columns;
    return COLI_OK;
}

size_t coli_row_bytes(int format, int columns) {
    return columns < 1 ? 0 : coli_geometry_row_bytes(format, columns);
}

size_t coli_weight_bytes(int format, int rows, int columns) {
    return rows < 1 ? 0 : (size_t)rows * coli_row_bytes(format, columns);
}

size_t coli_scale_count(int format, int rows, int columns, int group_size) {
    return rows < 1 || columns < 1 ? 0 : coli_geometry_scale_count(format, rows, columns, group_size);
}

size_t coli_scale_bytes(int format, int rows, int columns, int group_size) {
    return coli_scale_count(format, rows, columns, group_size) * coli_geometry_scale_bytes_each(format);
}
