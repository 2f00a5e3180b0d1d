"""Whole MoE layers: Router, MoELayer, and place() and repin() for the layers of a model together."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from os import environ

import numpy as np

from ._arrays import as_array, as_float32, as_matrix, as_rows, floats
from ._lib import check, ffi, lib, text
from .backend import Backend
from .device import Device, parse_device
from .errors import ArgumentError, DeviceError, DtypeError, FreedError, OutOfMemoryError, ShapeError, StateError
from .placement import default_backend
from .products import check_expert
from .weights import Weights, encode, published_codebook

RESERVE = 2 << 30
"""Bytes that an automatic budget leaves free on a device, for activations and attention caches."""

_INT = 2**31 - 1
_SIZE = 2 ** (8 * ffi.sizeof("size_t")) - 1
_KINDS = {"softmax": "COLI_ROUTER_SOFTMAX", "sigmoid": "COLI_ROUTER_SIGMOID"}
_PATHS = ("issue", "group", "single", "cpu")
_STEPS = ("issue", "take", "group", "single", "update")
_NEVER_PLACED = "it was never placed"
_TRIPLE = ("gate", "up", "down")


class Router:
    """Chooses the experts of each row.

    Parameters
    ----------
    weight : float32 [E, D]
        Logits are ``x @ weight.T``. float16 and bfloat16 are converted exactly.
    top_k : int
        K experts a row.
    kind : "softmax" or "sigmoid"
        How logits become scores: over all experts (OLMoE, Qwen3-MoE, Mixtral), or each by itself (DeepSeek-V3, GLM).
    renormalise : bool
        Whether the K weights of a row are divided by their sum.
    groups, top_groups : int
        With groups > 0, the experts are that many equal groups of neighbours, and a row uses the best top_groups of
        them. A group counts by its best score with "softmax", by the sum of its two best with "sigmoid", bias included.
    bias : float32 [E], optional
        Added to the scores for the choice alone, not to the weights.
    scale : float
        Factor of all weights.

    Raises
    ------
    ArgumentError, DtypeError, ShapeError, NotFiniteError
    """

    def __init__(
        self,
        weight,
        top_k: int,
        *,
        kind: str = "softmax",
        renormalise: bool = False,
        groups: int = 0,
        top_groups: int = 0,
        bias=None,
        scale: float = 1.0,
    ):
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ArgumentError(f"kind must be {' or '.join(map(repr, _KINDS))}, got {kind!r}")
        self.weight = as_matrix(weight, "weight")
        self._matrix = encode(self.weight, "f32")
        self._bias = None if bias is None else as_float32(bias, "bias").copy()
        if self._bias is not None and self._bias.shape != (len(self.weight),):
            raise ShapeError(f"bias must be [{len(self.weight)}], got shape {list(self._bias.shape)}")
        self._router = ffi.new("coli_router *")
        self._router.kind = getattr(lib, _KINDS[kind])
        self._router.experts = len(self.weight)
        self._router.top_k = _whole(top_k, "top_k", _INT)
        self._router.renormalise = bool(renormalise)
        self._router.groups = _whole(groups, "groups", _INT)
        self._router.top_groups = _whole(top_groups, "top_groups", _INT)
        self._router.bias = ffi.NULL if self._bias is None else ffi.cast("float *", self._bias.ctypes.data)
        self._router.scale = _real(scale, "scale")
        check(lib.coli_route(self._router, ffi.NULL, 0, ffi.NULL, ffi.NULL))

    @property
    def experts(self) -> int:
        """E."""
        return self._router.experts

    @property
    def dim(self) -> int:
        """D."""
        return self.weight.shape[1]

    @property
    def top_k(self) -> int:
        """K."""
        return self._router.top_k

    def __call__(self, x) -> tuple[np.ndarray, np.ndarray]:
        """Rows float32 [..., D] to the ids int32 [..., K] of their experts, best first, and weights float32 [..., K].

        Raises
        ------
        DtypeError, ShapeError
        NotFiniteError
            Names the row and the expert whose logit is not finite.
        """
        rows, leading = as_rows(x, self.dim, "x")
        logits = np.empty((len(rows), self.experts), np.float32)
        check(lib.coli_matmul(self._matrix._matrix, floats(rows), len(rows), floats(logits)))
        ids, weights = self.choose(logits)
        return ids.reshape(*leading, self.top_k), weights.reshape(*leading, self.top_k)

    def choose(self, logits) -> tuple[np.ndarray, np.ndarray]:
        """The same for logits float32 [S, E]."""
        logits = as_float32(logits, "logits")
        if logits.ndim != 2 or logits.shape[1] != self.experts:
            raise ShapeError(f"logits must be [S, {self.experts}], got shape {list(logits.shape)}")
        ids = np.empty((len(logits), self.top_k), np.int32)
        weights = np.empty(ids.shape, np.float32)
        check(lib.coli_route(self._router, floats(logits), len(logits), _ints(ids), floats(weights)))
        return ids, weights


class MoELayer:
    """The experts of a layer, on GPUs as far as a budget goes and on the CPU, computed together.

    Whatever fails on a GPU is computed on the next path, down to the CPU; stats() tells. One layer's calls take turns;
    those of different layers may run at once. Free it with free(), or use it as a context manager.

    Parameters
    ----------
    experts : sequence of (gate, up, down)
        Weights: gate and up [H, D], down [D, H], one H and D for all, in any formats.
    router : Router, optional
        For calls without ids; not needed where there is a shared expert alone.
    shared : (gate, up, down), optional
        An expert that every row passes; its H may differ.
    devices : None, "cpu", a device, or a sequence of devices
        Where experts may be placed. None is every GPU there is; `why_cpu` says why one is on the CPU.
    vram_budget : int or mapping of devices to int, optional
        Bytes of each device for the layer's experts; a mapping gives none to devices that it leaves out. None is what
        is free, less `reserve`. For a model of several layers, make them with devices="cpu" and call pycoli.place().
    shared_gate : float32 [D], optional
        The shared expert's factor is the sigmoid of this vector's product with the row (Qwen2-MoE); 1 without it.
    reserve : int
        Bytes that an automatic budget leaves free.
    reread : callable int -> (gate, up, down), optional
        Gives the Weights of an expert again (len(experts): the shared one). With it, the layer keeps no host copies of
        experts that are on a GPU. It must not use a layer. Where it fails, place() and repin() leave the expert on the
        CPU with a RuntimeWarning.

    Attributes
    ----------
    dim : int
        D.
    router : Router or None

    Raises
    ------
    ArgumentError, DtypeError, ShapeError, FormatError
    DeviceError, BackendError
        A device that `devices` names cannot be used.
    """

    def __init__(
        self,
        experts: Sequence,
        router: Router | None = None,
        shared=None,
        devices=None,
        vram_budget=None,
        *,
        shared_gate=None,
        reserve: int = RESERVE,
        reread: Callable[[int], Sequence[Weights]] | None = None,
    ):
        self._used: _Used | None = None
        triples = [_triple(expert, f"experts[{i}]") for i, expert in enumerate(_listed(experts, "experts"))]
        triples += [] if shared is None else [_triple(shared, "shared")]
        self._count = len(triples) - (shared is not None)
        if not triples:
            raise ArgumentError("a layer needs at least 1 expert, got none")
        self.dim = triples[0][0].shape[1]
        self.router = _checked_router(router, self._count, self.dim)
        self._shared_gate = _checked_gate(shared_gate, shared, self.dim)
        self._host = _HostCopies(triples, reread)
        self._why_no_gpu = _NEVER_PLACED
        self._used = _Used(self._created(triples, shared is not None), self._host)
        place([self], devices, vram_budget, reserve=reserve)

    def _created(self, triples, has_shared: bool):
        structs = ffi.new("coli_expert[]", len(triples))
        for struct, triple in zip(structs, triples, strict=True):
            for name, weights in zip(_TRIPLE, triple, strict=True):
                setattr(struct, name, weights._matrix[0])
        layer = ffi.new("coli_moe **")
        shared = structs + self._count if has_shared else ffi.NULL
        check(lib.coli_moe_create(structs, self._count, shared, self._host.struct, layer))
        _LIVE.add(self._host)
        return ffi.gc(layer[0], partial(_free, self._host))

    def __len__(self) -> int:
        return self._count

    def __call__(self, x, ids=None, weights=None, shared_weights=None) -> np.ndarray:
        """Rows through their experts: float32 [..., D].

        Parameters
        ----------
        x : float32 [..., D]
            Plain activations.
        ids, weights : whole numbers and float32 [..., K], optional
            The experts of each row, -1 for none, and their factors; by default what the router says. Pairs of weight 0
            are not computed.
        shared_weights : float32 [...], optional
            Factors of the shared expert; by default what shared_gate gives.

        Raises
        ------
        DtypeError, ShapeError, ArgumentError, FreedError
        StateError
            `reread` failed, and the expert was needed on the CPU.
        DeviceError
            Experts are on GPUs, and this process is a fork of the one that placed them.
        """
        self._live()
        rows, leading = as_rows(x, self.dim, "x")
        if ids is None:
            ids, weights = self._routed(rows, weights)
        ids, weights = _pairs(ids, weights, len(rows))
        if shared_weights is None and self._shared_gate is not None:
            shared_weights = _sigmoid(rows.astype(np.float64) @ self._shared_gate)
        factors = None if shared_weights is None else as_float32(shared_weights, "shared_weights").reshape(-1)
        if factors is not None and len(factors) != len(rows):
            raise ShapeError(f"shared_weights must be one for each of {len(rows)} rows, got {len(factors)}")
        y = np.empty_like(rows)
        factors = ffi.NULL if factors is None else floats(factors)
        with self._live() as handle, self._turns():
            _check(
                lib.coli_moe_forward(
                    handle, floats(rows), len(rows), _ints(ids), floats(weights), ids.shape[1], factors, floats(y)
                )
            )
        return y.reshape(*leading, self.dim)

    def _routed(self, rows, weights):
        if weights is not None:
            raise ArgumentError("weights need ids beside them")
        if not self._count:  # of a shared expert alone
            return np.empty((len(rows), 0), np.int32), np.empty((len(rows), 0), np.float32)
        if self.router is None:
            raise ArgumentError("the layer has no router: pass ids and weights, or give it one")
        return self.router(rows)

    def place(self, devices=None, vram_budget=None, *, reserve: int = RESERVE) -> None:
        """Uploads experts that are on the CPU, hottest first, as far as the budget goes. See place()."""
        place([self], devices, vram_budget, reserve=reserve)

    def unplace(self) -> None:
        """Takes all experts off the GPUs."""
        with self._live() as handle, self._turns():
            lib.coli_moe_unplace(handle)

    def repin(self, hysteresis: float = 0.25, max_swaps: int = 0) -> dict:
        """Swaps cold experts on GPUs for hot ones on the CPU. See repin()."""
        return repin([self], hysteresis, max_swaps)

    @property
    def where(self) -> list[str]:
        """The device of each expert, "cpu" or "cuda:0"; last that of the shared one, where there is one."""
        with self._live() as handle:
            ordinals = [lib.coli_moe_device_of(handle, i) for i in range(self._host.count)]
        return ["cpu" if ordinal < 0 else f"cuda:{ordinal}" for ordinal in ordinals]

    def why_cpu(self, expert: int) -> str | None:
        """Why an expert is on the CPU, or was computed there last; None while a GPU does the work."""
        expert = _whole(expert, "expert")
        if not 0 <= expert < self._host.count:
            raise ArgumentError(f"expert must be 0 ... {self._host.count - 1}, got {expert}")
        with self._live() as handle:
            why = _text(lambda buffer, size: lib.coli_moe_why_cpu(handle, expert, buffer, size))
        return self._why_no_gpu if why == _NEVER_PLACED else why

    @property
    def heat(self) -> np.ndarray:
        """Rows that each expert has computed, older ones counting less: float64 [E]. May be set to an earlier run's."""
        heat = np.empty(self._count)
        with self._live() as handle:
            check(lib.coli_moe_get_heat(handle, ffi.from_buffer("double[]", heat)))
        return heat

    @heat.setter
    def heat(self, values) -> None:
        heat = as_array(values, "heat")
        if heat.dtype.kind not in "iuf":
            raise DtypeError(f"heat must be real numbers, got {heat.dtype.name}")
        heat = np.array(heat, np.float64)
        if heat.shape != (self._count,):
            raise ShapeError(f"heat must be [{self._count}], got shape {list(heat.shape)}")
        with self._live() as handle:
            check(lib.coli_moe_set_heat(handle, ffi.from_buffer("double[]", heat)))

    def set_half_life(self, rows: float) -> None:
        """After so many rows of the layer, a use counts half; 0: never. 4096 at first."""
        with self._live() as handle:
            check(lib.coli_moe_set_half_life(handle, _real(rows, "rows")))

    def stats(self) -> dict:
        """What was done where: {"total": ..., "last": ..., "why_failed": ...}.

        "total" is since the layer was made, "last" the last call alone. Each has calls, rows, rotations, cpu_bytes and
        seconds by stage; by path ("issue", "group", "single", "cpu") the experts and their rows ("pairs"); by step
        ("issue", "take", "group", "single", "update") how many experts it failed on ("failed"), so that another path
        or nobody did the work; and "repinned" with the swaps. "why_failed" is the reason of each step's last failure,
        None where it never failed.
        """
        total, last = ffi.new("coli_moe_stats *"), ffi.new("coli_moe_stats *")
        with self._live() as handle:
            check(lib.coli_moe_get_stats(handle, total, last, ffi.sizeof("coli_moe_stats")))
            reasons = [
                _text(lambda buffer, size, step=step: lib.coli_moe_why_failed(handle, step, buffer, size))
                for step in range(len(_STEPS))
            ]
        return {"total": _stats(total), "last": _stats(last), "why_failed": dict(zip(_STEPS, reasons, strict=True))}

    def free(self) -> None:
        """Frees what is on GPUs, after calls in progress. A second call does nothing."""
        used, self._used = self._used, None
        if used is not None:
            used.free()

    def _live(self) -> _Used:
        """For ``with``: the layer in C, which is not freed meanwhile."""
        used = self._used
        if used is None:
            raise FreedError(f"the layer of {self._count} experts has been freed")
        if _HERE.rereading:
            raise StateError("reread() must not use a layer: the one that asks for weights waits for it")
        return used

    def _turns(self) -> ExitStack:
        """The turns of all devices, for libraries that do not keep calls apart themselves. DeviceError in a fork."""
        stack = ExitStack()
        backend = self._host.backend
        if backend and backend._in_other_process() and any(name != "cpu" for name in self.where):
            backend._start()  # which says so
        if backend and not backend.has("abi_version"):
            stack.enter_context(backend._all_devices())
        return stack

    def _join(self, backend: Backend) -> None:
        """Has the layer taken off the GPUs before the backend is shut down."""
        if self._host.backend not in (None, backend):
            raise DeviceError(f"the layer has been placed through {self._host.backend.path}, not {backend.path}")
        if self._host.has_e8 and backend.e8_codebook != published_codebook():
            raise StateError("the devices decode E8 with another codebook (see Backend.set_e8_codebook)")
        self._host.backend = backend
        backend._layers.add(self)

    def _e8_on_gpus(self) -> int:
        """Experts on GPUs, if there may be an E8 matrix among theirs."""
        if not self._host.has_e8:
            return 0
        try:
            return sum(name != "cpu" for name in self.where)
        except FreedError:
            return 0

    def __enter__(self) -> MoELayer:
        return self

    def __exit__(self, *_) -> None:
        self.free()

    def __repr__(self) -> str:
        try:
            where = self.where
        except FreedError:
            return f"<MoELayer of {self._count} experts, freed>"
        places = ", ".join(f"{where.count(name)} on {name}" for name in dict.fromkeys(where))
        return f"<MoELayer of {self._count} experts [{self.dim}]: {places}>"


