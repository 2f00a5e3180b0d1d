/* t_core.c - libcoli on the CPU as a C program uses it: encode, decode, multiply, on numbers worked out by hand and on a
 * small E8 matrix. */
#include "coli/coli.h"

#include <float.h>

#include "check.h"

#define CHECK_OK(call) CHECK((call) == COLI_OK, "%s", coli_last_error())

static void integers(void) {
    /* the largest magnitude of a row becomes 127, so the scales are 0.5 and 2 */
    static const float w[] = {63.5f, -1, 0.5f, 2, -254, 0, 4, -2};
    static const signed char expected[] = {127, -2, 1, 4, -127, 0, 2, -1};
    signed char codes[8];
    float scales[2], decoded[8], y[4];
    CHECK_OK(coli_encode(COLI_INT8, w, 2, 4, 0, codes, scales));
    CHECK(!memcmp(codes, expected, sizeof codes), "the codes of row 0 are %d %d %d %d", codes[0], codes[1], codes[2],
          codes[3]);
    check_close("scales", scales, (const float[]){0.5f, 2}, 2, 0);

    coli_matrix matrix = {.format = COLI_INT8, .rows = 2, .columns = 4, .weights = codes, .scales = scales};
    CHECK_OK(coli_decode(&matrix, decoded));
    check_close("decoded", decoded, w, 8, 0);
    static const float x[] = {2, 1, 0, -1, 0, 0, 1, 1};
    CHECK_OK(coli_matmul(&matrix, x, 2, y));
    check_close("product", y, (const float[]){124, -506, 2.5f, 2}, 4, 0);
}

static void e8(void) {
    enum { O = 8, I = 384, S = 3 };
    static float w[O * I], stored[O * I], decoded[O * I], x[S * I], rotated[S * I], y[S * O], expected[S * O];
    fill_random(w, O * I, 1);
    fill_random(x, S * I, 2);
    void *blocks = malloc(coli_weight_bytes(COLI_E8, O, I));
    CHECK(coli_weight_bytes(COLI_E8, O, I) == (size_t)O * 2 * 98, "%zu bytes", coli_weight_bytes(COLI_E8, O, I));
    CHECK(coli_scale_bytes(COLI_E8, O, I, 0) == 0, "e8 has %zu bytes of scales", coli_scale_bytes(COLI_E8, O, I, 0));

    CHECK_OK(coli_rotate_rows(w, stored, O, I));
    CHECK_OK(coli_encode(COLI_E8, stored, O, I, 0, blocks, NULL));
    coli_matrix matrix = {.format = COLI_E8, .rows = O, .columns = I, .weights = blocks};
    CHECK_OK(coli_decode(&matrix, decoded));
    CHECK_OK(coli_unrotate_rows(decoded, decoded, O, I));
    double error = relative_rms(decoded, w, O * I);
    CHECK(error > 0.05 && error < 0.22, "e8 keeps a uniform matrix with a relative error of %.3f", error);

    for (int s = 0; s < S; s++) {
        for (int o = 0; o < O; o++) {
            double sum = 0;
            for (int i = 0; i < I; i++) sum += (double)decoded[o * I + i] * x[s * I + i];
            expected[s * O + o] = (float)sum;
        }
    }
    CHECK_OK(coli_rotate_rows(x, rotated, S, I));
    CHECK_OK(coli_matmul(&matrix, rotated, S, y));
    error = relative_rms(y, expected, S * O);
    CHECK(error < 3e-6, "the product of rotated rows is off by %.3g", error);
    free(blocks);
}

static void errors(void) {
    int format, group_size;
    CHECK_OK(coli_format_parse("int4-g32", &format, &group_size));
    CHECK(format == COLI_INT4_GROUPED && group_size == 32, "format %d, group size %d", format, group_size);
    CHECK(coli_format_parse("int5", &format, NULL) == COLI_E_FORMAT, "int5 was accepted");
    CHECK(strstr(coli_last_error(), "int5"), "the error does not name it: %s", coli_last_error());

    coli_matrix empty = {.format = COLI_INT8, .rows = 4, .columns = 256};
    float y[4] = {7, 7, 7, 7};
    CHECK(coli_matmul(&empty, y, 1, y) != COLI_OK, "a matrix without weights was multiplied");
    CHECK(strstr(coli_last_error(), "1024"), "the error does not say what was expected: %s", coli_last_error());
    check_close("untouched", y, (const float[]){7, 7, 7, 7}, 4, 0);
    CHECK(!strcmp(coli_status_string(COLI_E_SHAPE), "COLI_E_SHAPE"), "%s", coli_status_string(COLI_E_SHAPE));
}

/* Row counts whose bytes no memory can hold, and weights at the end of float32. */
static void extremes(void) {
    signed char code = 3, codes[3];
    float scale = 2, scales[1], value = 1, y = 7, decoded[3];
    coli_matrix one = {.format = COLI_INT8, .rows = 1, .columns = 1, .weights = &code, .scales = &scale};
    static const size_t rows[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX / 2, SIZE_MAX / 8 + 1};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK(coli_matmul(&one, &value, rows[i], &y) == COLI_E_SHAPE, "%zu rows", rows[i]);
        CHECK(coli_rotate_rows(&value, &y, rows[i], 1) == COLI_E_SHAPE, "%zu rows", rows[i]);
        CHECK(coli_expert_mlp(&one, &one, &one, &value, rows[i], &y) == COLI_E_SHAPE, "%zu rows", rows[i]);
    }
    CHECK(y == 7, "a refused call wrote %g", y);

    static const float largest[] = {FLT_MAX, -FLT_MAX, 1};
    CHECK_OK(coli_encode(COLI_INT8, largest, 1, 3, 0, codes, scales));
    coli_matrix matrix = {.format = COLI_INT8, .rows = 1, .columns = 3, .weights = codes, .scales = scales};
    CHECK_OK(coli_decode(&matrix, decoded));
    CHECK(decoded[0] > 0.99f * FLT_MAX && decoded[0] <= FLT_MAX, "%g decodes to %g", FLT_MAX, decoded[0]);
}

int main(void) {
    CHECK(coli_version_number() == COLI_VERSION_NUMBER, "library %d, header %d", coli_version_number(),
          COLI_VERSION_NUMBER);
    CHECK(coli_abi_version() == COLI_ABI_MAJOR * 1000 + COLI_ABI_MINOR, "%d", coli_abi_version());
    integers();
    e8();
    errors();
    extremes();
    return finish("t_core");
}
