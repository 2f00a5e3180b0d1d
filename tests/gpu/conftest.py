"""Fixtures of the GPU tests: the library under test, simulated or real, with no, one or two devices configured."""

import shutil

import pytest
from abi import Gpu
from real_library import real_library
from simulator import Simulator


def pytest_generate_tests(metafunc):
    """Every GPU test runs against the simulated library, and where there is a GPU against the real one (`pytest -m gpu`
    runs the latter alone)."""
    if "gpu_lib" in metafunc.fixturenames:
        libraries = ["simt"]
        if real_library().path:
            libraries.append(pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("gpu_lib", libraries, indirect=True, scope="session")


@pytest.fixture(scope="session")
def gpu_lib(request):
    """The library under test."""
    return request.getfixturevalue("simt_lib") if request.param == "simt" else real_library().path


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
