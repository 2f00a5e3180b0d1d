/* kernels/product.cuh - a thread block multiplies a share of a matrix (or of gate and up) with up to 16 activation rows.
 *
 * The share is pairs of strips (32 weight rows). Their columns are cut into slices of 512, and a unit is one slice of one
 * pair. Warps work alone on units: tiles come through the warp's own ring, which it fills itself or, where the copy engine
 * does, has filled by warps that only feed. They are decoded once for all activation rows, and meet activations that the
 * block has split in shared memory, into fp16 parts (activations.cuh) or into bytes (limbs.cuh). Where those of all columns
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

#include "../ptx/barrier.cuh"
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
    SplitRows activations;
    float *partials; /* [2][units of a round][rows][32 weight rows] */
    float *totals;   /* [matrices][pairs][rows][32 weight rows] */
};

__device__ inline RingMemory ring_memory(const ProductPlan &plan, uint8_t *shared, int warp) {
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + plan.barriers_offset) + 2 * warp * plan.stages;
    return {shared + plan.ring_offset + static_cast<size_t>(warp) * plan.stages * plan.slot_bytes, barriers,
            plan.slot_bytes, plan.stages};
}

template <class Scheme> __device__ ProductMemory product_memory(const ProductPlan &plan, uint8_t *shared) {
    ProductMemory memory;
    memory.codebook = reinterpret_cast<uint32_t *>(shared);
    memory.activations = {shared + plan.parts_offset, reinterpret_cast<float *>(shared + plan.factors_offset),
                          plane_bytes<typename Scheme::Planes>(plan.chunk_slices * kSliceColumns), 0};
    memory.partials = reinterpret_cast<float *>(shared + plan.partials_offset);
    memory.totals = reinterpret_cast<float *>(shared + plan.totals_offset);
    return memory;
}

/* The units of a round that one warp computes. Units are numbered pair by pair, slice by slice. */
struct UnitRange {
    int begin, end;
};
__device__ __forceinline__ UnitRange units_of_warp(int units, int warp, int warps) {
    return {units * warp / warps, units * (warp + 1) / warps};
}

/* Tiles of each strip in a slot: a whole slice where that fits. */
__device__ __forceinline__ int tiles_of_slot(const ProductPlan &plan, const MatrixView &matrix) {
    return plan.slot_bytes < 2 * kSliceTiles * matrix.tile_bytes ? 1 : kSliceTiles;
}

/* The order in which a warp takes its tiles: chunks, matrices, rounds, pairs, and of a pair the run of tiles that are its
 * units'. The ring goes through it ahead of the products. What it needs within a run are few values, so that a lane can
 * keep them in registers; the rest lies in shared memory. */
struct TileRun {
    TilePair tiles; /* the next ones; a whole slot but at the end */
    int left;       /* tiles of a strip from there on; 0 at the end of the walk */
    int slot_tiles;

    /* False where the run ends, and the walk has to say where the next one begins. */
    __device__ __forceinline__ bool next() {
        left -= slot_tiles;
        if (left <= 0) return false;
        tiles.first += tiles.bytes;
        tiles.second += tiles.bytes;
        if (left < slot_tiles) tiles.bytes = left * (tiles.bytes / slot_tiles);
        return true;
    }
};

class TileWalk {
  public:
    /* The first run. */
    __device__ TileRun start(const Share &share, const ProductPlan &plan, int warp) {
        chunk_ = matrix_ = round_ = 0;
        enter_round(share, plan, warp);
        return run(share, plan, warp);
    }
    /* The run after the one that ended. */
    __device__ TileRun next_run(const Share &share, const ProductPlan &plan, int warp) {
        slice_ = 0, pair_++;
        return run(share, plan, warp);
    }

