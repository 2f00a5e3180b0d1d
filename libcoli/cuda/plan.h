/* plan.h - rows a pass, threads, blocks, buffers: every tuning choice, as constants and plain functions. */
#ifndef COLI_CUDA_PLAN_H
#define COLI_CUDA_PLAN_H

#include <cstddef>

namespace coli {

/* Warps of a block of the product kernels; each warp has one row of the weights. */
constexpr int kWarpsPerBlock = 8;
/* Activation rows that share one decode of the weights, at most. */
constexpr int kMaxRowsPerPass = 16;
/* Limit of a grid's y and z. Kernels walk on by the grid's size, so that any number of rows fits. */
constexpr int kMaxGrid = 65535;
/* Elements of a rotation block that one thread block transforms in shared memory (32 KB). */
constexpr int kRotationPiece = 8192;
constexpr int kRotationThreads = 256;

/* Threads of a block that packs or unpacks E8, a super-block each; and the buffer that blocks travel through, a few rows at
 * a time. */
constexpr int kPackThreads = 128;
constexpr size_t kStagingBytes = size_t{8} << 20;

struct ProductPlan {
    int rows_per_pass; /* 1, 4 or 16: the kernel's ROWS */
    int row_blocks;    /* grid x: blocks that cover the O weight rows */
    int passes;        /* grid y: passes over the activation rows */
};

struct RotationPlan {
    int pieces; /* grid x: blocks that cover a row */
    int rows;   /* grid y; 0: nothing is rotated */
};

struct GroupPlan {
    ProductPlan hidden, down;
    RotationPlan rotation;
};

/* For O weight rows and at most `rows` activation rows an expert. */
ProductPlan plan_product(int O, int rows);
RotationPlan plan_rotation(int dim, int rows);
/* For experts with gate and up [H, D] and at most `rows` rows each; `rotates` where one of them rotates its hidden rows. */
GroupPlan plan_group(int D, int H, int rows, bool rotates);

} // namespace coli

#endif
