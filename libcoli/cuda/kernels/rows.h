/* kernels/rows.h - from the plan's rows a pass to the kernels' template parameter. */
#ifndef COLI_CUDA_KERNELS_ROWS_H
#define COLI_CUDA_KERNELS_ROWS_H

#include <type_traits>

namespace coli {

/* Calls launch(std::integral_constant<int, ROWS>). */
template <class Launch> void with_rows(int rows_per_pass, Launch launch) {
    switch (rows_per_pass) {
    case 1:
        launch(std::integral_constant<int, 1>{});
        break;
    case 4:
        launch(std::integral_constant<int, 4>{});
        break;
    default:
        launch(std::integral_constant<int, 16>{});
        break;
    }
}

} // namespace coli

#endif
