"""The CUDA driver for measurements: device memory, one stream, graphs, and times between events.

Only what the benchmark needs, straight from libcuda, which is there wherever a GPU is: the GPU library has no such
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cffi
import numpy as np

from ...errors import DeviceError, OutOfMemoryError

LIBRARY = "libcuda.so.1"

_DECLARATIONS = """
typedef unsigned long long address;
int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);
int cuGetErrorString(int error, const char **text);
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetName(char *name, int size, int device);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(address *memory, size_t size);
int cuMemFree_v2(address memory);
int cuMemHostAlloc(void **memory, size_t size, unsigned flags);
int cuMemFreeHost(void *memory);
int cuMemcpyHtoD_v2(address to, const void *from, size_t size);
int cuMemcpyDtoH_v2(void *to, address from, size_t size);
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamSynchronize(void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags);
int cuGraphLaunch(void *executable, void *stream);
int cuGraphExecDestroy(void *executable);
int cuGraphDestroy(void *graph);
int cuEventCreate(void **event, unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuEventSynchronize(void *event);
int cuEventElapsedTime(float *milliseconds, void *start, void *stop);
int cuEventDestroy_v2(void *event);
"""

_OUT_OF_MEMORY = 2
_NON_BLOCKING_STREAM = 1
_RELAXED_CAPTURE = 2
_MULTIPROCESSORS, _L2_BYTES, _MAJOR, _MINOR = 16, 38, 75, 76


class Driver:
    """One GPU through the driver, with a stream of its own. A context manager.

    It shares the GPU library's context, so that memory and stream are good for its device-pointer calls. Addresses are
    integers. For one thread.

    Parameters
    ----------
    ordinal : int

    Attributes
    ----------
    version : str
        The CUDA version that the driver offers, such as "13.0".
    capability : str
        Such as "9.0".
    multiprocessors, l2_bytes : int
    stream : int
        Address of a cudaStream_t that does not wait for the default stream.

    Raises
    ------
    DeviceError
        There is no driver or no such device; later: a call failed, and the text says which.
    """

    def __init__(self, ordinal: int):
        self._ffi = cffi.FFI()
        self._ffi.cdef(_DECLARATIONS)
        try:
            self._library = self._ffi.dlopen(LIBRARY)
        except OSError as error:
            raise DeviceError(f"measuring a GPU needs the NVIDIA driver: {error}") from error
        self._call("cuInit", 0)
        version = self._result("int *", "cuDriverGetVersion")
        self.version = f"{version // 1000}.{version % 1000 // 10}"
        self._device = self._result("int *", "cuDeviceGet", ordinal)
        self.capability = f"{self._attribute(_MAJOR)}.{self._attribute(_MINOR)}"
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.l2_bytes = self._attribute(_L2_BYTES)
        self._context = self._result("void **", "cuDevicePrimaryCtxRetain", self._device)
        self._enter()
        self._stream = self._result("void **", "cuStreamCreate", _NON_BLOCKING_STREAM)
        self.stream = int(self._ffi.cast("intptr_t", self._stream))
        self._events = [self._result("void **", "cuEventCreate", 0) for _ in range(2)]

    def close(self) -> None:
        """Waits for the stream and gives everything back but memory and graphs, which end with their blocks."""
        self.synchronize()
        for event in self._events:
            self._call("cuEventDestroy_v2", event)
        self._call("cuStreamDestroy_v2", self._stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextmanager
    def memory(self, nbytes: int) -> Iterator[int]:
        """Address of so many bytes on the device, for the time of the block. OutOfMemoryError without room."""
        self._enter()
        address = self._result("address *", "cuMemAlloc_v2", max(nbytes, 1))
        try:
            yield address
        finally:
            self.synchronize()
            self._call("cuMemFree_v2", address)

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[np.ndarray]:
        """Page-locked host memory, uint8 [nbytes], for the time of the block."""
        self._enter()
        memory = self._result("void **", "cuMemHostAlloc", nbytes, 0)
        try:
            yield np.frombuffer(self._ffi.buffer(memory, nbytes), np.uint8)
        finally:
            self.synchronize()
            self._call("cuMemFreeHost", memory)

    def put(self, address: int, array: np.ndarray) -> None:
        """Copies a C-contiguous array to the device, after the work on the stream."""
        self.synchronize()
        self._call("cuMemcpyHtoD_v2", address, self._data(array), array.nbytes)
        self._call("cuStreamSynchronize", self._ffi.NULL)  # from pageable memory the copy may return before it arrives

    def get(self, address: int, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
        """An array from the device, after the work on the stream."""
        array = np.empty(shape, dtype)
        self.synchronize()
        self._call("cuMemcpyDtoH_v2", self._data(array), address, array.nbytes)
        return array

    def enqueue_upload(self, address: int, pinned: np.ndarray) -> None:
        """Puts a copy from page-locked memory on the stream."""
        self._call("cuMemcpyHtoDAsync_v2", address, self._data(pinned), pinned.nbytes, self._stream)

    @contextmanager
    def graph(self, work: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Captures what `work` puts on the stream; gives a function that puts a replay of it there."""
        self._enter()
        self._call("cuStreamBeginCapture_v2", self._stream, _RELAXED_CAPTURE)
        captured = self._ffi.new("void **")
        try:
            work()
        except BaseException:
            self._library.cuStreamEndCapture(self._stream, captured)  # its error is the consequence of that one
            raise
        self._call("cuStreamEndCapture", self._stream, captured)
        executable = self._result("void **", "cuGraphInstantiateWithFlags", captured[0], 0)
        try:
            yield lambda: self._call("cuGraphLaunch", executable, self._stream)
        finally:
            self.synchronize()
            self._call("cuGraphExecDestroy", executable)
            self._call("cuGraphDestroy", captured[0])

    def seconds(self, work: Callable[[], None]) -> float:
        """How long the device takes for what `work` puts on the stream: the time between events before and after it."""
        self._enter()
        start, stop = self._events
        self._call("cuEventRecord", start, self._stream)
        work()
        self._call("cuEventRecord", stop, self._stream)
        self._call("cuEventSynchronize", stop)
        return 1e-3 * self._result("float *", "cuEventElapsedTime", start, stop)

    def synchronize(self) -> None:
        """Waits for the work on the stream."""
        self._enter()
        self._call("cuStreamSynchronize", self._stream)

    def _enter(self) -> None:
        """Makes the context this thread's: the GPU library and others may have left another one."""
        self._call("cuCtxSetCurrent", self._context)

    def _attribute(self, number: int) -> int:
        return self._result("int *", "cuDeviceGetAttribute", number, self._device)

    def _data(self, array: np.ndarray):
        return self._ffi.cast("void *", array.ctypes.data)

    def _result(self, ctype: str, name: str, *arguments):
        """What a call writes through its first argument."""
        result = self._ffi.new(ctype)
        self._call(name, result, *arguments)
        return result[0]

    def _call(self, name: str, *arguments) -> None:
        try:
            error = getattr(self._library, name)(*arguments)
        except AttributeError as missing:
            raise DeviceError(f"the NVIDIA driver lacks {name}: it is too old to measure with") from missing
        if error:
            text = self._ffi.new("const char **")
            known = self._library.cuGetErrorString(error, text) == 0
            reason = self._ffi.string(text[0]).decode() if known else "unknown"
            kind = OutOfMemoryError if error == _OUT_OF_MEMORY else DeviceError
            raise kind(f"{name} gave error {error}: {reason}")
