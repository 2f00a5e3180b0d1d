"""Layers of experts on a GPU, each in memory of its own, so that no layer finds its weights in the cache."""

from __future__ import annotations

import math
from contextlib import ExitStack

from ..._lib import ffi
from ...device import Device, Tensor
from .samples import Sample, number_of

CACHES = 4
"""What takes turns is together at least so many times the cache,"""

LEAST_BYTES = 512 * 2**20
"""and on a GPU so many bytes."""


def layers_needed(layer_bytes: int, cache_bytes: int) -> int:
    """Layers that take turns until the first one's weights have left the cache."""
    return math.ceil(max(CACHES * cache_bytes, LEAST_BYTES) / layer_bytes)


class Layers:
    """Resident layers. A context manager, which frees them.

    Attributes
    ----------
    sample : Sample
    device : Device
    count, experts : int
        Layers, and experts in each.
    """

    def __init__(self, sample: Sample, device: Device, count: int, experts: int):
        self.sample, self.device, self.count, self.experts = sample, device, count, experts
        self._owned = ExitStack()
        try:
            self._tensors = [
                [self._upload(sample.experts[number]) for number in self.numbers(layer)] for layer in range(count)
            ]
        except BaseException:
            self._owned.close()
            raise
        with device._turn():
            self._columns = [self._pointers(layer) for layer in self._tensors]

    @property
    def layer_bytes(self) -> int:
        return self.experts * self.sample.nbytes

    def numbers(self, layer: int) -> list[int]:
        """Which of the sample's experts stand in a layer."""
        return [number_of(layer, position) for position in range(self.experts)]

    def expert(self, layer: int, position: int = 0) -> tuple:
        """C handles of gate, up and down."""
        return tuple(column[position] for column in self._columns[layer])

    def tensors(self, layer: int, position: int = 0) -> tuple[Tensor, ...]:
        """Gate, up and down."""
        return self._tensors[layer][position]

    def group(self, layer: int, rows: int) -> tuple:
        """The first arguments of the C group functions, with so many rows for each expert."""
        return *self._columns[layer], ffi.new("int[]", [rows] * self.experts), self.experts

    def __enter__(self) -> Layers:
        return self

    def __exit__(self, *_) -> None:
        self._owned.close()

    def _upload(self, expert) -> tuple[Tensor, ...]:
        return tuple(self._owned.enter_context(Tensor(weights, self.device)) for weights in expert)

    @staticmethod
    def _pointers(layer: list[tuple[Tensor, ...]]) -> list:
        """Arrays of gates, ups and downs."""
        return [ffi.new("ColiCudaTensor *[]", [t._handle for t in column]) for column in zip(*layer, strict=True)]
