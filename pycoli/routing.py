"""What a model's configuration says of its routers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ._json import positive_integer
from .errors import CheckpointError


def router_settings(weight: np.ndarray, bias: np.ndarray | None, config: dict, source: str | Path) -> dict:
    """A router as `Router` takes it: weight float32 [E, D], top_k, kind, ...

    Parameters
    ----------
    weight : float32 [E, D]
    bias : float32 [E] or None
        What is added to the scores for the choice alone.
    config : dict
        The model's configuration; `source` is what names it in messages.

    Raises
    ------
    CheckpointError
        The configuration does not say how many experts a row has.
    """
    top_k = positive_integer(config, source, "num_experts_per_tok", "moe_top_k")
    if top_k is None:
        raise CheckpointError(f"{source}: num_experts_per_tok is needed to route, and missing")
    kind = str(config.get("scoring_func") or ("softmax" if bias is None else "sigmoid"))
    renormalise = bool(config.get("norm_topk_prob", config.get("model_type") == "mixtral"))
    groups = positive_integer(config, source, "n_group") or 0
    if groups < 2 or config.get("topk_method") == "greedy":
        groups = 0
    scale = float(config.get("routed_scaling_factor") or 1.0)
    return {
        "weight": weight,
        "top_k": top_k,
        "kind": kind,
        "renormalise": renormalise,
        "groups": groups,
        "top_groups": (positive_integer(config, source, "topk_group") or 1) if groups else 0,
        "bias": bias,
        # models with softmax scale weights that they do not renormalise, and no others
        "scale": 1.0 if kind == "softmax" and renormalise else scale,
    }
