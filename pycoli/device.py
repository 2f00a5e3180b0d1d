"""GPUs and the weight matrices that are resident on them: Device, Tensor."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ._arrays import seal
from ._lib import ffi, lib, text
from .backend import Backend, open_backend
from .errors import ArgumentError, BackendError, ColiError, DeviceError, DtypeError, FormatError, FreedError, ShapeError
from .weights import Weights, empty_scales, parse_format, pointer, published_codebook


class Memory(NamedTuple):
    """Bytes of device memory."""

    free: int
    total: int


class Stats(NamedTuple):
    """Matrices on a device and their logical bytes (weights and scales)."""

    tensors: int
    nbytes: int


class GroupStats(NamedTuple):
    """Expert groups computed since the process began. The times move with COLI_CUDA_PROFILE=1 alone."""

    calls: int
    experts: int
    rows: int
    upload_ms: float
    kernel_ms: float
    download_ms: float


class Device:
    """A GPU.

    Parameters
    ----------
    device : "cuda:0", int or Device
        The CUDA ordinal.
    backend : Backend, path or None
        The GPU library; None for open_backend().

    Attributes
    ----------
    name : str
        "cuda:0"
    ordinal : int
    backend : Backend

    Raises
    ------
    ArgumentError
        The name is not a device's.
    DeviceError
        There is no such device; says which there are, or why there is none.
    BackendError
        The library that `backend` names cannot be opened.
    """

    def __init__(self, device: str | int | Device = "cuda:0", backend: Backend | str | os.PathLike | None = None):
        if isinstance(device, Device):
            backend = backend or device.backend
        self.ordinal = parse_device(device)
        if self.ordinal is None:
            raise ArgumentError(f"a Device is a GPU such as 'cuda:0', got {device!r}")
        self.name = f"cuda:{self.ordinal}"
        self.backend = backend if isinstance(backend, Backend) else self._opened(backend)
        self._slot = self.backend._slot(self.ordinal)

    def _opened(self, path) -> Backend:
        try:
            return open_backend(path)
        except BackendError as error:
            if path is not None:
                raise
            raise DeviceError(f"{self.name} cannot be used: {error}") from error

    @property
    def model(self) -> str | None:
        """The product's name, such as "NVIDIA H200"; None for libraries that cannot tell."""
        if not self.backend.has("device_name"):
            return None
        name = ffi.new("char[]", 256)
        self._call("coli_cuda_device_name", self.ordinal, name, len(name))
        return text(name)

    @property
    def integrated(self) -> bool:
        """Whether the device shares the host's memory."""
        if not self.backend.has("device_integrated"):
            return False
        return bool(self.backend._entry("coli_cuda_device_integrated")(self.ordinal))

    def memory(self) -> Memory:
        """Free and total bytes."""
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        self._call("coli_cuda_mem_info", self.ordinal, free, total)
        return Memory(free[0], total[0])

    def stats(self) -> Stats:
        """Matrices on the device and their bytes."""
        count, nbytes = ffi.new("size_t *"), ffi.new("size_t *")
        with self._turn():
            self.backend._entry("coli_cuda_stats")(self.ordinal, count, nbytes)
        return Stats(count[0], nbytes[0])

    def group_stats(self) -> GroupStats:
        """Expert groups that the device has computed."""
        counters = [ffi.new("uint64_t *") for _ in range(3)] + [ffi.new("double *") for _ in range(3)]
        with self._turn():
            self.backend._entry("coli_cuda_group_stats_device")(self.ordinal, *counters)
        return GroupStats(*(counter[0] for counter in counters))

    def __eq__(self, other) -> bool:
        return isinstance(other, Device) and (self.backend, self.ordinal) == (other.backend, other.ordinal)

    def __hash__(self) -> int:
        return hash((self.backend, self.ordinal))

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    # What the other modules of the package use.

    def _call(self, name: str, *arguments) -> None:
        """Backend._call() in the device's turn."""
        with self._turn():
            self.backend._call(name, *arguments)

    @contextmanager
    def _turn(self):
        """Takes the device's turn: other threads' calls for it wait until the block ends. Gives the device's Slot."""
        self.backend._start()
        with self._slot.lock:
            self._free_abandoned()
            yield self._slot

    def _abandon(self, handle) -> None:
        """Frees a tensor as soon as the device's turn can be had without waiting.

        For finalizers: they run in the middle of anything, other devices' turns included, so waiting could deadlock.
        """
        self._slot.abandoned.append(handle)
        if self._slot.lock.acquire(blocking=False):
            try:
                self._free_abandoned()
            finally:
                self._slot.lock.release()

    def _free_abandoned(self) -> None:
        while self._slot.abandoned:
            self.backend._entry("coli_cuda_tensor_free")(self._slot.abandoned.pop())


