#include "plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "../formats/signs.h"
#include "ptx/lookup.cuh"

namespace coli {

namespace {

/* Costs in quarters of the time that twelve warps take for a unit each, about a microsecond: a block's start and end; a
 * barrier between rounds. */
constexpr int kBlockCost = 16;
constexpr int kUnitCost = 4;
constexpr int kRoundCost = 1;

/* Tiles of a strip in a slot, and slots of a warp. */
struct Slots {
    int tiles, stages;
};

/* One row leaves memory for whole slices. More rows want it for their activations: all columns at once, and long rounds,
 * save more than large slots do. */
std::array<Slots, 4> slots_to_try(int rows) {
    if (rows == 1) return {{{2, 2}, {1, 3}, {1, 2}, {1, 1}}};
    return {{{1, 2}, {1, 3}, {2, 2}, {1, 1}}};
}

int pass_rows_for(const GpuTraits &gpu, const ProductTask &task, Path path, bool limbs_only) {
    const int most = most_pass_rows(gpu.capability, path);
    int rows = least_pass_rows(gpu.capability, path, limbs_only);
    while (rows < most && rows < task.rows) rows *= 2;
    return rows;
}

/* Bytes of an activation row of `columns` in shared memory. */
size_t parts_bytes(const ProductTask &task, Path path, int columns) {
    const size_t halves =
        task.halves || path == Path::kPlain ? HalfPlanes::kPlanes * plane_bytes<HalfPlanes, size_t>(columns) : 0;
    const size_t limbs = task.bytes ? LimbPlanes::kPlanes * plane_bytes<LimbPlanes, size_t>(columns) : 0;
    return std::max(halves, limbs);
}

int slices_of(int I) {
    return coli_ceil_div(tile_count(I), kSliceTiles);
}

int largest_share(const ProductTask &task, int blocks) {
    return coli_ceil_div(coli_ceil_div(task.O, kPairRows), blocks);
}

/* A rotation in the block needs all rows of a pass in shared memory, and all their slices at once. */
bool fuses_rotation(const ProductTask &task, const ProductPlan &plan) {
    return plan.pass_rows <= kMostRotatedRows && task.I <= kRotationPiece && plan.chunk_slices == slices_of(task.I);
}

/* Lays out shared memory; false when the plan needs more than there is. */
bool place_memory(const GpuTraits &gpu, const ProductTask &task, ProductPlan &plan) {
    const int rows = std::min(task.rows, plan.pass_rows), share = largest_share(task, plan.blocks);
    size_t end = 0;
    const auto place = [&end](size_t bytes) {
        const size_t offset = end;
        end = align_up(end + bytes, 128);
        return static_cast<int>(offset);
    };
    place(plan.codebook ? kCodebookBytes : 0);
    plan.ring_offset = place(static_cast<size_t>(plan.warps) * plan.stages * plan.slot_bytes);
    plan.barriers_offset = place(2 * static_cast<size_t>(plan.warps) * plan.stages * sizeof(uint64_t));
    plan.walks_offset = place(static_cast<size_t>(plan.warps) * kWalkBytes);
    plan.parts_offset = place(rows * parts_bytes(task, plan.path, plan.chunk_slices * kSliceColumns));
    plan.factors_offset = place(static_cast<size_t>(plan.chunk_slices) * kMaxPassRows * sizeof(float));
    plan.partials_floats = plan.round_pairs * plan.chunk_slices * rows * kPairRows;
    plan.partials_offset = place(2 * static_cast<size_t>(plan.partials_floats) * sizeof(float));
    plan.totals_offset = place(static_cast<size_t>(task.matrices) * share * rows * kPairRows * sizeof(float));
    plan.rotated_offset = place(plan.rotate ? static_cast<size_t>(rows) * task.I * sizeof(float) : 0);
    plan.signs_offset = place(plan.rotate ? task.I / 4 + 1 : 0);
    plan.shared_bytes = static_cast<int>(std::min<size_t>(end, INT32_MAX));
    return end <= static_cast<size_t>(gpu.shared_bytes);
}

/* Time of a block. Its busiest warp sets the pace; fewer than twelve hide less of each other's latencies. */
int cost_of(const ProductTask &task, const ProductPlan &plan) {
    const int slices = slices_of(task.I), share = largest_share(task, plan.blocks);
    int steps = 0, rounds = 0;
    for (int first = 0; first < slices; first += plan.chunk_slices) {
        const int count = std::min(plan.chunk_slices, slices - first), full = share / plan.round_pairs;
        const int rest = share % plan.round_pairs;
        steps += full * coli_ceil_div(plan.round_pairs * count, plan.warps) + coli_ceil_div(rest * count, plan.warps);
        rounds += full + (rest > 0);
    }
    int work = steps * kUnitCost * (plan.warps + 12) / 24;
    /* what keeps the warp waiting for the copy engine: copies of one tile at a time, and only one under way */
    if (task.rows == 1 && plan.slot_bytes == 2 * task.tile_bytes) work += work / 12;
    if (plan.stages == 1) work += work / 3;
    return kBlockCost + task.matrices * (work + rounds * kRoundCost);
}

/* Chunks and rounds for the plan's blocks, warps and stages: the largest chunk that fits, then the round that takes the
 * least time. False when nothing fits. */
bool fill(const GpuTraits &gpu, const ProductTask &task, ProductPlan &plan) {
    const int slices = slices_of(task.I), share = largest_share(task, plan.blocks);
    for (int chunks = 1; chunks <= slices; chunks++) {
        const int chunk_slices = coli_ceil_div(slices, chunks);
        if (chunk_slices == plan.chunk_slices) continue;
        plan.chunk_slices = chunk_slices;
        ProductPlan best = plan;
        int best_cost = 0;
        for (plan.round_pairs = 1; plan.round_pairs <= share; plan.round_pairs++) {
            plan.rotate = task.rotates && fuses_rotation(task, plan);
            if (!place_memory(gpu, task, plan)) break;
            const int cost = cost_of(task, plan);
            if (best_cost == 0 || cost < best_cost) best = plan, best_cost = cost;
        }
        if (best_cost) {
            plan = best;
            return true;
        }
    }
    return false;
}

constexpr const char *kPathNames[] = {"plain", "ampere", "hopper"};
Path most_path = Path::kHopper;

} // namespace

const char *path_name(Path path) {
    return kPathNames[static_cast<int>(path)];
}

bool path_named(const char *name, Path *path) {
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, kPathNames[i]) != 0) continue;
        *path = static_cast<Path>(i);
        return true;
    }
    return false;
}

