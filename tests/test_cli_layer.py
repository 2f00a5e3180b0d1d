"""``pycoli run --layer-forward`` on checkpoints of several families."""

import json

import numpy as np
import pytest
from experts import gaussian
from safetensors.numpy import save_file

import pycoli
from pycoli.checkpoint import Checkpoint
from pycoli.cli import main
from pycoli.cli.layer import routing_error, stored_layer
from pycoli.container import Container

D, H, E = 64, 32, 8

FAMILIES = {
    "olmoe": {"num_experts": E, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": E, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": E, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": E,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "qwen2_moe": {"num_experts": E, "num_experts_per_tok": 2, "norm_topk_prob": False},
}


def family_tensors(family):
    mixtral = family == "mixtral"
    block = "model.layers.1." + ("block_sparse_moe." if mixtral else "mlp.")
    matrices = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")

    def expert(stem, hidden, seed):
        shapes = ((hidden, D), (hidden, D), (D, hidden))
        return {
            f"{stem}{m}.weight": gaussian(*s, seed=seed + i)
            for i, (m, s) in enumerate(zip(matrices, shapes, strict=True))
        }

    tensors = {f"{block}gate.weight": gaussian(E, D, seed=1, scale=0.2)}
    for number in range(E):
        tensors |= expert(f"{block}experts.{number}.", H, 100 * number)
    if family == "deepseek_v3":
        tensors[f"{block}gate.e_score_correction_bias"] = gaussian(E, seed=2, scale=0.1)
        tensors |= expert(f"{block}shared_experts.", 2 * H, 9000)
    if family == "qwen2_moe":
        tensors |= expert(f"{block}shared_expert.", 2 * H, 9000)
        tensors[f"{block}shared_expert_gate.weight"] = gaussian(1, D, seed=3, scale=0.2)
    return tensors


def write_checkpoint(folder, family, tensors=None, **config):
    config = {"model_type": family, "hidden_size": D, "moe_intermediate_size": H} | FAMILIES[family] | config
    save_file(family_tensors(family) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_CUDA_LIB", str(tmp_path / "none.so"))


def definition(x, tensors, family):
    """The block as the family's papers define it, in float64."""
    config = FAMILIES[family]
    tensors = {name.split("mlp.")[-1].split("moe.")[-1]: t.astype(np.float64) for name, t in tensors.items()}
    logits = x.astype(np.float64) @ tensors["gate.weight"].T
    top_k = config["num_experts_per_tok"]

    def expert(stem, row):
        names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (tensors[f"{stem}{m}.weight"] for m in names)
        a = gate @ row
        return down @ (a / (1 + np.exp(-a)) * (up @ row))

    y = np.zeros(x.shape)
    for s, row in enumerate(x.astype(np.float64)):
        if family == "deepseek_v3":
            scores = 1 / (1 + np.exp(-logits[s]))
            choice = (scores + tensors["gate.e_score_correction_bias"]).reshape(4, 2)
            best = np.argsort(-choice.sum(axis=1))[:2]
            masked = np.full(choice.shape, -np.inf)
            masked[best] = choice[best]
            ids = np.argsort(-masked.ravel())[:top_k]
            factors = 2.5 * scores[ids] / scores[ids].sum()
            y[s] += expert("shared_experts.", row)
        else:
            scores = np.exp(logits[s]) / np.exp(logits[s]).sum()
            ids = np.argsort(-scores)[:top_k]
            factors = scores[ids] / (scores[ids].sum() if family in ("mixtral", "qwen3_moe") else 1)
        if family == "qwen2_moe":
            y[s] += expert("shared_expert.", row) / (1 + np.exp(-(tensors["shared_expert_gate.weight"] @ row)))
        for e, factor in zip(ids, factors, strict=True):
            y[s] += factor * expert(f"experts.{e}.", row)
    return y


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_routes_as_its_papers_say(family, tmp_path):
    tensors = family_tensors(family)
    checkpoint = Checkpoint(write_checkpoint(tmp_path, family, tensors))

    def encoded(weights):
        return [pycoli.encode(w, "f32") for w in (weights.gate, weights.up, weights.down)]

    x = gaussian(6, D, seed=4)
    shared, gate = checkpoint.shared_expert(1) or (None, None)
    experts = [encoded(checkpoint.expert(1, number)) for number in range(E)]
    router = pycoli.Router(**checkpoint.router(1))
    shared = shared and encoded(shared)
    with pycoli.MoELayer(experts, router, shared, devices="cpu", shared_gate=gate) as layer:
        np.testing.assert_allclose(layer(x), definition(x, tensors, family), rtol=1e-4, atol=1e-3)


def test_a_gpu_that_fails(tmp_path, capsys, simt_lib, monkeypatch):
    """The CPU does it, and the report says at each step why."""
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))
    monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
    assert main(["run", write_checkpoint(tmp_path, "olmoe"), "--layer-forward", "--tokens", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "issue failed on 2 experts: coli_cuda_expert_group_issue_sum: " in text
    assert "group failed on 2 experts: coli_cuda_expert_group: " in text
    assert "single failed on 2 experts: coli_cuda_expert_mlp: " in text
    assert "take failed" not in text
    pycoli.open_backend().shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_report(family, tmp_path, capsys):
    path = write_checkpoint(tmp_path, family)
    assert main(["run", path, "--layer-forward", "--tokens", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    top_k = FAMILIES[family]["num_experts_per_tok"]
    shared = family in ("deepseek_v3", "qwen2_moe")
    assert report["right"]
    assert report["error_against_decoded"] < 3e-6
    assert report["paths"]["cpu"]["rows"] == 5 * (top_k + shared)
    assert report["shared_expert"] == shared
    assert report["where"] == ["cpu"] * (E + shared)
    assert report["rotations"] == 1
    assert main(["run", path, "--layer-forward", "--tokens", "5", "--format", "int4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "right" in text
    assert f"{E} experts" in text


def test_on_a_gpu(tmp_path, capsys, simt_lib, monkeypatch):
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))
    path = write_checkpoint(tmp_path, "deepseek_v3")
    assert main(["run", path, "--layer-forward", "--tokens", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["paths"]["issue"]["rows"] + report["paths"]["group"]["rows"] == 8
    assert report["why_failed"] == {}
    pycoli.open_backend().shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_container(family, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    tensors = family_tensors(family)
    folder = write_checkpoint(tmp_path / "model", family, tensors)
    assert main(["convert", folder, str(tmp_path / "container"), "--experts", "f32", "--dense", "f32"]) == 0
    rows = gaussian(5, D, seed=4)
    np.save(tmp_path / "rows.npy", rows)
    capsys.readouterr()
    run = ["run", str(tmp_path / "container"), "--layer-forward", "--activations", str(tmp_path / "rows.npy"), "--json"]
    assert main(run) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["right"]
    assert report["shared_expert"] == (family in ("deepseek_v3", "qwen2_moe"))
    with Container(tmp_path / "container") as container:
        parts = stored_layer(container, 1)
        router = pycoli.Router(**parts.router)
        with pycoli.MoELayer(parts.experts, router, parts.shared, devices="cpu", shared_gate=parts.gate) as layer:
            np.testing.assert_allclose(layer(rows), definition(rows, tensors, family), rtol=1e-4, atol=1e-3)


def test_a_container_in_e8_and_int8(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    folder = write_checkpoint(tmp_path / "model", "qwen2_moe")
    assert main(["convert", folder, str(tmp_path / "container"), "--fallback", "int8"]) == 0
    capsys.readouterr()
    assert main(["run", str(tmp_path / "container"), "--layer-forward"]) == 0
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), "layer 1 has no router that is known here"),
        (lambda t: t.update({"model.layers.1.mlp.gate.weight": gaussian(E, D + 1)}), "expected F32 of shape [8, 64]"),
        (lambda t: t.pop("model.layers.1.mlp.shared_expert.up_proj.weight"), "shared_expert.up_proj.weight"),
    ],
)
def test_containers_that_cannot_be_routed(change, message, tmp_path, capsys):
    tensors = family_tensors("qwen2_moe")
    change(tensors)
    write_checkpoint(tmp_path, "qwen2_moe", tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "out-00000.safetensors")
    assert main(["run", str(tmp_path), "--layer-forward"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("model.layers.1.mlp.gate.weight"), "layer 1 has no router that is known here"),
        (lambda t, c: t.update({"model.layers.1.mlp.gate.weight": gaussian(E, D + 1)}), "shape"),
        (lambda t, c: c.update(num_experts_per_tok=None), "num_experts_per_tok is needed"),
        (lambda t, c: c.update(num_experts_per_tok=E + 1), "top_k must be 1 ... 8"),
        (lambda t, c: c.update(scoring_func="tanh"), "kind must be"),
    ],
)
def test_what_cannot_be_routed(change, message, tmp_path, capsys):
    tensors, config = family_tensors("olmoe"), {}
    change(tensors, config)
    assert main(["run", write_checkpoint(tmp_path, "olmoe", tensors, **config), "--layer-forward"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--layer-forward: expected a CHECKPOINT, since the sample has no router"),
        (["model", "--experts", "0-3"], "--experts: --layer-forward runs a whole layer, got both"),
    ],
)
def test_options_that_do_not_fit(arguments, message, capsys):
    assert main(["run", *arguments, "--layer-forward"]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_choice_is_seen():
    rows, weight = gaussian(3, D), gaussian(E, D, seed=1)
    settings = {
        "weight": weight,
        "top_k": 2,
        "kind": "softmax",
        "renormalise": False,
        "groups": 0,
        "bias": None,
        "scale": 1,
    }
    ids, weights = pycoli.Router(weight, 2)(rows)
    assert routing_error(rows, ids, weights, settings) < 1e-6
    assert routing_error(rows, ids, weights * np.float32(1.001), settings) > 1e-5
    others = (ids + 1) % E
    assert routing_error(rows, others, weights, settings) > 1e-3
