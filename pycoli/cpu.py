"""The CPU side of the library that runs: version, instruction set, threads."""

from __future__ import annotations

import operator

from ._lib import check, ffi, lib, name_bytes, path, text
from .errors import ArgumentError, DtypeError

__all__ = ["build_info", "isa", "library_path", "set_isa", "set_threads", "threads", "version"]


def version() -> str:
    """The version of libcoli, such as "0.1.0"."""
    return text(lib.coli_version_string())


def build_info() -> str:
    """One line: version, compiler, instruction sets built in, OpenMP."""
    return text(lib.coli_build_info())


def library_path() -> str:
    """The file that libcoli is loaded from, at the first use of it."""
    return path


def isa() -> str:
    """The instruction set of the kernels in use: "avx512", "avx2" or "scalar"."""
    return text(lib.coli_isa())


def set_isa(name: str | None) -> None:
    """Forces an instruction set; None returns to the best. NotProvidedError where processor or build lack it.

    Not to be called while other threads compute.
    """
    if not isinstance(name, (str, type(None))):
        raise DtypeError(f"name must be a str or None, got {type(name).__name__} {name!r}")
    check(lib.coli_set_isa(ffi.NULL if name is None else name_bytes(name)))


def threads() -> int:
    """CPU threads that a call may use.

    A process that was forked from one that has used pycoli computes with one thread: the others stay behind in the
    fork. Workers that are to use several must be spawned (multiprocessing.get_context("spawn")).
    """
    return lib.coli_threads()


def set_threads(count: int) -> None:
    """Sets the number of threads; 0 returns to OMP_NUM_THREADS or the cores available. Results do not depend on it.

    ArgumentError for a negative number, or more threads than libcoli can have.
    """
    try:
        check(lib.coli_set_threads(operator.index(count)))
    except TypeError:
        raise DtypeError(f"count must be a whole number, got {type(count).__name__} {count!r}") from None
    except OverflowError:
        raise ArgumentError(f"count must be a number of threads, got {count}") from None
