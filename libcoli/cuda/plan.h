/* plan.h - which kernel, how many blocks, what in shared memory: every tuning choice, as plain functions. */
#ifndef COLI_CUDA_PLAN_H
#define COLI_CUDA_PLAN_H

#include <cstddef>
#include <vector>

#include "layout.h"

namespace coli {

constexpr int kWarp = 32;
/* Columns that are summed up together, and whose activations share a power of two (kernels/activations.cuh). It is part of
 * what a result's bits depend on; nothing else here is. */
constexpr int kSliceColumns = 512;
constexpr int kSliceTiles = kSliceColumns / kTileColumns;
/* Weight rows that a warp multiplies at a time: a pair of strips. */
constexpr int kPairRows = 2 * kStripRows;
/* An activation row in shared memory, as planes: two fp16 parts (kernels/activations.cuh), or four limbs of a byte
 * (kernels/limbs.cuh). What a plane is longer than its columns lets neighbouring planes meet in no bank. From a row to
 * the next it is kRowStep planes. */
struct HalfPlanes {
    static constexpr int kPlanes = 2, kRowStep = 2, kColumnBytes = 2, kPadding = 64;
};
struct LimbPlanes {
    static constexpr int kPlanes = 4, kRowStep = 1, kColumnBytes = 1, kPadding = 32;
};
template <class Planes, class Size> COLI_FN constexpr Size plane_bytes(Size columns) {
    return columns * Planes::kColumnBytes + Planes::kPadding;
}
/* Activation rows that share one decode of the weights, at most. */
constexpr int kMaxPassRows = 16;
/* Shared memory for the place of a warp in its work. */
constexpr int kWalkBytes = 64;
/* Limit of a grid's y and z. */
constexpr int kMaxGrid = 65535;
/* Elements of a rotation block that one thread block transforms in shared memory (32 KB). */
constexpr int kRotationPiece = 8192;
constexpr int kRotationThreads = 256;
/* Rows of a pass that a block of a product rotates itself, at most. */
constexpr int kMostRotatedRows = 4;

/* What of a GPU the choices depend on. */
struct GpuTraits {
    int capability; /* 10 major + minor */
    int multiprocessors;
    int shared_bytes; /* that a block may have */
};

enum class Path {
    kPlain,  /* no tensor cores, plain loads */
    kAmpere, /* tensor cores, asynchronous copies */
    kHopper, /* tensor cores, the copy engine, overlapping launches */
};
const char *path_name(Path path);
bool path_named(const char *name, Path *path);

/* What fits the registers of a GPU: threads of a block that multiply, at most, and activation rows of a pass. Many rows,
 * kernels for any format, and copies by threads leave room for fewer threads; the compiler needs more registers for newer
 * GPUs. With the copy engine a warp more starts the copies, or a warpgroup where registers can be handed over. */
COLI_FN constexpr int service_threads(int capability, Path path) {
    return path != Path::kHopper ? 0 : capability == 90 ? 4 * kWarp : kWarp;
}
COLI_FN constexpr int product_threads(int capability, Path path, int pass_rows, bool limbs_only) {
    const bool many = limbs_only ? pass_rows <= (path == Path::kHopper ? 8 : 2)
                                 : capability == 90 && path == Path::kHopper && pass_rows <= 4;
    const int threads = many ? 384 : 256;
    return capability == 90 ? threads : threads - service_threads(capability, path);
}
/* Kernels for any format start at four rows; on GPUs of 10.x the compiler gets along with eight rows better than with four.
 */
COLI_FN constexpr int least_pass_rows(int capability, Path path, bool limbs_only) {
    if (limbs_only) return 1;
    return path == Path::kAmpere && capability / 10 == 10 ? 8 : 4;
}
/* The path of kernels that stand for `path`: those for any format and the copy engine fit the registers of Hopper alone. */
COLI_FN constexpr Path product_path(int capability, Path path, bool limbs_only) {
    return path == Path::kHopper && capability != 90 && !limbs_only ? Path::kAmpere : path;
}
COLI_FN constexpr int most_pass_rows(int capability, Path path) {
    if (path == Path::kPlain || capability >= 120) return 4;
    return path == Path::kAmpere ? 8 : 16;
}

/* The best path of a GPU, or what limit_path says where that is less: a Hopper GPU can take all of them. */
Path path_of(const GpuTraits &gpu);
/* For tests. Not to be called while products are launched. */
void limit_path(Path most);

/* A common GPU of that capability, for plans without a device; false where none is known. */
bool typical_gpu(int capability, GpuTraits *gpu);

/* One launch of kernels/product.cuh: a grid of (blocks, experts). Offsets are bytes in a block's shared memory, which
 * begins with the E8 codebook where there is one. */
struct ProductPlan {
    Path path;
    bool gate_up;  /* gate and up with the activation, or down */
    int pass_rows; /* activation rows that share one decode: 1, 2, 4, 8 or 16 */
    int blocks;    /* that share an expert */
    int threads;   /* of a block */
    int warps;     /* that multiply; with the copy engine others feed them: */
    int first_feeder, feeders;
    int stages;       /* slots of each warp, on their way or in work */
    int slot_bytes;   /* one tile, or those of a slice, of two strips */
    int chunk_slices; /* slices whose activations are in shared memory together */
    int round_pairs;  /* pairs of strips between two barriers */
    bool codebook;    /* a matrix is E8 */
    bool rotate;      /* the block rotates its activations itself */
    bool limbs_only;  /* all matrices are multiplied as bytes */
    int ring_offset, barriers_offset, walks_offset, parts_offset, factors_offset, partials_offset, partials_floats,
        totals_offset, rotated_offset, signs_offset, shared_bytes;
};

struct RotationPlan {
    int pieces; /* grid x: blocks that cover a row */
    int rows;   /* grid y; 0: nothing is rotated */
};

struct GroupPlan {
    ProductPlan hidden, down;
    RotationPlan rotation;
};

/* Matrices [O, I] of `experts` experts, `matrices` of them at once (gate and up: 2), with at most `rows` activation rows.
 */
struct ProductTask {
    Path path;
    int O, I, experts, rows, matrices;
    int tile_bytes; /* of the largest format among them */
    bool codebook, rotates;
    bool bytes, halves; /* some are multiplied as bytes, as fp16 */

