"""The CPU side of the library that runs: version, instruction set, threads."""

from __future__ import annotations

from ._lib import check, ffi, lib, path, text

__all__ = ["build_info", "isa", "library_path", "set_isa", "set_threads", "threads", "version"]


def version() -> str:
    """The version of libcoli, such as "0.1.0"."""
    return text(lib.coli_version_string())


def build_info() -> str:
    """One line: version, compiler, instruction sets built in, OpenMP."""
    return text(lib.coli_build_info())


def library_path() -> str:
    """The file that libcoli was loaded from."""
    return path


def isa() -> str:
    """The instruction set of the kernels in use: "avx512", "avx2" or "scalar"."""
    return text(lib.coli_isa())


def set_isa(name: str | None) -> None:
    """Forces an instruction set; None returns to the best. NotProvidedError where processor or build lack it.

    Not to be called while other threads compute.
    """
    check(lib.coli_set_isa(ffi.NULL if name is None else name.encode()))


def threads() -> int:
    """CPU threads that a call may use."""
    return lib.coli_threads()


def set_threads(count: int) -> None:
    """Sets the number of threads; 0 returns to OMP_NUM_THREADS or the cores available. Results do not depend on it."""
    check(lib.coli_set_threads(count))
