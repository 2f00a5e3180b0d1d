/* kernels/prefill_product.cuh - experts' weights times their tokens: weights are decoded into registers and are the matrix
 * unit's rows, tokens lie in shared memory and are its columns.
 *
 *                          token tile (32, 64 or 96 tokens)
 *                         +-----------+
 *                         |  a stage: |  256 columns of the tokens and of their losses,
 *                         +-----------+  and those tiles of weights
 *          +-------------+
 *     w 0  | tile        |  set 0: 16 weight rows a warp (hidden: of gate)
 *     w 1  | tile        |
 *     ...  |             |
 *     w 7  | tile        |
 *          +-------------+
 *     w 0  | tile        |  set 1: 16 more (hidden: the same rows of up)
 *     ...  |             |
 *          +-------------+
 *
 * An item is one such rectangle of results, all columns long. Blocks take items in turn, token tiles of the same weights
 * one after another, so that these are in L2. Stages come through a ring: on Hopper warps of their own fill it with
 * the copy engine, before that all threads do. A warp keeps the totals of both sets in registers and works on one set at a
 * time, in chunks (prefill_weights.cuh): while the matrix unit multiplies a sub-block, it decodes the next. */
#ifndef COLI_CUDA_KERNELS_PREFILL_PRODUCT_CUH
#define COLI_CUDA_KERNELS_PREFILL_PRODUCT_CUH

#include <type_traits>

#include "../ptx/copy.cuh"
#include "../ptx/dependent.cuh"
#include "outputs.cuh"
#include "prefill_kernels.h"
#include "prefill_tokens.cuh"
#include "tile_product.cuh"

namespace coli {

/* What a launch computes. */
struct PrefillJob {
    const GroupParams &p;
    const PrefillProduct &plan;
    const Tokens &tokens;

    __device__ __forceinline__ int rows() const { return plan.hidden ? p.H : p.D; }
    __device__ __forceinline__ int columns() const { return plan.hidden ? p.D : p.H; }
    __device__ __forceinline__ const MatrixView &matrix(int expert, int set) const {
        const ExpertEntry &entry = p.experts[expert];
        return !plan.hidden ? entry.down : set ? entry.up : entry.gate;
    }
    __device__ __forceinline__ int token_blocks() const { return token_blocks_of_tile(plan.exact); }
    /* Strips of an item, one after another in a matrix. */
    __device__ __forceinline__ int item_strips() const { return plan.hidden ? plan.warps : plan.sets * plan.warps; }
    __device__ __forceinline__ ExpertTokens tokens_of(int expert) const {
        const int row = p.experts[expert].first_row - p.experts[0].first_row;
        return expert_tokens(tokens, first_token(row, expert), p.experts[expert].rows, columns(), plan.exact);
    }
};

struct PrefillItem {
    int expert, first_strip, first_token, tokens;

    /* Tokens that are multiplied, existing or not. */
    __device__ __forceinline__ int width(const PrefillProduct &plan) const {
        return tokens <= 32 ? 32 : tokens <= 64 && plan.wgmma ? 64 : plan.token_tile;
    }
    __device__ __forceinline__ int strip(const PrefillJob &job, int set, int warp) const {
        return first_strip + (job.plan.hidden ? 0 : set * job.plan.warps) + warp;
    }
};

/* The items of a block. */
class ItemWalk {
  public:
    __device__ explicit ItemWalk(const PrefillJob &job) : job_(job), index_(blockIdx.x) { settle(); }
    __device__ __forceinline__ bool done() const { return expert_ == job_.p.count; }
    __device__ __forceinline__ const PrefillItem &item() const { return item_; }
    __device__ __forceinline__ void next() {
        index_ += gridDim.x;
        settle();
    }

  private:
    /* Finds the item: index_ counts from the first one of expert_. */
    __device__ void settle() {
        const int row_tiles = coli_ceil_div(tile_strips(job_.rows()), job_.item_strips());
        for (; expert_ < job_.p.count; expert_++) {
            const int rows = job_.p.experts[expert_].rows, token_tiles = coli_ceil_div(rows, job_.plan.token_tile);
            if (index_ < row_tiles * token_tiles) {
                const int first = index_ % token_tiles * job_.plan.token_tile;
                item_ = {expert_, index_ / token_tiles * job_.item_strips(), first,
                         min(job_.plan.token_tile, rows - first)};
                return;
            }
            index_ -= row_tiles * token_tiles;
        }
    }
    const PrefillJob &job_;
    int index_, expert_ = 0;
    PrefillItem item_{};
};

/*------   Stages   ------*/

/* Bytes that a stage is made of; `to` is their place in it. Those that the launch reads once need not stay in L2. */
struct StagePiece {
    const uint8_t *from;
    int to, bytes;
    bool once;
};

/* A stage: first the blocks of tokens, then a slot for each tile of weights. */
class StageWalk {
  public:
    __device__ explicit StageWalk(const PrefillJob &job)
        : job_(job), items_(job), tiles_(tile_count(job.columns())), strips_(tile_strips(job.rows())) {}
    __device__ __forceinline__ bool done() const { return items_.done(); }
    __device__ __forceinline__ void next() {
        if (++tile_ < tiles_) return;
        tile_ = 0;
        items_.next();
    }
    __device__ __forceinline__ int pieces() const { return job_.token_blocks() + job_.plan.sets * job_.plan.warps; }
    __device__ __forceinline__ StagePiece piece(int i) const {
        const int blocks = job_.token_blocks();
        return i < blocks ? token_piece(i) : weight_piece(i - blocks);
    }

