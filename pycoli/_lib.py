"""libcoli as a cffi library, and the way from its status codes to Python exceptions.

The library is loaded at the first use, so that a broken one can still be reported on.
"""

from __future__ import annotations

import functools
import ntpath
import os
import sys
from importlib import resources
from pathlib import Path

from . import errors

try:
    from ._bindings import ffi
except ModuleNotFoundError as error:
    if error.name != f"{__package__}._bindings":
        raise
    # Only an installation has them: these modules are those of a checkout.
    raise ImportError("pycoli is not installed in this Python; in the checkout: pip install .") from None

_FILE_NAMES = {"win32": "{}.dll", "darwin": "lib{}.dylib"}

# Flags of LoadLibraryEx: the folder of Python, System32 and what os.add_dll_directory() added, for a path also the
# library's own folder; never the current folder or PATH.
_SEARCH_DEFAULT_DIRS, _SEARCH_DLL_LOAD_DIR = 0x1000, 0x100


def packaged_library(name: str, platform: str = sys.platform) -> str:
    """Where "coli" or "coli_cuda" is when it was installed with the package; in an editable install, in the build."""
    file = _FILE_NAMES.get(platform, "lib{}.so").format(name)
    folders = [resources.files(__package__), *map(Path, sys.modules[__package__].__path__)]
    return str(next((folder / file for folder in folders if (folder / file).is_file()), folders[0] / file))


def open_library(library: str, platform: str = sys.platform, dlopen=ffi.dlopen):
    """The shared library at a path; a name without a folder is left to the system. OSError says what failed."""
    if platform != "win32":
        return dlopen(library)
    if not ntpath.dirname(library):
        return dlopen(library, _SEARCH_DEFAULT_DIRS)
    return dlopen(ntpath.abspath(library), _SEARCH_DEFAULT_DIRS | _SEARCH_DLL_LOAD_DIR)


def path_bytes(library: str | os.PathLike, platform: str = sys.platform) -> bytes:
    """A path as libcoli takes it: UTF-8 on Windows, the file system's bytes elsewhere.

    TypeError for what is no path, UnicodeEncodeError for what no file can be called.
    """
    return os.fspath(library).encode() if platform == "win32" else os.fsencode(library)


def path_text(library: bytes, platform: str = sys.platform) -> str:
    """The inverse of path_bytes()."""
    return library.decode() if platform == "win32" else os.fsdecode(library)


path = os.environ.get("COLI_LIB") or packaged_library("coli")


@functools.cache
def _loaded():
    try:
        library = open_library(path)
        version = library.coli_abi_version()
    except OSError as error:
        raise errors.BackendError(
            f"libcoli cannot be loaded from {path}: {error}; COLI_LIB names another file"
        ) from error
    except ffi.error as error:
        raise errors.BackendError(f"{path} is not libcoli: it lacks coli_abi_version") from error
    if version // 1000 != library.COLI_ABI_MAJOR:
        raise errors.BackendError(
            f"{path} has ABI {version // 1000}.{version % 1000}, pycoli was built for {library.COLI_ABI_MAJOR}.x"
        )
    return library


class _Library:
    """Functions and constants of libcoli. BackendError at every use where it cannot be loaded."""

    def __getattr__(self, name: str):
        try:
            value = getattr(_loaded(), name)
        except ffi.error as error:
            raise errors.BackendError(f"{path} is not a whole libcoli: it lacks {name}") from error
        setattr(self, name, value)  # found without a call from now on
        return value

    def __dir__(self) -> list[str]:
        return dir(_loaded())


lib = _Library()

version = ".".join(str(ffi.integer_const(f"COLI_VERSION_{part}")) for part in ("MAJOR", "MINOR", "PATCH"))
"""Of the headers that pycoli was built with."""

_ERRORS = {
    ffi.integer_const(f"COLI_E_{name}"): error
    for name, error in {
        "ARGUMENT": errors.ArgumentError,
        "SHAPE": errors.ShapeError,
        "FORMAT": errors.FormatError,
        "NOT_FINITE": errors.NotFiniteError,
        "STATE": errors.StateError,
        "MEMORY": errors.OutOfMemoryError,
        "NO_DEVICE": errors.DeviceError,
        "DEVICE": errors.DeviceError,
        "INJECTED": errors.DeviceError,
        "NOT_PROVIDED": errors.NotProvidedError,
        "NO_LIBRARY": errors.BackendError,
        "ABI": errors.BackendError,
    }.items()
}


def error_of(status: int, message: str) -> errors.ColiError:
    """The exception that stands for a coli_status."""
    return _ERRORS.get(status, errors.ColiError)(message)


def check(status: int) -> None:
    """Raises what libcoli reports, unless the call succeeded."""
    if status != lib.COLI_OK:
        raise error_of(status, text(lib.coli_last_error()))


def name_bytes(name: str) -> bytes:
    """A name for libcoli to look up. What a C string cannot hold becomes an escape, which is in no name."""
    return name.encode("utf-8", "backslashreplace").replace(b"\0", rb"\0")


def text(pointer) -> str | None:
    """A C string, or None for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else None
