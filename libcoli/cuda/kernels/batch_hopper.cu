/* An expert's weights times limbs of its rows. Weights are decoded into registers and are the rows of Hopper's matrix unit,
 * limbs lie in shared memory and are its columns.
 *
 *                          columns of a pass: 32, or 64 of 16 rows
 *                         +-----------+
 *                         |  a stage: |  256 values of each,
 *                         +-----------+  and those tiles of weights
 *          +-------------+
 *     w 0  | tile        |  16 weight rows a warp; hidden: the first half of the warps has gate's, the second up's
 *     w 1  | tile        |
 *     ...  |             |
 *          +-------------+
 *
 * An item is one such rectangle of results, all columns of the matrix long. Blocks take items in turn. Warps of their
 * own fill the ring of stages with the copy engine.
 *
 * Sums of a limb over a tile are exact integers (limbs.cuh). What happens to them then is what kernels/product.cuh does: by
 * limb, tile after tile of a slice with the tile's scale; limbs together; slice after slice with the slice's factor. */
#include "../ptx/barrier.cuh"
#include "../ptx/dependent.cuh"
#include "limb_tokens.cuh"
#include "outputs.cuh"
#include "ring.cuh"
#include "tile_product.cuh"
#include "wgmma_unit.cuh"

namespace coli {

namespace {

/* Of the registers that a block of kBatchWarps + kBatchFillWarps starts with, 96 each. */
constexpr int kFillRegisters = 32, kMultiplyRegisters = 112;

static_assert(kLimbColumnBytes == kWgmmaRowBytes && kRowGroup == kWgmmaRows, "columns lie as the matrix unit wants them");

/* A launch, as a block sees it. */
struct BatchJob {
    const GroupParams &p;
    const BatchProduct &plan;
    const Limbs &limbs;

    __device__ __forceinline__ int rows() const { return plan.hidden ? p.H : p.D; }
    __device__ __forceinline__ int columns() const { return plan.hidden ? p.D : p.H; }
    __device__ __forceinline__ const MatrixView &matrix(int expert, int warp) const {
        const ExpertEntry &entry = p.experts[expert];
        return !plan.hidden ? entry.down : warp < plan.warps / 2 ? entry.gate : entry.up;
    }
};

struct BatchItem {
    int expert, first_strip;

