"""Control of the simulated CUDA runtime that libcoli_cuda_simt.so carries (tests/simt)."""

import ctypes


class Simulator:
    """Fault injection, call counts and leak accounts of one simulated library."""

    def __init__(self, path):
        library = ctypes.CDLL(path)
        self._fail_call = library.simt_fail_call
        self._fail_call.argtypes, self._fail_call.restype = [ctypes.c_char_p, ctypes.c_int], None
        self._call_count = library.simt_call_count
        self._call_count.argtypes, self._call_count.restype = [ctypes.c_char_p], ctypes.c_size_t
        self._live_allocations = library.simt_live_allocations
        self._live_allocations.argtypes, self._live_allocations.restype = [], ctypes.c_size_t
        self._live_bytes = library.simt_live_bytes
        self._live_bytes.argtypes, self._live_bytes.restype = [ctypes.c_int], ctypes.c_size_t

    @staticmethod
    def is_in(path):
        """Whether a library is a simulated one."""
        return hasattr(ctypes.CDLL(path), "simt_fail_call")

    def fail(self, name, nth):
        """Makes the nth next runtime call of that name (b"*": of any) fail; 0 makes none fail."""
        self._fail_call(name, nth)

    def lose_devices(self, nth):
        """Makes the nth next runtime call and all later ones fail, as when a device is lost, until fail(b"*", 0)."""
        self._fail_call(b"*", -nth)

    def calls(self, name=b"*"):
        """Runtime calls so far."""
        return self._call_count(name)

    def live(self):
        """(allocations, bytes on device 0): what was allocated and not yet released."""
        return self._live_allocations(), self._live_bytes(0)