void limit_path(Path most) {
    most_path = most;
}

Path path_of(const GpuTraits &gpu) {
    const Path best = gpu.capability >= 90 ? Path::kHopper : gpu.capability >= 80 ? Path::kAmpere : Path::kPlain;
    return std::min(best, most_path);
}

bool typical_gpu(int capability, GpuTraits *gpu) {
    /* A100, RTX 3090, RTX 4090, H200, B200, RTX 5090 */
    constexpr GpuTraits known[] = {{75, 68, 65536},   {80, 108, 166912},  {86, 82, 101376},  {89, 128, 101376},
                                   {90, 132, 232448}, {100, 148, 232448}, {120, 170, 101376}};
    for (const GpuTraits &candidate : known) {
        if (candidate.capability != capability) continue;
        *gpu = candidate;
        return true;
    }
    return false;
}

ProductPlan plan_product(const GpuTraits &gpu, const ProductTask &task) {
    ProductPlan best{};
    int best_cost = 0;
    const int pairs = coli_ceil_div(task.O, kPairRows);
    /* Outputs of a block's share stay in shared memory: what is too large for four waves takes the fewest that fit. */
    const long long most_waves = 1LL * pairs * task.experts / gpu.multiprocessors + 1;
    for (long long waves = 1; waves <= 4 || (best_cost == 0 && waves <= most_waves); waves++) {
        ProductPlan plan{};
        plan.gate_up = task.matrices == 2;
        plan.limbs_only = task.path != Path::kPlain && !task.halves;
        plan.path = product_path(gpu.capability, task.path, plan.limbs_only);
        plan.pass_rows = pass_rows_for(gpu, task, plan.path, plan.limbs_only);
        plan.codebook = task.codebook;
        plan.blocks = static_cast<int>(std::clamp<long long>(waves * gpu.multiprocessors / task.experts, 1, pairs));
        const int most_threads = product_threads(gpu.capability, plan.path, plan.pass_rows, plan.limbs_only);
        const int service = service_threads(gpu.capability, plan.path);
        for (plan.warps = most_threads / kWarp; plan.warps >= 1; plan.warps -= plan.warps > 2 ? 2 : 1) {
            plan.threads = service ? most_threads + service : kWarp * plan.warps;
            plan.first_feeder = most_threads / kWarp;
            plan.feeders = service / kWarp;
            for (const Slots slots : slots_to_try(task.rows)) {
                ProductPlan filled = plan;
                filled.stages = slots.stages;
                filled.slot_bytes = 2 * slots.tiles * task.tile_bytes;
                if (!fill(gpu, task, filled)) continue;
                const int cost = coli_ceil_div(task.experts * filled.blocks, gpu.multiprocessors) * cost_of(task, filled);
                if (best_cost == 0 || cost < best_cost) best = filled, best_cost = cost;
            }
        }
    }
    return best;
}

