"""Finds the real GPU library and says whether it has a GPU to work on."""

import functools
from pathlib import Path
from typing import NamedTuple

from abi import Gpu
from libraries import gpu_library


class Found(NamedTuple):
    path: Path | None
    why_not: str | None


@functools.cache
def real_library():
    """The library that COLI_CUDA_LIB names, or the one that is installed with pycoli; or why neither can be tested."""
    path = gpu_library()
    if not path.exists():
        return Found(None, f"no GPU library at {path}")
    gpu = Gpu(path)
    if gpu.lib.coli_cuda_available_device_count() == 0:
        return Found(None, f"{path}: {gpu.refusal().text}")
    return Found(path, None)
