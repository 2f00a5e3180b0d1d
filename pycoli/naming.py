"""How models name the matrices of their routed experts.

Names that are understood, after any prefix::

    layers.N.mlp.experts.E.{gate_proj,up_proj,down_proj}.weight      OLMoE, Qwen-MoE, DeepSeek, GLM
    layers.N.block_sparse_moe.experts.E.{w1,w3,w2}.weight            Mixtral
    layers.N.mlp.experts.{gate_up_proj,down_proj}                    all experts in one tensor
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .errors import CheckpointError

ROLES = ("gate", "up", "down")
"""The matrices of an expert, ``down(silu(gate x) * (up x))``, in the order in which they are handed about."""

_EXPERTS = r"^(?P<prefix>(?:.*\.)?)layers\.(?P<layer>[0-9]{1,6})\.(?:mlp|block_sparse_moe|feed_forward)\.experts\."
_SEPARATE = re.compile(_EXPERTS + r"(?P<expert>[0-9]{1,6})\.(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_FUSED = re.compile(_EXPERTS + r"(?P<matrix>gate_up_proj|down_proj)(?P<suffix>(?:\.weight)?)$")
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.")

_COMMON = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
_ROLE_OF = dict(zip(_COMMON + _MIXTRAL, ROLES + ROLES, strict=True))


class ExpertPlace(NamedTuple):
    """Which matrix of which routed expert a tensor is; `stem` is what the names of its layer's experts begin with."""

    stem: str
    layer: int
    expert: int
    role: str


def expert_place(name: str) -> ExpertPlace | None:
    """What the name of one routed expert's matrix says, None for other names."""
    match = _SEPARATE.match(name)
    if not match:
        return None
    stem = name[: match.start("expert")]
    return ExpertPlace(stem, int(match["layer"]), int(match["expert"]), _ROLE_OF[match["matrix"]])


def expert_role(name: str) -> str | None:
    """``"gate"``, ``"up"`` or ``"down"`` for the matrix of one routed expert, else None."""
    place = expert_place(name)
    return place.role if place else None


def layer_number(name: str) -> int | None:
    """The layer that a tensor belongs to, None for one outside of the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


@dataclass
class SeparateLayer:
    """A layer with three tensors an expert."""

    stem: str  # "model.layers.1.mlp.experts."
    matrices: tuple[str, str, str]  # gate, up, down
    experts: set[int] = field(default_factory=set)

    def tensor(self, expert: int, matrix: str) -> str:
        return f"{self.stem}{expert}.{matrix}.weight"

    def tensors(self, expert: int) -> tuple[str, str, str]:
        """Names of an expert's gate, up and down."""
        gate, up, down = (self.tensor(expert, matrix) for matrix in self.matrices)
        return gate, up, down

    def count(self, number: int, listing: str | Path) -> int:
        """Number of experts of this layer. CheckpointError where some are missing; `listing` says of which file."""
        count = max(self.experts) + 1
        missing = sorted(set(range(count)) - self.experts)
        if missing:
            raise CheckpointError(
                f"{listing}: layer {number} has experts up to {count - 1} but not {number_ranges(missing)}"
            )
        return count


@dataclass
class FusedLayer:
    """A layer with all experts in two tensors: gate over up, and down."""

    stem: str
    suffix: str  # ".weight" or ""

    @property
    def gate_up(self) -> str:
        return f"{self.stem}gate_up_proj{self.suffix}"

    @property
    def down(self) -> str:
        return f"{self.stem}down_proj{self.suffix}"

    def tensors(self, expert: int) -> tuple[str, str, str]:
        """Names of an expert's gate, up and down when each is a tensor of its own."""
        return SeparateLayer(self.stem, _COMMON).tensors(expert)


def layers_by_prefix(names: Iterable[str], listing: str | Path) -> dict[str, dict[int, SeparateLayer | FusedLayer]]:
    """All layers with routed experts, by what precedes ``layers.N`` in their names and by number.

    Raises
    ------
    CheckpointError
        There is none, or a layer mixes two namings; `listing` is what names the file.
    """
    by_prefix: dict[str, dict[int, SeparateLayer | FusedLayer]] = {}
    similar = None
    for name in names:
        if match := _SEPARATE.match(name):
            matrices = _MIXTRAL if match["matrix"].startswith("w") else _COMMON
            fresh: SeparateLayer | FusedLayer = SeparateLayer(name[: match.start("expert")], matrices)
        elif match := _FUSED.match(name):
            fresh = FusedLayer(name[: match.start("matrix")], match["suffix"])
        else:
            similar = similar or (name if ".experts." in name else None)
            continue
        layer = by_prefix.setdefault(match["prefix"], {}).setdefault(int(match["layer"]), fresh)
        if type(layer) is not type(fresh) or layer.stem != fresh.stem:
            raise CheckpointError(f"{listing}: layer {match['layer']} mixes two namings of experts: {name}")
        if isinstance(layer, SeparateLayer):
            layer.experts.add(int(match["expert"]))
    if not by_prefix:
        text = f"{listing}: no routed experts in a known naming (such as layers.0.mlp.experts.0.gate_proj.weight)"
        raise CheckpointError(f"{text}; the closest is {similar}" if similar else text)
    return by_prefix


def model_layers(names: Iterable[str], listing: str | Path) -> dict[int, SeparateLayer | FusedLayer]:
    """The layers of the model proper: speculative heads repeat the naming under a prefix of their own
    ("mtp.layers.0..."), so that it is the prefix with the most layers. Raises as layers_by_prefix()."""
    by_prefix = layers_by_prefix(names, listing)
    sizes = sorted(by_prefix, key=lambda prefix: len(by_prefix[prefix]), reverse=True)
    if len(sizes) > 1 and len(by_prefix[sizes[0]]) == len(by_prefix[sizes[1]]):
        raise CheckpointError(
            f"{listing}: the prefixes {sizes[0]!r} and {sizes[1]!r} have "
            f"{len(by_prefix[sizes[0]])} MoE layers each; which is the model is not clear"
        )
    return by_prefix[sizes[0]]


def natural_order(name: str) -> list:
    """A key that sorts numbers in names by value: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def number_ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