std::vector<ProductPlan> all_variants(const GpuTraits &gpu) {
    std::vector<ProductPlan> variants;
    for (Path path : {Path::kPlain, Path::kAmpere, Path::kHopper}) {
        if (path != Path::kPlain && gpu.capability < (path == Path::kHopper ? 90 : 80)) continue;
        for (bool limbs_only : {false, true}) {
            if (limbs_only && path == Path::kPlain) continue;
            if (product_path(gpu.capability, path, limbs_only) != path) continue;
            for (int rows = least_pass_rows(gpu.capability, path, limbs_only); rows <= most_pass_rows(gpu.capability, path);
                 rows *= 2) {
                ProductPlan plan{};
                plan.path = path, plan.limbs_only = limbs_only, plan.pass_rows = rows;
                variants.push_back(plan);
            }
        }
    }
    return variants;
}

const ProductPlan &PlanCache::product(const GpuTraits &gpu, const ProductTask &task) {
    for (size_t i = 0; i < count_; i++) {
        if (entries_[i].task == task) return entries_[i].plan;
    }
    Entry &entry = entries_[count_ < kEntries ? count_++ : oldest_++ % kEntries];
    entry = {task, plan_product(gpu, task)};
    return entry.plan;
}

RotationPlan plan_rotation(int dim, int rows) {
    int pieces = 0;
    for (int offset = 0; offset < dim;) {
        const int block = coli_rotation_block(dim - offset);
        pieces += coli_ceil_div(block, kRotationPiece);
        offset += block;
    }
    return {pieces, std::min(rows, kMaxGrid)};
}

int describe(const ProductPlan &plan, const char *name, int experts, char *text, size_t capacity) {
    return snprintf(
        text, capacity,
        "%-6s %s%s, %d row%s a pass, grid %d x %d, %d warps, %d slots of %d bytes, chunks of %d slices, rounds of %d "
        "pairs, %d bytes shared%s",
        name, path_name(plan.path), plan.limbs_only ? ", bytes" : "", plan.pass_rows, plan.pass_rows == 1 ? "" : "s",
        plan.blocks, experts, plan.warps, plan.stages, plan.slot_bytes, plan.chunk_slices, plan.round_pairs,
        plan.shared_bytes, plan.rotate ? ", rotates" : "");
}

int describe(const RotationPlan &plan, int experts, char *text, size_t capacity) {
    return snprintf(text, capacity, "rotate grid %d x %d x %d, %d threads", plan.pieces, plan.rows, experts,
                    kRotationThreads);
}

} // namespace coli
