/* t_host.c - the GPU library as an existing host uses it: linked, through the kept calls alone, on numbers worked out by
 * hand. Where there is no GPU it exits with 77. */
#include "coli/coli_cuda.h"

#include "check.h"

#define CHECK_DONE(call) CHECK((call) == 1, "%s", coli_cuda_last_error())
#define CHECK_REFUSED(call) CHECK((call) == 0, "it was done")

static int device;

static void check_stats(size_t tensors, size_t bytes) {
    size_t tensor_count = 99, tensor_bytes = 99;
    coli_cuda_stats(device, &tensor_count, &tensor_bytes);
    CHECK(tensor_count == tensors && tensor_bytes == bytes, "%zu tensors of %zu bytes, expected %zu of %zu", tensor_count,
          tensor_bytes, tensors, bytes);
}

static ColiCudaTensor *upload(const void *weights, const void *scales, int format, int rows, int columns) {
    ColiCudaTensor *tensor = NULL;
    CHECK_DONE(coli_cuda_tensor_upload(&tensor, weights, scales, format, columns, rows, device));
    CHECK(coli_cuda_tensor_device(tensor) == device, "on %d", coli_cuda_tensor_device(tensor));
    return tensor;
}

/* Uploads, multiplies S rows, compares and releases. */
static void check_matmul(const char *what, const void *weights, const void *scales, int format, int group_size, int rows,
                         int columns, const float *x, int S, const float *expected) {
    ColiCudaTensor *tensor = NULL;
    float y[16];
    CHECK_DONE(coli_cuda_tensor_upload_g(&tensor, weights, scales, format, columns, rows, device, group_size));
    CHECK_DONE(coli_cuda_matmul(&tensor, y, x, NULL, NULL, format, S, columns, rows, device, group_size));
    check_close(what, y, expected, S * rows, 1e-5);
    coli_cuda_tensor_free(tensor);
}

static void integers(void) {
    static const float x[] = {1, 2, 3, 4, 5};

    static const signed char int8[] = {1, -2, 3, 4, -5, 6, 0, -1};
    static const float int8_scales[] = {0.5f, 2}, int8_x[] = {1, 2, 3, 4, -1, 0.5f, 2, 0};
    check_matmul("int8", int8, int8_scales, COLI_INT8, 0, 2, 4, int8_x, 2, (const float[]){11, 6, 2, 16});

    /* -8 7 1 -1 and 2 0 -3 5, each stored with 8 added */
    static const unsigned char int4[] = {0xf0, 0x79, 0x8a, 0xd5};
    static const float int4_scales[] = {1, 0.25f}, group_scales[] = {0.5f, 2, 1, -0.5f};
    check_matmul("int4", int4, int4_scales, COLI_INT4, 0, 2, 4, x, 1, (const float[]){5, 3.25f});
    check_matmul("int4-g2", int4, group_scales, COLI_INT4_GROUPED, 2, 2, 4, x, 1, (const float[]){1, -3.5f});

    /* -2 1 0 -1 1 and 1 1 -1 -2 0, each stored with 2 added; the last byte of a row holds one weight */
    static const unsigned char int2[] = {0x6c, 0x03, 0x1f, 0x02};
    static const float int2_scales[] = {2, 0.5f};
    check_matmul("int2", int2, int2_scales, COLI_INT2, 0, 2, 5, x, 1, (const float[]){2, -4});
}

