"""Build coli_cuda.dll on Windows, with Microsoft's compiler and nvcc. NOBODY HAS RUN THIS YET (docs/platforms.md).

    build_cuda_dll.py OUTPUT_FOLDER [--nvcc NVCC] [--archs 90 120+PTX] [--print]

To be started from an "x64 Native Tools Command Prompt" of Visual Studio 2022, with a CUDA toolkit of 12.8 or newer. The
sources are those that libcoli/cuda/meson.build lists; the CUDA runtime is linked into the DLL, which needs the driver
alone. --print shows the commands and runs none of them.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA = ROOT / "libcoli" / "cuda"
HOPPER = "kernels/prefill_hopper.cu"
"""The kernel of Hopper's matrix unit, which has a target of its own."""
ENCODER = "kernels/encode_e8.cu"
"""Must round as libcoli does, which fuses no products and sums."""


def sources(variable: str) -> list[str]:
    """A list of files in libcoli/cuda/meson.build."""
    text = re.search(rf"^{variable} = files\((.*?)\)", (CUDA / "meson.build").read_text(), re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"'([^']+)'", text)


def default_archs() -> list[str]:
    """Those of the option gpu_archs in meson.options."""
    option = re.search(r"option\('gpu_archs'.*?value: \[(.*?)\]", (ROOT / "meson.options").read_text(), re.DOTALL)
    return re.findall(r"'([^']+)'", option[1])


def targets(archs: list[str]) -> list[str]:
    """nvcc's flags for GPU architectures such as "90"; "120+PTX" embeds PTX for newer ones too."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX")
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if arch.endswith("+PTX"):
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


def commands(nvcc: str, output: Path, archs: list[str]) -> list[list[str]]:
    """One command for each source, and the last one links."""
    common = [
        nvcc,
        "-std=c++20",
        "-O3",
        "-DCOLI_BUILD",
        f"-I{ROOT / 'libcoli' / 'include'}",
        "-Xcompiler",
        "/MT,/EHsc,/utf-8",
    ]
    arch_names = f'-DCOLI_GPU_ARCHS=\\"sm {" ".join(archs)}\\"'
    compiled, objects = [], []
    for source in sources("cuda_host_sources") + sources("cuda_kernel_sources"):
        flags = [arch_names]
        if source.endswith(".cu"):
            flags = ["-gencode", "arch=compute_90a,code=sm_90a"] if source == HOPPER else targets(archs)
            flags += ["-fmad=false"] if source == ENCODER else []
        target = output / (source.replace("/", "_") + ".obj")
        compiled.append([*common, *flags, "-c", str(CUDA / source), "-o", str(target)])
        objects.append(str(target))
    return [*compiled, [nvcc, "-shared", "-cudart", "static", *objects, "-o", str(output / "coli_cuda.dll")]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--archs", nargs="+", default=default_archs(), help="default: %(default)s")
    parser.add_argument("--print", action="store_true", help="show the commands, run none")
    options = parser.parse_args()
    if not options.print:
        if sys.platform != "win32":
            parser.error("this is for Windows; elsewhere meson builds the library (README.md)")
        options.output.mkdir(parents=True, exist_ok=True)
    for command in commands(options.nvcc, options.output, options.archs):
        print(subprocess.list2cmdline(command), flush=True)
        if not options.print and subprocess.run(command).returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