  private:
    __device__ __forceinline__ int token_bytes() const { return pad_tokens(items_.item().tokens) * kTokenBytes; }
    __device__ __forceinline__ StagePiece token_piece(int block) const {
        const PrefillItem &item = items_.item();
        const ExpertTokens tokens = job_.tokens_of(item.expert);
        return {tokens.row(job_.token_blocks() * tile_ + block, item.first_token),
                block * item.width(job_.plan) * kTokenBytes, token_bytes(), false};
    }
    /* Strips that do not exist repeat the last one; nobody stores what they give. */
    __device__ __forceinline__ StagePiece weight_piece(int slot) const {
        const PrefillItem &item = items_.item();
        const MatrixView &matrix = job_.matrix(item.expert, slot / job_.plan.warps);
        const int strip = min(item.strip(job_, slot / job_.plan.warps, slot % job_.plan.warps), strips_ - 1);
        return {matrix.weights + (static_cast<size_t>(strip) * tiles_ + tile_) * matrix.tile_bytes,
                token_stage_bytes(job_.plan) + slot * job_.plan.slot_bytes, matrix.tile_bytes,
                job_.p.experts[item.expert].rows <= job_.plan.token_tile};
    }

    const PrefillJob &job_;
    ItemWalk items_;
    int tiles_, strips_, tile_ = 0;
};

/*------   Results   ------*/

/* As activate, without branches, so that what a thread has of an item goes through in one stream; to a few units in the
 * last place, which fp16 forgets. */
__device__ __forceinline__ float fast_sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ __forceinline__ float fast_tanh(float x) {
    const float squared = x * x,
                series = fmaf(fmaf(fmaf(-0.05396825f, squared, 0.13333333f), squared, -0.33333333f), squared, 1.0f);
    return fabsf(x) < 0.25f ? x * series : 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
}
struct FastSilu {
    __device__ explicit FastSilu(const Activation &) {}
    __device__ __forceinline__ float operator()(float gate, float up) const { return gate * fast_sigmoid(gate) * up; }
};
struct FastSitu {
    float b1, b2, inverse1, inverse2;
    __device__ explicit FastSitu(const Activation &activation)
        : b1(activation.b1), b2(activation.b2), inverse1(1.0f / b1), inverse2(1.0f / b2) {}
    __device__ __forceinline__ float operator()(float gate, float up) const {
        return b1 * fast_tanh(gate * inverse1) * fast_sigmoid(gate) * (b2 * fast_tanh(up * inverse2));
    }
};

/* As activate. */
template <Activation::Kind KIND> struct ExactActivation {
    Activation activation;
    __device__ explicit ExactActivation(const Activation &of_group) : activation(of_group) { activation.kind = KIND; }
    __device__ __forceinline__ float operator()(float gate, float up) const { return activate(activation, gate, up); }
};

/* Where results of an item go: [token][row]. */
struct ItemResults {
    float *first; /* of the item's first token */
    int rows, tokens, lane;

    __device__ __forceinline__ int token(int i) const { return 8 * (i / 2) + 2 * (lane % 4) + i % 2; }
    /* result(r, i), of row g + 8 r of a strip and token(i), all in one stream. */
    template <int N, class Result> __device__ __forceinline__ void store(int strip, Result result) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = kStripRows * strip + lane / 4 + 8 * r;
            float *of_row = first + row;
#pragma unroll
            for (int i = 0; i < N / 4; i++) {
                const float value = result(r, i);
                if (row < rows && token(i) < tokens) of_row[static_cast<size_t>(token(i)) * rows] = value;
            }
        }
    }
};

/* Scales of rows g and g + 8 of a strip; rows that do not exist take the last one's. */
struct StripScales {
    float of[2];
    __device__ __forceinline__ StripScales(const MatrixView &matrix, int strip, int rows, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) of[r] = row_scale(matrix, min(kStripRows * strip + lane / 4 + 8 * r, rows - 1));
    }
};

/* totals[set][j][c] is row g + 8 (c / 2), token 8 j + 2 t + c % 2. */
template <class Activate, int N>
__device__ __forceinline__ void store_hidden(const PrefillJob &job, const PrefillItem &item, int warp,
                                             const ItemResults &results, const float (&factors)[N / 4],
                                             const float (&totals)[2][N / 8][4]) {
    const ExpertEntry &expert = job.p.experts[item.expert];
    const Activate activate(job.p.activation);
    const int strip = item.strip(job, 0, warp);
    const StripScales gate(expert.gate, strip, results.rows, results.lane),
        up(expert.up, strip, results.rows, results.lane);
    results.store<N>(strip, [&](int r, int i) {
        const int c = 2 * r + i % 2;
        return activate(totals[0][i / 2][c] * factors[i] * gate.of[r], totals[1][i / 2][c] * factors[i] * up.of[r]);
    });
}