    __device__ __forceinline__ int strip(const BatchJob &job, int warp) const {
        return first_strip + warp % item_strips(job.plan);
    }
};

__device__ __forceinline__ BatchItem batch_item(const BatchJob &job, int index) {
    const int of_expert = coli_ceil_div(tile_strips(job.rows()), item_strips(job.plan));
    return {index / of_expert, index % of_expert * item_strips(job.plan)};
}

/*------   Stages   ------*/

/* What a lane of the filling warps copies to each stage of an item: limbs, or a tile. */
struct StagePiece {
    const uint8_t *from;
    size_t step; /* from stage to stage */
    int to, bytes;
    bool weights;
};

/* Strips that do not exist repeat the last one; nobody stores what they give. */
__device__ __forceinline__ StagePiece stage_piece(const BatchJob &job, const BatchItem &item, int i) {
    if (i == 0) {
        const int bytes = pass_stage_bytes(job.plan.pass_rows);
        return {limb_pass(job.limbs, item.expert, job.columns()), static_cast<size_t>(bytes), 0, bytes, false};
    }
    const int warp = i - 1;
    if (warp >= job.plan.warps) return {};
    const MatrixView &matrix = job.matrix(item.expert, warp);
    const size_t strip = min(item.strip(job, warp), tile_strips(job.rows()) - 1);
    return {matrix.weights + strip * tile_count(job.columns()) * matrix.tile_bytes, static_cast<size_t>(matrix.tile_bytes),
            pass_stage_bytes(job.plan.pass_rows) + warp * job.plan.slot_bytes, matrix.tile_bytes, true};
}

__device__ __forceinline__ void copy_piece(const StagePiece &piece, int stage, const RingPosition &position) {
    const uint8_t *from = piece.from + stage * piece.step;
    if (piece.weights)
        copy_bulk(position.slot() + piece.to, from, piece.bytes, position.filled());
    else
        copy_bulk_kept(position.slot() + piece.to, from, piece.bytes, position.filled());
}

/* By kBatchFillWarps warps, pieces in turn. Weights of the first stages come before the launch before this one has ended.
 */
__device__ __forceinline__ void fill_stages(const BatchJob &job, const RingMemory &ring, int warp, int lane) {
    const int stages = tile_count(job.columns()), first_stages = min(stages, ring.stages);
    RingPosition position(ring);
    for (int index = blockIdx.x; index < job.plan.items; index += gridDim.x) {
        const StagePiece piece = stage_piece(job, batch_item(job, index), warp + kBatchFillWarps * lane);
        const int bytes = sum_of_warp(piece.bytes);
        int stage = 0;
        if (index == static_cast<int>(blockIdx.x)) {
            RingPosition ahead = position;
            for (int i = 0; i < first_stages; i++, ahead.advance()) {
                if (lane == 0) barrier_expect(ahead.filled(), bytes);
                if (piece.bytes && piece.weights) copy_piece(piece, i, ahead);
            }
            dependency_wait();
            for (; stage < first_stages; stage++, position.advance()) {
                if (piece.bytes && !piece.weights) copy_piece(piece, stage, position);
            }
        }
        for (; stage < stages; stage++, position.advance()) {
            barrier_wait(position.emptied(), position.phase() ^ 1);
            if (lane == 0) barrier_expect(position.filled(), bytes);
            if (piece.bytes) copy_piece(piece, stage, position);
        }
    }
}

/*------   Products   ------*/

/* An operand whose sums are those of bytes (tiles.cuh), bit by bit: the constant factor that they lack comes last. */
template <class Operand> struct LimbOperand : Operand {
    static constexpr float kRest = Operand::kByteUnit;
    __device__ __forceinline__ float factor(int b, int r) const { return Operand::factor(b, r, Operand::kUnit / kRest); }
};

/* Calls visit(T{}) with the operand type of a kind that multiplies_bytes. MXFP4's scales stay as they are, so that all its
 * sums are exact (prefill's are not). */
template <class Visit> __device__ __forceinline__ void with_limb_operand(TileKind kind, Visit visit) {
    switch (kind) {
    case TileKind::kInt8:
        return visit(LimbOperand<PlainOperand<Int8Half>>{});
    case TileKind::kInt4:
        return visit(LimbOperand<PlainOperand<Int4Half>>{});
    case TileKind::kInt2:
        return visit(LimbOperand<PlainOperand<Int2Half>>{});
    case TileKind::kInt4Groups32:
        return visit(LimbOperand<PlainOperand<Int4GroupedHalf<1>>>{});
    case TileKind::kInt4Groups:
        return visit(LimbOperand<PlainOperand<Int4GroupedHalf<2>>>{});
    case TileKind::kMxfp4:
        return visit(LimbOperand<PlainOperand<Mxfp4Half>>{});
    default:
        return visit(LimbOperand<E8Operand>{});
    }
}

struct NoLosses {
    static __device__ constexpr bool of(int) { return false; }
    static __device__ constexpr int step(int values) { return values; }
};

/* Activation row of value i of a lane, of a pass. */
__device__ __forceinline__ int pass_row(int i, int lane) {
    return kRowGroup * (i / 2) + 2 * (lane % 4) + i % 2;
}

/* What an item comes to: of each lane a float for weight row g + 8 r of its warp's strip and activation row pass_row(i,
 * lane). They lie in shared memory, where gate's and up's can meet; products need the registers. */
struct Totals {
    float *values; /* [2 i + r][warp][lane] */
    int warps;

    __device__ __forceinline__ float &at(int r, int i, int warp, int lane) const {
        return values[((2 * i + r) * warps + warp) * kWarp + lane];
    }
};

/* A slice's sums by limb, to the totals. */
template <int N>
__device__ __forceinline__ void add_slice(const float (&limbs)[N / 8][4], const float (&factors)[N / 16], float rest,
                                          bool first, const Totals &totals, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        const float factor = factors[i] * rest;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const auto limb = [&](int l) { return limbs[kLimbs * (i / 2) + l][2 * r + i % 2]; };
            const float sum = join_halves(join_limbs(limb(0), limb(1)), join_limbs(limb(2), limb(3)));
            float &total = totals.at(r, i, warp, lane);
            total = __fadd_rn(first ? 0.0f : total, __fmul_rn(sum, factor)); /* two roundings, as few rows have */
        }
    }
}