/* The table gives entry 1 the magnitudes 1 2 3 4, d = 1 and code 0 a quarter of them: 2.5 for four weights, 160 a row. */
static void e8(void) {
    unsigned char grid[1024] = {0}, rows[3][98] = {{0}};
    const unsigned char entry[] = {2, 4, 6, 8};
    memcpy(grid + 4, entry, sizeof entry);
    for (int row = 0; row < 3; row++) {
        memset(rows[row], 1, 64);
        rows[row][97] = 0x3c;
    }
    rows[1][64] = 1;                     /* weight 0 of lane 0 is negative, and so by parity is weight 7 */
    rows[2][96] = 1, rows[2][97] = 0x00; /* d = 2^-24, the smallest subnormal */
    float x[256];
    for (int i = 0; i < 256; i++) x[i] = 1;
    CHECK_REFUSED(coli_cuda_e8_set_grid(NULL));
    CHECK_DONE(coli_cuda_e8_set_grid(grid));

    ColiCudaTensor *tensor = upload(rows, NULL, COLI_E8, 3, 256);
    check_stats(1, sizeof rows);
    CHECK(coli_cuda_tensor_bytes(tensor) == sizeof rows, "%zu bytes", coli_cuda_tensor_bytes(tensor));
    float y[3];
    CHECK_DONE(coli_cuda_matmul(&tensor, y, x, NULL, NULL, COLI_E8, 1, 256, 3, device, 0));
    check_close("e8", y, (const float[]){160, 157.5f}, 2, 1e-4);
    CHECK(fabs(y[2] - 160 * 0x1p-24) <= 1e-9 * 160, "a subnormal d gives %.9g, expected %.9g", y[2], 160 * 0x1p-24);

    memcpy(rows[0], rows[1], sizeof rows[0]);
    CHECK_DONE(coli_cuda_tensor_update(tensor, rows, NULL));
    CHECK_DONE(coli_cuda_matmul(&tensor, y, x, NULL, NULL, COLI_E8, 1, 256, 3, device, 0));
    check_close("e8 after update", y, (const float[]){157.5f, 157.5f}, 2, 1e-4);
    coli_cuda_tensor_free(tensor);
}

static float e4m3(int code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude = exponent ? ldexpf(8 + (float)mantissa, exponent - 10) : ldexpf((float)mantissa, -9);
    if ((code & 127) == 127) magnitude = NAN;
    return code & 128 ? -magnitude : magnitude;
}

static void small_floats(void) {
    static const float x[] = {1, 2, 3};
    static const unsigned char fp8[] = {0x38, 0x40, 0xb8}, mxfp4[] = {0xd2}, exponent[] = {128}; /* 1 2 -1; 1 -3; 2 */
    static const float scale[] = {0.5f};
    ColiCudaTensor *refused = NULL;
    CHECK_REFUSED(coli_cuda_tensor_upload(&refused, fp8, scale, COLI_FP8_B128, 3, 1, device));
    CHECK(!refused, "a refused upload left a handle");
    float table[256];
    for (int code = 0; code < 256; code++) table[code] = e4m3(code);
    CHECK_DONE(coli_cuda_fp8_set_lut(table));
    check_matmul("fp8", fp8, scale, COLI_FP8_B128, 0, 1, 3, x, 1, (const float[]){1});
    check_matmul("mxfp4", mxfp4, exponent, COLI_MXFP4, 0, 1, 2, x, 1, (const float[]){-10});
}

static void refusals(void) {
    static const signed char weights[8] = {0};
    static const float scales[2] = {1, 1};
    ColiCudaTensor *tensor = NULL;
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, weights, scales, COLI_INT8, 4, 2, 9999));
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, weights, scales, COLI_INT3_G64, 4, 2, device));
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, weights, scales, 99, 4, 2, device));
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, weights, NULL, COLI_INT8, 4, 2, device));
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, NULL, scales, COLI_INT8, 4, 2, device));
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, weights, scales, COLI_INT8, 0, 2, device));
    CHECK(!tensor, "a refused upload left a handle");
    check_stats(0, 0);

    tensor = upload(weights, scales, COLI_INT8, 2, 4);
    check_stats(1, sizeof weights + sizeof scales);
    CHECK_DONE(coli_cuda_tensor_upload(&tensor, NULL, NULL, COLI_INT8, 4, 2, device));
    CHECK_REFUSED(coli_cuda_tensor_upload(&tensor, NULL, NULL, COLI_INT8, 2, 4, device));
    check_stats(1, sizeof weights + sizeof scales);
    coli_cuda_tensor_free(tensor);
    check_stats(0, 0);
}

#define LN3 1.0986123f