template <bool EXACT, int N>
__device__ __forceinline__ void store_item(const PrefillJob &job, const PrefillItem &item, int warp, int lane,
                                           const float (&totals)[2][N / 8][4]) {
    const ExpertEntry &expert = job.p.experts[item.expert];
    float *all = job.plan.hidden ? const_cast<float *>(job.p.hidden) : job.p.y;
    const ItemResults results{all + (static_cast<size_t>(expert.first_row) + item.first_token) * job.rows(), job.rows(),
                              item.tokens, lane};
    const float *token_factors = job.tokens_of(item.expert).factors + item.first_token;
    float factors[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) factors[i] = __ldg(token_factors + min(results.token(i), item.tokens - 1));
    if (job.plan.hidden) {
        using Silu = std::conditional_t<EXACT, ExactActivation<Activation::kSilu>, FastSilu>;
        using Situ = std::conditional_t<EXACT, ExactActivation<Activation::kSitu>, FastSitu>;
        if (job.p.activation.kind == Activation::kSilu)
            store_hidden<Silu, N>(job, item, warp, results, factors, totals);
        else
            store_hidden<Situ, N>(job, item, warp, results, factors, totals);
        return;
    }
#pragma unroll
    for (int set = 0; set < 2; set++) {
        if (set >= job.plan.sets) continue;
        const int strip = item.strip(job, set, warp);
        const StripScales scales(expert.down, strip, results.rows, lane);
        results.store<N>(strip,
                         [&](int r, int i) { return totals[set][i / 2][2 * r + i % 2] * factors[i] * scales.of[r]; });
    }
}

template <template <int> class Unit, bool EXACT, int N, class Pipe>
__device__ __forceinline__ void multiply_item(const PrefillJob &job, const PrefillItem &item, Pipe &pipe,
                                              const KernelTables &tables, int warp, int lane) {
    float totals[2][N / 8][4] = {};
    const MatrixView &first = job.matrix(item.expert, 0), &second = job.matrix(item.expert, 1);
    const int tiles = tile_count(job.columns()), sets = job.plan.sets;
    const int slots = token_stage_bytes(job.plan) + warp * job.plan.slot_bytes;
    const int second_slot = job.plan.warps * job.plan.slot_bytes;
    const auto multiply_stages = [&](auto multiply_first, auto multiply_second) {
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const uint8_t *stage = pipe.front();
            multiply_first(TileInputs{stage + slots, stage, first, tables, lane});
            if (sets == 2) multiply_second(TileInputs{stage + slots + second_slot, stage, second, tables, lane});
            pipe.pop();
        }
    };
    if (first.kind == second.kind) { /* the usual case saves a branch for every tile */
        with_operand(first.kind, [&](auto operand) {
            using Operand = decltype(operand);
            multiply_stages(
                [&](const TileInputs &in) { multiply_tile<Unit<N>, Losses<EXACT>, Operand, N>(in, totals[0]); },
                [&](const TileInputs &in) { multiply_tile<Unit<N>, Losses<EXACT>, Operand, N>(in, totals[1]); });
        });
    } else {
        const auto multiply_any = [](const TileInputs &in, float (&sums)[N / 8][4]) {
            with_operand(in.matrix.kind,
                         [&](auto operand) { multiply_tile<Unit<N>, Losses<EXACT>, decltype(operand), N>(in, sums); });
        };
        multiply_stages([&](const TileInputs &in) { multiply_any(in, totals[0]); },
                        [&](const TileInputs &in) { multiply_any(in, totals[1]); });
    }
    store_item<EXACT, N>(job, item, warp, lane, totals);
}

/* All items of the block, by a warp that multiplies. Token tiles are 32, MAX_TILE, and 64 if that is between them. */
template <template <int> class Unit, bool EXACT, int MAX_TILE, class Pipe>
__device__ __forceinline__ void multiply_items(const PrefillJob &job, Pipe &pipe, const KernelTables &tables, int warp,
                                               int lane) {
    for (ItemWalk items(job); !items.done(); items.next()) {
        const PrefillItem &item = items.item();
        if (MAX_TILE == 32 || item.tokens <= 32)
            multiply_item<Unit, EXACT, 32>(job, item, pipe, tables, warp, lane);
        else if (MAX_TILE > 64 && item.tokens <= 64)
            multiply_item<Unit, EXACT, 64>(job, item, pipe, tables, warp, lane);
        else
            multiply_item<Unit, EXACT, MAX_TILE>(job, item, pipe, tables, warp, lane);
    }
}

} // namespace coli

#endif
