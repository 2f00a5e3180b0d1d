/* kernels/product.cuh - a thread block multiplies a share of a matrix (or of gate and up) with up to 16 activation rows.
 *
 * The share is pairs of strips (32 weight rows). Their columns are cut into slices of 512, and a unit is one slice of one
 * pair. Warps work alone on units: tiles come through the warp's own ring, are decoded once for all activation rows, and
 * meet activations that the block has split into fp16 parts in shared memory (activations.cuh). Where those of all columns
 * do not fit there, the block takes the columns in chunks of slices.
 *
 *     for each chunk: split its activations
 *         for each matrix, for each round (some pairs x the chunk's slices):
 *             warps: multiply units, leave their sums in `partials`         -- barrier --
 *             threads: add the partials of each output to its total, slice after slice
 *
 * How much of a unit's work stands in registers, chunks and rounds is the plan's choice and does not change a bit: a unit
 * is summed tile after tile, an output slice after slice, whatever the rest of the call looks like. */
#ifndef COLI_CUDA_KERNELS_PRODUCT_CUH
#define COLI_CUDA_KERNELS_PRODUCT_CUH

#include "activations.cuh"
#include "limbs.cuh"
#include "multiply.cuh"
#include "ring.cuh"

namespace coli {

/* What a block computes: pairs first_pair ... of matrices that have one shape. */
struct Share {
    const MatrixView *first_matrix, *second_matrix;
    int matrix_count;
    int O, I;
    int strips, tiles; /* of a whole matrix; tiles of a strip */
    int first_pair, pairs;
    int rows; /* activation rows */

    __device__ __forceinline__ const MatrixView &matrix(int i) const { return i ? *second_matrix : *first_matrix; }
};

/* The block's shared memory, laid out by the plan. */
struct ProductMemory {
    uint32_t *codebook;
    RingMemory ring; /* this warp's */
    SplitRows activations;
    float *partials; /* [2][units of a round][rows][32 weight rows] */
    float *totals;   /* [matrices][pairs][rows][32 weight rows] */
    float *scratch;  /* a row on its way through a rotation */
};

template <class Scheme> __device__ ProductMemory product_memory(const ProductPlan &plan, uint8_t *shared, int warp) {
    ProductMemory memory;
    memory.codebook = reinterpret_cast<uint32_t *>(shared);
    memory.ring = {shared + plan.ring_offset + static_cast<size_t>(warp) * plan.stages * plan.slot_bytes,
                   reinterpret_cast<uint64_t *>(shared + plan.barriers_offset) + warp * plan.stages, plan.slot_bytes,
                   plan.stages};
    memory.activations = {shared + plan.parts_offset, reinterpret_cast<float *>(shared + plan.factors_offset),
                          plan.chunk_slices * kSliceColumns * Scheme::kColumnBytes + Scheme::kPlanePadding};
    memory.partials = reinterpret_cast<float *>(shared + plan.partials_offset);
    memory.totals = reinterpret_cast<float *>(shared + plan.totals_offset);
    memory.scratch = reinterpret_cast<float *>(shared + plan.scratch_offset);
    return memory;
}

/* The units of a round that one warp computes. Units are numbered pair by pair, slice by slice. */
struct UnitRange {
    int begin, end;
};
__device__ __forceinline__ UnitRange units_of_warp(int units, int warp, int warps) {
    return {units * warp / warps, units * (warp + 1) / warps};
}

/* The order in which a warp takes its tiles: chunks, matrices, rounds, units, tiles. The ring runs through it ahead of the
 * products. */
class TileWalk {
  public:
    __device__ TileWalk(const Share &share, const ProductPlan &plan, int warp) : share_(share), plan_(plan), warp_(warp) {
        slices_ = coli_ceil_div(share.tiles, kSliceTiles);
        enter_round();
        settle();
    }
    __device__ __forceinline__ bool done() const { return chunk_ >= slices_; }
    __device__ __forceinline__ TilePair tiles() const { return tiles_; }
    __device__ __forceinline__ void next() {
        if (--tiles_left_) {
            tiles_.first += tiles_.bytes;
            tiles_.second += tiles_.bytes;
            return;
        }
        units_left_--;
        if (++slice_ == chunk_slices_) slice_ = 0, pair_++;
        settle();
    }

