"""Experts that stay in place between calls: Expert, ExpertGroup."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from ._arrays import as_rows, floats
from ._lib import ffi, lib
from .device import Device, names_apart
from .errors import ArgumentError, DeviceError, DtypeError, FreedError, OutOfMemoryError, ShapeError, StateError
from .placement import Matrix, choose, may_fall_back, uploaded
from .products import check_expert, expert, why_not_one_call
from .weights import rotate


class Expert:
    """An expert, y = down(silu(gate x) * (up x)), on a GPU or the CPU.

    Parameters
    ----------
    gate, up : Weights or Tensor
        [H, D], in any formats.
    down : Weights or Tensor
        [D, H].
    device : None, "cpu", "cuda:0", int or Device
        Weights are uploaded there and freed with the expert; Tensors stay their owner's. None is the best: a GPU where
        there is one that takes the formats and has room, else the CPU, and `why_cpu` says why.

    Attributes
    ----------
    device : str
        "cpu" or "cuda:0".
    gpu : Device or None
        The same as an object; None for the CPU.
    why_cpu : str or None
        Why it is on the CPU; None on a GPU.
    gate, up, down : Weights or Tensor
        The matrices where they compute.
    dim, hidden : int
        D and H.

    Raises
    ------
    DtypeError, ShapeError, FreedError
    DeviceError, NotProvidedError, OutOfMemoryError
        The named GPU cannot hold it. Nothing stays behind on the device.
    """

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix, device=None):
        check_expert(gate, up, down)
        self.hidden, self.dim = gate.shape
        self._freed = False
        self._owned = ExitStack()
        self.gpu: Device | None
        self.gpu, self.why_cpu = choose((gate, up, down), device)
        if self.gpu:
            try:
                gate, up, down = self._owned.enter_context(uploaded((gate, up, down), self.gpu))
            except (DeviceError, OutOfMemoryError) as error:
                if not may_fall_back((gate, up, down), device):
                    raise
                self.gpu, self.why_cpu = None, str(error)
        self.gate, self.up, self.down = gate, up, down

    @property
    def device(self) -> str:
        """Where it computes: "cpu" or "cuda:0"."""
        return self.gpu.name if self.gpu else "cpu"

    @property
    def why_by_parts(self) -> str | None:
        """Why its three products are calls of their own, with the rest on the CPU; None where one call does it all."""
        return why_not_one_call("expert_mlp", self.gate, self.up, self.down)

    @property
    def nbytes(self) -> int:
        """Bytes of the three matrices."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes

    def __call__(self, x) -> np.ndarray:
        """Plain activations float32 [..., D] through the expert: float32 [..., D].

        Raises
        ------
        DtypeError, ShapeError, FreedError
        DeviceError, OutOfMemoryError
            The GPU failed.
        """
        self._check_live()
        rows, leading = as_rows(x, self.dim, "x")
        return expert(rows, self.gate, self.up, self.down).reshape(*leading, self.dim)

    def free(self) -> None:
        """Frees what the expert has uploaded. A second call does nothing."""
        self._freed = True
        self._owned.close()

    def _check_live(self) -> None:
        """FreedError after free()."""
        if self._freed:
            raise FreedError(f"the expert [{self.hidden}, {self.dim}] on {self.device} has been freed")

    def __enter__(self) -> Expert:
        return self

    def __exit__(self, *_) -> None:
        self.free()

    def __repr__(self) -> str:
        names = "/".join(dict.fromkeys(m.fmt for m in (self.gate, self.up, self.down)))
        return f"<Expert {names} [{self.hidden}, {self.dim}] on {self.device}{', freed' if self._freed else ''}>"