  private:
    __device__ void enter_round(const Share &share, const ProductPlan &plan, int warp) {
        chunk_slices_ = min(plan.chunk_slices, coli_ceil_div(share.tiles, kSliceTiles) - chunk_);
        const int pairs = min(plan.round_pairs, share.pairs - round_);
        const UnitRange range = units_of_warp(pairs * chunk_slices_, warp, plan.warps);
        units_left_ = range.end - range.begin;
        pair_ = range.begin / chunk_slices_;
        slice_ = range.begin - pair_ * chunk_slices_;
    }
    /* Goes on to the next round that has a unit for this warp; false at the end. */
    __device__ bool find_units(const Share &share, const ProductPlan &plan, int warp) {
        while (units_left_ == 0) {
            round_ += plan.round_pairs;
            if (round_ >= share.pairs) {
                round_ = 0;
                if (++matrix_ == share.matrix_count) matrix_ = 0, chunk_ += plan.chunk_slices;
                if (chunk_ * kSliceTiles >= share.tiles) return false;
            }
            enter_round(share, plan, warp);
        }
        return true;
    }
    __device__ TileRun run(const Share &share, const ProductPlan &plan, int warp) {
        if (!find_units(share, plan, warp)) return {};
        const MatrixView &matrix = share.matrix(matrix_);
        const int first = 2 * (share.first_pair + round_ + pair_), second = min(first + 1, share.strips - 1);
        const int units = min(units_left_, chunk_slices_ - slice_), tile = kSliceTiles * (chunk_ + slice_);
        units_left_ -= units;
        const int left = min(kSliceTiles * units, share.tiles - tile), slot_tiles = tiles_of_slot(plan, matrix);
        const size_t strip_bytes = static_cast<size_t>(share.tiles) * matrix.tile_bytes;
        const uint8_t *tiles = matrix.weights + first * strip_bytes + tile * matrix.tile_bytes;
        return {
            {tiles, tiles + (second - first) * strip_bytes, min(left, slot_tiles) * matrix.tile_bytes}, left, slot_tiles};
    }

    int chunk_, matrix_, round_; /* first slice of the chunk, first pair of the round */
    int chunk_slices_, pair_, slice_, units_left_;
};
/* A warp's place in its walk, in shared memory. */
struct WalkMemory {
    TileRun run; /* of a warp that fills its ring itself */
    TileWalk walk;
};
static_assert(sizeof(WalkMemory) <= kWalkBytes, "the plan reserves too little");

__device__ inline WalkMemory &walk_of_warp(const ProductPlan &plan, uint8_t *shared, int warp) {
    return *reinterpret_cast<WalkMemory *>(shared + plan.walks_offset + kWalkBytes * warp);
}

/* The threads of a block that multiply, beside warps that feed their rings. */
struct FedMultipliers {
    int count, feeders;

    __device__ explicit FedMultipliers(const ProductPlan &plan)
        : count(kWarp * plan.warps), feeders(kWarp * plan.feeders) {}
    __device__ __forceinline__ void sync() const { named_barrier_sync(1, count); }
    /* With those that feed: before rings are used, and when activations are there. */
    __device__ __forceinline__ void meet_feeders() const { named_barrier_sync(2, count + feeders); }
};

/* The same where all threads multiply. */
struct OwnMultipliers {
    int count;

    __device__ explicit OwnMultipliers(const ProductPlan &plan) : count(kWarp * plan.warps) {}
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ void meet_feeders() const {}
};

/* Rings that the copy engine fills: a lane of warps of their own goes through the walk of a multiplying warp and starts its
 * copies, so that this costs the products neither instructions nor registers. A warp starts one copy after the other, and
 * that takes its time: the rings are shared out between the feeders. */
__device__ inline void feed_rings(const Share &share, const ProductPlan &plan, uint8_t *shared, int feeder, int passes) {
    const int warp = feeder + plan.feeders * (threadIdx.x % kWarp);
    const bool feeds = warp < plan.warps;
    const RingMemory memory = ring_memory(plan, shared, feeds ? warp : 0);
    RingFeeder ring(memory);
    TileWalk &walk = walk_of_warp(plan, shared, feeds ? warp : 0).walk;
    TileRun run{};
    const auto push = [&] {
        ring.push(run.tiles);
        if (!run.next()) run = walk.next_run(share, plan, warp);
    };
    if (feeds) {
        init_ring(memory, 1);
        run = walk.start(share, plan, warp);
        if (run.left > 0) push();
    }
    FedMultipliers(plan).meet_feeders(); /* rings may be used */
    FedMultipliers(plan).meet_feeders(); /* activations are there, which the copies of the other slots are not to delay */
    if (!feeds) return;
    for (int pass = 0;;) {
        while (run.left > 0) { /* no lane waits: others' warps may need tiles before this one's hands a slot back */
            if (ring.ready())
                push();
            else
                pause();
        }
        if (++pass >= passes) return;
        run = walk.start(share, plan, warp);
    }
}

