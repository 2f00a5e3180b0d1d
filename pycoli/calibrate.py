"""What activations tell an encoder about the columns of a matrix: Calibration, and importance matrices of ggml."""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ._arrays import MAX_DIM, as_float32, as_rows, check_finite, floats
from ._lib import check, lib
from .errors import ArgumentError, CheckpointError, ShapeError, StateError

MIN_ROWS = 64
"""Activations below this number say too little of the columns' relations; encoding falls back to searching."""


@dataclass(frozen=True)
class CalibrationReport:
    """How an encoding by quality="calibrated" went.

    Attributes
    ----------
    quality : str
        "calibrated", or "search" where there were too few activations.
    reason : str or None
        Why it is "search".
    rows : int or None
        Activations that were seen; None where the calibration came from importance.
    output_error : float
        Squared error of the outputs over the calibration's activations, in relation to the outputs' squares.
    search_output_error : float
        What quality="search" would have given.
    collect_seconds, encode_seconds : float
        Time that collecting the activations and encoding took.
    peak_bytes : int
        About the memory that it took at most, besides the matrix and its encoding.
    """

    quality: str
    reason: str | None
    rows: int | None
    output_error: float
    search_output_error: float
    collect_seconds: float
    encode_seconds: float
    peak_bytes: int


class CalibrationWarning(UserWarning):
    """An encoding that was to be calibrated could not be."""


class Calibration:
    """Sums over the activations that a matrix meets, for ``encode(..., quality="calibrated")``.

    Matrices of one input share it: gate and up of an expert, or all experts of a layer where rows of each are too few.

        calibration = pycoli.Calibration(columns)
        for x in batches:
            calibration.add(x)
        weights = pycoli.encode(w, "e8", quality="calibrated", activations=calibration)

    Not to be changed by several threads at once. Holds ``columns**2`` floats, and as many again once `exact` is given.

    Parameters
    ----------
    columns : int
        Columns of the matrix, which are the elements of an activation.

    Attributes
    ----------
    columns : int
    rows : int or None
        Activations added so far; None for one made by `from_importance`.
    seconds : float
        Time spent in `add`.
    """

    def __init__(self, columns: int):
        if not isinstance(columns, (int, np.integer)) or isinstance(columns, bool) or not 1 <= columns <= MAX_DIM:
            raise ArgumentError(f"columns must be a whole number of at least 1, got {columns!r}")
        self.columns = int(columns)
        self.rows: int | None = 0
        self.seconds = 0.0
        self._gram = np.zeros((self.columns, self.columns), np.float32)
        self._drift: np.ndarray | None = None  # sum of x^T (exact - x)

    @classmethod
    def from_importance(cls, importance) -> Calibration:
        """From mean squares of the activations' elements, float32 [columns], 0 or more: no relations between columns.

        Raises
        ------
        DtypeError, ShapeError, NotFiniteError
        ArgumentError
            An element is negative, or all are zero.
        """
        calibration = cls(1)
        importance = as_importance(importance)
        calibration.columns = importance.size
        calibration.rows = None
        # relations alone count: powers of two, so that no bit changes, keep sums clear of what float32 cannot hold
        calibration._gram = np.diag(np.ldexp(importance, -np.frexp(importance.max())[1]))
        return calibration

    def add(self, x, exact=None) -> None:
        """Adds activations.

        Parameters
        ----------
        x : float32 [..., columns]
            Plain rows as the matrix will meet them; not rotated. May be scaled by what a row counts for, such as the
            router's share.
        exact : float32 [..., columns], optional
            What the model gives in their place before anything is encoded, scaled likewise. The matrix is then encoded
            so that its products with `x` come close to those of the exact weights with `exact`.

        Raises
        ------
        DtypeError, ShapeError, NotFiniteError
            Nothing is added.
        StateError
            The calibration came from importance.
        """
        if self.rows is None:
            raise StateError("this Calibration came from importance; activations cannot be added to it")
        start = time.perf_counter()
        x, leading = as_rows(x, self.columns, "x")
        check_finite(x, "x")
        drift = None if exact is None else self._checked_exact(exact, leading) - x
        with np.errstate(over="ignore", invalid="ignore"):
            gram = self._gram + x.T @ x
            if drift is not None:
                drift = x.T @ drift
                if self._drift is not None:
                    drift += self._drift
        check_finite(gram, "sum of x x^T")
        if drift is not None:
            check_finite(drift, "sum of x (exact - x)^T")
            self._drift = drift
        self._gram = gram
        self.rows += len(x)
        self.seconds += time.perf_counter() - start

    def _checked_exact(self, exact, leading: tuple[int, ...]) -> np.ndarray:
        rows, exact_leading = as_rows(exact, self.columns, "exact")
        if exact_leading != leading:
            expected, got = ([*shape, self.columns] for shape in (leading, exact_leading))
            raise ShapeError(f"exact must have the shape of x, {expected}, got {got}")
        check_finite(rows, "exact")
        return rows

    def targets(self, w: np.ndarray, damping: float) -> np.ndarray:
        """What to encode in place of w [O, columns], so that products with x come close to w exact: float32."""
        if self._drift is None:
            return w
        gram = self._gram.astype(np.float64)
        gram[np.diag_indices_from(gram)] += max(damping, 1e-6) * np.diagonal(gram).mean()
        return w + w @ np.linalg.solve(gram, self._drift).T.astype(np.float32)

    def hessian(self, rotated: bool) -> np.ndarray:
        """Sum of x x^T, or of rotate(x) rotate(x)^T: float32 [columns, columns], a new array."""
        gram = self._gram.copy()
        for _ in range(2 if rotated else 0):  # rotates the rows, then the columns
            check(lib.coli_rotate_rows(floats(gram), floats(gram), *gram.shape))
            gram = np.ascontiguousarray(gram.T)
        return gram

    @property
    def peak_bytes(self) -> int:
        """About the memory that encoding with it takes, its own included: four float32 [columns, columns], and while
        targets for exact activations are computed, as much again in float64."""
        return (32 if self._drift is not None else 16) * self.columns**2

    def fallback_reason(self) -> str | None:
        """Why there is too little to calibrate with, or None."""
        if self.rows is not None and self.rows < MIN_ROWS:
            return f"{self.rows} activations are too few to calibrate with, at least {MIN_ROWS} are needed"
        if not np.diagonal(self._gram).any():
            return "the activations are all zero"
        return None

    def __repr__(self) -> str:
        source = "importance" if self.rows is None else f"{self.rows} activations"
        return f"<Calibration of {self.columns} columns from {source}>"


