"""Names of GGUF tensors and of metadata as Hugging Face models have them, and back."""

from __future__ import annotations

import re

_MODEL_TYPES = {
    "olmoe": "olmoe",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "llama": "mixtral",
    "deepseek2": "deepseek_v3",
    "glm4moe": "glm4_moe",
}
"""Model types by GGUF architecture, of models with experts; others keep their name."""

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}

_NORMED_AFTER_ATTENTION = ("glm4moe",)
"""Architectures of _MODEL_TYPES that call the norm before the experts post_attention_norm; others say ffn_norm."""

_LAYER = re.compile(r"^blk\.([0-9]{1,6})\.([a-z_]+)\.(weight|bias)$")
_EXPERTS = re.compile(r"^blk\.([0-9]{1,6})\.ffn_(gate|up|down)_exps\.weight$")
_OLD_EXPERT = re.compile(r"^blk\.([0-9]{1,6})\.ffn_(gate|up|down)\.([0-9]{1,6})\.weight$")


def experts_tensor(name: str) -> tuple[int, str] | None:
    """Layer and role of a tensor with a matrix of every expert, else None."""
    match = _EXPERTS.match(name)
    return (int(match[1]), match[2]) if match else None


def experts_name(layer: int, role: str) -> str:
    """The name of the tensor with a matrix of every expert."""
    return f"blk.{layer}.ffn_{role}_exps.weight"


def single_expert_name(layer: int, expert: int, role: str) -> str:
    """The name of one expert's matrix in older files, which have a tensor for each."""
    return f"blk.{layer}.ffn_{role}.{expert}.weight"


def expert_name(layer: int, expert: int, role: str) -> str:
    """The name of one expert's matrix in a container."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"


def to_container(name: str, architecture: str) -> str | None:
    """The name of a tensor that is not of all experts in a container; None for one that is not known."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if match := _OLD_EXPERT.match(name):
        return expert_name(int(match[1]), int(match[3]), match[2])
    match = _LAYER.match(name)
    if not match:
        return None
    if (match[2], match[3]) == ("exp_probs_b", "bias"):
        return f"model.layers.{match[1]}.mlp.gate.e_score_correction_bias"
    if match[2] not in _IN_LAYER:
        return None
    inner = _IN_LAYER[match[2]]
    if architecture.startswith("qwen"):
        inner = inner.replace("shared_experts", "shared_expert")
    return f"model.layers.{match[1]}.{inner}.{match[3]}"


def to_gguf(name: str, architecture: str) -> str:
    """The name in a GGUF file of a tensor of a container; itself where none is known."""
    for gguf_name, ours in _OUTSIDE.items():
        if name == ours:
            return gguf_name
    if match := re.match(r"^model\.layers\.([0-9]+)\.(?:mlp|block_sparse_moe)\.gate\.e_score_correction_bias$", name):
        return f"blk.{match[1]}.exp_probs_b.bias"
    match = re.match(r"^model\.layers\.([0-9]+)\.(.+?)\.(weight|bias)$", name)
    if not match:
        return name
    inner = match[2].replace("shared_expert.", "shared_experts.").replace("block_sparse_moe.", "mlp.")
    other_norm = "ffn_norm" if architecture in _NORMED_AFTER_ATTENTION else "post_attention_norm"
    for gguf_name, ours in _IN_LAYER.items():
        if inner == ours and gguf_name != other_norm:
            return f"blk.{match[1]}.{gguf_name}.{match[3]}"
    return name


def _architecture(config: dict) -> str:
    """The GGUF architecture of a model; its model type where that is not known."""
    model_type = str(config.get("model_type") or "unknown")
    return next((arch for arch, known in _MODEL_TYPES.items() if known == model_type), model_type)


_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts_per_tok": "expert_used_count",
    "max_position_embeddings": "context_length",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_REALS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "routed_scaling_factor": "expert_weights_scale",
}
_SCORES = {1: "softmax", 2: "sigmoid"}
"""How routers make scores of logits, by expert_gating_func."""
_RENORMALISE = ("llama", "qwen3moe")
"""Architectures whose routers divide an expert's weights by their sum without a field that says so."""


def config_of(fields: dict, experts: int, inner: int, hidden: int, vocabulary: int | None) -> dict:
    """A config.json for the metadata of a GGUF file; sizes that the tensors show come from there."""
    architecture = str(fields.get("general.architecture", "unknown"))
    config: dict[str, object] = {"model_type": _MODEL_TYPES.get(architecture, architecture), "hidden_act": "silu"}
    for key, field in (*_SIZES.items(), *_REALS.items()):
        value = fields.get(f"{architecture}.{field}")
        if type(value) in (int, float):
            config[key] = value
    renormalise = fields.get(f"{architecture}.expert_weights_norm", architecture in _RENORMALISE)
    config["norm_topk_prob"] = bool(renormalise)
    scores = fields.get(f"{architecture}.expert_gating_func")
    if type(scores) is int and scores in _SCORES:
        config["scoring_func"] = _SCORES[scores]
    config |= {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts}
    config.setdefault("intermediate_size", inner)
    return config | ({"vocab_size": vocabulary} if vocabulary else {})


def renormalise_field(config: dict) -> tuple[str, bool] | None:
    """The field for routers that divide an expert's weights by their sum, or do not; None where nothing is said."""
    said = config.get("norm_topk_prob")
    if not isinstance(said, bool):
        return None
    return f"{_architecture(config)}.expert_weights_norm", said


def fields_of(config: dict) -> tuple[str, dict[str, int], dict[str, float]]:
    """Architecture, whole numbers and reals of a GGUF file for a configuration."""
    architecture = _architecture(config)
    sizes = {f"{architecture}.{field}": config.get(key) for key, field in _SIZES.items()}
    sizes[f"{architecture}.expert_feed_forward_length"] = config.get("moe_intermediate_size")
    sizes[f"{architecture}.expert_count"] = next(
        (config[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config), None
    )
    sizes[f"{architecture}.expert_gating_func"] = next(
        (number for number, scores in _SCORES.items() if scores == config.get("scoring_func")), None
    )
    reals = {f"{architecture}.{field}": config.get(key) for key, field in _REALS.items()}
    return (
        architecture,
        {key: value for key, value in sizes.items() if type(value) is int and 0 <= value < 2**32},
        {key: float(value) for key, value in reals.items() if type(value) in (int, float)},
    )