  private:
    __device__ void enter_round() {
        chunk_slices_ = min(plan_.chunk_slices, slices_ - chunk_);
        const int pairs = min(plan_.round_pairs, share_.pairs - round_);
        const UnitRange range = units_of_warp(pairs * chunk_slices_, warp_, plan_.warps);
        units_left_ = range.end - range.begin;
        pair_ = range.begin / chunk_slices_;
        slice_ = range.begin - pair_ * chunk_slices_;
    }
    __device__ __forceinline__ void enter_unit() {
        const MatrixView &matrix = share_.matrix(matrix_);
        const int first = 2 * (share_.first_pair + round_ + pair_), second = min(first + 1, share_.strips - 1);
        const int tile = kSliceTiles * (chunk_ + slice_);
        const size_t strip_bytes = static_cast<size_t>(share_.tiles) * matrix.tile_bytes;
        tiles_left_ = min(kSliceTiles, share_.tiles - tile);
        tiles_.bytes = matrix.tile_bytes;
        tiles_.first = matrix.weights + first * strip_bytes + tile * matrix.tile_bytes;
        tiles_.second = tiles_.first + (second - first) * strip_bytes;
    }
    /* Goes on to the next round that has a unit for this warp, and to its first tile. */
    __device__ void settle() {
        while (units_left_ == 0) {
            round_ += plan_.round_pairs;
            if (round_ >= share_.pairs) {
                round_ = 0;
                if (++matrix_ == share_.matrix_count) matrix_ = 0, chunk_ += plan_.chunk_slices;
                if (done()) return;
            }
            enter_round();
        }
        enter_unit();
    }