    bool operator==(const ProductTask &other) const {
        return path == other.path && O == other.O && I == other.I && experts == other.experts && rows == other.rows &&
               matrices == other.matrices && tile_bytes == other.tile_bytes && codebook == other.codebook &&
               rotates == other.rotates && bytes == other.bytes && halves == other.halves;
    }
};

/* A plan of no warps where shared memory is too small for any. */
ProductPlan plan_product(const GpuTraits &gpu, const ProductTask &task);

/* Plans that name every kernel that plan_product may choose on a GPU; of each, path, pass_rows and limbs_only alone. */
std::vector<ProductPlan> all_variants(const GpuTraits &gpu);

/* Remembers the plans of a device's last tasks: hosts repeat them call after call. */
class PlanCache {
  public:
    const ProductPlan &product(const GpuTraits &gpu, const ProductTask &task);

  private:
    struct Entry {
        ProductTask task;
        ProductPlan plan;
    };
    static constexpr size_t kEntries = 32;
    Entry entries_[kEntries]{}; /* no memory is asked for in a call */
    size_t count_ = 0, oldest_ = 0;
};

RotationPlan plan_rotation(int dim, int rows);

/* One line, without its end; returns the length that it needs. */
int describe(const ProductPlan &plan, const char *name, int experts, char *text, size_t capacity);
int describe(const RotationPlan &plan, int experts, char *text, size_t capacity);

} // namespace coli

#endif
