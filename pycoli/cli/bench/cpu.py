"""CPU times of products and experts, beside reads and copies of memory by the same number of threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import numpy as np

import pycoli

from ...products import expert, product
from .cases import Settings, Shape
from .resident import CACHES
from .results import COPY, READ, Result
from .samples import Sample, limit
from .timing import interleave

SHARE_OF_MEMORY = 0.25
"""Of what is free: the weights that take turns are CACHES times the largest cache, but not more than this."""

_READ_BYTES = 128 * 2**20


def measure(fmt: str, shape: Shape, settings: Settings, memory: Memory) -> list[Result]:
    """Times of a gate product and of an expert for every number of rows, and of the ceilings."""
    sample = Sample(fmt, shape)
    copies = cycle(_copies(sample, memory.nbytes))
    keys = [(what, rows) for what in ("product", "expert") for rows in settings.rows]
    errors = {key: _error(sample, *key) for key in keys}
    works = {key: _work(sample, copies, *key) for key in keys if errors[key] <= limit(key[1])}
    seconds = interleave({READ: memory.read, **works, COPY: memory.copy}, settings.repetitions)
    read = Result(READ, fmt, shape, memory.read_bytes, seconds[READ])
    copy = Result(COPY, fmt, shape, memory.copied_bytes, seconds[COPY])

    def result(what: str, rows: int) -> Result:
        nbytes, weights = sample.nbytes, shape.weights
        if what == "product":
            nbytes, weights = sample.experts[0][0].nbytes, shape.dim * shape.hidden
        return Result(what, fmt, shape, nbytes, seconds.get((what, rows), ()), 1, rows, weights, errors[what, rows])

    return [*(result(*key).against(read) for key in keys), read, copy.against(read)]


class Memory:
    """The host's memory, to be read and copied by as many threads as libcoli uses. A context manager.

    Attributes
    ----------
    nbytes : int
        As much as leaves nothing of what was used before in the caches.
    cold : bool
        Whether there is enough free memory for that.
    read_bytes, copied_bytes : int
        That a call of read(), and of copy(), moves.
    """

    def __init__(self):
        wanted = CACHES * largest_cache()
        self.nbytes = int(max(min(wanted, SHARE_OF_MEMORY * _free_memory()), 1))
        self.cold = self.nbytes >= wanted
        self.read_bytes = min(_READ_BYTES, max(self.nbytes // 4, 4096)) // 8 * 8
        self.copied_bytes = 2 * self.read_bytes
        count = max(math.ceil(self.nbytes / self.read_bytes), 2)
        self._regions = np.ones((count, self.read_bytes // 8), np.uint64)
        self._turn = cycle(range(count))
        self._threads = pycoli.cpu.threads()

    def __enter__(self) -> Memory:
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown()

    def read(self, calls: int) -> float:
        """Seconds of so many reads."""
        return self._timed(calls, lambda part, _: part.max())

    def copy(self, calls: int) -> float:
        """Seconds of so many copies."""
        return self._timed(calls, lambda part, other: np.copyto(other, part))

    def _timed(self, calls: int, work: Callable[[np.ndarray, np.ndarray], object]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            number, count = next(self._turn), len(self._regions)
            opposite = (number + count // 2) % count
            parts, others = (np.array_split(self._regions[n], self._threads) for n in (number, opposite))
            list(self._pool.map(work, parts, others))
        return time.perf_counter() - start


def largest_cache() -> int:
    """Bytes of the processor's largest cache; 0 where the system does not say."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        units = {"K": 2**10, "M": 2**20, "G": 2**30}
        sizes.append(int(text.rstrip("KMG")) * units.get(text[-1], 1))
    return max(sizes)


def _free_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 2**32


def _copies(sample: Sample, nbytes: int) -> list:
    """Experts, each in memory of its own, so many bytes of them together."""
    count = max(math.ceil(nbytes / sample.nbytes), 2)
    return [tuple(map(_copy, sample.experts[n % len(sample.experts)])) for n in range(count)]


def _copy(weights: pycoli.Weights) -> pycoli.Weights:
    return pycoli.Weights.from_bytes(
        weights.data.copy(), fmt=weights.fmt, shape=weights.shape, scales=weights.scales, rotated=weights.rotated
    )


def _work(sample: Sample, copies: Iterator, what: str, rows: int) -> Callable[[int], float]:
    x = sample.rows(rows)

    def work(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            _compute(what, x, next(copies))
        return time.perf_counter() - start

    return work


def _compute(what: str, x: np.ndarray, matrices) -> np.ndarray:
    return product(x, matrices[0]) if what == "product" else expert(x, *matrices)


def _error(sample: Sample, what: str, rows: int) -> float:
    """The largest relative RMS error over the sample's experts."""
    errors = []
    for number, matrices in enumerate(sample.experts):
        y = _compute(what, sample.rows(rows), matrices)
        errors.append(sample.product_error(y, number) if what == "product" else sample.error(y, [number]))
    return max(errors)
