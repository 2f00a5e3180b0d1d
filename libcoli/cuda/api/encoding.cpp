/* api/encoding.cpp - matrices encoded on a device: entry points of coli_cuda.h. */
#include <cmath>

#include "../encode.h"
#include "../fault.h"

using namespace coli;

namespace {

bool importance_valid(const float *importance, int columns) {
    for (int i = 0; importance && i < columns; i++) {
        COLI_REFUSE_IF(!std::isfinite(importance[i]), COLI_E_NOT_FINITE, "importance must be finite, got %f at column %d",
                       static_cast<double>(importance[i]), i);
        COLI_REFUSE_IF(importance[i] < 0, COLI_E_ARGUMENT, "importance must be 0 or more, got %g at column %d",
                       static_cast<double>(importance[i]), i);
    }
    return true;
}

bool encode_valid(const EncodeCall &call) {
    COLI_REFUSE_IF(call.quality == COLI_E8_CALIBRATED, COLI_E_ARGUMENT,
                   "COLI_E8_CALIBRATED is for the CPU: coli_encode_e8 of coli.h");
    COLI_REFUSE_IF(call.quality != COLI_E8_SEARCH && call.quality != COLI_E8_REFERENCE, COLI_E_ARGUMENT,
                   "quality must be COLI_E8_SEARCH or COLI_E8_REFERENCE, got %d", call.quality);
    COLI_REFUSE_IF(call.importance && call.quality != COLI_E8_SEARCH, COLI_E_ARGUMENT,
                   "importance is for COLI_E8_SEARCH, got it with quality %d", call.quality);
    COLI_REFUSE_IF(call.rows < 1 || call.columns < 1, COLI_E_SHAPE, "matrix [%d, %d], expected at least [1, 1]", call.rows,
                   call.columns);
    COLI_REFUSE_IF(call.columns > kMostEncodedColumns, COLI_E_SHAPE,
                   "rows of %d columns, expected at most %d on a device; libcoli encodes them", call.columns,
                   kMostEncodedColumns);
    COLI_REFUSE_IF(!call.w, COLI_E_ARGUMENT, "w, the [%d, %d] weights to encode, is NULL", call.rows, call.columns);
    COLI_REFUSE_IF(!call.blocks, COLI_E_ARGUMENT, "blocks, the memory for [%d, %d] weights, is NULL", call.rows,
                   call.columns);
    return importance_valid(call.importance, call.columns);
}

} // namespace

int coli_cuda_encode_e8(int device, int quality, int rotate, const float *importance, const float *w, int rows, int columns,
                        void *blocks) {
    COLI_FORWARD(!fault_injected("coli_cuda_encode_e8"));
    const EncodeCall encoding{quality, rotate != 0, importance, w, rows, columns, static_cast<uint8_t *>(blocks)};
    COLI_FORWARD(encode_valid(encoding));
    Context *context = find_context(device);
    if (!context) return 0;
    DeviceCall call(*context);
    return call.ok() && run_encode(*context, encoding);
}