class Tensor:
    """A weight matrix on a GPU.

    Use it as a context manager, or call free(); a forgotten one is freed when it is collected. It keeps its backend
    alive.

    Parameters
    ----------
    weights : Weights
        [O, I] in any format but "int3-g64".
    device : "cuda:0", int or Device

    Attributes
    ----------
    device : str
        Such as "cuda:0".
    gpu : Device
        The same as an object.
    fmt, shape, group_size, rotated
        As in Weights.

    Raises
    ------
    DeviceError
        As for Device; or the GPU runtime failed.
    NotProvidedError
        The format cannot be on a GPU, or this library lacks what it needs.
    OutOfMemoryError
        Of device memory.
    FormatError
        An E8 matrix with a codebook other than the backend's: see Backend.set_e8_codebook().
    """

    _address = None

    def __init__(self, weights: Weights, device: str | int | Device = "cuda:0"):
        _check_is_weights(weights, "weights")
        self.gpu = Device(device)
        self.fmt = weights.fmt
        # What it is, for C functions that do not read its bytes.
        self._matrix = ffi.new("coli_matrix *", weights._matrix[0])
        self._matrix.weights = self._matrix.scales = self._matrix.codebook = ffi.NULL
        self.shape = weights.shape
        self.group_size = weights.group_size
        self.rotated = weights.rotated
        self._upload(weights)

    @classmethod
    def upload(cls, weights: Weights, device: str | int | Device = "cuda:0") -> Tensor:
        """The constructor under the name of what it does."""
        return cls(weights, device)

    @property
    def device(self) -> str:
        """Where it is: "cuda:0"."""
        return self.gpu.name

    @property
    def freed(self) -> bool:
        """Whether the matrix has left the device."""
        return self._address is None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and scales."""
        with self.gpu._turn():
            return self.gpu.backend._entry("coli_cuda_tensor_bytes")(self._handle)

    @property
    def vram(self) -> int:
        """Bytes of device memory that the matrix takes, padding included."""
        backend = self.gpu.backend
        if not backend.has("tensor_vram"):
            return self.nbytes
        with self.gpu._turn():
            return backend._entry("coli_cuda_tensor_vram")(self._handle)

    @property
    def _handle(self):
        """The C handle. To be used inside ``with tensor.gpu._turn()``. FreedError after free()."""
        if self.freed:
            raise FreedError(f"the {self.fmt} tensor {list(self.shape)} on {self.device} has been freed")
        return self._address

    def update(self, weights: Weights) -> None:
        """Replaces the contents in place, after work that still reads them.

        Parameters
        ----------
        weights : Weights
            Of the same format, group size, shape and rotation.

        Raises
        ------
        ShapeError, FormatError, FreedError
        NotProvidedError
            The library has no update.
        DeviceError
            The copy failed. If it failed half-way, the tensor refuses to compute until an update succeeds.
        """
        _check_is_weights(weights, "weights")
        if weights.shape != self.shape:
            raise ShapeError(f"the tensor has shape {list(self.shape)}, the new weights {list(weights.shape)}")
        if (weights.fmt, weights.rotated) != (self.fmt, self.rotated):
            raise FormatError(f"the tensor is {_kind(self)}, the new weights are {_kind(weights)}")
        backend = self.gpu.backend
        backend.require("update")
        with self.gpu._turn():
            self._check_codebook(weights)
            backend._call("coli_cuda_tensor_update", self._handle, weights._matrix.weights, weights._matrix.scales)

    def download(self) -> Weights:
        """The very bytes that were uploaded. NotProvidedError where the library has no download."""
        backend = self.gpu.backend
        backend.require("download")
        number, group = parse_format(self.fmt)
        data = np.empty(lib.coli_weight_bytes(number, *self.shape), np.uint8)
        scales = empty_scales(number, *self.shape, group)
        with self.gpu._turn():
            backend._call("coli_cuda_tensor_download", self._handle, pointer(data), pointer(scales))
            own_codebook = self.fmt == "e8" and backend.e8_codebook != published_codebook()
            codebook = backend.e8_codebook if own_codebook else None
        scales = None if scales is None else seal(scales)
        return Weights._of(number, group, self.shape, seal(data), scales, self.rotated, codebook)

    def free(self) -> None:
        """Releases the device memory, after work that still reads it. A second call does nothing."""
        if self.freed:
            return
        if self.gpu.backend._in_other_process():
            self._address = None
            return
        with self.gpu._turn():
            handle, self._address = self._address, None
            if handle is not None:
                self.gpu.backend._entry("coli_cuda_tensor_free")(handle)

    def __enter__(self) -> Tensor:
        return self

    def __exit__(self, *_) -> None:
        self.free()

    def __del__(self):
        handle, self._address = self._address, None
        if handle is not None and not self.gpu.backend._in_other_process():
            self.gpu._abandon(handle)

    def __repr__(self) -> str:
        state = ", freed" if self.freed else ""
        return f"<Tensor {self.fmt} {list(self.shape)} on {self.device}{state}>"

    def _upload(self, weights: Weights) -> None:
        backend = self.gpu.backend
        backend.require(self.fmt)
        matrix = weights._matrix
        slot = ffi.new("ColiCudaTensor **")
        place = (matrix.columns, matrix.rows, self.gpu.ordinal)
        with self.gpu._turn():
            self._check_codebook(weights)
            if matrix.format == lib.COLI_INT4_GROUPED:
                source = (matrix.weights, matrix.scales, matrix.format)
                backend._call("coli_cuda_tensor_upload_g", slot, *source, *place, matrix.group_size)
            else:
                backend._call("coli_cuda_tensor_upload", slot, matrix.weights, matrix.scales, matrix.format, *place)
            self._address = slot[0]
            backend._register(self)
            if _is_unrotated_e8(self) and backend.has("tensor_set_rotated"):
                self._declare_unrotated()

    def _declare_unrotated(self) -> None:
        try:
            self.gpu.backend._call("coli_cuda_tensor_set_rotated", self._address, 0)
        except ColiError:
            self.free()
            raise

    def _check_codebook(self, weights: Weights) -> None:
        published = self.gpu.backend.e8_codebook
        if weights.fmt == "e8" and (weights.codebook or published_codebook()) != published:
            raise FormatError(
                "the E8 matrix has another codebook than the devices: Backend.set_e8_codebook() publishes one for all"
            )


def _is_unrotated_e8(matrix: Weights | Tensor) -> bool:
    return matrix.fmt == "e8" and not matrix.rotated


def parse_device(device: str | int | Device) -> int | None:
    """The ordinal of a device's name, None for "cpu"."""
    if isinstance(device, Device):
        return device.ordinal
    if isinstance(device, (int, np.integer)) and not isinstance(device, bool) and device >= 0:
        return int(device)
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::([0-9]{1,9}))?", device) if isinstance(device, str) else None
    if not match:
        raise ArgumentError(f"device must be 'cpu', 'cuda' (cuda:0), 'cuda:N' or an ordinal, got {device!r}")
    return int(match[1] or 0)


def e8_encoder(device: str | int | Device | None) -> Device | None:
    """The GPU that encodes E8 where the caller named one; None for the CPU.

    ArgumentError for what names no device, DeviceError and NotProvidedError for one that cannot encode.
    """
    if device is None or parse_device(device) is None:
        return None
    gpu = Device(device)
    gpu.backend.require("encode_e8")
    return gpu


def names_apart(first: Device | None, other: Device | None) -> list[str]:
    """Names of two places that differ (None is the CPU), with the libraries' where nothing else tells them apart."""
    names = [place.name if place else "cpu" for place in (first, other)]
    if names[0] != names[1]:
        return names
    return [f"{place.name} of {place.backend.path}" for place in (first, other)]


def _check_is_weights(weights, what: str) -> None:
    if not isinstance(weights, Weights):
        raise DtypeError(f"{what} must be Weights (see pycoli.encode), got {type(weights).__name__}")


def _kind(matrix: Weights | Tensor) -> str:
    return "unrotated e8" if _is_unrotated_e8(matrix) else matrix.fmt