def as_importance(importance) -> np.ndarray:
    """Weights of columns: float32 [columns], finite, 0 or more, not all 0."""
    importance = as_float32(importance, "importance")
    if importance.ndim != 1 or importance.size == 0:
        raise ShapeError(f"importance must be [columns], got shape {list(importance.shape)}")
    check_finite(importance, "importance")
    if (importance < 0).any():
        column = int(np.argmax(importance < 0))
        raise ArgumentError(f"importance[{column}] must be 0 or more, got {importance[column]}")
    if not importance.any():
        raise ArgumentError("importance must not be 0 everywhere")
    return importance


def read_imatrix(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The importance vectors of a ggml imatrix file, in its binary or its GGUF form.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    dict of str to float32 array
        By the names of the GGUF tensors ("blk.0.ffn_down.weight"): mean squares of the activations, [columns], or for
        tensors of several experts [experts, columns] in a GGUF file; the binary form does not tell the number of
        experts, so there they are one after another. Experts that saw no activations have zeros. For
        `Calibration.from_importance`.

    Raises
    ------
    CheckpointError
        The file cannot be read, is damaged or is of neither form.
    NotProvidedError
        It is a GGUF file, and the Python package gguf is not installed.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            content = b"" if magic == b"GGUF" else magic + file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    vectors = _read_gguf_imatrix(path) if magic == b"GGUF" else _read_binary_imatrix(path, content)
    for name, vector in vectors.items():
        if not np.isfinite(vector).all() or (vector < 0).any():
            raise CheckpointError(f"{path}: {name}: expected finite numbers of at least 0")
    return vectors


def _read_binary_imatrix(path: Path, content: bytes) -> dict[str, np.ndarray]:
    """Count of entries, then for each: length and text of its name, calls, count and values; int32 and float32."""
    position = 0

    def take(size: int, what: str) -> bytes:
        nonlocal position
        if size < 0 or position + size > len(content):
            raise CheckpointError(f"{path}: not a readable imatrix file: {what} is beyond its end")
        position += size
        return content[position - size : position]

    def integer(what: str) -> int:
        return struct.unpack("<i", take(4, what))[0]

    vectors = {}
    count = integer("the number of entries")
    if count < 1:
        raise CheckpointError(f"{path}: not a readable imatrix file: it has {count} entries")
    for entry in range(count):
        try:
            name = take(integer(f"name of entry {entry}"), f"name of entry {entry}").decode()
        except UnicodeDecodeError:
            raise CheckpointError(f"{path}: not a readable imatrix file: name of entry {entry} is not text") from None
        calls, values = integer(f"calls of {name}"), integer(f"size of {name}")
        sums = np.frombuffer(take(4 * values, f"values of {name}"), "<f4").astype(np.float32)
        if name in vectors:
            raise CheckpointError(f"{path}: {name} is there twice")
        vectors[name] = sums / np.float32(max(calls, 1))
    return vectors


def _read_gguf_imatrix(path: Path) -> dict[str, np.ndarray]:
    from .gguf import GgufFile  # here, as that module builds on this one

    file, vectors = GgufFile(path), {}
    for stored, tensor in file.tensors.items():
        if not stored.endswith(".in_sum2"):
            continue
        name = stored.removesuffix(".in_sum2")
        counts = file.tensors.get(f"{name}.counts")
        rows = math.prod(tensor.shape[:-1])
        if tensor.dtype != "F32" or not 1 <= len(tensor.shape) <= 2:
            raise CheckpointError(
                f"{path}: {stored}: expected F32 [rows, columns], got {tensor.dtype} {list(tensor.shape)}"
            )
        if counts is None or counts.dtype != "F32" or math.prod(counts.shape) != rows:
            raise CheckpointError(f"{path}: {stored} {list(tensor.shape)}: expected {name}.counts, one for each row")
        calls = file.read(counts, 0, counts.nbytes).view("<f4").reshape(rows, 1)
        means = (file.rows(tensor, 0, rows) / np.maximum(calls, 1)).astype(np.float32)
        vectors[name] = means[0] if rows == 1 else means
    if not vectors:
        raise CheckpointError(f"{path}: a GGUF file without importance (tensors named *.in_sum2)")
    return vectors