/* What is left for the warp itself. */
class FedTiles {
  public:
    __device__ FedTiles(const RingMemory &memory, WalkMemory &, int lane) : ring_(memory, lane) {}
    __device__ __forceinline__ void start(const Share &, const ProductPlan &, int) {}
    __device__ __forceinline__ void fill() {} /* feeders do at the second meeting */
    __device__ __forceinline__ const uint8_t *front() const { return ring_.front(); }
    __device__ __forceinline__ void pop() { ring_.pop(); }

  private:
    FedRing ring_;
};

/* A ring that its own warp fills. */
template <class Ring> class OwnTiles {
  public:
    __device__ OwnTiles(const RingMemory &memory, WalkMemory &place, int lane)
        : ring_(memory, lane), place_(place), lane_(lane) {}
    /* For each pass over the weights: brings the first tiles. */
    __device__ void start(const Share &share, const ProductPlan &plan, int warp) {
        share_ = &share, plan_ = &plan, warp_ = warp;
        if (lane_ == 0) place_.run = place_.walk.start(share, plan, warp);
        push();
    }
    /* Fills the rest of the ring; once a pass, before the first front(). */
    __device__ __forceinline__ void fill() {
        for (int i = 1; i < plan_->stages; i++) push();
    }
    __device__ __forceinline__ const uint8_t *front() { return ring_.front(); }
    __device__ __forceinline__ void pop() {
        ring_.pop();
        push();
    }

  private:
    __device__ __forceinline__ void push() {
        __syncwarp();
        if (place_.run.left <= 0) return;
        ring_.push(place_.run.tiles);
        __syncwarp();
        if (lane_ == 0 && !place_.run.next()) place_.run = place_.walk.next_run(*share_, *plan_, warp_);
    }

    Ring ring_;
    WalkMemory &place_;
    const Share *share_;
    const ProductPlan *plan_;
    int warp_, lane_;
};

/*------   How a unit is multiplied   ------*/

/* What the units of a round have in common. */
template <class Fragments> struct Round {
    const Share &share;
    const MatrixView &matrix;
    int first_pair, first_slice, slices; /* of the matrix; slices of the chunk */
    const Fragments &activations;
    const float *factors;
    const ByteTables &tables;
    int slot_tiles, lane;
};

template <class Scheme, class Half, class Tiles>
__device__ __forceinline__ void multiply_units(Tiles &stream, const Round<typename Scheme::Fragments> &round,
                                               const UnitRange &range, float *partials);

