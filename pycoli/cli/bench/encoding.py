"""Times of encoding a matrix as E8 on the GPU, rotation and copies included, and on the CPU, in the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

import pycoli

from ...device import Device
from .cases import Shape
from .results import Result

QUALITIES = ("reference", "search")

_CPU_ROWS = 64
"""Rows that the CPU is timed with: all of them would take seconds."""


class Encodings:
    """The gate of one expert, encoded by each quality."""

    def __init__(self, shape: Shape, device: Device):
        self._shape = shape
        self._w = np.random.default_rng(0).standard_normal((shape.hidden, shape.dim), np.float32)
        self._part = self._w[:_CPU_ROWS]
        self._encode = {quality: partial(pycoli.encode, fmt="e8", quality=quality) for quality in QUALITIES}
        self._device = device
        self._there = device.backend.has("encode_e8")

    def works(self) -> dict[str, Callable[[int], float]]:
        works = {}
        for quality, encode in self._encode.items() if self._there else ():
            works[on_gpu(quality)] = partial(_timed, partial(encode, self._w, device=self._device))
            works[on_cpu(quality)] = partial(_timed, partial(encode, self._part))
        return works

    def errors(self) -> dict[str, float]:
        """0 where the GPU gives the bytes that the CPU gives for all rows, else infinity."""
        errors = {}
        for quality, encode in self._encode.items() if self._there else ():
            here, there = encode(self._w), encode(self._w, device=self._device)
            errors[on_gpu(quality)] = 0.0 if np.array_equal(here.data, there.data) else np.inf
        return errors

    def results(self, seconds: Mapping[str, Sequence[float]], errors: Mapping[str, float]) -> list[Result]:
        rows = {what: self._part if what in map(on_cpu, QUALITIES) else self._w for what in self.works()}
        return [
            Result(what, "e8", self._shape, w.nbytes, seconds.get(what, ()), weights=w.size, error=errors.get(what))
            for what, w in rows.items()
        ]


def on_gpu(quality: str) -> str:
    """The name of a result."""
    return f"encode {quality}"


def on_cpu(quality: str) -> str:
    """The name of a result."""
    return f"encode {quality}, CPU"


def _timed(call: Callable[[], pycoli.Weights], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start
