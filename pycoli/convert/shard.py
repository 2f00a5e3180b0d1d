"""Writing one file of a container: rows are encoded by several threads, and the file appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..device import Device
from ..errors import CheckpointError, ColiError
from ..layout import SCALES_SUFFIX, e8_tag, sizes
from ..weights import Weights, encode
from .plan import PlannedTensor, ShardPlan

__all__ = ["Loss", "ShardResult", "digest", "replace_file", "write_shard"]

_CHUNK_FLOATS = 2**20
_CHUNK_ROWS = 128
"""A chunk is this many rows, which is what one block of fp8 scales covers, or several times as many while they have
fewer floats than that."""


@dataclass
class Loss:
    """What encoding did to matrices of one kind and format."""

    tensors: int = 0
    weights: int = 0
    nbytes: int = 0
    error: float = 0.0  # sum of squared differences
    energy: float = 0.0  # sum of squared weights

    def add(self, other: Loss) -> None:
        for name in ("tensors", "weights", "nbytes", "error", "energy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def nmse(self) -> float:
        """The error's share of the weights' energy."""
        return self.error / self.energy if self.energy else float(self.error > 0)


@dataclass
class ShardResult:
    """A file that was written: its size, SHA-256, and losses by "kind|format"."""

    nbytes: int
    sha256: str
    losses: dict[str, Loss] = field(default_factory=dict)


@dataclass(frozen=True)
class _Chunk:
    planned: PlannedTensor
    first: int
    last: int


def write_shard(
    shard: ShardPlan,
    folder: Path,
    pool: ThreadPoolExecutor,
    jobs: int,
    progress: Callable[[int], object],
    device: Device | None = None,
) -> ShardResult:
    """Writes a file into the folder; under another name until all of it is on the disk.

    `progress` is called with the number of weights that were done; `device` encodes E8 in place of the CPU.
    """
    final, partial = folder / shard.name, folder / f"{shard.name}.partial"
    data_start = len(shard.header({}))
    try:
        with open(partial, "wb") as file:
            file.truncate(shard.file_bytes)

        def work(chunk: _Chunk) -> tuple[_Chunk, Loss]:
            return chunk, _write_chunk(partial, data_start, shard, chunk, device)

        result = ShardResult(shard.file_bytes, "")
        for chunk, loss in _bounded_map(pool, work, _chunks(shard), 2 * jobs):
            result.losses.setdefault(f"{chunk.planned.kind}|{chunk.planned.fmt}", Loss()).add(loss)
            progress(loss.weights)
        _write_header(partial, shard)
        result.sha256 = digest(partial)
        sync(partial)
        os.replace(partial, final)
        sync(folder)
        return result
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Gives a file its content all at once: whoever reads sees the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def digest(path: Path, start: int = 0, nbytes: int | None = None) -> str:
    """SHA-256 of a file, or of a part of it, in hexadecimal."""
    result, buffer = hashlib.sha256(), bytearray(2**20)
    left = path.stat().st_size - start if nbytes is None else nbytes
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left:
            count = file.readinto(memoryview(buffer)[: min(left, len(buffer))])
            if not count:
                raise CheckpointError(f"{path}: it has become shorter")
            result.update(memoryview(buffer)[:count])
            left -= count
    return result.hexdigest()


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk; folders can be waited for on POSIX alone."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def row_chunks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are worked on at once, so that memory does not grow with the matrix; none if it is empty."""
    if rows * columns == 0:
        return
    step = max(1, _CHUNK_FLOATS // max(1, columns) // _CHUNK_ROWS) * _CHUNK_ROWS
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def encode_rows(planned: PlannedTensor, first: int, w: np.ndarray, device: Device | None = None) -> Weights:
    """Rows of a matrix, from `first` on, in the encoding of the plan. `device` encodes E8 in place of the CPU.

    Raises
    ------
    CheckpointError
        Names the tensor, and the first element that is NaN or infinite.
    """
    finite = np.isfinite(w)
    if not finite.all():
        row, column = (int(i) for i in np.unravel_index(int(np.argmin(finite)), w.shape))
        raise CheckpointError(
            f"{planned.tensor.source}: expected finite weights, got {w[row, column]} at [{first + row}, {column}]"
        )
    try:
        fmt = planned.encoding.fmt
        return encode(w, fmt, quality=planned.quality, device=device if fmt == "e8" else None)
    except ColiError as error:
        raise CheckpointError(f"{planned.tensor.source}: rows {first} to {first + len(w) - 1}: {error}") from error


def _chunks(shard: ShardPlan) -> Iterator[_Chunk]:
    for planned in shard.tensors:
        if planned.encoding is None and not planned.tensor.is_float:
            yield _Chunk(planned, 0, planned.tensor.row_count)
        else:
            for first, last in row_chunks(*planned.matrix_shape):
                yield _Chunk(planned, first, last)


def _write_chunk(path: Path, data_start: int, shard: ShardPlan, chunk: _Chunk, device: Device | None) -> Loss:
    planned, first, last = chunk.planned, chunk.first, chunk.last
    tensor = planned.tensor
    entry = shard.entries[tensor.name]
    start = data_start + entry.offset
    loss = Loss(tensors=int(first == 0), weights=(last - first) * tensor.columns)
    if planned.encoding is None:
        data = tensor.rows(first, last) if tensor.is_float else tensor.raw()
        loss.nbytes = data.nbytes
        _write_at(path, start + (4 * first * tensor.columns if tensor.is_float else 0), data)
        return loss
    fmt = planned.encoding.fmt
    if planned.take_over:
        data, scales = tensor.native_rows(first, last)
    else:
        w = tensor.rows(first, last)
        encoded = encode_rows(planned, first, w, device)
        data, scales = encoded.data, encoded.scales
        loss.error, loss.energy = squared_error(w, encoded.decode())
    before, scales_before = sizes(fmt, (first, tensor.columns)) if first else (0, 0)
    _write_at(path, start + before, data)
    loss.nbytes = data.nbytes
    scales_start = data_start + shard.entries[tensor.name + SCALES_SUFFIX].offset
    if fmt == "e8":
        if first == 0:
            _write_at(path, scales_start, e8_tag(planned.encoding.rotated))
    else:
        _write_at(path, scales_start + scales_before, scales)
        loss.nbytes += scales.nbytes
    return loss


def squared_error(w: np.ndarray, decoded: np.ndarray) -> tuple[float, float]:
    """Sums of the squared differences and of the squares, in float64, without BLAS, whose threads get in the way of
    those of the conversion."""
    w, decoded, error, energy = w.reshape(-1), decoded.reshape(-1), 0.0, 0.0
    for first in range(0, w.size, 2**14):
        part = w[first : first + 2**14].astype(np.float64)
        error += float(np.square(decoded[first : first + 2**14] - part).sum())
        energy += float(np.square(part).sum())
    return error, energy


def _write_at(path: Path, offset: int, data: np.ndarray) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        buffer = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
        while buffer:
            buffer = buffer[file.write(buffer) :]


def _write_header(path: Path, shard: ShardPlan) -> None:
    start = len(shard.header({}))
    checksums = {e.name: digest(path, start + e.offset, e.nbytes) for e in shard.entries.values()}
    _write_at(path, 0, np.frombuffer(shard.header(checksums), np.uint8))


def _bounded_map(pool: ThreadPoolExecutor, work: Callable, items: Iterable, limit: int) -> Iterator:
    """pool.map() with at most `limit` items under way. After an error nothing of it runs any more."""
    running = []
    try:
        for item in items:
            if len(running) >= limit:
                yield running.pop(0).result()
            running.append(pool.submit(work, item))
        while running:
            yield running.pop(0).result()
    finally:
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()