template <class Operand, int N>
__device__ __forceinline__ void multiply_strip(const BatchJob &job, const BatchItem &item, FedRing &ring,
                                               const KernelTables &tables, const Totals &totals, int warp, int lane) {
    using Unit = WgmmaUnit<N, 2, N == 32 ? 2 : 1>;
    const MatrixView &matrix = job.matrix(item.expert, warp);
    const int tiles = tile_count(job.columns()), slot = pass_stage_bytes(job.plan.pass_rows) + warp * job.plan.slot_bytes;
#pragma unroll 1
    for (int slice = 0; slice < slice_count(job.columns()); slice++) {
        float limbs[N / 8][4] = {}, factors[N / 16];
        const int end = min(kSliceTiles * (slice + 1), tiles);
#pragma unroll 1
        for (int tile = kSliceTiles * slice; tile < end; tile++) {
            const uint8_t *stage = ring.front();
            multiply_tile<Unit, NoLosses, Operand, N>({stage + slot, stage, matrix, tables, lane}, limbs);
            if (tile + 1 == end) {
                const float *of_rows = reinterpret_cast<const float *>(stage + pass_blocks_bytes(N / kLimbs));
#pragma unroll
                for (int i = 0; i < N / 16; i++) factors[i] = of_rows[pass_row(i, lane)];
            }
            ring.pop();
        }
        add_slice<N>(limbs, factors, Operand::kRest, slice == 0, totals, warp, lane);
    }
}

/* Hidden rows are stored by gate's warps, which find up's sums in the totals. */
template <int N>
__device__ __forceinline__ void store_item(const BatchJob &job, const BatchItem &item, const Totals &totals, int warp,
                                           int lane) {
    if (warp >= item_strips(job.plan)) return;
    const ExpertEntry &expert = job.p.experts[item.expert];
    const int rows = job.rows();
    float *first = (job.plan.hidden ? job.p.hidden : job.p.y) + static_cast<size_t>(expert.first_row) * rows;
#pragma unroll 1
    for (int r = 0; r < 2; r++) {
        const int o = kStripRows * item.strip(job, warp) + lane / 4 + 8 * r;
        if (o >= rows) continue;
#pragma unroll 1
        for (int i = 0; i < N / 16; i++) {
            const int row = pass_row(i, lane);
            if (row >= expert.rows) continue;
            float value = totals.at(r, i, warp, lane) * row_scale(job.matrix(item.expert, warp), o);
            if (job.plan.hidden)
                value = activate(job.p.activation, value,
                                 totals.at(r, i, item_strips(job.plan) + warp, lane) * row_scale(expert.up, o));
            first[static_cast<size_t>(row) * rows + o] = value;
        }
    }
}

template <int N>
__device__ __forceinline__ void multiply_item(const BatchJob &job, const BatchItem &item, FedRing &ring,
                                              const KernelTables &tables, const Totals &totals, int warp, int lane) {
    const int threads = kWarp * job.plan.warps;
    with_limb_operand(job.matrix(item.expert, warp).kind, [&](auto operand) {
        multiply_strip<decltype(operand), N>(job, item, ring, tables, totals, warp, lane);
    });
    if (job.plan.hidden) named_barrier_sync(1, threads);
    store_item<N>(job, item, totals, warp, lane);
    if (job.plan.hidden) named_barrier_sync(1, threads); /* the totals were read */
}

/* Passes of ROWS rows. */
template <int ROWS>
__global__ void __launch_bounds__((kBatchWarps + kBatchFillWarps) * kWarp, 1)
    batch_product(const __grid_constant__ GroupParams p, const __grid_constant__ BatchProduct plan, const Limbs limbs) {
    dependency_trigger();
    uint8_t *shared = dynamic_shared();
    const int warp = warp_of_block(), lane = threadIdx.x % kWarp;
    const BatchJob job{p, plan, limbs};
    const RingMemory ring{shared + plan.ring_offset, reinterpret_cast<uint64_t *>(shared + plan.barriers_offset),
                          plan.stage_bytes, plan.stages};
    if (threadIdx.x == 0) init_ring(ring, plan.warps, kBatchFillWarps);
    if (plan.codebook) spread_codebook(reinterpret_cast<uint2 *>(shared), *p.tables);
    __syncthreads();
    if (warp >= plan.warps) {
        give_registers<kFillRegisters>();
        return fill_stages(job, ring, warp - plan.warps, lane);
    }
    take_registers<kMultiplyRegisters>();
    const KernelTables tables{codebook_of(reinterpret_cast<const uint2 *>(shared), lane)};
    const Totals totals{reinterpret_cast<float *>(shared + plan.totals_offset), plan.warps};
    FedRing stages(ring, lane);
    for (int index = blockIdx.x; index < plan.items; index += gridDim.x)
        multiply_item<kLimbs * ROWS>(job, batch_item(job, index), stages, tables, totals, warp, lane);
}

} // namespace

BatchKernel batch_kernel(const BatchProduct &plan) {
    return plan.pass_rows <= kRowGroup ? batch_product<kRowGroup> : batch_product<kMaxPassRows>;
}

} // namespace coli