def place(layers: Sequence[MoELayer], devices=None, vram_budget=None, *, reserve: int = RESERVE) -> None:
    """Uploads the experts of all these layers, hottest first, to the device with the most room left.

    An expert is uploaded whole or not at all, and those that are on a GPU stay there. Not being able to place is no
    error: MoELayer.why_cpu() says why.

    Parameters
    ----------
    layers : sequence of MoELayer
    devices, vram_budget, reserve
        As for MoELayer; a budget is for the experts of all these layers together.

    Raises
    ------
    ArgumentError, DtypeError, FreedError
    DeviceError, BackendError
        A device that is named cannot be used.
    """
    layers = _checked_layers(layers)
    reserve = _whole(reserve, "reserve", _SIZE)
    targets, reason = _targets(devices)
    if not targets:
        for layer in layers:
            layer._why_no_gpu = reason
        return
    budgets = _budgets(vram_budget, targets)
    backend = targets[0].backend
    structs = ffi.new("coli_moe_device[]", [(d.ordinal, b, reserve) for d, b in zip(targets, budgets, strict=True)])
    with backend._start_lock:  # it is not shut down meanwhile
        backend._start()
        for layer in layers:
            layer._join(backend)
        with _handles(layers) as handles:
            _check(lib.coli_moe_place(handles, len(handles), backend._handle, structs, len(targets)))


