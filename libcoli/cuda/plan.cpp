#include "plan.h"

#include <algorithm>

#include "../formats/signs.h"

namespace coli {

ProductPlan plan_product(int O, int rows) {
    const int rows_per_pass = rows == 1 ? 1 : rows <= 4 ? 4 : kMaxRowsPerPass;
    const int passes = std::clamp(coli_ceil_div(rows, rows_per_pass), 1, kMaxGrid);
    return {rows_per_pass, coli_ceil_div(O, kWarpsPerBlock), passes};
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

GroupPlan plan_group(int D, int H, int rows, bool rotates) {
    return {plan_product(H, rows), plan_product(D, rows), plan_rotation(H, rotates ? rows : 0)};
}

} // namespace coli
