"""Low-bit expert weights of mixture-of-experts models: encode them, keep them on GPUs, compute with them.

    import numpy as np, pycoli

    w = pycoli.encode(np.random.randn(512, 2048).astype(np.float32), "e8")   # 3.0625 bits a weight
    y = pycoli.matmul(np.ones((1, 2048), np.float32), w)                     # on a GPU, or else on the CPU
    print(w, pycoli.explain(w))                                              # where it ran, and why there

Activations are plain float32 everywhere; what a format needs rotated is rotated here.
"""

from pkgutil import extend_path

# In a checkout, the folder of this file hides the installed package, which alone has the libraries: look there too.
__path__ = extend_path(__path__, __name__)

from . import _lib, cpu
from .backend import Backend, open_backend
from .calibrate import Calibration, CalibrationReport, CalibrationWarning, read_imatrix
from .container import Container, EncodedExpert
from .device import Device, Tensor
from .errors import (
    ArgumentError,
    BackendError,
    CheckpointError,
    ColiError,
    DeviceError,
    DtypeError,
    FormatError,
    FreedError,
    NotFiniteError,
    NotProvidedError,
    OutOfMemoryError,
    ShapeError,
    SizeError,
    StateError,
)
from .expert_encoding import encode_expert
from .experts import Expert, ExpertGroup
from .moe import MoELayer, Router, place, repin, trim_memory
from .placement import Placement, explain
from .products import expert_mlp, matmul
from .weights import Format, Weights, encode, encode_calibrated, formats, rotate, unrotate

__version__ = _lib.version

__all__ = [
    "ArgumentError",
    "Backend",
    "BackendError",
    "Calibration",
    "CalibrationReport",
    "CalibrationWarning",
    "CheckpointError",
    "ColiError",
    "Container",
    "Device",
    "DeviceError",
    "DtypeError",
    "EncodedExpert",
    "Expert",
    "ExpertGroup",
    "Format",
    "FormatError",
    "FreedError",
    "MoELayer",
    "NotFiniteError",
    "NotProvidedError",
    "OutOfMemoryError",
    "Placement",
    "Router",
    "ShapeError",
    "SizeError",
    "StateError",
    "Tensor",
    "Weights",
    "cpu",
    "encode",
    "encode_calibrated",
    "encode_expert",
    "expert_mlp",
    "explain",
    "formats",
    "matmul",
    "open_backend",
    "place",
    "read_imatrix",
    "repin",
    "rotate",
    "trim_memory",
    "unrotate",
]
