#include "encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../formats/e8_codebook.h"
#include "copy_threads.h"
#include "kernels/encode_e8.h"
#include "kernels/rotate.h"

namespace coli {

namespace {

constexpr int kSlots = Staging::kSlots;
/* Blocks of a chunk: as many as the weights of a slot take, and more where short rows are padded. */
constexpr size_t kBlocksBytes = size_t{256} << 10;
static_assert(kMostEncodedColumns / COLI_E8_BLOCK * COLI_E8_BLOCK_BYTES <= static_cast<int>(kBlocksBytes));

/* Rows on their way. Chunk n is in slot n % kSlots. */
class Encoding {
  public:
    Encoding(Context &context, const EncodeCall &call)
        : context_(context), staging_(context.staging), buffers_(context.encode), call_(call),
          row_floats_(static_cast<size_t>(call.columns)), row_bytes_(coli_e8_row_bytes(call.columns)) {
        const size_t weight_rows = Staging::kSlotBytes / (row_floats_ * sizeof(float));
        most_rows_ = static_cast<int>(std::min(weight_rows, kBlocksBytes / row_bytes_));
    }

    /* No thread touches the caller's memory afterwards. */
    ~Encoding() {
        for (Slot &slot : slots_) slot.copy.finish();
    }

    bool run() {
        COLI_FORWARD(reserve());
        *not_finite() = 0;
        const int chunks = coli_ceil_div(call_.rows, most_rows_);
        for (int n = 0; n < chunks + kSlots; n++) {
            if (n >= kSlots) COLI_FORWARD(receive(slots_[n % kSlots], n % kSlots));
            if (n < chunks) gather(n);
            if (n > 0 && n <= chunks) COLI_FORWARD(send((n - 1) % kSlots));
        }
        return true;
    }

  private:
    struct Slot {
        int first_row = 0, rows = 0; /* 0 rows: free */
        CopyJob copy;
    };

    bool reserve() {
        const size_t importance_bytes = call_.importance ? row_floats_ * sizeof(float) : 0;
        COLI_FORWARD(staging_.reserve() && buffers_.reserve(kSlots * kBlocksBytes, importance_bytes));
        if (!call_.importance) return true;
        return succeeded(cudaMemcpyAsync(buffers_.importance.as<float>(), call_.importance, importance_bytes,
                                         cudaMemcpyHostToDevice, context_.stream),
                         "copying the importance of %d columns", call_.columns);
    }

    /* The kernels write there, behind the blocks. */
    volatile int *not_finite() const {
        return reinterpret_cast<volatile int *>(buffers_.host_blocks.bytes() + kSlots * kBlocksBytes);
    }
    uint8_t *host_blocks(int slot) const { return buffers_.host_blocks.bytes() + slot * kBlocksBytes; }

    bool done(cudaError_t result, const Slot &slot) const {
        return succeeded(result, "encoding rows %d to %d of a matrix [%d, %d] on device %d", slot.first_row,
                         slot.first_row + slot.rows - 1, call_.rows, call_.columns, context_.device);
    }

    /* Weights of chunk n from the caller's memory to its slot. */
    void gather(int n) {
        Slot &slot = slots_[n % kSlots];
        slot.first_row = n * most_rows_;
        slot.rows = std::min(most_rows_, call_.rows - slot.first_row);
        const size_t bytes = slot.rows * row_floats_ * sizeof(float);
        slot.copy.clear();
        slot.copy.add(staging_.host_slot(n % kSlots), bytes, call_.w + slot.first_row * row_floats_, bytes, bytes, 1);
        slot.copy.begin(true);
    }

    /* From the slot through the kernels to pinned memory. */
    bool send(int index) {
        Slot &slot = slots_[index];
        slot.copy.finish();
        float *weights = reinterpret_cast<float *>(staging_.device_slot(index));
        cudaError_t result = cudaMemcpyAsync(weights, staging_.host_slot(index), slot.rows * row_floats_ * sizeof(float),
                                             cudaMemcpyHostToDevice, staging_.stream);
        if (result == cudaSuccess) result = staging_.cross(staging_.stream, context_.stream);
        if (result == cudaSuccess) result = launch(weights, slot.rows);
        if (result == cudaSuccess)
            result = cudaMemcpyAsync(host_blocks(index), buffers_.blocks.as<void>(), slot.rows * row_bytes_,
                                     cudaMemcpyDeviceToHost, context_.stream);
        if (result == cudaSuccess) result = cudaEventRecord(staging_.passed[index], context_.stream);
        return done(result, slot);
    }