def repin(layers: Sequence[MoELayer], hysteresis: float = 0.25, max_swaps: int = 0) -> dict:
    """Swaps the coldest experts on GPUs for the hottest on the CPU, in place, where formats and shapes are the same.

    Parameters
    ----------
    layers : sequence of MoELayer
    hysteresis : float
        A swap needs a heat above (1 + hysteresis) times that of the expert that leaves.
    max_swaps : int
        0: no limit.

    Returns
    -------
    dict
        swaps, failed, bytes, seconds.
    """
    hysteresis, max_swaps = _real(hysteresis, "hysteresis"), _whole(max_swaps, "max_swaps", _INT)
    result = ffi.new("coli_moe_repinned *")
    with _handles(_checked_layers(layers)) as handles:
        _check(lib.coli_moe_repin(handles, len(handles), hysteresis, max_swaps, result))
    return _fields(result[0])


def trim_memory() -> None:
    """Gives memory back to the system that calls of layers worked in and kept for the next, up to 512 MB.

    Freeing the last layer does the same.
    """
    lib.coli_moe_trim()


_LIVE: set[_HostCopies] = set()
"""Of the layers that were not freed yet: C code may still call or read them, whatever is collected first."""


def _free(host: _HostCopies, layer) -> None:
    if _HERE.rereading:  # the call into C that asks has locks that this would wait for
        _HERE.to_free.append((host, layer))
        return
    if not (host.backend and host.backend._in_other_process()):
        lib.coli_moe_free(layer)
    _LIVE.discard(host)


