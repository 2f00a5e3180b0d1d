"""Find a hipcc that can build libcoli_hip for the architectures named as arguments; print its path, version and the
folder of its HIP, a line each.

$HIPCC is taken alone where it is set. Otherwise, in this order: PATH; $ROCM_PATH and $HIP_PATH; /opt/rocm. Each is
tried on a kernel, as a hipcc may be there without headers, runtime, or device libraries for an architecture. Exit code
1, with one line per candidate on stderr, when none will do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from find_nvcc import compiler_version, print_first_usable

KERNEL = """
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
__global__ void twice(float *x) { x[threadIdx.x] *= __half2float(__float2half(2.0f)); }
int main() { twice<<<1, 1>>>(nullptr); return hipDeviceSynchronize(); }
"""


def candidates() -> Iterator[Path]:
    if "HIPCC" in os.environ:
        yield Path(os.environ["HIPCC"])
        return
    if on_path := shutil.which("hipcc"):
        yield Path(on_path)
    for variable in ("ROCM_PATH", "HIP_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable], "bin", "hipcc")
    yield Path("/opt/rocm/bin/hipcc")


def inspect(hipcc: Path, archs: list[str]) -> tuple[str, Path]:
    """Version, and the folder that has HIP's include and lib; ValueError says what is wrong with it."""
    version = compiler_version(hipcc, r"HIP version: ([\d.]+)", (5, 2))
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "kernel.hip"
        kernel.write_text(KERNEL)
        targets = [f"--offload-arch={arch}" for arch in archs]
        build = subprocess.run(
            [hipcc, "-x", "hip", *targets, kernel, "-o", kernel.with_suffix("")], capture_output=True, text=True
        )
    if build.returncode:
        reasons = [line for line in build.stderr.splitlines() if "error" in line] or build.stderr.splitlines()
        raise ValueError(f"builds no kernel for {' '.join(archs)}: {reasons[0] if reasons else 'it says nothing'}")
    config = subprocess.run([hipcc.with_name("hipconfig"), "--path"], capture_output=True, text=True)
    top = Path(config.stdout.strip())
    if not (top / "include" / "hip" / "hip_runtime_api.h").exists():
        raise ValueError(f"no HIP headers below {top}/include, the folder that hipconfig --path names")
    return version, top


if __name__ == "__main__":
    os.environ["HIP_PLATFORM"] = "amd"  # where nvcc is in PATH too, hipcc would take it
    sys.exit(print_first_usable("hipcc", candidates(), partial(inspect, archs=sys.argv[1:])))
