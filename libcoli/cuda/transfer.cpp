#include "transfer.h"

#include <algorithm>
#include <utility>

#include "copy_threads.h"
#include "kernels/layout.h"

namespace coli {

namespace {

constexpr int kSlots = Staging::kSlots;
/* The first chunk is small, so that the link has work soon; each next one is twice as large, until it fills a slot. */
constexpr size_t kFirstChunkBytes = size_t{256} << 10;
/* Matrices of less than this are copied before other threads would have come to help. */
constexpr size_t kThreadedBytes = size_t{256} << 10;
/* Chunks that the device is ahead of the host in a download. */
constexpr int kDownloadLead = 2;

/*------   Chunks   ------*/

/* Rows of bytes in the caller's memory, which lie close together in a slot. */
struct Rectangle {
    uint8_t *host = nullptr;
    size_t pitch = 0, width = 0, height = 0, slot_offset = 0;

    size_t bytes() const { return width * height; }
};

struct Chunk {
    TileRange range;
    ScaleRange scale_range;
    Rectangle weights, scales;

    size_t bytes() const { return scales.slot_offset + scales.bytes(); }
};

enum class Direction { kUpload, kDownload };

/* Cuts a matrix into chunks: runs of strips, or of the tiles of one strip where a strip alone is too large. */
class Chunks {
  public:
    Chunks(const ColiCudaTensor &tensor, uint8_t *weights, uint8_t *scales, Direction direction)
        : tensor_(tensor), weights_(weights), direction_(direction) {
        row_bytes_ = coli_geometry_row_bytes(tensor.format, tensor.I);
        tile_row_bytes_ = coli_geometry_row_bytes(tensor.format, kTileColumns);
        const int rows = std::min(tensor.O, kStripRows);
        strip_bytes_ = rows * row_bytes_;
        tile_bytes_ = rows * tile_row_bytes_;
        if (!scales || !scales_in_tiles(tensor.format, tensor.group_size)) return;
        scales_ = scales;
        scale_bytes_ = coli_geometry_scale_bytes_each(tensor.format);
        rows_a_scale_ = coli_geometry_scale_rows(tensor.format);
        columns_a_scale_ = coli_geometry_scale_columns(tensor.format, tensor.I, tensor.group_size);
        const size_t scale_rows = coli_ceil_div(rows, rows_a_scale_);
        strip_bytes_ += scale_rows * coli_ceil_div(tensor.I, columns_a_scale_) * scale_bytes_;
        tile_bytes_ += scale_rows * tile_scale_groups(tensor.format, tensor.group_size) * scale_bytes_;
    }

    bool next(Chunk *chunk) {
        if (strip_ == tile_strips(tensor_.O)) return false;
        const int tiles = tile_count(tensor_.I);
        const size_t room = limit_ - kPieceBytes; /* the scales begin at a multiple of that */
        const bool whole_strips = tile_ == 0 && strip_bytes_ <= room;
        TileRange range{strip_, 1, tile_, tiles};
        if (whole_strips)
            range.strips = static_cast<int>(std::min<size_t>(room / strip_bytes_, tile_strips(tensor_.O) - strip_));
        else
            range.tiles = static_cast<int>(std::min<size_t>(room / tile_bytes_, tiles - tile_));
        *chunk = describe(range);

        tile_ = (tile_ + range.tiles) % tiles;
        if (tile_ == 0) strip_ += range.strips;
        limit_ = std::min(2 * limit_, Staging::kSlotBytes);
        return true;
    }

  private:
    Chunk describe(const TileRange &range) const {
        const int top = range.first_strip * kStripRows, left = range.first_tile * kTileColumns;
        const int bottom = std::min(tensor_.O - top, range.strips * kStripRows) + top;
        const int right = std::min(tensor_.I - left, range.tiles * kTileColumns) + left;
        Chunk chunk{range, {}, {}, {}};
        const size_t first_byte = range.first_tile * tile_row_bytes_;
        const size_t end_byte = std::min(row_bytes_, first_byte + range.tiles * tile_row_bytes_);
        chunk.weights = {weights_ + top * row_bytes_ + first_byte, row_bytes_, end_byte - first_byte,
                         static_cast<size_t>(bottom - top), 0};
        chunk.scales.slot_offset = align_up(chunk.weights.bytes(), kPieceBytes);
        if (!scales_) return chunk;

        const auto [first_row, rows] = scales_of(top, bottom, rows_a_scale_);
        const auto [first_column, columns] = scales_of(left, right, columns_a_scale_);
        const size_t pitch = coli_ceil_div(tensor_.I, columns_a_scale_) * scale_bytes_;
        chunk.scale_range = {first_row, rows, first_column, columns};
        chunk.scales.host = scales_ + first_row * pitch + first_column * scale_bytes_;
        chunk.scales.pitch = pitch;
        chunk.scales.width = columns * scale_bytes_;
        chunk.scales.height = rows;
        return chunk;
    }