    const Share &share_;
    const ProductPlan &plan_;
    int warp_, slices_;
    int chunk_ = 0, matrix_ = 0, round_ = 0; /* first slice of the chunk, first pair of the round */
    int chunk_slices_ = 0, pair_ = 0, slice_ = 0, units_left_ = 0, tiles_left_ = 0;
    TilePair tiles_{};
};

/* The ring together with the walk that feeds it. */
template <class Ring> class TileStream {
  public:
    __device__ TileStream(Ring &ring, const Share &share, const ProductPlan &plan, int warp)
        : ring_(ring), ahead_(share, plan, warp) {
        push(); /* the others follow when the activations are on their way: this one's copies are not to delay them */
    }
    /* Fills the rest of the ring; once, before the first front(). */
    __device__ __forceinline__ void fill(int stages) {
        for (int i = 1; i < stages; i++) push();
    }
    __device__ __forceinline__ const uint8_t *front() { return ring_.front(); }
    __device__ __forceinline__ void pop() {
        ring_.pop();
        push();
    }

  private:
    __device__ __forceinline__ void push() {
        if (ahead_.done()) return;
        ring_.push(ahead_.tiles());
        ahead_.next();
    }
    Ring &ring_;
    TileWalk ahead_;
};

/*------   How a unit is multiplied   ------*/

/* Where a unit's activations and weights are. */
template <class Stream, class Fragments> struct Unit {
    Stream &stream;
    const MatrixView &matrix;
    const Share &share;
    const Fragments &activations;
    const ByteTables &tables;
    int pair, tile, tile_end; /* of the matrix */
    int place;                /* first column in the chunk */
    int lane;

    /* Calls multiply(slot, place of the first tile, first column in the chunk) for each tile. */
    template <class Multiply> __device__ __forceinline__ void for_tiles(Multiply multiply) const {
        for (int i = 0; i < tile_end - tile; i++) {
            const TilePlace where{matrix, kPairRows * pair, kTileColumns * (tile + i), share.O, share.I};
            multiply(stream.front(), where, place + kTileColumns * i);
            stream.pop();
        }
    }
};

/* Activations as two fp16 parts, any format. */
template <class Path, int ROWS> struct HalfScheme {
    static constexpr int kColumnBytes = 2, kPlanePadding = 64; /* of a plane in shared memory */
    static constexpr int kValues = (ROWS + 3) / 4;
    using Fragments = HalfFragments<kValues>;
    struct Sums {
        float of[2][2][kValues] = {};
        float unit = 1.0f;
    };

    static __device__ __forceinline__ void prepare(const FloatRows &x, int row, int s, int slice, int place,
                                                   const SplitRows &split, int lane) {
        split_slice(x, row, s, slice, place, split, lane);
    }
    template <class Half, class Stream>
    static __device__ __forceinline__ void multiply_as(const Unit<Stream, Fragments> &unit, Sums &sums) {
        unit.for_tiles([&](const uint8_t *slot, const TilePlace &where, int column) {
            multiply_tiles<Half, Path, kValues>(slot, where, unit.activations, column, unit.tables, unit.lane, sums.of);
        });
        sums.unit = Half::kUnit;
    }
    template <class Stream>
    static __device__ __forceinline__ void multiply(const Unit<Stream, Fragments> &unit, Sums &sums) {
        switch (unit.matrix.kind) {
        case TileKind::kE8:
        case TileKind::kE8AnyCodebook:
            return multiply_as<E8Half>(unit, sums);
        case TileKind::kInt4:
            return multiply_as<Int4Half>(unit, sums);
        case TileKind::kInt4Groups32:
            return multiply_as<Int4GroupedHalf<1>>(unit, sums);
        case TileKind::kInt4Groups:
            return multiply_as<Int4GroupedHalf<2>>(unit, sums);
        case TileKind::kInt4AnyGroups:
            return multiply_as<Int4AnyGroupHalf>(unit, sums);
        case TileKind::kInt8:
            return multiply_as<Int8Half>(unit, sums);
        case TileKind::kInt2:
            return multiply_as<Int2Half>(unit, sums);
        case TileKind::kMxfp4:
            return multiply_as<Mxfp4Half>(unit, sums);
        case TileKind::kFp8:
            return multiply_as<Fp8Half>(unit, sums);
        case TileKind::kFp8Table:
            return multiply_as<Fp8TableHalf>(unit, sums);
        case TileKind::kF32:
            return multiply_as<F32Half>(unit, sums);
        }
    }
    /* Activation row of a lane's value k, and the value for tile m, row g + 8 r, to be multiplied with unit(). */
    static __device__ __forceinline__ int row(int k, int lane) { return 4 * k + lane % 4; }
    static __device__ __forceinline__ float unit(const Sums &sums) { return sums.unit; }
    static __device__ __forceinline__ float value(const Sums &sums, int m, int r, int k, int) { return sums.of[m][r][k]; }
};

/* Activations as three signed bytes, E8 with byte codebook alone. */
template <int ROWS> struct LimbScheme {
    using Columns = LimbColumns<ROWS>;
    using Fragments = LimbFragments<ROWS>;
    static constexpr int kColumnBytes = 1, kPlanePadding = 32;
    static constexpr int kValues = Columns::kValues;
    struct Sums {
        float of[2][2][Columns::kTiles][2] = {};
    };

    static __device__ __forceinline__ void prepare(const FloatRows &x, int row, int s, int slice, int place,
                                                   const SplitRows &split, int lane) {
        cut_slice(x, row, s, slice, place, split, lane);
    }
    template <class Stream>
    static __device__ __forceinline__ void multiply(const Unit<Stream, Fragments> &unit, Sums &sums) {
        unit.for_tiles([&](const uint8_t *slot, const TilePlace &where, int column) {
            multiply_bytes<E8Half, ROWS>(slot, where, unit.activations, column, unit.tables, unit.lane, sums.of);
        });
    }
    static __device__ __forceinline__ int row(int k, int lane) { return Columns::row(k, lane); }
    static __device__ __forceinline__ float unit(const Sums &) { return E8Half::kUnit; }
    static __device__ __forceinline__ float value(const Sums &sums, int m, int r, int k, int lane) {
        return Columns::join(sums.of[m][r], k, lane);
    }
};

/* The sums of a unit to its place in the partials, [rows][32]. */
template <class Scheme>
__device__ __forceinline__ void store_partials(const typename Scheme::Sums &sums, const float *factors, int rows, int lane,
                                               float *partials) {
    const int g = lane / 4;
#pragma unroll
    for (int k = 0; k < Scheme::kValues; k++) {
        const int s = Scheme::row(k, lane);
        const float factor = s < rows ? factors[s] * Scheme::unit(sums) : 0.0f;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float value = Scheme::value(sums, m, r, k, lane) * factor;
                if (s < rows) partials[kPairRows * s + kStripRows * m + 8 * r + g] = value;
            }
        }
    }
}

