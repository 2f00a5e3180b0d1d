"""Device memory, streams and graphs for tests of the device-pointer calls.

On a real GPU through the driver, which is there wherever the library works; on the simulator through the runtime
functions that the simulated library exports. Both take the same arguments under different names.
"""

import ctypes

import numpy as np

_DRIVER_NAMES = {
    "malloc": "cuMemAlloc_v2",
    "free": "cuMemFree_v2",
    "stream_create": "cuStreamCreate",
    "stream_destroy": "cuStreamDestroy_v2",
    "stream_synchronize": "cuStreamSynchronize",
    "begin_capture": "cuStreamBeginCapture_v2",
    "end_capture": "cuStreamEndCapture",
    "instantiate": "cuGraphInstantiateWithFlags",
    "launch": "cuGraphLaunch",
    "graph_destroy": "cuGraphDestroy",
    "exec_destroy": "cuGraphExecDestroy",
}
_RUNTIME_NAMES = {
    "malloc": "cudaMalloc",
    "free": "cudaFree",
    "stream_create": "cudaStreamCreateWithFlags",
    "stream_destroy": "cudaStreamDestroy",
    "stream_synchronize": "cudaStreamSynchronize",
    "begin_capture": "cudaStreamBeginCapture",
    "end_capture": "cudaStreamEndCapture",
    "instantiate": "cudaGraphInstantiate",
    "launch": "cudaGraphLaunch",
    "graph_destroy": "cudaGraphDestroy",
    "exec_destroy": "cudaGraphExecDestroy",
}
_NON_BLOCKING = 1
_RELAXED_CAPTURE = 2
_ANY_DIRECTION = 4

address = ctypes.c_void_p


class DeviceMemory:
    """What the caller of the device-pointer functions brings along, on device 0. Addresses and streams are integers."""

    def __init__(self, simulated_library=None):
        self._simulated = simulated_library is not None
        self._library = ctypes.CDLL(simulated_library or "libcuda.so.1")
        self._names = _RUNTIME_NAMES if self._simulated else _DRIVER_NAMES
        self._allocations, self._streams = [], []
        self._graphs = []  # (graph, executable)
        self._select_device()

    def _check(self, name, *arguments):
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name} gave error {result}"

    def _call(self, what, *arguments):
        self._check(self._names[what], *arguments)

    def _select_device(self):
        if self._simulated:
            self._check("cudaSetDevice", 0)
            return
        device, context = ctypes.c_int(), address()
        self._check("cuInit", 0)
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxSetCurrent", context)

    def _copy(self, to, source, count):
        arguments = address(to), address(source), ctypes.c_size_t(count)
        if self._simulated:
            self._check("cudaMemcpy", *arguments, _ANY_DIRECTION)
        else:
            self._check("cuMemcpy", *arguments)
        self.synchronize(None)  # a copy from pageable memory may return before it has arrived

    def allocate(self, count):
        """Address of so many bytes."""
        result = address()
        self._call("malloc", ctypes.byref(result), ctypes.c_size_t(count))
        self._allocations.append(result.value)
        return result.value

    def put(self, array, where=None):
        """Copies an array to the device, to fresh memory unless `where` says."""
        array = np.ascontiguousarray(array)
        where = where or self.allocate(array.nbytes)
        self._copy(where, array.ctypes.data, array.nbytes)
        return where

    def get(self, where, shape):
        """Float32 from the device."""
        array = np.empty(shape, np.float32)
        self._copy(array.ctypes.data, where, array.nbytes)
        return array

    def stream(self):
        """A stream that does not wait for the default one."""
        result = address()
        self._call("stream_create", ctypes.byref(result), _NON_BLOCKING)
        self._streams.append(result.value)
        return result.value

    def synchronize(self, stream):
        self._call("stream_synchronize", address(stream))

    def capture(self, stream, work):
        """A graph of what `work()` puts on the stream."""
        graph, executable = address(), address()
        self._call("begin_capture", address(stream), _RELAXED_CAPTURE)
        try:
            work()
        finally:
            self._call("end_capture", address(stream), ctypes.byref(graph))
        self._call("instantiate", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self._graphs.append((graph.value, executable.value))
        return executable.value

    def launch(self, graph, stream):
        self._call("launch", address(graph), address(stream))

    def close(self):
        for stream in self._streams:
            self.synchronize(stream)
        for graph, executable in self._graphs:
            self._call("exec_destroy", address(executable))
            self._call("graph_destroy", address(graph))
        for stream in self._streams:
            self._call("stream_destroy", address(stream))
        for allocation in self._allocations:
            self._call("free", address(allocation))