class _Here(threading.local):
    """What happens in this thread while C code asks reread() for weights."""

    def __init__(self):
        self.rereading = False
        self.error: BaseException | None = None  # that reread() raised
        self.to_free: list = []


_HERE = _Here()


def _check(status: int) -> None:
    """Raises what a call of a layer reports, with the exception of reread() as its cause.

    What reread() raised while experts were placed is only a reason to leave them on the CPU, but not a silent one; an
    interrupt is one whatever became of the call.
    """
    error, _HERE.error = _HERE.error, None
    while _HERE.to_free:
        _free(*_HERE.to_free.pop())
    if error is not None and not isinstance(error, Exception):
        raise error
    if status == lib.COLI_OK:
        if error is not None:
            warnings.warn(f"weights for a GPU could not be read: {error!r}", RuntimeWarning, stacklevel=4)
        return
    try:
        check(status)
    except Exception as failure:
        raise failure from error


class _Used:
    """A layer in C, and how many calls are using it: it is freed after the last of them."""

    def __init__(self, layer, host: _HostCopies):
        self._layer = layer
        self._host = host
        self._lock = threading.RLock()
        self._users = 0
        self._freed = False

    def __enter__(self):
        with self._lock:
            if self._freed:
                raise FreedError(f"the layer of {self._host.count} experts has been freed")
            self._users += 1
        return self._layer

    def __exit__(self, *_) -> None:
        with self._lock:
            self._users -= 1
            unused = self._freed and not self._users
        if unused:
            ffi.release(self._layer)

    def free(self) -> None:
        with self._lock:
            unused = not self._freed and not self._users
            self._freed = True
        if unused:
            ffi.release(self._layer)