/* totals [pairs][rows][32] of a round, each of its outputs slice after slice. */
__device__ inline void add_partials(const float *partials, float *totals, int pairs, int slices, int rows, bool first) {
    const int outputs = rows * kPairRows;
    for (int i = threadIdx.x; i < pairs * outputs; i += blockDim.x) {
        const int pair = i / outputs, output = i % outputs;
        float total = first ? 0.0f : totals[i];
        const float *of_pair = partials + pair * slices * outputs + output;
        for (int slice = 0; slice < slices; slice++) total += of_pair[slice * outputs];
        totals[i] = total;
    }
}

/* All products of the share into memory.totals; a barrier must follow before they are read. split_chunk(first, count) puts
 * slices first ... into memory.activations, called by all threads, which have a barrier before it and another one after. */
template <class Scheme, class Stream, class SplitChunk>
__device__ void multiply_share(Stream &stream, const Share &share, const ProductPlan &plan, const ProductMemory &memory,
                               const ByteTables &tables, SplitChunk split_chunk) {
    const int warp = warp_of_block(), lane = threadIdx.x % kWarp, slices = coli_ceil_div(share.tiles, kSliceTiles);
    const typename Scheme::Fragments fragments(memory.activations, share.rows, lane);
    int buffer = 0; /* offset of the partials that this round fills */
    for (int first = 0; first < slices; first += plan.chunk_slices) {
        const int count = min(plan.chunk_slices, slices - first);
        if (first > 0) __syncthreads(); /* the last chunk's activations were read */
        split_chunk(first, count);
        __syncthreads();
        for (int matrix = 0; matrix < share.matrix_count; matrix++) {
            for (int pair = 0; pair < share.pairs; pair += plan.round_pairs) {
                const int pairs = min(plan.round_pairs, share.pairs - pair);
                const UnitRange range = units_of_warp(pairs * count, warp, plan.warps);
                float *partials = memory.partials + buffer + range.begin * share.rows * kPairRows;
                int of_round = range.begin / count, slice = range.begin - of_round * count;
                for (int unit = range.begin; unit < range.end; unit++) {
                    const int tile = kSliceTiles * (first + slice), tile_end = min(tile + kSliceTiles, share.tiles);
                    const Unit<Stream, typename Scheme::Fragments> work{
                        stream,   share.matrix(matrix),  share, fragments, tables, share.first_pair + pair + of_round, tile,
                        tile_end, kSliceColumns * slice, lane};
                    typename Scheme::Sums sums;
                    Scheme::multiply(work, sums);
                    store_partials<Scheme>(sums, memory.activations.factors + slice * kMaxPassRows, share.rows, lane,
                                           partials);
                    partials += share.rows * kPairRows;
                    if (++slice == count) slice = 0, of_round++;
                }
                __syncthreads();
                const int place = (matrix * share.pairs + pair) * share.rows * kPairRows;
                add_partials(memory.partials + buffer, memory.totals + place, pairs, count, share.rows, first == 0);
                buffer = plan.partials_floats - buffer;
            }
        }
    }
}

} // namespace coli

#endif