/* silu(ln 3) = 3/4 ln 3, silu(-ln 3) = -1/4 ln 3 and silu(2 ln 3) = 9/10 2 ln 3 make this expert a matter of fractions. */
static void experts(void) {
    static const float gate_weights[] = {LN3, 0, 0, 7, 0, 0, LN3, -3}, up_weights[] = {1, 1, 1, 1, 0, 2, 0, 5};
    static const float down_weights[] = {1, 0, 0, 1, 2, 2, -1, 3};
    static const float x[] = {1, 2, -1, 0, 0, 1, 2, 0};
    static const float expected[] = {1.5f * LN3, -LN3, LN3, -4.5f * LN3, 0, 3.6f * LN3, 7.2f * LN3, 10.8f * LN3};
    ColiCudaTensor *gate = upload(gate_weights, NULL, COLI_F32, 2, 4), *up = upload(up_weights, NULL, COLI_F32, 2, 4);
    ColiCudaTensor *down = upload(down_weights, NULL, COLI_F32, 4, 2);
    float y[8], alone[8];
    CHECK_DONE(coli_cuda_expert_mlp(gate, up, down, y, x, 2));
    check_close("expert", y, expected, 8, 1e-4);
    memcpy(alone, y, sizeof y);

    uint64_t calls = 0, experts = 0, rows = 0, calls_after, experts_after, rows_after;
    coli_cuda_group_stats(&calls, &experts, &rows, NULL, NULL, NULL);
    ColiCudaTensor *gates[] = {gate, gate}, *ups[] = {up, up}, *downs[] = {down, down};
    const int one_each[] = {1, 1};
    CHECK_DONE(coli_cuda_expert_group(gates, ups, downs, one_each, 2, y, x));
    check_close("group", y, expected, 8, 1e-4);

    CHECK_DONE(coli_cuda_expert_group_issue(gates, ups, downs, one_each, 2, x));
    CHECK_REFUSED(coli_cuda_expert_group_issue(gates, ups, downs, one_each, 2, x));
    const float *taken = coli_cuda_expert_group_take(device);
    CHECK(taken && !memcmp(taken, y, sizeof y), "issue and take differ from the synchronous group");
    CHECK(!coli_cuda_expert_group_take(device), "taken twice");
    const int too_many[] = {COLI_CUDA_MAX_ISSUE_ROWS, 1};
    CHECK_REFUSED(coli_cuda_expert_group_issue(gates, ups, downs, too_many, 2, x));

    coli_cuda_group_stats(&calls_after, &experts_after, &rows_after, NULL, NULL, NULL);
    CHECK(calls_after - calls == 2 && experts_after - experts == 4 && rows_after - rows == 4,
          "%d calls, %d experts, %d rows were counted, expected 2, 4, 4", (int)(calls_after - calls),
          (int)(experts_after - experts), (int)(rows_after - rows));
    CHECK(!memcmp(alone, y, sizeof y), "rows in a group differ from the same rows in expert_mlp");

    CHECK_REFUSED(coli_cuda_expert_mlp(gate, up, gate, y, x, 2));
    CHECK(!memcmp(alone, y, sizeof y), "a refused call wrote its result");
    coli_cuda_tensor_free(gate);
    coli_cuda_tensor_free(up);
    coli_cuda_tensor_free(down);
}

int main(void) {
    if (coli_cuda_available_device_count() < 1) {
        fprintf(stderr, "skipped: %s\n", coli_cuda_last_error());
        return SKIPPED;
    }
    CHECK_REFUSED(coli_cuda_init(NULL, 1));
    CHECK_REFUSED(coli_cuda_init((const int[]){9999}, 1));
    CHECK_DONE(coli_cuda_init(&device, 1));
    CHECK(coli_cuda_device_count() == 1 && coli_cuda_device_at(0) == device && coli_cuda_device_at(1) == -1,
          "%d devices, the first is %d", coli_cuda_device_count(), coli_cuda_device_at(0));
    size_t free_bytes = 0, total_bytes = 0;
    CHECK_DONE(coli_cuda_mem_info(device, &free_bytes, &total_bytes));
    CHECK(free_bytes > 0 && free_bytes <= total_bytes, "%zu of %zu bytes free", free_bytes, total_bytes);

    refusals();
    integers();
    e8();
    small_floats();
    experts();

    check_stats(0, 0);
    coli_cuda_shutdown();
    CHECK(coli_cuda_device_count() == 0, "%d devices after shutdown", coli_cuda_device_count());
    return finish("t_host");
}