class _HostCopies:
    """What a layer in C relies on: its GPU library, and the Weights, kept, or got again by a function when needed."""

    def __init__(self, triples, reread):
        self.count = len(triples)
        self.backend: Backend | None = None
        self.has_e8 = any(w.fmt == "e8" for triple in triples for w in triple)
        self._kinds = [[(w.fmt, w.shape, w.rotated) for w in triple] for triple in triples]
        self._codebooks = [[w.codebook for w in triple] for triple in triples]  # which the layer in C points to
        self._held = dict(enumerate(triples))
        self._reread = reread
        self.struct = ffi.NULL
        if reread is None:
            return
        if not callable(reread):
            raise DtypeError(f"reread must be callable, got {type(reread).__name__}")
        self._held.clear()
        self._acquire = ffi.callback("int(void *, int, coli_expert *)", self._acquired)
        self._release = ffi.callback("void(void *, int)", self._released)
        self.struct = ffi.new("coli_moe_host *", [self._acquire, self._release, ffi.NULL])

    def _acquired(self, _, expert: int, struct) -> int:
        _HERE.rereading = True
        try:
            triple = _triple(self._reread(expert), f"reread({expert})")
            kinds = [(w.fmt, w.shape, w.rotated) for w in triple]
            if kinds != self._kinds[expert]:
                raise ShapeError(f"reread({expert}) must give {self._kinds[expert]}, got {kinds}")
            if [w.codebook for w in triple] != self._codebooks[expert]:
                raise StateError(f"reread({expert}) must give matrices with the codebooks that the layer was made with")
        except BaseException as error:  # of the caller's function: it must not be lost in C
            _HERE.error = error
            return 0
        finally:
            _HERE.rereading = False
        self._held[expert] = triple
        for name, weights in zip(_TRIPLE, triple, strict=True):
            matrix = getattr(struct, name)
            matrix.weights, matrix.scales = weights._matrix.weights, weights._matrix.scales
        return 1

    def _released(self, _, expert: int) -> None:
        self._held.pop(expert, None)


