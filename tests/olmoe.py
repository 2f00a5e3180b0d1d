"""A plain float32 forward pass of OLMoE checkpoints in numpy, in which the mixture-of-experts block can be replaced.

It tells what an encoding of the experts costs: `Olmoe.losses` with experts as they are, and with experts that were
encoded and decoded. Nothing here is fast for its own sake; windows go through in batches and experts meet all of their
rows at once, which is what numpy is good at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path

import numpy as np

from pycoli.checkpoint import Checkpoint
from pycoli.tensorfile import TensorFile

Moe = Callable[[int, np.ndarray], np.ndarray]
"""moe(layer, x float32 [rows, D]) -> y float32 [rows, D]: router, experts and the sum of what they give."""

_QUERIES = 128
"""Queries that attend together: later keys need not be looked at."""

Expert = tuple[np.ndarray, np.ndarray, np.ndarray]
"""gate and up [I, D], down [D, I]; float32."""


def evaluation_windows(models: Path) -> np.ndarray:
    """The held-out windows: uint8 [96, 513], the first 512 of a window being inputs, the last 512 targets."""
    chosen = json.loads((models / "eval-windows.json").read_text())
    text = np.fromfile(models / chosen["text"], np.uint8)
    return np.stack([text[offset : offset + chosen["length"] + 1] for offset in chosen["offsets"]])


def calibration_windows(models: Path, tokens: int = 32768, length: int = 512) -> np.ndarray:
    """Windows of the calibration text, evenly spread over it: uint8 [tokens // length, length]."""
    text = np.fromfile(models / "calibration-text.bin", np.uint8)
    starts = np.linspace(0, text.size - length, tokens // length).astype(int)
    return np.stack([text[start : start + length] for start in starts])


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def hidden_rows(expert: Expert, x: np.ndarray) -> np.ndarray:
    """What an expert's down matrix meets: float32 [rows, I]."""
    return silu(x @ expert[0].T) * (x @ expert[1].T)


class Olmoe:
    """A checkpoint in Hugging Face layout, all of it in memory as float32.

    Attributes
    ----------
    layers, top_k : int
    experts : list of list of Expert
        experts[layer][expert], as the checkpoint has them.
    """

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        files = {shard: TensorFile(folder / shard) for shard in set(shards.values())}
        self._weights = {
            name.removeprefix("model."): files[shard].view(name).astype(np.float32)
            for name, shard in shards.items()
            if ".experts." not in name
        }
        checkpoint = Checkpoint(folder)
        self.layers: int = self.config["num_hidden_layers"]
        self.top_k: int = self.config["num_experts_per_tok"]
        self.experts: list[list[Expert]] = [
            [self._expert(checkpoint, layer, number) for number in range(checkpoint.expert_count(layer))]
            for layer in range(self.layers)
        ]

    def changed(self, weights: dict[str, np.ndarray], experts: Sequence[Sequence[Expert]]) -> Olmoe:
        """The model with others of its weights, by their names in the checkpoint, and other experts."""
        other = copy(self)
        renamed = {name.removeprefix("model."): w for name, w in weights.items()}
        other._weights = {name: renamed.get(name, w) for name, w in self._weights.items()}
        other.experts = experts
        return other

    def weights(self) -> dict[str, np.ndarray]:
        """All but the experts, by their names in the checkpoint."""
        return {name if name == "lm_head.weight" else f"model.{name}": w for name, w in self._weights.items()}

    @staticmethod
    def _expert(checkpoint: Checkpoint, layer: int, number: int) -> Expert:
        weights = checkpoint.expert(layer, number)
        return weights.gate, weights.up, weights.down

    # The model

    def losses(self, windows: np.ndarray, moe: Moe | None = None, batch: int = 4, threads: int = 1) -> np.ndarray:
        """Mean loss of each window in nats a token.

        Parameters
        ----------
        windows : integers [N, length + 1]
        moe : Moe, optional
            In place of `self.moe`.
        batch : int
            Windows that go through together.
        threads : int
            Batches at a time; then `moe` is called by several threads. Better than threads in numpy's products, which
            are small, where OPENBLAS_NUM_THREADS=1.

        Returns
        -------
        float64 [N]
        """
        parts = [windows[start : start + batch] for start in range(0, len(windows), batch)]
        with ThreadPoolExecutor(threads) as pool:
            return np.concatenate(list(pool.map(lambda part: self._losses(part, moe or self.moe), parts)))

    def _losses(self, windows: np.ndarray, moe: Moe) -> np.ndarray:
        hidden = self.embed(windows[:, :-1])
        for layer in range(self.layers):
            hidden = self.attend(layer, hidden)
            hidden += moe(layer, self.moe_input(layer, hidden)).reshape(hidden.shape)
        logits = self.logits(hidden).astype(np.float64)
        top = logits.max(axis=-1, keepdims=True)
        log_sums = top[..., 0] + np.log(np.exp(logits - top).sum(axis=-1))
        wanted = np.take_along_axis(logits, windows[:, 1:, None].astype(np.int64), axis=-1)[..., 0]
        return (log_sums - wanted).mean(axis=1)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """Integers [batch, length] to float32 [batch, length, D]."""
        return self._weights["embed_tokens.weight"][tokens]

    def attend(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """The stream [batch, length, D] after the layer's attention: a new array."""
        stem = f"layers.{layer}.self_attn."
        heads = self.config["num_attention_heads"]
        x = self._norm(hidden, f"layers.{layer}.input_layernorm.weight")
        q, k, v = (self._project(x, f"{stem}{name}_proj.weight") for name in "qkv")
        q, k = self._norm(q, f"{stem}q_norm.weight"), self._norm(k, f"{stem}k_norm.weight")
        q, k, v = (np.ascontiguousarray(_split(part, heads)) for part in (q, k, v))
        q, k = self._rope(q) * np.float32(q.shape[-1] ** -0.5), self._rope(k)
        blocks = [_attention(q, k, v, start) for start in range(0, q.shape[-2], _QUERIES)]
        mixed = np.concatenate(blocks, axis=-2).swapaxes(1, 2).reshape(hidden.shape)
        return hidden + self._project(mixed, f"{stem}o_proj.weight")

    def moe_input(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """What the layer's MoE block gets: float32 [batch * length, D]."""
        normed = self._norm(hidden, f"layers.{layer}.post_attention_layernorm.weight")
        return normed.reshape(-1, hidden.shape[-1])

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """The stream after the last layer [..., D] to float32 [..., vocabulary]."""
        return self._project(self._norm(hidden, "norm.weight"), "lm_head.weight")

    # The MoE block

    def router(self, layer: int) -> np.ndarray:
        """The weight of the layer's router: float32 [experts, D]."""
        return self._weights[f"layers.{layer}.mlp.gate.weight"]

    def route(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Experts that the router picks for x [rows, D], and their shares: integers and float32 [rows, top_k]."""
        scores = x @ self.router(layer).T
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        chosen = np.argsort(-shares, axis=1, kind="stable")[:, : self.top_k]
        shares = np.take_along_axis(shares, chosen, axis=1)
        if self.config["norm_topk_prob"]:
            shares /= shares.sum(axis=1, keepdims=True)
        return chosen, shares

    def moe(self, layer: int, x: np.ndarray) -> np.ndarray:
        """The block with the checkpoint's own experts."""
        return self.moe_of(layer, x, self.experts[layer])

    def moe_of(self, layer: int, x: np.ndarray, experts: Sequence[Expert]) -> np.ndarray:
        """The block with other experts: x [rows, D] to float32 [rows, D]."""
        chosen, shares = self.route(layer, x)
        y = np.zeros_like(x)
        for number, expert in enumerate(experts):
            rows, places = np.nonzero(chosen == number)
            if rows.size:
                y[rows] += shares[rows, places, None] * (hidden_rows(expert, x[rows]) @ expert[2].T)
        return y

    def with_experts(self, experts: Sequence[Sequence[Expert]]) -> Moe:
        """The block with experts[layer][expert], as `losses` takes it."""
        return lambda layer, x: self.moe_of(layer, x, experts[layer])

    # Parts

    def _project(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weights[name].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean_square = np.einsum("...i,...i->...", x, x)[..., None] / np.float32(x.shape[-1])
        return x / np.sqrt(mean_square + np.float32(self.config["rms_norm_eps"])) * self._weights[name]

    def _rope(self, x: np.ndarray) -> np.ndarray:
        """Rotary positions on x [batch, heads, length, head]: pairs are i and i + head / 2."""
        length, half = x.shape[-2], x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(length)[:, None] * theta ** (-np.arange(half) / half)
        cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], axis=-1)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int) -> np.ndarray:
    """Causal attention of _QUERIES queries from `start` on, or those that are left: [batch, heads, length, head]."""
    end = min(start + _QUERIES, q.shape[-2])
    scores = q[..., start:end, :] @ k[..., :end, :].swapaxes(-1, -2)
    scores[..., start:] += np.triu(np.full((end - start, end - start), -np.inf, np.float32), 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return (scores @ v[..., :end, :]) / scores.sum(axis=-1, keepdims=True)


def _split(x: np.ndarray, heads: int) -> np.ndarray:
    """[batch, length, heads * head] to [batch, heads, length, head]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)
