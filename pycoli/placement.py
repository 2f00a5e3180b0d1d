"""Where matrices compute, and why there: one place for the choice between GPU and CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import environ
from typing import NamedTuple

from .backend import Backend, open_backend
from .device import Device, Tensor, names_apart, parse_device
from .errors import BackendError, DeviceError, DtypeError, OutOfMemoryError
from .weights import Weights, published_codebook

Matrix = Weights | Tensor


class Placement(NamedTuple):
    """Where a matrix computes: "cpu" or "cuda:0", and why not on a GPU (None when it is)."""

    device: str
    reason: str | None


def explain(weights: Matrix, device=None) -> Placement:
    """Where matmul() would compute with these weights and this device argument, and why. Raises what it would raise."""
    check_is_matrix(weights, "weights")
    target, reason = choose([weights], device)
    return Placement(target.name if target else "cpu", reason)


def choose(matrices: Sequence[Matrix], device=None) -> tuple[Device | None, str | None]:
    """The GPU for a computation, or None and the reason for the CPU.

    Tensors decide by where they are. Else `device` does: None asks for the best, and a GPU that cannot be had is then a
    reason; a GPU that is named and cannot be had is an error.
    """
    resident = [matrix.gpu for matrix in matrices if isinstance(matrix, Tensor)]
    if resident:
        return _common_device(resident, device), None
    if device is None:
        return _best(matrices)
    if parse_device(device) is None:
        return None, "the CPU was asked for"
    target = Device(device)
    for feature in _features(matrices):
        target.backend.require(feature)
    return target, None


def compute(matrices: Sequence[Matrix], device, work: Callable):
    """work(matrices) with all of them on the chosen device for the time of the call.

    Where the device was left open and the GPU fails, the CPU does the work, with a RuntimeWarning.
    """
    target, _ = choose(matrices, device)
    if target is None:
        return work(matrices)
    try:
        with uploaded(matrices, target) as tensors:
            return work(tensors)
    except (DeviceError, OutOfMemoryError) as error:
        if not may_fall_back(matrices, device):
            raise
        warnings.warn(f"computed on the CPU: {error}", RuntimeWarning, stacklevel=3)
        return work(matrices)


@contextmanager
def uploaded(matrices: Sequence[Matrix], device: Device) -> Iterator[list[Tensor]]:
    """Tensors for the matrices: those that are on the device already, and uploads that are freed at the end."""
    with ExitStack() as stack:
        yield [m if isinstance(m, Tensor) else stack.enter_context(Tensor(m, device)) for m in matrices]


def may_fall_back(matrices: Sequence[Matrix], device) -> bool:
    """Whether the CPU may take over from a GPU that fails: nobody named the GPU, and the weights are in host memory."""
    return device is None and not any(isinstance(matrix, Tensor) for matrix in matrices)


def check_is_matrix(matrix, what: str) -> None:
    if not isinstance(matrix, Matrix):
        raise DtypeError(f"{what} must be Weights or a Tensor, got {type(matrix).__name__}")


def _common_device(resident: Sequence[Device], device) -> Device:
    first = resident[0]
    for other in resident:
        if other != first:
            raise DeviceError(f"the matrices must be on one device, got {' and '.join(names_apart(first, other))}")
    if isinstance(device, Device) and device != first:
        there, wanted = names_apart(first, device)
        raise DeviceError(f"the matrices are on {there}, got device {wanted}")
    if device is not None and parse_device(device) != first.ordinal:
        raise DeviceError(f"the matrices are on {first.name}, got device={device!r}")
    return first


def _best(matrices: Sequence[Weights]) -> tuple[Device | None, str | None]:
    backend, reason = default_backend(environ.get("COLI_CUDA_LIB"))
    if backend is None:
        return None, reason
    reasons = [backend.why_no_device(), *map(backend.why_not, _features(matrices))]
    reason = next(filter(None, reasons), None)
    if reason:
        return None, reason
    if any(m.fmt == "e8" and (m.codebook or published_codebook()) != backend.e8_codebook for m in matrices):
        return None, "the E8 matrix has another codebook than the devices (see Backend.set_e8_codebook)"
    try:
        return Device(0, backend), None
    except (DeviceError, OutOfMemoryError) as error:
        return None, str(error)


def _features(matrices: Sequence[Matrix]) -> list[str]:
    return ["matmul", *dict.fromkeys(matrix.fmt for matrix in matrices)]


@functools.lru_cache(maxsize=8)
def default_backend(library: str | None) -> tuple[Backend | None, str | None]:
    """open_backend(), tried once for each value of COLI_CUDA_LIB."""
    try:
        return open_backend(), None
    except BackendError as error:
        return None, str(error)
