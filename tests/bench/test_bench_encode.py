"""How fast matrices are encoded as E8, and that it is within its limits."""

import time

import numpy as np
import pytest

import pycoli

ROWS, COLUMNS, PART = 2048, 6144, 8
"""The matrix that limits are stated for; an eighth of its rows is encoded."""

CPU_SECONDS = {"reference": 2 * 0.5, "search": 2 * 3}
"""Of the whole matrix: what two cores may take. Those of the CPU and not of the clock, so that other programs do not
count."""


@pytest.mark.parametrize("quality", CPU_SECONDS)
def test_encoding_a_matrix(benchmark, capsys, isa, quality):
    w = np.random.default_rng(3).standard_normal((ROWS // PART, COLUMNS), np.float32)
    seconds = []

    def encode():
        start = time.process_time()
        pycoli.encode(w, "e8", quality=quality)
        seconds.append(PART * (time.process_time() - start))

    benchmark.pedantic(encode, rounds=5)
    benchmark.extra_info["cpu_seconds"] = min(seconds)
    with capsys.disabled():
        print(f"\n{quality}, {isa}: {min(seconds):.2f} CPU seconds for {ROWS} x {COLUMNS}")
    if isa != "scalar":
        assert min(seconds) <= CPU_SECONDS[quality]