    cudaError_t launch(const float *weights, int rows) const {
        const cudaStream_t stream = context_.stream;
        cudaError_t result = cudaSuccess;
        if (call_.rotate) {
            float *rotated = buffers_.rotated.as<float>();
            result = launch_rotate_as_cpu({weights, rotated, rows, call_.columns, false, context_.tables},
                                          plan_rotation(call_.columns, rows), stream);
            weights = rotated;
        }
        const EncodeParams params{weights,
                                  rows,
                                  call_.columns,
                                  call_.importance ? buffers_.importance.as<float>() : nullptr,
                                  &context_.tables->encoder,
                                  buffers_.blocks.as<uint8_t>(),
                                  const_cast<int *>(not_finite())};
        if (result == cudaSuccess) result = launch_encode_reference(params, stream);
        if (result == cudaSuccess && call_.quality == COLI_E8_SEARCH) result = launch_encode_search(params, stream);
        return result;
    }

    /* Blocks to the caller's memory; the slot is free afterwards. */
    bool receive(Slot &slot, int index) {
        if (slot.rows == 0) return true;
        COLI_FORWARD(done(cudaEventSynchronize(staging_.passed[index]), slot));
        if (*not_finite()) return refuse();
        memcpy(call_.blocks + slot.first_row * row_bytes_, host_blocks(index), slot.rows * row_bytes_);
        slot.rows = 0;
        return true;
    }

    /* The first weight that is not finite, in the words of coli_encode; where all are, rotating has made it so. */
    bool refuse() const {
        const float *end = call_.w + call_.rows * row_floats_;
        const float *first = std::find_if(call_.w, end, [](float weight) { return !std::isfinite(weight); });
        const size_t place = first - call_.w;
        COLI_REFUSE_IF(first == end, COLI_E_NOT_FINITE, "rotating overflows float32: a matrix [%d, %d]", call_.rows,
                       call_.columns);
        return fail(COLI_E_NOT_FINITE, "weights must be finite, got %f at row %zu, column %zu", static_cast<double>(*first),
                    place / row_floats_, place % row_floats_);
    }

    Context &context_;
    Staging &staging_;
    EncodeBuffers &buffers_;
    const EncodeCall &call_;
    const size_t row_floats_, row_bytes_;
    int most_rows_; /* of a chunk */
    Slot slots_[kSlots];
};

} // namespace

bool EncodeBuffers::reserve(size_t block_bytes, size_t importance_bytes) {
    const char *purpose = "a matrix to encode";
    return host_blocks.reserve(block_bytes + sizeof(int), purpose) && blocks.reserve(kBlocksBytes, purpose) &&
           rotated.reserve(Staging::kSlotBytes, purpose) && importance.reserve(importance_bytes, purpose);
}

void EncodeBuffers::release() {
    host_blocks.release();
    blocks.release();
    rotated.release();
    importance.release();
}

bool run_encode(Context &context, const EncodeCall &call) {
    return Encoding(context, call).run() || context.abandon();
}

void fill_encoder_codebook(EncoderCodebook *codebook) {
    coli_e8_codebook_expand(codebook->bytes[0]);
    const auto length = [&](int entry) {
        const uint8_t *bytes = codebook->bytes[entry];
        return std::inner_product(bytes, bytes + 4, bytes, 0);
    };
    LengthOrder &order = codebook->order;
    uint8_t *entries = order.entries;
    std::iota(entries, entries + 256, 0);
    std::stable_sort(entries, entries + 256, [&](int a, int b) { return length(a) < length(b); });
    int lengths = 0;
    for (int i = 0; i < 256; i++) {
        if (i == 0 || length(entries[i]) != length(entries[i - 1])) order.first[lengths++] = static_cast<uint16_t>(i);
    }
    order.first[lengths] = 256;
}

} // namespace coli
