"""Fixtures that all tests share: the test build, the libraries in it, and the shared models where they lie at hand."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def _compile(build: Path, *options: str, targets: tuple[str, ...] = ()) -> Path:
    """Set up and compile a Meson build with the tests' own targets; several test processes may ask for it at once."""
    build.parent.mkdir(parents=True, exist_ok=True)
    with open(build.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        if not (build / "build.ninja").exists():
            fixed = ["-Dcuda=disabled", "-Dtests=true", "-Dwerror=true"]
            _run([*meson, "setup", str(build), str(ROOT), *fixed, *options])
        _run([*meson, "compile", "-C", str(build), *targets])
    return build


def _run(command: list[str]) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        pytest.fail(f"{' '.join(command)}\n{result.stdout[-6000:]}", pytrace=False)


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The test build: C programs, stub libraries and libcoli_cuda_simt. `COLI_TEST_BUILD` names a ready one."""
    if ready := os.environ.get("COLI_TEST_BUILD"):
        return Path(ready)
    return _compile(ROOT / "build" / "tests")


@pytest.fixture(scope="session")
def simt_lib(build_dir: Path) -> Path:
    """The GPU backend compiled for the CPU."""
    return build_dir / "tests" / "simt" / "libcoli_cuda_simt.so"


@pytest.fixture(scope="session")
def sanitized_simt_lib():
    """A function (sanitizers, comma-separated) -> the GPU backend compiled for the CPU with them."""

    def build(sanitizers: str) -> Path:
        options = [f"-Dsimt_sanitize={sanitizers}", "-Dbuildtype=debugoptimized"]
        folder = ROOT / "build" / f"tests-{sanitizers.replace(',', '-')}"
        return _compile(folder, *options, targets=("coli_cuda_simt",)) / "tests" / "simt" / "libcoli_cuda_simt.so"

    return build


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large models ($COLI_SHARED, or `shared` beside the checkout)."""
    folder = Path(os.environ.get("COLI_SHARED", ROOT.parent / "shared"))
    if not (folder / "models").is_dir():
        pytest.skip(f"no models in {folder}; set COLI_SHARED")
    return folder


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(20260)


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Float64 golden vectors of E8: decoded matrices, rotations, one expert, one encoded matrix."""
    with np.load(ROOT / "tests" / "data" / "golden_e8.npz") as archive:
        return dict(archive)
