"""Comparison of a container with what it was made from: verify()."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .._json import read_json
from ..container import MANIFEST, Container
from ..errors import ArgumentError, CheckpointError
from ..layout import SCALES_SUFFIX
from ..weights import format_feature
from .plan import CALIBRATED, kind_of
from .shard import CALIBRATED_LIMIT, NMSE_LIMITS, Loss, digest, row_chunks, squared_error
from .source import Source, SourceTensor

__all__ = ["NMSE_LIMITS", "TensorResult", "verify"]


@dataclass
class TensorResult:
    """What verify() found of one tensor. `problem` says what is wrong, None if nothing is."""

    name: str
    kind: str
    fmt: str
    loss: Loss
    largest: float  # absolute difference
    problem: str | None


def verify(
    container: str | os.PathLike | Container,
    source: Source,
    *,
    limit: float | None = None,
    progress: Callable[[str], object] | None = None,
) -> Iterator[TensorResult]:
    """Decodes the tensors of a container one after the other and compares them with the source's.

    Parameters
    ----------
    limit : float, optional
        NMSE above which an encoded matrix is wrong, in place of NMSE_LIMITS and CALIBRATED_LIMIT.

    Yields
    ------
    TensorResult
        For every tensor of either side.

    Raises
    ------
    CheckpointError
        The container or the source as a whole cannot be read. What is wrong with one tensor is a problem in its result.
    """
    if limit is not None and not limit >= 0:
        raise ArgumentError(f"limit: expected a number of at least 0, got {limit!r}")
    container = container if isinstance(container, Container) else Container(container)
    limits = NMSE_LIMITS if limit is None else dict.fromkeys(NMSE_LIMITS, limit)
    if limit is None and _is_calibrated(container):
        limits = {**limits, "e8": CALIBRATED_LIMIT}
    seen = set()
    for tensor in source.tensors():
        seen.add(tensor.name)
        yield _compare(container, tensor, limits)
        if progress:
            progress(tensor.name)
    for name in container.names():
        if name not in seen:
            yield TensorResult(name, "other", "?", Loss(), 0.0, "the source has no such tensor")


def _is_calibrated(container: Container) -> bool:
    """Whether pycoli made it so; other programs' containers have no such manifest."""
    manifest = container.path / MANIFEST
    settings = read_json(manifest).get("settings") if manifest.is_file() else None
    return isinstance(settings, dict) and settings.get("quality") == CALIBRATED


def _compare(container: Container, tensor: SourceTensor, limits: dict[str, float]) -> TensorResult:
    result = TensorResult(tensor.name, kind_of(tensor), "?", Loss(tensors=1), 0.0, None)
    try:
        file = container.file(tensor.name)
        result.problem = _changed(container, tensor.name)
        if file.dtype(tensor.name) == "U8" and tensor.is_float:
            _compare_encoded(container, tensor, limits, result)
        else:
            _compare_exact(container, tensor, result)
    except CheckpointError as error:
        result.problem = str(error)
    return result


def _changed(container: Container, name: str) -> str | None:
    """Whether a tensor or its scales are not what their checksum says."""
    for part in (name, name + SCALES_SUFFIX):
        if part in container and (stated := container.checksum(part)):
            file = container.file(part)
            if digest(file.path, file.offset(part), file.nbytes(part)) != stated:
                return f"{part} is not what its checksum says"
    return None


def _compare_encoded(
    container: Container, tensor: SourceTensor, limits: dict[str, float], result: TensorResult
) -> None:
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{tensor.name}: encoded, but {list(tensor.shape)} in the source")
    stored = container.stored(tensor.name, (tensor.shape[0], tensor.shape[1]))
    result.fmt, loss = stored.encoding.fmt, result.loss
    loss.weights, loss.nbytes = tensor.row_count * tensor.columns, stored.nbytes
    for first, last in row_chunks(*stored.shape):
        original, decoded = tensor.rows(first, last), stored.weights(first, last).decode()
        error, energy = squared_error(original, decoded)
        loss.error, loss.energy = loss.error + error, loss.energy + energy
        result.largest = max(result.largest, float(np.abs(decoded - original).max()))
    allowed = limits[format_feature(result.fmt)]
    if not loss.nmse <= allowed:
        result.problem = result.problem or f"NMSE {loss.nmse:.3g}, above the limit of {allowed:g}"


def _compare_exact(container: Container, tensor: SourceTensor, result: TensorResult) -> None:
    file = container.file(tensor.name)
    result.fmt = file.dtype(tensor.name).lower()
    result.loss.weights, result.loss.nbytes = tensor.row_count * tensor.columns, file.nbytes(tensor.name)
    if file.shape(tensor.name) != tensor.shape:
        raise CheckpointError(
            f"{tensor.name}: expected shape {list(tensor.shape)}, got {list(file.shape(tensor.name))}"
        )
    if not tensor.is_float:
        same = file.dtype(tensor.name) == tensor.dtype and np.array_equal(file.data(tensor.name), tensor.raw())
        result.problem = result.problem or (None if same else "its bytes differ from the source's")
        return
    rows = file.view(tensor.name).reshape(tensor.row_count, tensor.columns)
    for first, last in row_chunks(tensor.row_count, tensor.columns):
        original, stored = tensor.rows(first, last), rows[first:last].astype(np.float32)
        if not np.array_equal(original, stored, equal_nan=True):
            result.problem = result.problem or "its values differ from the source's"
            with np.errstate(invalid="ignore"):
                result.largest = max(result.largest, float(np.nanmax(np.abs(stored - original))))
