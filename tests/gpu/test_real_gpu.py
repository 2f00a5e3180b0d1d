"""Says why the tests of a real GPU are not there, where they are not."""

import pytest
from abi import Gpu, ffi
from real_library import real_library


@pytest.mark.gpu
def test_there_is_a_real_gpu():
    found = real_library()
    if found.why_not:
        pytest.skip(found.why_not)
    build = ffi.string(Gpu(found.path).lib.coli_cuda_build_info()).decode()
    assert "CUDA runtime" in build, f"{found.path} is not the real library: {build}"
