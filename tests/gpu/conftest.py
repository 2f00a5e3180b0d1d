"""Fixtures of the GPU tests. `gpu_lib` (tests/conftest.py) names the library: the simulated one, and with `-m gpu` the real."""

import shutil

import pytest
from abi import Gpu
from simulator import Simulator


@pytest.fixture(scope="session")
def private_gpu(gpu_lib, tmp_path_factory):
    """The library under a name of its own, so that nothing else in this process shares its state."""
    copy = tmp_path_factory.mktemp("gpu") / "libcoli_cuda_under_test.so"
    shutil.copy(gpu_lib, copy)
    return Gpu(copy)


@pytest.fixture
def closed_gpu(private_gpu):
    """The library before coli_cuda_init. Whatever a test leaves, the next one starts from here."""
    yield private_gpu
    private_gpu.free_all()
    assert private_gpu.stats() == (0, 0), "tensors are still counted after all of them were freed"
    private_gpu.shutdown()


@pytest.fixture
def gpu(closed_gpu):
    """The library with device 0 and the fp8 table."""
    closed_gpu.init(0)
    closed_gpu.publish_tables()
    return closed_gpu


@pytest.fixture
def two_gpus(closed_gpu):
    """The library with devices 0 and 1 and the fp8 table."""
    if closed_gpu.lib.coli_cuda_available_device_count() < 2:
        pytest.skip("needs two GPUs")
    closed_gpu.init(0, 1)
    closed_gpu.publish_tables()
    return closed_gpu


@pytest.fixture(scope="session")
def simulator(private_gpu):
    """Control of the simulated runtime, or None for a real GPU."""
    return Simulator(private_gpu.path) if Simulator.is_in(private_gpu.path) else None


@pytest.fixture
def faults(simulator):
    """The simulated runtime's fault injection."""
    if simulator is None:
        pytest.skip("a real GPU does not fail on request")
    yield simulator
    simulator.fail(b"*", 0)