def _triple(expert, what: str) -> tuple[Weights, Weights, Weights]:
    expert = tuple(_listed(expert, what))
    if len(expert) != 3:
        raise ShapeError(f"{what} must be (gate, up, down), got {len(expert)} matrices")
    for matrix, name in zip(expert, _TRIPLE, strict=True):
        if not isinstance(matrix, Weights):
            raise DtypeError(f"{what}: {name} must be Weights, which the layer uploads, got {type(matrix).__name__}")
    check_expert(*expert)
    return expert


def _listed(values, what: str) -> list:
    try:
        return list(values)
    except TypeError:
        raise DtypeError(f"{what} must be a sequence, got {type(values).__name__}") from None


def _checked_router(router, count: int, dim: int) -> Router | None:
    if router is None:
        return None
    if not isinstance(router, Router):
        raise DtypeError(f"router must be a Router, got {type(router).__name__}")
    if (router.experts, router.dim) != (count, dim):
        raise ShapeError(f"router must be for [{count}, {dim}], got {[router.experts, router.dim]}")
    return router


def _checked_gate(gate, shared, dim: int) -> np.ndarray | None:
    """The vector in float64."""
    if gate is None:
        return None
    if shared is None:
        raise ArgumentError("shared_gate is given, and no shared expert")
    gate = as_float32(gate, "shared_gate").reshape(-1)
    if gate.shape != (dim,):
        raise ShapeError(f"shared_gate must be [{dim}], got shape {list(gate.shape)}")
    return gate.astype(np.float64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-x))).astype(np.float32)


def _pairs(ids, weights, rows: int) -> tuple[np.ndarray, np.ndarray]:
    ids = as_array(ids, "ids")
    if ids.dtype.kind not in "iu":
        raise DtypeError(f"ids must be whole numbers, got {ids.dtype.name}")
    if weights is None:
        raise ArgumentError("ids need weights beside them")
    weights = as_float32(weights, "weights")
    top_k = ids.shape[-1] if ids.ndim else 0
    if ids.ndim < 1 or ids.size != rows * top_k or ids.shape != weights.shape:
        raise ShapeError(
            f"ids and weights must be [..., K] for {rows} rows, got {list(ids.shape)}, {list(weights.shape)}"
        )
    limits = np.iinfo(np.int32)
    if ids.size and not (limits.min <= ids.min() and ids.max() <= limits.max):
        raise ArgumentError(f"ids must be numbers of experts, got {ids.min()} ... {ids.max()}")
    return np.ascontiguousarray(ids.reshape(rows, top_k), np.int32), weights.reshape(rows, top_k)


