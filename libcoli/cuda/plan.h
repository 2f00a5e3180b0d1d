/* plan.h - which kernel, how many rows a pass, how many blocks: every tuning choice, as plain functions. */
#ifndef COLI_CUDA_PLAN_H
#define COLI_CUDA_PLAN_H

namespace coli {

/* Warps of a block of the product kernels; each warp has one row of the weights. */
constexpr int kWarpsPerBlock = 8;
/* Activation rows that share one decode of the weights, at most. */
constexpr int kMaxRowsPerPass = 16;
/* Limit of a grid's y and z. Kernels walk on by the grid's size, so that any number of rows fits. */
constexpr int kMaxGrid = 65535;
/* Elements of a rotation block that one thread block transforms in shared memory (32 KB). */
constexpr int kRotationPiece = 8192;

struct ProductPlan {
    int rows_per_pass; /* 1, 4 or 16: the kernel's ROWS */
    int row_blocks;    /* grid x: blocks that cover the O weight rows */
    int passes;        /* grid y: passes over the activation rows */
};

/* For O weight rows and at most `rows` activation rows an expert. */
ProductPlan plan_product(int O, int rows);

/* Thread blocks that rotate one row of `dim`. */
int rotation_pieces(int dim);

} // namespace coli

#endif
