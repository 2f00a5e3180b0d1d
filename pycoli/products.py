"""Products with encoded matrices: y = x w^T, and one expert. Activations are plain; rotation is handled here.

The functions without a device argument work on matrices that are in place: Weights compute on the CPU, Tensors on their
device.
"""

from __future__ import annotations

import numpy as np

from ._arrays import as_rows, floats
from ._lib import check, ffi, lib
from .errors import ShapeError
from .placement import Matrix, check_is_matrix, compute
from .weights import Weights, rotate


def matmul(x, weights: Matrix, device=None) -> np.ndarray:
    """y = x w^T.

    Parameters
    ----------
    x : float32 [..., I]
        Plain activations, never rotated ones. float16 and bfloat16 are converted exactly.
    weights : Weights or Tensor
        [O, I]. Weights for a GPU are uploaded for the time of the call; a Tensor stays where it is.
    device : None, "cpu", "cuda:0", int or Device
        None is the best: a GPU where there is one that takes the format, else the CPU; explain() says which and why. A
        Tensor computes on its own device.

    Returns
    -------
    float32 [..., O]

    Raises
    ------
    DtypeError, ShapeError, FreedError
    DeviceError, NotProvidedError, OutOfMemoryError
        The named GPU cannot do it. With device=None, where the GPU fails the CPU does the work, with a RuntimeWarning.
    """
    check_is_matrix(weights, "weights")
    rows, leading = as_rows(x, weights.shape[1], "x")
    y = compute([weights], device, lambda matrices: product(rows, *matrices))
    return y.reshape(*leading, weights.shape[0])


def expert_mlp(x, gate: Matrix, up: Matrix, down: Matrix, device=None) -> np.ndarray:
    """One expert: y = down(silu(gate x) * (up x)).

    Parameters
    ----------
    x : float32 [..., D]
        Plain activations.
    gate, up : Weights or Tensor
        [H, D], in any formats.
    down : Weights or Tensor
        [D, H].
    device : None, "cpu", "cuda:0", int or Device
        As in matmul().

    Returns
    -------
    float32 [..., D]

    Raises
    ------
    As matmul().
    """
    check_expert(gate, up, down)
    rows, leading = as_rows(x, gate.shape[1], "x")
    return compute([gate, up, down], device, lambda matrices: expert(rows, *matrices)).reshape(*leading, gate.shape[1])


def check_expert(gate: Matrix, up: Matrix, down: Matrix) -> None:
    """Raises unless the matrices can be an expert's: gate and up [H, D], down [D, H]."""
    for matrix, name in ((gate, "gate"), (up, "up"), (down, "down")):
        check_is_matrix(matrix, name)
    if up.shape != gate.shape:
        raise ShapeError(f"up must have gate's shape {list(gate.shape)}, got {list(up.shape)}")
    if down.shape != gate.shape[::-1]:
        raise ShapeError(
            f"down must be {list(gate.shape[::-1])} for a gate of {list(gate.shape)}, got {list(down.shape)}"
        )


def product(x: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Plain rows float32 [S, I] times a matrix [O, I] in place: float32 [S, O]."""
    x = rotate(x) if matrix.rotated else x
    y = np.empty((len(x), matrix.shape[0]), np.float32)
    if isinstance(matrix, Weights):
        check(lib.coli_matmul(matrix._matrix, floats(x), len(x), floats(y)))
        return y
    with matrix.gpu._turn():
        slot = ffi.new("ColiCudaTensor **", matrix._handle)
        if len(x):
            size = (len(x), matrix.shape[1], matrix.shape[0])
            place = (matrix.gpu.ordinal, matrix.group_size or 0)
            data = (ffi.NULL, ffi.NULL, matrix._matrix.format)
            matrix.gpu.backend._call("coli_cuda_matmul", slot, floats(y), floats(x), *data, *size, *place)
    return y


def expert(x: np.ndarray, gate: Matrix, up: Matrix, down: Matrix) -> np.ndarray:
    """Plain rows float32 [S, D] through an expert in place: float32 [S, D]."""
    if why_not_one_call("expert_mlp", gate, up, down):
        return _expert_by_parts(x, gate, up, down)
    x = rotate(x) if gate.rotated else x
    y = np.empty_like(x)
    if isinstance(gate, Weights):
        matrices = (gate._matrix, up._matrix, down._matrix)
        check(lib.coli_expert_mlp(*matrices, floats(x), len(x), floats(y)))
        return y
    with gate.gpu._turn():
        handles = (gate._handle, up._handle, down._handle)
        if len(x):
            gate.gpu.backend._call("coli_cuda_expert_mlp", *handles, floats(y), floats(x), len(x))
    return y


def why_not_one_call(feature: str, gate: Matrix, up: Matrix, down: Matrix) -> str | None:
    """Why the C function of a feature cannot compute an expert in place; None when it can.

    The features are "expert_mlp", "expert_group" and "issue_take". All take one x for gate and up, rotated or not.
    """
    if isinstance(gate, Weights):
        if feature != "expert_mlp":
            return "experts on the CPU are computed one after the other"
        if gate.rotated != up.rotated:
            return "its gate and up matrices need different inputs: one is stored rotated, the other is not"
        return None
    return gate.gpu.backend._why_not_expert(feature, gate._matrix, up._matrix, down._matrix)


def _expert_by_parts(x: np.ndarray, gate: Matrix, up: Matrix, down: Matrix) -> np.ndarray:
    g = product(x, gate)
    with np.errstate(over="ignore"):  # exp(-g) may be infinite: g / inf is the right -0
        hidden = g / (1 + np.exp(-g)) * product(x, up)
    return product(hidden, down)
