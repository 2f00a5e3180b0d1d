"""Writing one file of a container: rows are encoded by several threads, and the file appears whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..device import Device
from ..errors import CheckpointError, ColiError
from ..layout import SCALES_SUFFIX, e8_tag, sizes
from ..naming import expert_place
from ..weights import Weights, encode, format_feature
from .calibration import CalibrationTotals, Calibrator
from .plan import CALIBRATED, PlannedTensor, ShardPlan
from .source import check_finite_rows

__all__ = ["Loss", "ShardResult", "digest", "replace_file", "write_shard"]

_CHUNK_FLOATS = 2**20
_CHUNK_ROWS = 128
"""A chunk is this many rows, which is what one block of fp8 scales covers, or several times as many while they have
fewer floats than that."""


NMSE_LIMITS = {
    "f32": 0.0,
    "int8": 2e-3,
    "fp8-e4m3-b128": 5e-3,
    "mxfp4": 0.05,
    "int4": 0.08,
    "int4-g64": 0.08,
    "e8": 0.08,
    "int3-g64": 0.15,
    "int2": 1.0,
}
"""Error energy over weight energy above which a matrix counts as wrong: several times what the formats lose on Gaussian
weights, so that rows with outliers pass."""

CALIBRATED_LIMIT = 1.0
"""For e8 in a calibrated container: it gives up weights where activations never are. Zeros have 1, other weights 2."""


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
    """A file that was written: its size, SHA-256, losses by "kind|format", how calibrating went, and the names of the
    matrices that lost more than their format should."""

    nbytes: int
    sha256: str
    losses: dict[str, Loss] = field(default_factory=dict)
    calibration: CalibrationTotals = field(default_factory=CalibrationTotals)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Chunk:
    """Rows of a tensor."""

    planned: PlannedTensor
    first: int
    last: int


@dataclass(frozen=True)
class _Expert:
    """The matrices of an expert that are calibrated, those of them that are in the file."""

    members: tuple[PlannedTensor, ...]


def write_shard(
    shard: ShardPlan,
    folder: Path,
    pool: ThreadPoolExecutor,
    jobs: int,
    progress: Callable[[int], object],
    calibrator: Calibrator | None = None,
    device: Device | None = None,
) -> ShardResult:
    """Writes a file into the folder; under another name until all of it is on the disk.

    `progress` is called with the number of weights that were done. A shard with calibrated matrices needs a calibrator;
    in others, `device` encodes E8 in place of the CPU.
    """
    final, partial = folder / shard.name, folder / f"{shard.name}.partial"
    data_start = len(shard.header({}))
    try:
        with _naming(partial), open(partial, "wb") as file:
            file.truncate(shard.file_bytes)

        def work(part: _Chunk | _Expert) -> tuple[list[tuple[PlannedTensor, Loss]], CalibrationTotals]:
            if isinstance(part, _Expert):
                return _write_expert(partial, data_start, shard, part, calibrator)
            return [(part.planned, _write_chunk(partial, data_start, shard, part, device))], CalibrationTotals()

        result = ShardResult(shard.file_bytes, "")
        of_matrices = {planned.tensor.name: Loss() for planned in shard.tensors}
        for done, totals in _bounded_map(pool, work, _parts(shard), 2 * jobs):
            for planned, loss in done:
                result.losses.setdefault(f"{planned.kind}|{planned.fmt}", Loss()).add(loss)
                of_matrices[planned.tensor.name].add(loss)
                progress(loss.weights)
            result.calibration.add(totals)
        result.wrong = [p.tensor.name for p in shard.tensors if not of_matrices[p.tensor.name].nmse <= _limit(p)]
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
        with _naming(partial):
            partial.write_bytes(content)
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the system name the file; those of writing, such as that of a full disk, do not by themselves."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
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
    check_finite_rows(planned.tensor, first, w)
    try:
        fmt = planned.encoding.fmt
        return encode(w, fmt, quality=planned.quality, device=device if fmt == "e8" else None)
    except ColiError as error:
        raise CheckpointError(f"{planned.tensor.source}: rows {first} to {first + len(w) - 1}: {error}") from error


def _limit(planned: PlannedTensor) -> float:
    """The NMSE of a matrix above which something is wrong with it."""
    if planned.quality == CALIBRATED:
        return CALIBRATED_LIMIT
    return NMSE_LIMITS[format_feature(planned.fmt)] if planned.encoding else 0.0


def _parts(shard: ShardPlan) -> Iterator[_Chunk | _Expert]:
    """What is worked on at once; an expert comes when its first matrix does."""
    experts: dict[tuple, list[PlannedTensor]] = {}
    for planned in shard.tensors:
        if planned.quality == CALIBRATED:
            experts.setdefault(expert_place(planned.tensor.name)[:3], []).append(planned)
    for planned in shard.tensors:
        if planned.quality == CALIBRATED:
            if members := experts.pop(expert_place(planned.tensor.name)[:3], None):
                yield _Expert(tuple(members))
        elif planned.encoding is None and not planned.tensor.is_float:
            yield _Chunk(planned, 0, planned.tensor.row_count)
        else:
            for first, last in row_chunks(*planned.matrix_shape):
                yield _Chunk(planned, first, last)


def _write_expert(
    path: Path, data_start: int, shard: ShardPlan, expert: _Expert, calibrator: Calibrator
) -> tuple[list[tuple[PlannedTensor, Loss]], CalibrationTotals]:
    done, totals = [], CalibrationTotals()
    for planned, (w, (encoded, of_matrix)) in zip(expert.members, calibrator.encode(expert.members), strict=True):
        totals.add(of_matrix)
        _write_encoded(path, data_start, shard, _Chunk(planned, 0, len(w)), encoded.data, encoded.scales)
        error, energy = squared_error(w, encoded.decode())
        done.append((planned, Loss(1, w.size, encoded.data.nbytes, error, energy)))
    return done, totals


def _write_chunk(path: Path, data_start: int, shard: ShardPlan, chunk: _Chunk, device: Device | None) -> Loss:
    planned, first, last = chunk.planned, chunk.first, chunk.last
    tensor = planned.tensor
    loss = Loss(tensors=int(first == 0), weights=(last - first) * tensor.columns)
    if planned.encoding is None:
        data = tensor.rows(first, last) if tensor.is_float else tensor.raw()
        loss.nbytes = data.nbytes
        start = data_start + shard.entries[tensor.name].offset
        _write_at(path, start + (4 * first * tensor.columns if tensor.is_float else 0), data)
        return loss
    if planned.take_over:
        data, scales = tensor.native_rows(first, last)
    else:
        w = tensor.rows(first, last)
        encoded = encode_rows(planned, first, w, device)
        data, scales = encoded.data, encoded.scales
        loss.error, loss.energy = squared_error(w, encoded.decode())
    loss.nbytes = _write_encoded(path, data_start, shard, chunk, data, scales)
    return loss


def _write_encoded(
    path: Path, data_start: int, shard: ShardPlan, chunk: _Chunk, data: np.ndarray, scales: np.ndarray | None
) -> int:
    """Writes encoded rows and their scales; returns their bytes, without the tag of E8."""
    name, encoding, columns = chunk.planned.tensor.name, chunk.planned.encoding, chunk.planned.tensor.columns
    before, scales_before = sizes(encoding.fmt, (chunk.first, columns)) if chunk.first else (0, 0)
    _write_at(path, data_start + shard.entries[name].offset + before, data)
    scales_start = data_start + shard.entries[name + SCALES_SUFFIX].offset
    if encoding.fmt != "e8":
        _write_at(path, scales_start + scales_before, scales)
        return data.nbytes + scales.nbytes
    if chunk.first == 0:
        _write_at(path, scales_start, e8_tag(encoding.rotated))
    return data.nbytes


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
    with _naming(path), open(path, "r+b", buffering=0) as file:
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
