"""libcoli as a cffi library, and the way from its status codes to Python exceptions."""

from __future__ import annotations

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


def packaged_library(name: str) -> str:
    """Where "coli" or "coli_cuda" is when it was installed with the package; in an editable install, in the build."""
    file = _FILE_NAMES.get(sys.platform, "lib{}.so").format(name)
    folders = [resources.files(__package__), *map(Path, sys.modules[__package__].__path__)]
    return str(next((folder / file for folder in folders if (folder / file).is_file()), folders[0] / file))


def _load(path: str):
    try:
        library = ffi.dlopen(path)
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


path = os.environ.get("COLI_LIB") or packaged_library("coli")
lib = _load(path)

_ERRORS = {
    lib.COLI_E_ARGUMENT: errors.ArgumentError,
    lib.COLI_E_SHAPE: errors.ShapeError,
    lib.COLI_E_FORMAT: errors.FormatError,
    lib.COLI_E_NOT_FINITE: errors.NotFiniteError,
    lib.COLI_E_STATE: errors.StateError,
    lib.COLI_E_MEMORY: errors.OutOfMemoryError,
    lib.COLI_E_NO_DEVICE: errors.DeviceError,
    lib.COLI_E_DEVICE: errors.DeviceError,
    lib.COLI_E_INJECTED: errors.DeviceError,
    lib.COLI_E_NOT_PROVIDED: errors.NotProvidedError,
    lib.COLI_E_NO_LIBRARY: errors.BackendError,
    lib.COLI_E_ABI: errors.BackendError,
}


def error_of(status: int, message: str) -> errors.ColiError:
    """The exception that stands for a coli_status."""
    return _ERRORS.get(status, errors.ColiError)(message)


def check(status: int) -> None:
    """Raises what libcoli reports, unless the call succeeded."""
    if status != lib.COLI_OK:
        raise error_of(status, text(lib.coli_last_error()))


def text(pointer) -> str | None:
    """A C string, or None for NULL."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else None
