"""Fixtures of the benchmarks: the measuring code on the simulated GPU, and on a real one."""

import subprocess
from pathlib import Path

import pytest
from libraries import installed_gpu_library

import pycoli
from pycoli.cli.bench import driver as driver_module
from pycoli.cli.bench.driver import Driver


@pytest.fixture(scope="session")
def simulated_libcuda(simt_lib, tmp_path_factory):
    """A libcuda on top of the simulated runtime, so that the driver calls are tested too."""
    library = tmp_path_factory.mktemp("libcuda") / "libcuda_simulated.so"
    link = [str(simt_lib), f"-Wl,-rpath,{simt_lib.parent}"]
    source = str(Path(__file__).parent / "simulated_libcuda.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", source, "-o", str(library), *link], check=True)
    return library


@pytest.fixture
def simulated_command(monkeypatch, simt_lib, simulated_libcuda):
    """``pycoli bench`` measures the simulated GPU."""
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))
    monkeypatch.setattr(driver_module, "LIBRARY", str(simulated_libcuda))


@pytest.fixture
def simulated(simulated_command, simt_lib):
    """(device, driver) of the simulated GPU, whose times mean nothing."""
    device = pycoli.Device(0, pycoli.open_backend(simt_lib))
    with Driver(0) as driver:
        yield device, driver


@pytest.fixture
def real():
    """(device, driver) of the first real GPU."""
    backend = pycoli.open_backend(installed_gpu_library())
    if not backend.devices():
        pytest.skip(backend.why_no_device())
    device = pycoli.Device(0, backend)
    with Driver(0) as driver:
        yield device, driver