class ExpertGroup:
    """Experts of one shape on one device, computed together, each with rows of its own.

    Formats may be mixed, and there may be any number of experts. Those that the device cannot compute together are
    computed one after the other, with the same results; why_not() says why. The group keeps the experts alive but does
    not own them. One thread at a time may use a group.

    Parameters
    ----------
    experts : sequence of Expert

    Attributes
    ----------
    experts : tuple of Expert
    device : str
        "cpu" or "cuda:0".
    gpu : Device or None
        The same as an object; None for the CPU.
    dim : int
        D.

    Raises
    ------
    ArgumentError, DtypeError, ShapeError, DeviceError
        There is no expert, or they differ in shape or device.
    """

    def __init__(self, experts: Sequence[Expert]):
        try:
            self.experts = tuple(experts)
        except TypeError:
            raise DtypeError(f"experts must be a sequence of Expert, got {type(experts).__name__}") from None
        if not self.experts:
            raise ArgumentError("a group needs at least 1 expert, got 0")
        first = self.experts[0]
        for i, other in enumerate(self.experts):
            if not isinstance(other, Expert):
                raise DtypeError(f"experts[{i}] must be an Expert, got {type(other).__name__}")
            if (other.hidden, other.dim) != (first.hidden, first.dim):
                shapes = f"{[first.hidden, first.dim]}, got {[other.hidden, other.dim]}"
                raise ShapeError(f"experts[{i}] must have the shape of experts[0], {shapes}")
            if other.gpu != first.gpu:
                wanted, there = names_apart(first.gpu, other.gpu)
                raise DeviceError(f"experts[{i}] must be on {wanted} like experts[0], got {there}")
        self.gpu = first.gpu
        self.dim = first.dim
        self._apart = {
            feature: [why_not_one_call(feature, e.gate, e.up, e.down) for e in self.experts]
            for feature in ("expert_group", "issue_take")
        }
        self._pending: _Pending | None = None

    @property
    def device(self) -> str:
        """Where it computes: "cpu" or "cuda:0"."""
        return self.experts[0].device

    def why_not(self, feature: str) -> str | None:
        """Why some of the experts are computed one after the other, not together: a sentence, or None where none are.

        Parameters
        ----------
        feature : "expert_group" or "issue_take"
            For calls, or for issue(), which waits for the result where it cannot overlap.

        Raises
        ------
        ArgumentError
            It is another name.
        """
        if feature not in self._apart:
            raise ArgumentError(f"feature must be one of {', '.join(self._apart)}, got {feature!r}")
        return next(filter(None, self._apart[feature]), None)

    def __call__(self, x, rows: Sequence[int] | None = None):
        """Computes every expert on its rows.

        Parameters
        ----------
        x : sequence of float32 [S_i, D], or float32 [sum(rows), D]
            One array for each expert, or the experts' rows one after the other. Plain activations. S_i may be 0.
        rows : sequence of int, optional
            With the second form: the number of rows of each expert.

        Returns
        -------
        list of float32 [S_i, D], or float32 [sum(rows), D]
            In the form of x.

        Raises
        ------
        DtypeError, ShapeError, ArgumentError, FreedError
        DeviceError, OutOfMemoryError
            The GPU failed.
        """
        batch = self._batch(x, rows)
        return batch.shaped(self._compute(batch))

    def issue(self, x, rows: Sequence[int] | None = None) -> None:
        """Starts a computation and returns; x may be reused at once. take() gives the result.

        A device takes one issue at a time. Where the work cannot overlap, it is done before this returns, and
        why_not("issue_take") says why.

        Parameters
        ----------
        x, rows
            As in a call; at most 8 rows in total.

        Raises
        ------
        ArgumentError
            There are more rows.
        StateError
            This group, or another on the device, has an issue that was not taken.
        """
        if self._pending:
            raise StateError("the group has been issued already: take() its result first")
        batch = self._batch(x, rows)
        total = len(batch.x)
        if total > lib.COLI_CUDA_MAX_ISSUE_ROWS:
            raise ArgumentError(f"issue takes at most {lib.COLI_CUDA_MAX_ISSUE_ROWS} rows in total, got {total}")
        active = batch.active()
        if total and not any(self._apart["issue_take"][i] for i in active):
            self._issue(batch, active)
            self._pending = _Pending(batch, None)
        else:
            self._pending = _Pending(batch, self._compute(batch))

    def take(self):
        """Waits for the issued computation and returns its result, in the form of the issued x.

        Raises
        ------
        StateError
            Nothing is issued.
        DeviceError
            The GPU failed. The issue is over then too.
        """
        if not self._pending:
            raise StateError("nothing is issued: call issue() before take()")
        pending, self._pending = self._pending, None
        y = self._take(len(pending.batch.x)) if pending.y is None else pending.y
        return pending.batch.shaped(y)

    def __repr__(self) -> str:
        return f"<ExpertGroup of {len(self.experts)} on {self.device}>"

    def _batch(self, x, rows) -> _Batch:
        for member in self.experts:
            member._check_live()
        count = len(self.experts)
        if rows is None:
            try:
                arrays = list(x)
            except TypeError:
                raise DtypeError(f"x must hold one array for each of {count} experts, got {type(x).__name__}") from None
            if len(arrays) != count:
                raise ShapeError(f"x must hold one array for each of {count} experts, got {len(arrays)}")
            arrays = [as_rows(a, self.dim, f"x[{i}]") for i, a in enumerate(arrays)]
            parts = [part for part, _ in arrays]
            return _Batch(np.concatenate(parts), [len(part) for part in parts], [leading for _, leading in arrays])
        try:
            rows = [operator.index(n) for n in rows]
        except TypeError:
            raise DtypeError(f"rows must be whole numbers, one for each expert, got {rows!r}") from None
        if len(rows) != count or min(rows) < 0:
            raise ShapeError(f"rows must be {count} numbers of at least 0, got {rows}")
        x, leading = as_rows(x, self.dim, "x")
        if leading != (sum(rows),):
            raise ShapeError(f"x must be [{sum(rows)}, {self.dim}], the sum of rows, got {[*leading, self.dim]}")
        return _Batch(x, rows, None)

    def _compute(self, batch: _Batch) -> np.ndarray:
        y = np.empty_like(batch.x)
        active = batch.active()
        together = [i for i in active if not self._apart["expert_group"][i]]
        most = lib.COLI_CUDA_MAX_EXPERTS
        for start in range(0, len(together), most):
            chosen = together[start : start + most]
            y[batch.mask(chosen)] = self._group_call(batch, chosen)
        for i in set(active).difference(together):
            part = batch.part(i)
            member = self.experts[i]
            y[part] = expert(batch.x[part], member.gate, member.up, member.down)
        return y

    def _group_call(self, batch: _Batch, chosen: list[int]) -> np.ndarray:
        x = self._rotated_rows(batch, chosen)
        y = np.empty_like(x)
        with self.gpu._turn():
            self.gpu.backend._call("coli_cuda_expert_group", *self._arguments(batch, chosen), floats(y), floats(x))
        return y

    def _issue(self, batch: _Batch, chosen: list[int]) -> None:
        backend = self.gpu.backend
        x = self._rotated_rows(batch, chosen)
        with self.gpu._turn() as slot:
            if slot.issued and slot.issued():
                raise StateError(f"another group has been issued on {self.device}: take() its result first")
            if slot.issued:  # its group is gone, and nobody will ask for the result
                backend._entry("coli_cuda_expert_group_take")(self.gpu.ordinal)
            backend._call("coli_cuda_expert_group_issue", *self._arguments(batch, chosen), floats(x))
            slot.issued = weakref.ref(self)

    def _take(self, rows: int) -> np.ndarray:
        backend = self.gpu.backend
        with self.gpu._turn() as slot:
            if not slot.issued or slot.issued() is not self:
                raise StateError(f"the issued rows are gone: {self.device} has been shut down since")
            slot.issued = None
            y = backend._entry("coli_cuda_expert_group_take")(self.gpu.ordinal)
            if not y:
                raise backend._error("coli_cuda_expert_group_take")
            return np.frombuffer(ffi.buffer(y, 4 * rows * self.dim), np.float32).reshape(rows, self.dim).copy()

    def _rotated_rows(self, batch: _Batch, chosen: list[int]) -> np.ndarray:
        """The rows of some experts, rotated where their gate and up are."""
        x = batch.x[batch.mask(chosen)]
        rotated = np.repeat([self.experts[i].gate.rotated for i in chosen], [batch.rows[i] for i in chosen])
        x[rotated] = rotate(x[rotated])
        return x

    def _arguments(self, batch: _Batch, chosen: list[int]):
        """The first arguments of the C group functions. To be used inside the device's turn."""
        members = [self.experts[i] for i in chosen]
        for name in ("gate", "up", "down"):
            yield ffi.new("ColiCudaTensor *[]", [getattr(member, name)._handle for member in members])
        yield ffi.new("int[]", [batch.rows[i] for i in chosen])
        yield len(chosen)


class _Batch:
    """Rows for the experts of a group, one expert's after the other's."""

    def __init__(self, x: np.ndarray, rows: list[int], shapes: list[tuple[int, ...]] | None):
        self.x = x
        self.rows = rows
        self._shapes = shapes  # leading dimensions of the arrays that came, or None where one array came

    def active(self) -> list[int]:
        """The experts that have rows."""
        return [i for i, n in enumerate(self.rows) if n]

    def part(self, i: int) -> slice:
        """The rows of x that belong to one expert."""
        start = sum(self.rows[:i])
        return slice(start, start + self.rows[i])

    def mask(self, chosen: list[int]) -> np.ndarray:
        """Which rows of x belong to these experts."""
        return np.repeat(np.isin(np.arange(len(self.rows)), chosen), self.rows)

    def shaped(self, y: np.ndarray):
        """Results in the form in which x came."""
        if self._shapes is None:
            return y
        parts = np.split(y, np.cumsum(self.rows)[:-1])
        return [part.reshape(*leading, y.shape[1]) for part, leading in zip(parts, self._shapes, strict=True)]


class _Pending:
    """An issued batch; y is its result where that is there already."""

    def __init__(self, batch: _Batch, y: np.ndarray | None):
        self.batch = batch
        self.y = y
