"""Exceptions of pycoli.

All derive from ColiError; each also derives from the built-in exception that fits, so ``except ValueError`` works too.
Messages say what was expected and what came.
"""


class ColiError(Exception):
    """Base of every error that pycoli raises itself."""


class ArgumentError(ColiError, ValueError):
    """An argument has a value that is not allowed."""


class ShapeError(ColiError, ValueError):
    """Dimensions do not fit: of an array, or of matrices to each other."""


class DtypeError(ColiError, TypeError):
    """The type of an object or an array's dtype is not one that can be taken without loss."""


class FormatError(ColiError, ValueError):
    """The weight format does not exist, or does not go with its options."""


class SizeError(ColiError, ValueError):
    """The number of weight bytes or scales is not what format and shape require."""


class CheckpointError(ColiError, ValueError):
    """A file of weights or activations that cannot be used; the text names the file and the tensor."""


class NotFiniteError(ColiError, ValueError):
    """NaN or infinity where a finite number is needed."""


class StateError(ColiError, RuntimeError):
    """The call comes at the wrong time, such as take() with nothing issued."""


class FreedError(StateError):
    """The device tensor, or what holds it, has been freed."""


class DeviceError(ColiError, RuntimeError):
    """There is no such device, matrices are on the wrong one, or the GPU runtime reported an error."""


class OutOfMemoryError(ColiError, MemoryError):
    """Host or device memory ran out."""


class BackendError(ColiError, RuntimeError):
    """A library was not found, did not load, or speaks another ABI."""


class NotProvidedError(ColiError, NotImplementedError):
    """The library at hand does not offer what was asked for."""
