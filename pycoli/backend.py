"""The GPU library: opening it, what it offers, and calls into it with its errors as exceptions."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from contextlib import ExitStack, suppress

from ._arrays import floats
from ._lib import (
    check,
    error_of,
    ffi,
    lib,
    name_bytes,
    open_library,
    packaged_library,
    path_bytes,
    path_text,
    text,
)
from .errors import (
    ArgumentError,
    BackendError,
    ColiError,
    DeviceError,
    DtypeError,
    FreedError,
    NotProvidedError,
    StateError,
)
from .weights import checked_codebook, format_feature, fp8_values, published_codebook

NOT_INSTALLED = "no GPU library is installed (built without CUDA)"
"""How the reason against every GPU begins where pycoli has no GPU library and the system has none either."""

_PREFIX = "coli_cuda_"
_opened: dict[str, Backend] = {}
_opened_lock = threading.Lock()


def open_backend(path: str | os.PathLike | None = None) -> Backend:
    """Opens the GPU library. The same file always gives the same Backend.

    Parameters
    ----------
    path : path, optional
        By default the environment variable COLI_CUDA_LIB, or else the library that was installed with pycoli, or else
        the one that the system finds.

    Raises
    ------
    BackendError
        Says which files were tried and why they do not do: not found, not a library, another ABI major.
    DtypeError
        The path is not one.
    """
    packaged = _packaged_path()
    with _opened_lock:
        try:
            backend = Backend(path if path is not None else packaged)
        except BackendError as error:
            if path is not None or packaged is not None or os.environ.get("COLI_CUDA_LIB"):
                raise
            raise BackendError(f"{NOT_INSTALLED}: {error}") from None
        return _opened.setdefault(os.path.normcase(os.path.realpath(backend.path)), backend)


def why_no_backend(feature: str) -> str:
    """The reason that a feature is not there when no GPU library is open."""
    return text(lib.coli_backend_why_not(ffi.NULL, name_bytes(feature)))


class Backend:
    """A loaded GPU library. Get one from open_backend().

    Each entry point is resolved on its own: a library that lacks some disables the features that need them and nothing
    else. The first use of a device prepares all visible ones and publishes the decode tables. It is shut down, tensors
    included, when the interpreter exits.

    Calls for different devices may run at once; calls for one device take turns. A process that was forked after
    devices were in use cannot use them.

    Attributes
    ----------
    path : str
        The file that was loaded.
    e8_codebook : bytes
        The codebook that E8 matrices on the devices are decoded with.
    """

    def __init__(self, path: str | os.PathLike | None = None):
        opened = ffi.new("coli_backend **")
        check(lib.coli_backend_open(ffi.NULL if path is None else _checked_path(path), opened))
        self._handle = ffi.gc(opened[0], lib.coli_backend_close)
        self.path = path_text(ffi.string(lib.coli_backend_path(self._handle)))
        self._library = open_library(self.path)
        self.e8_codebook = published_codebook()
        self._started_in: int | None = None
        self._start_lock = threading.RLock()
        self._slots: dict[int, Slot] = {}
        self._tensors: weakref.WeakSet = weakref.WeakSet()
        self._layers: weakref.WeakSet = weakref.WeakSet()  # of MoELayer, that may have experts on devices

    @property
    def version(self) -> str | None:
        """Such as "0.1.0"; None for libraries that cannot tell."""
        return self._optional_text("coli_cuda_version_string")

    @property
    def build_info(self) -> str | None:
        """One line: version, CUDA runtime, GPU architectures built in; None for libraries that cannot tell."""
        return self._optional_text("coli_cuda_build_info")

    def has(self, name: str) -> bool:
        """Whether the library has an entry point, by its full name or without the "coli_cuda_"."""
        if not isinstance(name, str):
            raise DtypeError(f"name must be that of an entry point, got {type(name).__name__} {name!r}")
        return lib.coli_backend_symbol(self._handle, name_bytes(_full_name(name))) != ffi.NULL

    def features(self) -> list[str]:
        """What why_not() can be asked about: format names, "devices", "matmul", "expert_mlp", "expert_group", ..."""
        return list(_feature_names())

    def why_not(self, feature: str) -> str | None:
        """Why this library cannot offer a feature: a sentence, or None when it can.

        ArgumentError for a name that is not a feature; the message lists them.
        """
        known = _feature_names()
        if feature not in known:
            try:
                feature = format_feature(feature)
            except ColiError:
                raise ArgumentError(f"no feature {feature!r}; there are {', '.join(known)}") from None
        return text(lib.coli_backend_why_not(self._handle, name_bytes(feature)))

    def require(self, feature: str) -> None:
        """NotProvidedError with the reason, unless the library offers the feature."""
        reason = self.why_not(feature)
        if reason:
            raise NotProvidedError(reason)

    def devices(self) -> list[str]:
        """Names of the visible devices, "cuda:0" and so on; empty where there is none, and why_no_device() says why.

        A library that cannot count devices without preparing them is asked for device 0 alone.
        """
        return [f"cuda:{ordinal}" for ordinal in self._visible()]

    def why_no_device(self) -> str | None:
        """Why devices() is empty; None when it is not."""
        reason = self.why_not("devices")
        if reason or self._visible():
            return reason
        asked = "available_device_count" if self.has("available_device_count") else "init"
        return self._last_error(_full_name(asked))

    def set_e8_codebook(self, codebook) -> None:
        """Replaces the E8 codebook on every device: 1024 bytes, 256 entries of 4 doubled magnitudes.

        Waits for calls in progress. StateError while E8 matrices are on a device: they would decode differently.
        """
        codebook = checked_codebook(codebook)
        self._start()
        with self._all_devices():
            live = sum(1 for tensor in self._tensors if tensor.fmt == "e8" and not tensor.freed)
            live += sum(layer._e8_on_gpus() for layer in list(self._layers))
            if live and codebook != self.e8_codebook:
                raise StateError(f"{live} E8 matrices on devices use the present codebook: free them first")
            self._call("coli_cuda_e8_set_grid", codebook)
            self.e8_codebook = codebook

    def shutdown(self) -> None:
        """Frees every tensor on every device and returns the library to its state before the first use."""
        with self._start_lock:
            if self._started_in != os.getpid():
                return
            for layer in list(self._layers):
                with suppress(FreedError):
                    layer.unplace()
            with self._all_devices():
                for tensor in list(self._tensors):
                    tensor.free()
                self._entry("coli_cuda_shutdown")()
                for slot in self._slots.values():
                    slot.issued = None
                self._started_in = None
                self.e8_codebook = published_codebook()

    def __repr__(self) -> str:
        return f"<Backend {self.path}, version {self.version or 'unknown'}>"

    # What the other modules of the package use.

    def _entry(self, name: str):
        """An entry point as a function. NotProvidedError where the library lacks it."""
        try:
            return getattr(self._library, name)
        except ffi.error:
            raise NotProvidedError(f"{self.path} lacks {name}") from None

    def _call(self, name: str, *arguments) -> None:
        """Calls an entry point that returns 1 or 0, and raises what the library says after a 0."""
        if not self._entry(name)(*arguments):
            raise self._error(name)

    def _why_not_expert(self, feature: str, gate, up, down) -> str | None:
        """Why a feature such as "expert_group" cannot compute an expert of these coli_matrix pointers."""
        return text(lib.coli_backend_why_not_expert(self._handle, feature.encode(), gate, up, down))

    def _error(self, name: str) -> ColiError:
        """The exception for a call that has just failed in this thread."""
        status = lib.COLI_E_DEVICE
        if self.has("coli_cuda_last_status"):
            status = self._library.coli_cuda_last_status() or status
        return error_of(status, self._last_error(name))

    def _start(self) -> None:
        """Prepares the visible devices and publishes the tables, at the first call."""
        if self._started_in == os.getpid():
            return
        with self._start_lock:
            if self._in_other_process():
                raise DeviceError(
                    f"process {self._started_in} uses the GPU library, and its fork {os.getpid()} cannot use it too: "
                    "start worker processes by spawning, or before the first use of a device"
                )
            if self._started_in is None:
                self.require("devices")
                for ordinal in self._initialised():
                    self._slots.setdefault(ordinal, Slot())
                # Last: other threads read this without the lock, and then rely on all the rest.
                self._started_in = os.getpid()

    def _in_other_process(self) -> bool:
        """Whether this process was forked from the one that prepared the devices, and so cannot use them."""
        return self._started_in not in (None, os.getpid())

    def _register(self, tensor) -> None:
        """Has a tensor freed before the library is shut down."""
        self._tensors.add(tensor)

    def _slot(self, ordinal: int) -> Slot:
        """The bookkeeping of a device. DeviceError for one that is not there."""
        self._start()
        if ordinal not in self._slots:
            there = ", ".join(f"cuda:{n}" for n in sorted(self._slots))
            raise DeviceError(f"there is no device cuda:{ordinal}; there are {there}")
        return self._slots[ordinal]

    def _initialised(self) -> list[int]:
        """Initialises the library for all visible devices, or takes over the devices that something else has chosen."""
        visible = self._visible()
        if not visible:
            raise DeviceError(self.why_no_device())
        library = self._library
        if not library.coli_cuda_init(ffi.new("int[]", visible), len(visible)):
            error = self._error("coli_cuda_init")
            visible = [library.coli_cuda_device_at(i) for i in range(library.coli_cuda_device_count())]
            if not visible:
                raise error
        try:
            if self.has("coli_cuda_e8_set_grid"):
                self._call("coli_cuda_e8_set_grid", published_codebook())
            if self.has("coli_cuda_fp8_set_lut"):
                self._call("coli_cuda_fp8_set_lut", floats(fp8_values()))
        except ColiError:
            library.coli_cuda_shutdown()
            raise
        return visible

    def _visible(self) -> list[int]:
        if self.why_not("devices"):
            return []
        if self.has("coli_cuda_available_device_count"):
            return list(range(min(self._library.coli_cuda_available_device_count(), lib.COLI_CUDA_MAX_DEVICES)))
        with self._start_lock:
            if self._started_in is not None:
                return sorted(self._slots)
            return [0] if self._library.coli_cuda_init(ffi.new("int[]", [0]), 1) else []

    def _all_devices(self) -> ExitStack:
        """The locks of all devices, in a fixed order."""
        stack = ExitStack()
        for ordinal in sorted(self._slots):
            stack.enter_context(self._slots[ordinal].lock)
        return stack

    def _last_error(self, name: str) -> str:
        said = self._optional_text("coli_cuda_last_error")
        return said or f"{name} returned 0 (this library does not say why)"

    def _optional_text(self, name: str) -> str | None:
        return text(self._entry(name)()) if self.has(name) else None


def _packaged_path() -> str | None:
    """The installed GPU library; None where libcoli is to search by itself."""
    packaged = packaged_library("coli_cuda")
    return packaged if not os.environ.get("COLI_CUDA_LIB") and os.path.exists(packaged) else None


def _checked_path(path) -> bytes:
    try:
        encoded = path_bytes(path)
    except TypeError:
        raise DtypeError(f"path must be a str or path, got {type(path).__name__} {path!r}") from None
    except UnicodeEncodeError:
        encoded = None
    if encoded is None or b"\0" in encoded:
        raise BackendError(f"a library cannot be loaded from {os.fspath(path)!r}: no file can have that name")
    return encoded


class Slot:
    """What all Device objects of one device share.

    Attributes
    ----------
    lock : RLock
        Held by the thread whose turn it is to call the library for the device.
    abandoned : list
        C handles of tensors to free in the next turn.
    issued : weak reference or None
        The group whose issue was not taken yet.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.abandoned: list = []
        self.issued: weakref.ref | None = None


@functools.cache
def _feature_names() -> tuple[str, ...]:
    return tuple(text(lib.coli_backend_feature_name(i)) for i in range(lib.coli_backend_feature_count()))


def _full_name(name: str) -> str:
    return name if name.startswith(_PREFIX) else _PREFIX + name


@atexit.register
def _shut_down_all() -> None:
    for backend in list(_opened.values()):
        backend.shutdown()