    /* First and number of the scales of `shared` rows or columns that begin ... end has: to pack it, all of them; to be
     * unpacked by this chunk and no other, those that begin here. */
    std::pair<int, int> scales_of(int begin, int end, int shared) const {
        const int first = direction_ == Direction::kUpload ? begin / shared : coli_ceil_div(begin, shared);
        return {first, coli_ceil_div(end, shared) - first};
    }

    const ColiCudaTensor &tensor_;
    uint8_t *weights_, *scales_ = nullptr;
    Direction direction_;
    size_t row_bytes_, tile_row_bytes_; /* uploaded bytes of a row, and of a tile's part of it */
    size_t strip_bytes_, tile_bytes_;   /* uploaded bytes of a strip and of a tile, at most */
    size_t scale_bytes_ = 0;            /* of one scale */
    int rows_a_scale_ = 1, columns_a_scale_ = 1;
    int strip_ = 0, tile_ = 0; /* where the next chunk begins */
    size_t limit_ = kFirstChunkBytes;
};

/*------   Transfers   ------*/

bool pinned(const void *memory, size_t bytes) {
    for (const uint8_t *end : {static_cast<const uint8_t *>(memory), static_cast<const uint8_t *>(memory) + bytes - 1}) {
        cudaPointerAttributes attributes{};
        const cudaError_t result = cudaPointerGetAttributes(&attributes, end);
        ignore(result);
        if (result != cudaSuccess || attributes.type == cudaMemoryTypeUnregistered) return false;
    }
    return true;
}

/* Whether the device may copy from or to the caller's memory itself. */
bool reached_by_device(const ColiCudaTensor &tensor, const void *weights, const void *scales) {
    const size_t bytes = coli_geometry_row_bytes(tensor.format, tensor.I) * tensor.O;
    const bool has_scales = scales && scales_in_tiles(tensor.format, tensor.group_size);
    return pinned(weights, bytes) && (!has_scales || pinned(scales, tensor.scale_bytes));
}

/* One matrix on its way. Chunk n is in slot n % kSlots. */
class Transfer {
  public:
    Transfer(const ColiCudaTensor &tensor, uint8_t *weights, uint8_t *scales, Direction direction)
        : tensor_(tensor), context_(*tensor.context), staging_(context_.staging),
          chunks_(tensor, weights, scales, direction), direct_(reached_by_device(tensor, weights, scales)),
          threaded_(tensor.logical_bytes >= kThreadedBytes) {}

    /* No thread touches the caller's memory afterwards. */
    ~Transfer() {
        for (CopyJob &job : jobs_) job.finish();
    }

    bool upload() {
        int n = 0;
        for (Chunk chunk; chunks_.next(&chunk); n++) {
            if (n >= kSlots) COLI_FORWARD(wait_for_slot(n % kSlots));
            slots_[n % kSlots] = chunk;
            if (!direct_) gather(n % kSlots);
            if (n > 0) COLI_FORWARD(send((n - 1) % kSlots));
        }
        return send((n - 1) % kSlots);
    }

    bool download() {
        bool more = true;
        for (int n = 0, count = 0; more || n < count + kDownloadLead; n++) {
            Chunk chunk;
            more = more && chunks_.next(&chunk);
            if (more) {
                jobs_[n % kSlots].finish();
                slots_[n % kSlots] = chunk;
                COLI_FORWARD(fetch(n % kSlots));
                count++;
            }
            if (n < kDownloadLead) continue;
            const int arrived = (n - kDownloadLead) % kSlots;
            COLI_FORWARD(wait_for_slot(arrived));
            if (!direct_) scatter(arrived);
        }
        return true;
    }

  private:
    bool done(cudaError_t result, const char *doing, const Chunk &chunk) const {
        const int first = chunk.range.first_strip * kStripRows;
        const int last = first + static_cast<int>(chunk.weights.height) - 1;
        return succeeded(result, "%s rows %d to %d of a matrix [%d, %d]", doing, first, last, tensor_.O, tensor_.I);
    }

    bool wait_for_slot(int slot) const {
        return done(cudaEventSynchronize(staging_.passed[slot]), "copying", slots_[slot]);
    }

