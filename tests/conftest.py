"""Fixtures that all tests share: the test build, the libraries in it, and the shared models where they lie at hand."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pycoli
from pycoli import backend as backend_module
from pycoli import cpu, placement

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
    # ninja may lie beside this Python alone, in a virtual environment that is not activated
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
def sanitized_build():
    """A function (sanitizers, comma-separated) -> build folder with the GPU backend compiled for the CPU with them, the
    C host t_host_simt, and t_moe_threads_sanitized, which has the core in it."""

    def build(sanitizers: str) -> Path:
        options = [f"-Dsimt_sanitize={sanitizers}", "-Dbuildtype=debugoptimized"]
        folder = ROOT / "build" / f"tests-{sanitizers.replace(',', '-')}"
        return _compile(folder, *options, targets=("coli_cuda_simt", "t_host_simt", "t_moe_threads_sanitized"))

    return build


@pytest.fixture
def built_without_cuda(monkeypatch):
    """As if there were no GPU library, neither beside libcoli nor in the system."""

    def search(path):
        raise pycoli.BackendError("no usable GPU library: libcoli_cuda.so: no such file")

    monkeypatch.delenv("COLI_CUDA_LIB", raising=False)
    monkeypatch.setattr(backend_module, "_packaged_path", lambda: None)
    monkeypatch.setattr(backend_module, "Backend", search)
    placement.default_backend.cache_clear()
    yield
    placement.default_backend.cache_clear()


def libraries():
    """The simulated GPU library, and the installed one on a machine where it finds a GPU."""
    yield "simulated"
    try:
        if pycoli.open_backend().devices():
            yield pytest.param("installed", marks=pytest.mark.gpu)
    except pycoli.BackendError:
        pass


LIBRARIES = list(libraries())


def opened_backend(request, monkeypatch):
    """The GPU library of a fixture's parameter; afterwards nothing may be left on its devices."""
    if request.param == "simulated":
        monkeypatch.setenv("COLI_CUDA_LIB", str(request.getfixturevalue("simt_lib")))
    backend = pycoli.open_backend()
    yield backend
    gc.collect()
    left = {name: pycoli.Device(name).stats() for name in backend.devices()}
    backend.shutdown()
    assert set(left.values()) == {(0, 0)}, left


@pytest.fixture(params=LIBRARIES)
def backend(request, monkeypatch):
    yield from opened_backend(request, monkeypatch)


@pytest.fixture(params=["cpu", *LIBRARIES])
def device(request, monkeypatch):
    """The name of a device to compute on."""
    if request.param == "cpu":
        yield "cpu"
    else:
        for _ in opened_backend(request, monkeypatch):
            yield "cuda:0"


@pytest.fixture
def another_backend(simt_lib, tmp_path):
    """The simulated GPU library once more, from another file."""
    backend = pycoli.open_backend(shutil.copy(simt_lib, tmp_path / "another.so"))
    yield backend
    backend.shutdown()


@pytest.fixture
def old_backend(build_dir, monkeypatch):
    """A GPU library from before the E8 entry points."""
    path = build_dir / "tests" / "stubs" / "stub_old.so"
    monkeypatch.setenv("COLI_CUDA_LIB", str(path))
    backend = pycoli.open_backend()
    yield backend
    backend.shutdown()


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


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request) -> Iterator[str]:
    """The test runs once on each of the CPU's instruction sets; those that build or processor lack are skipped."""
    try:
        cpu.set_isa(request.param)
    except pycoli.NotProvidedError as reason:
        pytest.skip(str(reason))
    yield request.param
    cpu.set_isa(None)


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Float64 golden vectors of E8: decoded matrices, rotations, one expert, one encoded matrix."""
    with np.load(ROOT / "tests" / "data" / "golden_e8.npz") as archive:
        return dict(archive)
