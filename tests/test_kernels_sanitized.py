"""The product's kernels, compiled for the CPU, under the sanitizers of g++.

AddressSanitizer and UndefinedBehaviorSanitizer see wrong indices and undefined arithmetic. ThreadSanitizer knows the
simulated GPU threads and takes barriers alone as order between them, so a missing one is a data race.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKLOAD = Path(__file__).parent / "gpu" / "workload.py"


def runtime(name: str) -> str:
    """Path of a sanitizer's runtime, to be loaded before Python's own libraries."""
    path = subprocess.run(["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
    if not Path(path.stdout.strip()).is_absolute():
        pytest.skip(f"g++ has no lib{name}")
    return path.stdout.strip()


@pytest.mark.parametrize("order", ["fwd", "rev", "rand:1"])
@pytest.mark.parametrize(
    ("sanitizers", "preloaded", "options"),
    [
        ("address,undefined", ["asan", "stdc++"], {"ASAN_OPTIONS": "detect_leaks=0"}),
        ("thread", ["tsan"], {"TSAN_OPTIONS": "exitcode=66 atexit_sleep_ms=0", "OMP_NUM_THREADS": "1"}),
    ],
    ids=["address-undefined", "thread"],
)
def test_every_kernel(sanitized_simt_lib, sanitizers, preloaded, options, order):
    library = sanitized_simt_lib(sanitizers)
    preload = " ".join(runtime(name) for name in preloaded)
    environment = {**os.environ, **options, "LD_PRELOAD": preload, "SIMT_ORDER": order}
    # the thread sanitizer's memory map allows no address randomisation
    command = [*(["setarch", "-R"] if sanitizers == "thread" else []), sys.executable, WORKLOAD, library]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert "all results are right" in run.stdout
    assert "runtime error" not in run.stderr
    assert "WARNING: ThreadSanitizer" not in run.stderr
