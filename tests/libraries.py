"""Where the libraries under test are."""

import os
from pathlib import Path

import pytest

from pycoli._lib import packaged_library


def gpu_library() -> Path:
    """The real GPU library: the one that COLI_CUDA_LIB names, or the one in the installed package. It may not exist."""
    return Path(os.environ.get("COLI_CUDA_LIB") or packaged_library("coli_cuda"))


def installed_gpu_library() -> Path:
    """The same for tests that need it; they are skipped where there is none."""
    path = gpu_library()
    if not path.exists():
        pytest.skip(f"no GPU library at {path}")
    return path