/* Activations as two fp16 parts, any format. */
template <class Path, int ROWS> struct HalfScheme {
    using Planes = HalfPlanes;
    static constexpr int kValues = (ROWS + 3) / 4;
    using Fragments = HalfFragments<kValues>;
    struct Sums {
        float of[2][2][kValues] = {};
    };

    static __device__ __forceinline__ void prepare(const SliceValues &values, int s, int place, const SplitRows &split,
                                                   int lane) {
        split_slice(values, s, place, split, lane);
    }
    /* sums += two tiles, whose columns begin at `column` of the chunk, times the activations. */
    template <class Half>
    static __device__ __forceinline__ void multiply(const TileSlots &slots, const TilePlace &where, const Fragments &x,
                                                    int column, const ByteTables &tables, int lane, Sums &sums) {
        multiply_tiles<Half, Path, kValues>(slots, where, x, column, tables, lane, sums.of);
    }
    template <class Half> static __device__ constexpr float unit() { return Half::kUnit; }
    /* multiply_units with the decoder of the kind. */
    template <class... Args> static __device__ __forceinline__ void multiply_kind(TileKind kind, Args &&...args) {
        switch (kind) {
        case TileKind::kE8:
        case TileKind::kE8AnyCodebook:
            return multiply_units<HalfScheme, E8Half>(args...);
        case TileKind::kInt4:
            return multiply_units<HalfScheme, Int4Half>(args...);
        case TileKind::kInt4Groups32:
            return multiply_units<HalfScheme, Int4GroupedHalf<1>>(args...);
        case TileKind::kInt4Groups:
            return multiply_units<HalfScheme, Int4GroupedHalf<2>>(args...);
        case TileKind::kInt4AnyGroups:
            return multiply_units<HalfScheme, Int4AnyGroupHalf>(args...);
        case TileKind::kInt8:
            return multiply_units<HalfScheme, Int8Half>(args...);
        case TileKind::kInt2:
            return multiply_units<HalfScheme, Int2Half>(args...);
        case TileKind::kMxfp4:
            return multiply_units<HalfScheme, Mxfp4Half>(args...);
        case TileKind::kFp8:
            return multiply_units<HalfScheme, Fp8Half>(args...);
        case TileKind::kFp8Table:
            return multiply_units<HalfScheme, Fp8TableHalf>(args...);
        case TileKind::kF32:
            return multiply_units<HalfScheme, F32Half>(args...);
        }
    }
    /* Activation row of a lane's value k, and the value for tile m, row g + 8 r. */
    static __device__ __forceinline__ int row(int k, int lane) { return 4 * k + lane % 4; }
    static __device__ __forceinline__ float value(const Sums &sums, int m, int r, int k, int) { return sums.of[m][r][k]; }
};

/* Activations as four signed bytes, formats whose weights are bytes (multiplies_bytes). */
template <int ROWS, bool ROLLED> struct LimbScheme {
    using Planes = LimbPlanes;
    using Columns = LimbColumns<ROWS>;
    using Fragments = LimbFragments<ROWS>;
    static constexpr int kValues = Columns::kValues;
    struct Sums {
        float of[2][2][Columns::kTiles][2] = {};
    };

    static __device__ __forceinline__ void prepare(const SliceValues &values, int s, int place, const SplitRows &split,
                                                   int lane) {
        cut_slice(values, s, place, split, lane);
    }
    template <class Half>
    static __device__ __forceinline__ void multiply(const TileSlots &slots, const TilePlace &where, const Fragments &x,
                                                    int column, const ByteTables &tables, int lane, Sums &sums) {
        multiply_bytes<Half, ROWS, ROLLED>(slots, where, x, column, tables, lane, sums.of);
    }
    template <class Half> static __device__ constexpr float unit() { return Half::kByteUnit; }
    template <class... Args> static __device__ __forceinline__ void multiply_kind(TileKind kind, Args &&...args) {
        switch (kind) {
        case TileKind::kInt8:
            return multiply_units<LimbScheme, Int8Half>(args...);
        case TileKind::kInt4:
            return multiply_units<LimbScheme, Int4Half>(args...);
        case TileKind::kInt4Groups32:
            return multiply_units<LimbScheme, Int4GroupedHalf<1>>(args...);
        case TileKind::kInt4Groups:
            return multiply_units<LimbScheme, Int4GroupedHalf<2>>(args...);
        case TileKind::kInt2:
            return multiply_units<LimbScheme, Int2Half>(args...);
        case TileKind::kMxfp4:
            return multiply_units<LimbScheme, Mxfp4Half>(args...);
        default:
            return multiply_units<LimbScheme, E8Half>(args...);
        }
    }
    static __device__ __forceinline__ int row(int k, int lane) { return Columns::row(k, lane); }
    static __device__ __forceinline__ float value(const Sums &sums, int m, int r, int k, int) {
        return Columns::join(sums.of[m][r], k);
    }
};