    /* The caller's bytes to a slot on the host, and back. */
    void gather(int slot) {
        CopyJob &job = jobs_[slot];
        job.clear();
        for (const Rectangle *r : {&slots_[slot].weights, &slots_[slot].scales})
            job.add(staging_.host_slot(slot) + r->slot_offset, r->width, r->host, r->pitch, r->width, r->height);
        job.begin(threaded_);
    }
    void scatter(int slot) {
        CopyJob &job = jobs_[slot];
        job.clear();
        for (const Rectangle *r : {&slots_[slot].weights, &slots_[slot].scales})
            job.add(r->host, r->pitch, staging_.host_slot(slot) + r->slot_offset, r->width, r->width, r->height);
        job.begin(threaded_);
    }

    LayoutParams layout(int slot) const {
        const Chunk &chunk = slots_[slot];
        uint8_t *staged = staging_.device_slot(slot);
        return {tensor_.memory,
                tensor_.format,
                tensor_.group_size,
                tensor_.O,
                tensor_.I,
                chunk.range,
                {staged, chunk.weights.width, staged + chunk.scales.slot_offset, chunk.scale_range}};
    }

    /* From the host to the tiles. */
    bool send(int slot) {
        jobs_[slot].finish();
        cudaError_t result = copy(slot, cudaMemcpyHostToDevice);
        if (result == cudaSuccess) result = staging_.cross(staging_.stream, context_.stream);
        if (result == cudaSuccess) result = launch_pack(layout(slot), context_.stream);
        if (result == cudaSuccess) result = cudaEventRecord(staging_.passed[slot], context_.stream);
        return done(result, "uploading", slots_[slot]);
    }

    /* From the tiles to the host. */
    bool fetch(int slot) {
        cudaError_t result = launch_unpack(layout(slot), context_.stream);
        if (result == cudaSuccess) result = staging_.cross(context_.stream, staging_.stream);
        if (result == cudaSuccess) result = copy(slot, cudaMemcpyDeviceToHost);
        if (result == cudaSuccess) result = cudaEventRecord(staging_.passed[slot], staging_.stream);
        return done(result, "downloading", slots_[slot]);
    }

    /* Between a slot's part on the device and its part on the host, or the caller's memory. */
    cudaError_t copy(int slot, cudaMemcpyKind kind) const {
        const Chunk &chunk = slots_[slot];
        uint8_t *device = staging_.device_slot(slot);
        if (!direct_)
            return copy_rows(device, chunk.bytes(), staging_.host_slot(slot), chunk.bytes(), chunk.bytes(), 1, kind);
        cudaError_t result = cudaSuccess;
        for (const Rectangle *r : {&chunk.weights, &chunk.scales}) {
            if (result == cudaSuccess && r->bytes() > 0)
                result = copy_rows(device + r->slot_offset, r->width, r->host, r->pitch, r->width, r->height, kind);
        }
        return result;
    }

    cudaError_t copy_rows(uint8_t *device, size_t device_pitch, uint8_t *host, size_t host_pitch, size_t width,
                          size_t height, cudaMemcpyKind kind) const {
        const bool to_device = kind == cudaMemcpyHostToDevice;
        uint8_t *to = to_device ? device : host, *from = to_device ? host : device;
        if (device_pitch == host_pitch) return cudaMemcpyAsync(to, from, width * height, kind, staging_.stream);
        const size_t to_pitch = to_device ? device_pitch : host_pitch, from_pitch = to_device ? host_pitch : device_pitch;
        return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, staging_.stream);
    }

    const ColiCudaTensor &tensor_;
    Context &context_;
    Staging &staging_;
    Chunks chunks_;
    const bool direct_, threaded_;
    Chunk slots_[kSlots];
    CopyJob jobs_[kSlots];
};

} // namespace

bool upload_tiles(const ColiCudaTensor &tensor, const void *weights, const void *scales) {
    uint8_t *raw_weights = static_cast<uint8_t *>(const_cast<void *>(weights)); /* read alone */
    uint8_t *raw_scales = static_cast<uint8_t *>(const_cast<void *>(scales));
    return Transfer(tensor, raw_weights, raw_scales, Direction::kUpload).upload();
}

bool download_tiles(const ColiCudaTensor &tensor, void *weights, void *scales) {
    return Transfer(tensor, static_cast<uint8_t *>(weights), static_cast<uint8_t *>(scales), Direction::kDownload)
        .download();
}

} // namespace coli
