"""How much of its shorter side an MoE layer hides, with one expert on a GPU that only takes time and one on the CPU."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from experts import expert_weights, gaussian

import pycoli
from pycoli import cpu

D, H = 1024, 2048
_CALLS = 15


class Overlap:
    """Measures calls of a layer of four int8 experts, some of which are on the GPU of stub_slow.c.

    Parameters
    ----------
    layer : MoELayer
    set_delay : callable str -> None
        Sets STUB_DELAY_US: what a call of that GPU takes, slept, so that the processor is free meanwhile.
    """

    def __init__(self, layer: pycoli.MoELayer, set_delay):
        self._layer = layer
        self._set_delay = set_delay
        self._x = gaussian(1, D)
        self.on_gpu = [i for i, name in enumerate(layer.where) if name != "cpu"]
        self.on_cpu = [i for i, name in enumerate(layer.where) if name == "cpu"]

    def call(self, experts) -> None:
        self._layer(self._x, [experts], np.ones((1, len(experts)), np.float32))

    def hidden_share(self, gpu_to_cpu: float) -> float:
        """The part of the shorter side that a call of both does not wait for, with a GPU that takes so many times as
        long as the CPU does: by the fastest of several calls of each side alone and of both, in turn."""
        cpu_side, gpu_side = self.on_cpu[:1], self.on_gpu[:1]
        delay = gpu_to_cpu * min(self._seconds(cpu_side) for _ in range(_CALLS))
        self._set_delay(str(int(1e6 * delay)))
        sides = cpu_side, gpu_side, gpu_side + cpu_side
        cpu, gpu, both = np.min([[self._seconds(side) for side in sides] for _ in range(_CALLS)], axis=0)
        return (cpu + gpu - both) / min(cpu, gpu)

    def hidden_shares(self, gpu_to_cpu: float, enough: float = 0.8, tries: int = 6) -> list[float]:
        """Several of these, until one is enough: other programs may be in the way."""
        shares = [self.hidden_share(gpu_to_cpu)]
        while len(shares) < tries and shares[-1] < enough:
            shares.append(self.hidden_share(gpu_to_cpu))
        return shares

    def _seconds(self, experts) -> float:
        start = time.perf_counter()
        self.call(experts)
        return time.perf_counter() - start


@contextmanager
def overlap(build_dir: Path, folder: Path, set_delay, threads: int = 1):
    """An Overlap with so many CPU threads; the library is copied into `folder`, so that it is this one's alone.

    One thread is the default, since two wait for each other where other programs keep processors busy.
    """
    backend = pycoli.open_backend(shutil.copy(build_dir / "tests" / "stubs" / "stub_slow.so", folder / "slow.so"))
    experts = [expert_weights(("int8",) * 3, D, H, seed=i) for i in range(4)]
    cpu.set_threads(threads)
    try:
        with pycoli.MoELayer(experts, devices=[pycoli.Device(0, backend)], vram_budget=15_000_000) as layer:
            yield Overlap(layer, set_delay)
    finally:
        cpu.set_threads(0)
        backend.shutdown()