/* The sums of a unit to its place in the partials, [rows][32]. */
template <class Scheme>
__device__ __forceinline__ void store_partials(const typename Scheme::Sums &sums, const float *factors, float unit,
                                               int rows, int lane, float *partials) {
    const int g = lane / 4;
#pragma unroll
    for (int k = 0; k < Scheme::kValues; k++) {
        const int s = Scheme::row(k, lane);
        const float factor = s < rows ? factors[s] * unit : 0.0f;
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

/* totals [pairs][rows][32] of a round, each of its outputs slice after slice; by `threads` threads. */
__device__ inline void add_partials(const float *partials, float *totals, int pairs, int slices, int rows, bool first,
                                    int threads) {
    for (int i = threadIdx.x; i < pairs * rows * kPairRows; i += threads) {
        const int line = i / kPairRows, pair = rows == 1 ? line : line / rows, stride = rows * kPairRows;
        const float *of_output = partials + (pair * (slices - 1)) * stride + i;
        float total = first ? 0.0f : totals[i];
#pragma unroll 4
        for (int slice = 0; slice < slices; slice++) total += of_output[slice * stride];
        totals[i] = total;
    }
}

/* A warp's units of a round, one after the other; their sums go to `partials`. */
template <class Scheme, class Half, class Tiles>
__device__ __forceinline__ void multiply_units(Tiles &stream, const Round<typename Scheme::Fragments> &round,
                                               const UnitRange &range, float *partials) {
    const Share &share = round.share;
    int pair = range.begin / round.slices, slice = range.begin - pair * round.slices;
    for (int unit = range.begin; unit < range.end; unit++) {
        const int tile = kSliceTiles * (round.first_slice + slice), tiles = min(kSliceTiles, share.tiles - tile);
        typename Scheme::Sums sums;
        for (int done = 0; done < tiles; done += round.slot_tiles) {
            const int count = min(round.slot_tiles, tiles - done), row = kPairRows * (round.first_pair + pair);
            const uint8_t *slot = stream.front();
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                const TilePlace where{round.matrix, row, kTileColumns * (tile + done + i), share.O, share.I};
                const TileSlots slots{slot + i * round.matrix.tile_bytes, count * round.matrix.tile_bytes};
                Scheme::template multiply<Half>(slots, where, round.activations,
                                                kSliceColumns * slice + kTileColumns * (done + i), round.tables, round.lane,
                                                sums);
            }
            stream.pop();
        }
        store_partials<Scheme>(sums, round.factors + slice * kMaxPassRows, Scheme::template unit<Half>(), share.rows,
                               round.lane, partials);
        partials += share.rows * kPairRows;
        if (++slice == round.slices) slice = 0, pair++;
    }
}

/* All products of the share into memory.totals; a barrier must follow before they are read. split_chunk(first, count) puts
 * slices first ... into memory.activations, called by all threads that multiply; the last ones were read before the last
 * round's barrier. */
template <class Scheme, class Team, class Tiles, class SplitChunk>
__device__ __forceinline__ void multiply_share(const Team &team, Tiles &stream, const Share &share, const ProductPlan &plan,
                                               const ProductMemory &memory, const ByteTables &tables,
                                               SplitChunk split_chunk) {
    const int warp = warp_of_block(), lane = threadIdx.x % kWarp, slices = coli_ceil_div(share.tiles, kSliceTiles);
    const typename Scheme::Fragments fragments(memory.activations, share.rows, lane);
    int buffer = 0; /* offset of the partials that this round fills */
    for (int first = 0; first < slices; first += plan.chunk_slices) {
        const int count = min(plan.chunk_slices, slices - first);
        split_chunk(first, count);
        team.sync();
        for (int matrix = 0; matrix < share.matrix_count; matrix++) {
            const MatrixView &view = share.matrix(matrix);
            for (int pair = 0; pair < share.pairs; pair += plan.round_pairs) {
                const int pairs = min(plan.round_pairs, share.pairs - pair);
                const UnitRange range = units_of_warp(pairs * count, warp, plan.warps);
                float *partials = memory.partials + buffer;
                const Round<typename Scheme::Fragments> round{share,
                                                              view,
                                                              share.first_pair + pair,
                                                              first,
                                                              count,
                                                              fragments,
                                                              memory.activations.factors,
                                                              tables,
                                                              tiles_of_slot(plan, view),
                                                              lane};
                Scheme::multiply_kind(view.kind, stream, round, range, partials + range.begin * share.rows * kPairRows);
                team.sync();
                const int place = (matrix * share.pairs + pair) * share.rows * kPairRows;
                add_partials(partials, memory.totals + place, pairs, count, share.rows, first == 0, team.count);
                buffer = plan.partials_floats - buffer;
            }
        }
    }
}

} // namespace coli

#endif
