"""Find an nvcc that can build this project; print its path, version, include folder and library folder, a line each.

$NVCC is taken alone where it is set. Otherwise, in this order: the CUDA wheels that this interpreter sees (pip's
cuda-toolkit[nvcc,cccl]); $CUDA_HOME and $CUDA_PATH; PATH; /usr/local/cuda. Exit code 1, with one line per candidate on
stderr, when none will do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

EXECUTABLE = "nvcc.exe" if os.name == "nt" else "nvcc"


def candidates() -> Iterator[Path]:
    if "NVCC" in os.environ:
        yield Path(os.environ["NVCC"])
        return
    namespace = importlib.util.find_spec("nvidia")
    for root in (namespace.submodule_search_locations or []) if namespace else []:
        yield from sorted(Path(root).glob(f"cu*/bin/{EXECUTABLE}"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable], "bin", EXECUTABLE)
    if on_path := shutil.which(EXECUTABLE):
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin", EXECUTABLE)


def compiler_version(compiler: Path, pattern: str, oldest: tuple[int, int]) -> str:
    """What group 1 of `pattern` is in the words of --version; ValueError where that is older than `oldest`."""
    if not compiler.is_file():
        raise ValueError("no such file")
    try:
        words = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"does not run: {error}") from error
    version = re.search(pattern, words)
    if not version:
        raise ValueError("prints no version")
    if tuple(map(int, version[1].split(".")[:2])) < oldest:
        raise ValueError(f"version {version[1]}, need {oldest[0]}.{oldest[1]} or newer")
    return version[1]


def inspect(nvcc: Path) -> tuple[str, Path, Path]:
    """Version, include folder and library folder of a toolkit; ValueError says what is wrong with it."""
    version = compiler_version(nvcc, r"V([\d.]+)", (12, 8))
    # nvcc may be a wrapper script: ask it where its toolkit lies
    plan = subprocess.run([nvcc, "-dryrun", "-x", "cu", "-E", os.devnull], capture_output=True, text=True).stderr
    stated = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    top = Path(stated[1].strip()).resolve() if stated else nvcc.resolve().parent.parent
    libraries = [
        folder
        for folder in (top / "lib64", top / "lib", top / "lib" / "x64")
        if (folder / "libcudart_static.a").exists() or (folder / "cudart_static.lib").exists()
    ]
    if not libraries:
        raise ValueError(f"no static CUDA runtime below {top}")
    if not any((top / "include" / part / "nv" / "target").exists() for part in ("cccl", ".")):
        raise ValueError(f"no CCCL headers below {top}/include (pip: cuda-toolkit[nvcc,cccl])")
    return version, top / "include", libraries[0]


def print_first_usable(name: str, candidates: Iterable[Path], inspect: Callable[[Path], tuple]) -> int:
    """Prints the first candidate that `inspect` accepts, and what it returned, a line each; the exit code."""
    tried = []
    for compiler in candidates:
        try:
            facts = inspect(compiler)
        except ValueError as error:
            tried.append(f"{compiler}: {error}")
            continue
        print(compiler, *facts, sep="\n")
        return 0
    print(f"no usable {name}; looked at:", *tried, sep="\n  ", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(print_first_usable("nvcc", candidates(), inspect))