def _targets(devices) -> tuple[list[Device], str | None]:
    """The GPUs that an argument `devices` means; where there are none, why."""
    if devices is None:
        return _all_gpus()
    single = isinstance(devices, (str, int, Device))
    listed = [devices] if single else _listed(devices, "devices")
    targets = [Device(d) for d in listed if parse_device(d) is not None]
    for target in targets[1:]:
        if target.backend is not targets[0].backend:
            raise DeviceError("the devices of a placement must be of one GPU library")
    return targets, "the CPU was asked for"


def _all_gpus() -> tuple[list[Device], str | None]:
    backend, reason = default_backend(environ.get("COLI_CUDA_LIB"))
    if backend is None:
        return [], reason
    try:
        return [Device(name, backend) for name in backend.devices()], backend.why_no_device()
    except (DeviceError, OutOfMemoryError) as error:
        return [], str(error)


def _budgets(vram_budget, targets: Sequence[Device]) -> list[int]:
    """Bytes for each of the devices."""
    if not isinstance(vram_budget, Mapping):
        return [_budget(vram_budget)] * len(targets)
    by_ordinal = {parse_device(device): budget for device, budget in vram_budget.items()}
    unknown = by_ordinal.keys() - {target.ordinal for target in targets}
    if unknown:
        names = ", ".join("cpu" if ordinal is None else f"cuda:{ordinal}" for ordinal in unknown)
        raise ArgumentError(f"vram_budget names {names}; the devices are {', '.join(t.name for t in targets)}")
    return [_budget(by_ordinal.get(target.ordinal, 0)) for target in targets]


def _budget(vram_budget) -> int:
    if vram_budget is None:
        return _SIZE  # COLI_MOE_AUTO
    return _whole(vram_budget, "vram_budget", _SIZE - 1)


def _checked_layers(layers) -> list[MoELayer]:
    layers = _listed(layers, "layers")
    if not layers:
        raise ArgumentError("at least 1 layer is needed, got 0")
    for i, layer in enumerate(layers):
        if not isinstance(layer, MoELayer):
            raise DtypeError(f"layers[{i}] must be a MoELayer, got {type(layer).__name__}")
        layer._live()
    return layers


@contextmanager
def _handles(layers: Sequence[MoELayer]):
    """The layers in C, which are not freed meanwhile, and whose turn it is."""
    with ExitStack() as stack:
        handles = [stack.enter_context(layer._live()) for layer in layers]
        for layer in layers:
            stack.enter_context(layer._turns())
        yield ffi.new("coli_moe *[]", handles)


def _whole(value, what: str, most: int | None = None) -> int:
    """A whole number; with `most`, one of 0 ... most."""
    try:
        value = operator.index(value)
    except TypeError:
        raise DtypeError(f"{what} must be a whole number, got {value!r}") from None
    if most is not None and not 0 <= value <= most:
        raise ArgumentError(f"{what} must be 0 ... {most}, got {value}")
    return value


def _real(value, what: str) -> float:
    if not isinstance(value, Real):
        raise DtypeError(f"{what} must be a real number, got {value!r}")
    return float(value)


def _ints(array: np.ndarray):
    return ffi.from_buffer("int[]", array)


def _text(copy) -> str | None:
    """A text that a function copies into a buffer; None for "" ."""
    size = copy(ffi.NULL, 0) + 1
    buffer = ffi.new("char[]", size)
    copy(buffer, size)
    return text(buffer) or None


def _fields(struct) -> dict:
    return {name: getattr(struct, name) for name, _ in ffi.typeof(struct).fields}


def _stats(struct) -> dict:
    found = _fields(struct[0])
    for name, keys in (("experts", _PATHS), ("pairs", _PATHS), ("failed", _STEPS)):
        found[name] = dict(zip(keys, found[name], strict=True))
    return {**found, "repinned": _fields(found["repinned"])}
