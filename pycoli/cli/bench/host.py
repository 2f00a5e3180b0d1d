"""Times of calls with host pointers: experts, uploads, updates, encoding, beside the copy from page-locked memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle

import numpy as np

from ..._arrays import floats
from ..._lib import ffi, lib
from ...device import Device, Tensor
from .cases import Settings, Shape
from .driver import Driver
from .encoding import Encodings
from .resident import Layers, layers_needed
from .results import Result
from .samples import Sample, limit
from .timing import interleave

EXPERT, GROUP, ISSUE, ISSUE_AND_TAKE = "expert_mlp", "expert_group", "issue", "issue + take"
UPLOAD, UPDATE = "upload", "update"

PINNED = "pinned copy"
"""The ceiling of uploads: a copy of the same bytes from page-locked memory, timed on the device."""


def measure(fmt: str, shape: Shape, settings: Settings, device: Device, driver: Driver) -> list[Result]:
    """One expert with one row, a group with one row for each, the same issued; an expert uploaded and updated; a matrix
    encoded, where that is E8."""
    sample = Sample(fmt, shape)
    encodings = Encodings(shape, device) if fmt == "e8" else None
    count = settings.layers or layers_needed(settings.experts * sample.nbytes, driver.l2_bytes)
    with ExitStack() as stack:
        layers = stack.enter_context(Layers(sample, device, count, settings.experts))
        calls, transfers = _Calls(layers), _Transfers(layers, driver, stack)
        errors = {**calls.errors(), **transfers.errors()}
        works = {**calls.works(), **transfers.works()}
        if encodings:
            errors |= encodings.errors()
            works |= encodings.works()
        right = {what: work for what, work in works.items() if errors.get(what, 0.0) <= limit(1)}
        seconds = interleave(right, settings.repetitions)

    def called(what: str, experts: int) -> Result:
        computes = 0 if what == ISSUE else experts  # the work of an issue is still to come when it returns
        nbytes, weights = computes * sample.nbytes, computes * shape.weights
        return Result(what, fmt, shape, nbytes, seconds.get(what, ()), experts, 1, weights, errors[what])

    def moved(what: str) -> Result:
        return Result(what, fmt, shape, sample.nbytes, seconds.get(what, ()), error=errors.get(what))

    pinned = moved(PINNED)
    return [
        *(called(what, 1 if what == EXPERT else settings.experts) for what in calls.works()),
        *(moved(what).against(pinned) for what in transfers.works() if what != PINNED),
        pinned,
        *(encodings.results(seconds, errors) if encodings else ()),
    ]


class _Calls:
    """Experts computed through host pointers, a layer after the other."""

    def __init__(self, layers: Layers):
        self._layers = layers
        self._backend, self._device = layers.device.backend, layers.device
        self._x = layers.sample.input(layers.experts)
        self._y = np.empty_like(self._x)
        self._groups = [layers.group(layer, 1) for layer in range(layers.count)]
        self._experts = [layers.expert(layer) for layer in range(layers.count)]
        self._turn = cycle(range(layers.count))

    def works(self) -> dict[str, Callable[[int], float]]:
        works = {EXPERT: self._timed(self._expert_mlp), GROUP: self._timed(self._expert_group)}
        if self._layers.experts <= lib.COLI_CUDA_MAX_ISSUE_ROWS:
            works |= {ISSUE: self._issues, ISSUE_AND_TAKE: self._timed(self._issue_and_take)}
        return works

    def errors(self) -> dict[str, float]:
        """Relative RMS errors on the last layer."""
        errors = {EXPERT: self._error(self._expert_mlp, 1), GROUP: self._error(self._expert_group)}
        if ISSUE in self.works():
            errors[ISSUE] = errors[ISSUE_AND_TAKE] = self._error(self._issue_and_take)
        return errors

    def _error(self, call: Callable[[int], np.ndarray], experts: int | None = None) -> float:
        last = self._layers.count - 1
        numbers = self._layers.numbers(last)[:experts]
        self._y.fill(np.nan)
        with self._device._turn():
            return self._layers.sample.error(call(last)[: len(numbers)], numbers)

    def _timed(self, call: Callable[[int], np.ndarray]) -> Callable[[int], float]:
        def work(calls: int) -> float:
            with self._device._turn():
                start = time.perf_counter()
                for _ in range(calls):
                    call(next(self._turn))
                return time.perf_counter() - start

        return work

    def _issues(self, calls: int) -> float:
        """The time until issue returns; the takes are not counted."""
        taken = 0.0
        for _ in range(calls):
            layer = next(self._turn)
            start = time.perf_counter()
            self._issue(layer)
            taken += time.perf_counter() - start
            self._take()
        return taken

    def _expert_mlp(self, layer: int) -> np.ndarray:
        self._backend._call("coli_cuda_expert_mlp", *self._experts[layer], floats(self._y), floats(self._x), 1)
        return self._y

    def _expert_group(self, layer: int) -> np.ndarray:
        self._backend._call("coli_cuda_expert_group", *self._groups[layer], floats(self._y), floats(self._x))
        return self._y

    def _issue(self, layer: int) -> None:
        self._backend._call("coli_cuda_expert_group_issue", *self._groups[layer], floats(self._x))

    def _take(self):
        taken = self._backend._entry("coli_cuda_expert_group_take")(self._device.ordinal)
        if not taken:
            raise self._backend._error("coli_cuda_expert_group_take")
        return taken

    def _issue_and_take(self, layer: int) -> np.ndarray:
        """The rows where the library keeps them, which is all that a take does."""
        self._issue(layer)
        return np.frombuffer(ffi.buffer(self._take(), self._y.nbytes), np.float32).reshape(self._y.shape)


class _Transfers:
    """The matrices of one expert on their way to the device, from pageable and from page-locked memory."""

    def __init__(self, layers: Layers, driver: Driver, stack: ExitStack):
        self._device, self._driver = layers.device, driver
        self._weights = layers.sample.experts
        self._tensors = layers.tensors(0)
        nbytes = layers.sample.nbytes
        self._pinned = stack.enter_context(driver.pinned(nbytes))
        self._memory = stack.enter_context(driver.memory(nbytes))
        self._next = cycle(self._weights)

    def works(self) -> dict[str, Callable[[int], float]]:
        return {UPLOAD: self._uploads, UPDATE: self._updates, PINNED: self._copies}

    def errors(self) -> dict[str, float]:
        """0 where the bytes that arrive are those that left, else infinity."""
        if self._device.backend.why_not("download"):
            return {}
        fresh = [Tensor(weights, self._device) for weights in self._weights[-1]]
        errors = {UPLOAD: _difference(fresh, self._weights[-1]), UPDATE: 0.0}
        for tensor in fresh:
            tensor.free()
        for weights in self._weights[::-1]:  # the last update leaves layer 0 as it was
            for tensor, matrix in zip(self._tensors, weights, strict=True):
                tensor.update(matrix)
            errors[UPDATE] = max(errors[UPDATE], _difference(self._tensors, weights))
        return errors

    def _uploads(self, calls: int) -> float:
        taken = 0.0
        for _ in range(calls):
            start = time.perf_counter()
            tensors = [Tensor(weights, self._device) for weights in self._weights[0]]
            taken += time.perf_counter() - start
            for tensor in tensors:
                tensor.free()
        return taken

    def _updates(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            for tensor, weights in zip(self._tensors, next(self._next), strict=True):
                tensor.update(weights)
        return time.perf_counter() - start

    def _copies(self, calls: int) -> float:
        def enqueue() -> None:
            for _ in range(calls):
                self._driver.enqueue_upload(self._memory, self._pinned)

        return self._driver.seconds(enqueue)


def _difference(tensors, weights) -> float:
    for tensor, matrix in zip(tensors, weights, strict=True):
        back = tensor.download()
        same_scales = matrix.scales is None or np.array_equal(back.scales, matrix.scales)
        if not (same_scales and np.array_equal(back.data, matrix.data)):
            return np.inf
    return 0.0
