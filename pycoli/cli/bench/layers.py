"""Device times of expert layers: CUDA graphs of one group call a layer, beside reads and copies of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from ..._lib import ffi
from ...device import Device
from ...errors import DeviceError
from .cases import Settings, Shape
from .driver import Driver
from .resident import Layers, layers_needed
from .results import COPY, READ, Result
from .samples import Sample, limit
from .timing import interleave

PROBE = "coli_cuda_probe_dev"
NO_PROBE = f"ceiling not measured: the library lacks {PROBE}"

_READ_KIND, _COPY_KIND = 0, 1
_ALIGNMENT = 512  # of a layer's place in the probes' memory; half of it is still whole cache lines
_UNIT = 16  # bytes that a thread reads at once
_CHECKED_BYTES = 4096


def measure(fmt: str, shape: Shape, settings: Settings, device: Device, driver: Driver) -> list[Result]:
    """Times of a layer for every number of rows, and of the ceilings; those that are wrong have none."""
    sample = Sample(fmt, shape)
    layer_bytes = settings.experts * sample.nbytes
    count = settings.layers or layers_needed(layer_bytes, driver.l2_bytes)
    with ExitStack() as stack:
        layers = stack.enter_context(Layers(sample, device, count, settings.experts))
        groups = {rows: stack.enter_context(Group(layers, rows, driver)) for rows in settings.rows}
        errors = {rows: group.eager_error() for rows, group in groups.items()}
        right = {rows: group for rows, group in groups.items() if errors[rows] <= limit(rows)}
        works: dict = {rows: group.run for rows, group in right.items()}
        probe = None
        if right and device.backend.has(PROBE):
            probe = stack.enter_context(_Probe(device, driver, count, layer_bytes))
            works = {READ: probe.read, **works, COPY: probe.copy}
        seconds = {key: [s / count for s in taken] for key, taken in interleave(works, settings.repetitions).items()}
        if probe:
            probe.check()
        for rows, group in right.items():
            errors[rows] = max(errors[rows], group.graph_error())

    def result(rows: int) -> Result:
        taken = seconds.get(rows, ()) if errors[rows] <= limit(rows) else ()
        weights = settings.experts * shape.weights
        return Result("layer", fmt, shape, layer_bytes, taken, settings.experts, rows, weights, errors[rows])

    results = [result(rows) for rows in settings.rows]
    if probe is None:
        return results
    read = Result(READ, fmt, shape, probe.read_bytes, seconds[READ], settings.experts)
    copy = Result(COPY, fmt, shape, probe.copied_bytes, seconds[COPY], settings.experts)
    return [*(r.against(read) for r in results), read, copy.against(read)]


class Group:
    """A graph of one group call a layer, all on the same rows. A context manager."""

    def __init__(self, layers: Layers, rows: int, driver: Driver):
        self._layers, self._driver, self._device = layers, driver, layers.device
        self._shape = (layers.experts * rows, layers.sample.shape.dim)
        self._calls = [layers.group(layer, rows) for layer in range(layers.count)]
        self._owned = ExitStack()

    def __enter__(self) -> Group:
        backend, driver = self._device.backend, self._driver
        with self._owned as owned, self._device._turn():
            size = backend._entry("coli_cuda_expert_group_workspace")(*self._calls[0])
            if size == 0:
                raise backend._error("coli_cuda_expert_group_workspace")
            x = self._layers.sample.input(self._shape[0])
            self._x, self._y = (owned.enter_context(driver.memory(x.nbytes)) for _ in range(2))
            self._workspace = (_address(owned.enter_context(driver.memory(size)), "void *"), size)
            driver.put(self._x, x)
            self._replay = owned.enter_context(driver.graph(self._enqueue_all))
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._owned.close()

    def run(self, replays: int) -> float:
        """Seconds of so many replays."""
        return self._driver.seconds(lambda: _repeat(self._replay, replays))

    def eager_error(self) -> float:
        """The larger relative RMS error of the first and the last layer, called one by one."""
        return max(self._error(layer, lambda layer=layer: self._enqueue(layer)) for layer in self._ends())

    def graph_error(self) -> float:
        """The relative RMS error of what a replay of the graph leaves: the results of the last layer."""
        return self._error(self._layers.count - 1, self._replay)

    def _ends(self) -> list[int]:
        return sorted({0, self._layers.count - 1})

    def _error(self, layer: int, work: Callable[[], None]) -> float:
        self._driver.put(self._y, np.full(self._shape, np.nan, np.float32))
        with self._device._turn():
            work()
        return self._layers.sample.error(self._driver.get(self._y, self._shape), self._layers.numbers(layer))

    def _enqueue_all(self) -> None:
        for layer in range(self._layers.count):
            self._enqueue(layer)

    def _enqueue(self, layer: int) -> None:
        x, y, stream = _address(self._x, "float *"), _address(self._y, "float *"), _stream(self._driver)
        call = (*self._calls[layer], y, x, *self._workspace, stream)
        self._device.backend._call("coli_cuda_expert_group_dev", *call)


class _Probe:
    """Graphs that read, or copy, as many bytes a layer as the weights of one. A context manager."""

    def __init__(self, device: Device, driver: Driver, count: int, layer_bytes: int):
        self._device, self._driver, self._count = device, driver, count
        self._stride = -(-layer_bytes // _ALIGNMENT) * _ALIGNMENT
        self._half = layer_bytes // 2 // _UNIT * _UNIT
        self.read_bytes, self.copied_bytes = layer_bytes // _UNIT * _UNIT, 2 * self._half
        self._owned = ExitStack()

    def __enter__(self) -> _Probe:
        with self._owned as owned, self._device._turn():
            self._memory = owned.enter_context(self._driver.memory(self._count * self._stride))
            self._read, self._copy = (
                owned.enter_context(self._driver.graph(work)) for work in (self._enqueue_reads, self._enqueue_copies)
            )
            self._owned = owned.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._owned.close()

    def read(self, replays: int) -> float:
        """Seconds of so many replays that read every layer's bytes."""
        return self._driver.seconds(lambda: _repeat(self._read, replays))

    def copy(self, replays: int) -> float:
        """Seconds of so many replays that copy half of every layer's bytes to the other half."""
        return self._driver.seconds(lambda: _repeat(self._copy, replays))

    def check(self) -> None:
        """DeviceError unless a copy arrives."""
        size = min(_CHECKED_BYTES, self._half)
        source = self._place(self._count - 1) + self._half - size
        pattern = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        self._driver.put(source, pattern)
        self._copy()
        if not np.array_equal(self._driver.get(source + self._target, (size,), np.uint8), pattern):
            raise DeviceError(f"{PROBE} copies wrong bytes: its times mean nothing")

    @property
    def _target(self) -> int:
        """Where the second half begins."""
        return self._stride // 2

    def _place(self, layer: int) -> int:
        return self._memory + layer * self._stride

    def _enqueue_reads(self) -> None:
        for layer in range(self._count):
            self._enqueue(_READ_KIND, self._place(layer), 0, self.read_bytes)

    def _enqueue_copies(self) -> None:
        for layer in range(self._count):
            place = self._place(layer)
            self._enqueue(_COPY_KIND, place, place + self._target, self._half)

    def _enqueue(self, kind: int, source: int, target: int, nbytes: int) -> None:
        source, target = _address(source, "void *"), _address(target, "void *")
        self._device.backend._call(PROBE, self._device.ordinal, kind, source, target, nbytes, _stream(self._driver))


def _address(number: int, ctype: str):
    return ffi.cast(ctype, number)


def _stream(driver: Driver):
    return _address(driver.stream, "void *")


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
