"""What is measured: the formats, shapes and numbers of rows that a command line names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import pycoli

from ...errors import ArgumentError, ColiError

DEFAULT_ROWS = (1, 2, 4, 8, 16, 32)
MOST_ROWS = 65536


class Shape(NamedTuple):
    """Experts of gate and up [hidden, dim], down [dim, hidden]."""

    dim: int
    hidden: int

    @property
    def label(self) -> str:
        """Such as "glm 6144x2048"."""
        name = next((name for name, shape in SHAPES.items() if shape == self), None)
        return f"{name} {self.dim}x{self.hidden}" if name else f"{self.dim}x{self.hidden}"

    @property
    def weights(self) -> int:
        """Of one expert."""
        return 3 * self.dim * self.hidden


SHAPES = {
    "glm": Shape(6144, 2048),
    "deepseek": Shape(7168, 2048),
    "qwen": Shape(2048, 768),
    "olmoe": Shape(2048, 1024),
}
"""Experts of known models."""


class Settings(NamedTuple):
    """What to measure and how often."""

    formats: Sequence[str]
    shapes: Sequence[Shape]
    rows: Sequence[int]
    experts: int
    layers: int | None  # None: as many as it takes to come from memory, not from the cache
    repetitions: int


def parse_formats(text: str, on_gpu: bool) -> list[str]:
    """``"e8,int4-g32"`` or ``"all"`` as names of formats; those without GPU kernels are refused for a GPU."""
    known = {fmt.name: fmt for fmt in pycoli.formats()}
    usable = [name for name, fmt in known.items() if fmt.on_gpu or not on_gpu]
    if text == "all":
        return usable
    names = _parts(text)
    for name in names:
        try:
            generic = pycoli.weights.format_feature(name)
        except ColiError as error:
            raise ArgumentError(f"--formats: {error}") from error
        if generic not in usable:
            raise ArgumentError(f"--formats: expected formats with GPU kernels ({', '.join(usable)}), got {name}")
    return names


def parse_shapes(text: str) -> list[Shape]:
    """``"glm,4096x1024"`` or ``"all"`` as shapes."""
    if text == "all":
        return list(SHAPES.values())
    shapes = []
    for part in _parts(text):
        match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", part)
        shape = Shape(int(match[1]), int(match[2])) if match else SHAPES.get(part)
        if shape is None or 0 in shape:
            raise ArgumentError(f"--shapes: expected {', '.join(SHAPES)}, all, or DIMxHIDDEN, got {part!r}")
        shapes.append(shape)
    return list(dict.fromkeys(shapes))


def parse_rows(text: str) -> list[int]:
    """``"1,4,16"`` as numbers of rows for each expert."""
    rows = []
    for part in _parts(text):
        if not re.fullmatch(r"[0-9]{1,9}", part) or not 1 <= int(part) <= MOST_ROWS:
            raise ArgumentError(f"--rows: expected numbers from 1 to {MOST_ROWS} such as 1,4,16, got {part!r}")
        rows.append(int(part))
    return list(dict.fromkeys(rows))


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",")))
