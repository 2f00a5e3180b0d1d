"""Experts of random weights, rows for them, and the results that are right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np

import pycoli

from ..._lib import lib
from ...weights import empty_scales, parse_format
from ..measure import ERROR_LIMIT, ROWS_PER_CALL, RelativeError, expert_float64
from .cases import Shape

MANY_ROWS_LIMIT = 3e-4
"""ERROR_LIMIT for calls of more than ROWS_PER_CALL rows an expert."""

DISTINCT_EXPERTS = 2
"""Experts of different contents; a kernel that takes one for the other is found out."""

DISTINCT_ROWS = 13
"""Activation rows, repeated as needed. Not a power of two, so that a kernel that takes one tile's rows for another's is
found out."""

_TYPICAL_CODE = {"int8": 74, "int4": 4.6, "int2": 1.2, "int3-g64": 2.3, "fp8-e4m3-b128": 110}


class Sample:
    """Random experts in one format and shape.

    Attributes
    ----------
    fmt : str
    shape : Shape
    experts : tuple of (gate, up, down) Weights
        DISTINCT_EXPERTS of them.
    nbytes : int
        Of one expert.
    """

    def __init__(self, fmt: str, shape: Shape, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.fmt, self.shape = fmt, shape
        D, H = shape
        self.experts = tuple(
            (random_weights(rng, fmt, H, D), random_weights(rng, fmt, H, D), random_weights(rng, fmt, D, H))
            for _ in range(DISTINCT_EXPERTS)
        )
        self.nbytes = sum(weights.nbytes for weights in self.experts[0])
        self._rows = rng.standard_normal((DISTINCT_ROWS, D), dtype=np.float32)
        self._expected = np.stack([expert_float64(*map(_decoded, expert), self._rows) for expert in self.experts])

    def rows(self, count: int) -> np.ndarray:
        """Plain activations [count, D]."""
        return self._rows[_row_numbers(count)]

    def input(self, count: int) -> np.ndarray:
        """rows() as C functions want them: rotated where gate and up are."""
        rows = self.rows(count)
        return pycoli.rotate(rows) if self.experts[0][0].rotated else rows

    def error(self, y: np.ndarray, numbers: Iterable[int]) -> float:
        """Relative RMS error of results [n * S, D]: of the experts with these numbers (see experts), each with S of
        rows(n * S). Infinite where they are not numbers."""
        return _error(y, self._expected, list(numbers))

    @cached_property
    def _expected_products(self) -> np.ndarray:
        gates = [_decoded(gate).astype(np.float64) for gate, _, _ in self.experts]
        return np.stack([self._rows.astype(np.float64) @ gate.T for gate in gates])

    def product_error(self, y: np.ndarray, number: int) -> float:
        """Relative RMS error of rows(S) times the gate of one expert, [S, H]."""
        return _error(y, self._expected_products, [number])


def limit(rows: int) -> float:
    """The largest error that passes for right, with so many rows for an expert."""
    return ERROR_LIMIT if rows <= ROWS_PER_CALL else MANY_ROWS_LIMIT


def number_of(layer: int, position: int) -> int:
    """Which of Sample.experts stands at a position of a layer."""
    return (layer + position) % DISTINCT_EXPERTS


def random_weights(rng: np.random.Generator, fmt: str, rows: int, columns: int) -> pycoli.Weights:
    """A matrix of random bytes whose weights are finite, and keep activations about as large as they are."""
    number, group = parse_format(fmt)
    magnitude = 1 / math.sqrt(columns)
    data = np.frombuffer(bytearray(rng.bytes(lib.coli_weight_bytes(number, rows, columns))), np.uint8)
    if number == lib.COLI_F32:
        data = (4 * magnitude * (rng.random(rows * columns, dtype=np.float32) - np.float32(0.5))).view(np.uint8)
    elif number == lib.COLI_E8:
        blocks = data.reshape(-1, 98)  # with an fp16 super-scale at the end
        blocks[:, 96:] = _between(rng, 0.005, 0.01, (len(blocks), 1), magnitude).astype("<f2").view(np.uint8)
    elif number == lib.COLI_FP8_B128:
        data[data & 0x7F == 0x7F] ^= 1  # the two NaNs
    scales = empty_scales(number, rows, columns, group)
    if scales is not None and scales.dtype == np.uint8:  # powers of two
        scales[:] = rng.integers(-3, 2, scales.shape) + 127 + round(math.log2(magnitude))
    elif scales is not None:
        typical = _TYPICAL_CODE["int4" if number == lib.COLI_INT4_GROUPED else fmt]
        scales[:] = _between(rng, 0.5, 1.5, scales.shape, magnitude / typical)
    return pycoli.Weights.from_bytes(data, fmt=fmt, shape=(rows, columns), scales=scales)


def _decoded(weights: pycoli.Weights) -> np.ndarray:
    return weights.decode()


def _between(rng: np.random.Generator, low: float, high: float, shape: tuple[int, ...], unit: float) -> np.ndarray:
    return unit * rng.uniform(low, high, shape)


def _row_numbers(count: int) -> np.ndarray:
    return np.arange(count) % DISTINCT_ROWS


def _error(y: np.ndarray, expected: np.ndarray, numbers: list[int]) -> float:
    experts = np.repeat(numbers, len(y) // len(numbers))
    error = RelativeError()
    error.add(y, expected[experts, _row_numbers(len(y))])
    return math.inf if math.isnan(error.value) else error.value
