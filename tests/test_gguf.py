"""GGUF: the values of gguf's own decoder, no bit lost on the way in and out, and files that nobody vouches for."""

import argparse
import ctypes
import json
import signal
import struct
from pathlib import Path

import numpy as np
import oracle
import pytest
from containers import file_size_limit
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import pycoli
from pycoli.cli import convert as convert_command
from pycoli.cli import main
from pycoli.convert import Settings, convert, open_source
from pycoli.convert.verify import verify

gguf = pytest.importorskip("gguf", reason="the package that decodes and writes these files")
from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf import quants  # noqa: E402

from pycoli import gguf as ours  # noqa: E402
from pycoli.convert.gguf_source import export_gguf  # noqa: E402

HIDDEN, INNER, EXPERTS = 512, 256, 3


def iq3_xxs(rng, shape):
    """Random IQ3_XXS blocks, uint8 [..., bytes of a row]: every code may occur, super-scales finite."""
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 98), dtype=np.uint8)
    scales = rng.uniform(0.002, 0.004, blocks.shape[:-1]).astype("<f2")
    blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def decoded(blocks, kind):
    return quants.dequantize(blocks, kind)


# Blocks


def any_scales(seed, shape):
    """IQ3_XXS blocks whose super-scales are any that can be doubled: subnormal, negative, zero, large."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 256, 98), dtype=np.uint8)
    bits = (
        rng.integers(0, 0x7800, len(blocks), dtype=np.uint16) | rng.integers(0, 2, len(blocks), dtype=np.uint16) << 15
    )
    blocks[:, :2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    return blocks


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_iq3_xxs_keeps_every_value_and_every_bit(seed, rows, blocks_a_row):
    shape = (rows, 256 * blocks_a_row)
    blocks = any_scales(seed, shape)
    weights = ours.from_iq3_xxs(blocks, shape)
    assert (weights.fmt, weights.rotated, weights.shape) == ("e8", False, shape)
    np.testing.assert_array_equal(weights.decode(), decoded(blocks.reshape(rows, -1), Type.IQ3_XXS))
    assert ours.to_iq3_xxs(weights).tobytes() == blocks.tobytes()


def test_ggml_decodes_what_goes_out(rng):
    package = pytest.importorskip("libggml", reason="libggml-python carries ggml's own decoder")
    libraries = sorted(Path(package.__file__).parent.rglob("libggml-base*.so*"))
    if not libraries:
        pytest.skip("libggml-python has no libggml-base library on this platform")
    weights = pycoli.encode(rng.standard_normal((4, 512)).astype(np.float32), "e8", rotate=False)
    blocks, values = ours.to_iq3_xxs(weights), np.empty((4, 512), np.float32)
    decode = ctypes.CDLL(str(libraries[0])).dequantize_row_iq3_xxs
    decode(ctypes.c_void_p(blocks.ctypes.data), ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(values.size))
    np.testing.assert_array_equal(values, weights.decode())


def test_e8_that_was_encoded_here_goes_out(rng):
    w = rng.standard_normal((4, 512)).astype(np.float32)
    weights = pycoli.encode(w, "e8", rotate=False)
    blocks = ours.to_iq3_xxs(weights)
    np.testing.assert_array_equal(decoded(blocks.reshape(4, -1), Type.IQ3_XXS), weights.decode())
    assert ours.from_iq3_xxs(blocks.tobytes(), (4, 512)).data.tobytes() == weights.data.tobytes()


def test_scales_that_cannot_be_doubled_or_halved(rng):
    for bits in (0x7800, 0x7C00, 0x7E01, 0xF800):
        blocks = iq3_xxs(rng, (3, 512)).reshape(-1, 98)
        blocks[4, :2] = np.array([bits], "<u2").view(np.uint8)
        with pytest.raises(pycoli.FormatError, match=r"of block 4 \(row 2\) cannot be doubled without loss"):
            ours.from_iq3_xxs(blocks, (3, 512))
    for bits in (0x0001, 0x03FF, 0x7C00, 0x7E01):
        data = oracle.random_encoded(rng, "e8", (3, 512)).data.copy()
        data.reshape(-1, 98)[4, 96:] = np.array([bits], "<u2").view(np.uint8)
        weights = pycoli.Weights.from_bytes(data, fmt="e8", shape=(3, 512), rotated=False)
        with pytest.raises(pycoli.FormatError, match=r"of block 4 \(row 2\) cannot be halved without loss"):
            ours.to_iq3_xxs(weights)


def test_matrices_that_are_no_iq3_xxs(rng):
    w = rng.standard_normal((2, 300)).astype(np.float32)
    with pytest.raises(pycoli.FormatError, match="got rotated rows"):
        ours.to_iq3_xxs(pycoli.encode(w[:, :256], "e8"))
    with pytest.raises(pycoli.FormatError, match="got int8"):
        ours.to_iq3_xxs(pycoli.encode(w, "int8"))
    own = pycoli.Weights.from_bytes(bytes(98), fmt="e8", shape=(1, 256), rotated=False, codebook=bytes(1024))
    with pytest.raises(pycoli.FormatError, match="got a codebook of its own"):
        ours.to_iq3_xxs(own)
    with pytest.raises(pycoli.ShapeError, match="whole super-blocks of 256"):
        ours.to_iq3_xxs(pycoli.encode(w, "e8", rotate=False))
    with pytest.raises(pycoli.ShapeError, match="whole super-blocks of 256"):
        ours.from_iq3_xxs(bytes(98), (1, 98))
    with pytest.raises(pycoli.SizeError, match=r"IQ3_XXS \[2, 256\] needs 196 bytes, got 98"):
        ours.from_iq3_xxs(bytes(98), (2, 256))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 5))
def test_q4_0_keeps_every_value(seed, rows, blocks_a_row):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * blocks_a_row, 18), dtype=np.uint8)
    blocks[:, 1] &= 0xBB  # no infinity
    weights = ours.from_q4_0(blocks, (rows, 32 * blocks_a_row))
    assert weights.fmt == "int4-g32"
    np.testing.assert_array_equal(weights.decode(), decoded(blocks.reshape(rows, -1), Type.Q4_0))
    with pytest.raises(pycoli.ShapeError, match="whole blocks of 32"):
        ours.from_q4_0(blocks, (rows, 31))


# Files


def write_gguf(path, tensors, architecture="olmoe", **fields):
    """A file of {name: (array or raw blocks, type)}."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(HIDDEN)
    writer.add_expert_used_count(2)
    writer.add_token_list(["a", "b"])
    for key, value in fields.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(rng, shape, kind):
    """An array of a type as the writer takes it, and the values it stands for."""
    if kind == Type.IQ3_XXS:
        blocks = iq3_xxs(rng, shape)
        return (blocks, kind), decoded(blocks, kind)
    w = (rng.standard_normal(shape) / 16).astype(np.float32)
    if kind in (Type.F32, Type.F16):
        array = w.astype(np.float16 if kind == Type.F16 else np.float32)
        return (array, kind), array.astype(np.float32)
    if kind == Type.Q4_K:  # gguf does not encode it
        blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, 144), dtype=np.uint8)
        blocks[..., :4] = np.array([0.001, 0.001], "<f2").view(np.uint8)
        blocks = blocks.reshape(*shape[:-1], -1)
        return (blocks, kind), decoded(blocks, kind)
    blocks = quants.quantize(w, kind)
    return (blocks, kind), decoded(blocks, kind)


def layer_tensors(rng, kinds, layer=0):
    """Experts of a layer, gate, up and down of the given types; the second result has the values."""
    shapes = ((EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    tensors, values = {}, {}
    for role, shape, kind in zip(("gate", "up", "down"), shapes, kinds, strict=True):
        tensors[f"blk.{layer}.ffn_{role}_exps.weight"], values[role] = quantised(rng, shape, kind)
    return tensors, values


def whole_model(rng, kinds=(Type.IQ3_XXS,) * 3):
    tensors, values = layer_tensors(rng, kinds)
    tensors["token_embd.weight"], values["embed"] = quantised(rng, (40, HIDDEN), Type.Q8_0)
    tensors["output_norm.weight"], values["norm"] = quantised(rng, (HIDDEN,), Type.F32)
    tensors["blk.0.attn_q.weight"], values["q"] = quantised(rng, (HIDDEN, HIDDEN), Type.Q4_0)
    tensors["blk.0.ffn_gate_inp.weight"], values["router"] = quantised(rng, (EXPERTS, HIDDEN), Type.F32)
    return tensors, values


def test_iq3_xxs_experts_come_in_and_go_out_without_loss(tmp_path, rng):
    tensors, values = whole_model(rng)
    file = write_gguf(tmp_path / "model.gguf", tensors)
    report = convert(file, tmp_path / "out")
    assert any("existing hosts, which always rotate, refuse it" in line for line in report.warnings)
    with pycoli.Container(tmp_path / "out") as container:
        assert container.config["num_experts"] == EXPERTS
        assert (container.config["hidden_size"], container.config["moe_intermediate_size"]) == (HIDDEN, INNER)
        assert container.config["model_type"] == "olmoe"
        for index, expert in enumerate(container.experts(0)):
            for weights, role in zip(expert, ("gate", "up", "down"), strict=True):
                assert (weights.fmt, weights.rotated) == ("e8", False)
                np.testing.assert_array_equal(weights.decode(), values[role][index])
    stored = load_file(tmp_path / "out" / "out-00000.safetensors")
    assert stored["model.layers.0.mlp.experts.0.up_proj.weight.qs"].tolist() == [6.0, 0.0]
    np.testing.assert_array_equal(stored["model.norm.weight"], values["norm"])
    np.testing.assert_array_equal(stored["model.layers.0.mlp.gate.weight"], values["router"])
    assert not [result for result in verify(tmp_path / "out", open_source(file)) if result.problem]

    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back.gguf")]) == 0
    back = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "back.gguf").tensors}
    assert back.keys() == tensors.keys()
    for role in ("gate", "up", "down"):
        name = f"blk.0.ffn_{role}_exps.weight"
        assert back[name].tensor_type == Type.IQ3_XXS
        assert back[name].data.tobytes() == tensors[name][0].tobytes()
        assert list(back[name].shape) == list(values[role].shape[::-1])
    np.testing.assert_array_equal(back["output_norm.weight"].data, values["norm"])
    assert not list(tmp_path.glob("*.partial"))
    convert(tmp_path / "back.gguf", tmp_path / "again")
    again = load_file(tmp_path / "again" / "out-00000.safetensors")
    assert all(again[name].tobytes() == array.tobytes() for name, array in stored.items() if "experts" in name)


def test_a_layer_without_rotation_runs_without_it(tmp_path, rng):
    tensors, values = whole_model(rng)
    convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out")
    x = rng.standard_normal((3, HIDDEN)).astype(np.float32)
    with pycoli.Container(tmp_path / "out") as container:
        y = pycoli.expert_mlp(x, *container.expert(0, 1), device="cpu")
    gate, up, down = (values[role][1].astype(np.float64) for role in ("gate", "up", "down"))
    wanted = (oracle.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert oracle.relative_rms(y, wanted) < 3e-6
    assert main(["run", str(tmp_path / "out"), "--experts", "0", "--device", "cpu"]) == 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "F16", "BF16", "F32"])
def test_other_types_are_decoded_and_encoded_again(tmp_path, rng, kind):
    tensors, values = layer_tensors(rng, (Type[kind],) * 3)
    convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out", Settings("int8"))
    with pycoli.Container(tmp_path / "out") as container:
        for weights, role in zip(container.expert(0, 2), ("gate", "up", "down"), strict=True):
            assert weights.data.tobytes() == pycoli.encode(values[role][2], "int8").data.tobytes()


def test_the_types_of_the_source(tmp_path, rng):
    tensors, values = whole_model(rng, (Type.IQ3_XXS, Type.IQ3_XXS, Type.Q4_0))
    tensors["token_embd.weight"], values["embed"] = quantised(rng, (40, HIDDEN), Type.BF16)
    convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out", Settings("source", dense="source"))
    with pycoli.Container(tmp_path / "out") as container:
        expert = container.expert(0, 0)
        assert [weights.fmt for weights in expert] == ["e8", "e8", "int4-g32"]
        for weights, role in zip(expert, ("gate", "up", "down"), strict=True):
            np.testing.assert_array_equal(weights.decode(), values[role][0])
        q = container.stored("model.layers.0.self_attn.q_proj.weight").weights()
        np.testing.assert_array_equal(q.decode(), values["q"])
        np.testing.assert_array_equal(
            container.file("model.embed_tokens.weight").view("model.embed_tokens.weight"), values["embed"]
        )
    tensors, _ = layer_tensors(rng, (Type.Q8_0,) * 3)
    with pytest.raises(pycoli.CheckpointError, match="no format holds Q8_0 without loss"):
        convert(write_gguf(tmp_path / "q8.gguf", tensors), tmp_path / "q8", Settings("source"))
    assert not (tmp_path / "q8").exists()


def test_gate_and_up_of_a_layer_are_rotated_together(tmp_path, rng):
    """They meet the same inputs; down has inputs of its own."""
    tensors, values = layer_tensors(rng, (Type.IQ3_XXS, Type.Q8_0, Type.IQ3_XXS))
    report = convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out")
    assert any("encoded again, with rotation" in line for line in report.warnings)
    with pycoli.Container(tmp_path / "out") as container:
        gate, up, down = container.expert(0, 0)
    assert (gate.rotated, up.rotated, down.rotated) == (True, True, False)
    assert gate.data.tobytes() == pycoli.encode(values["gate"][0], "e8").data.tobytes()
    np.testing.assert_array_equal(down.decode(), values["down"][0])


def test_rows_of_llama_heads_are_put_back(tmp_path, rng):
    """The rule of the llama architecture: rows (head, half, i) of Hugging Face are (head, i, half) in the file."""
    heads, tensors = 4, whole_model(rng)[0]
    w = rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32)
    permuted = w.reshape(heads, 2, HIDDEN // heads // 2, HIDDEN).swapaxes(1, 2).reshape(w.shape)
    tensors["blk.0.attn_q.weight"] = (np.ascontiguousarray(permuted), Type.F32)
    file = write_gguf(tmp_path / "model.gguf", tensors, "llama", attention__head_count=heads)
    convert(file, tmp_path / "out", Settings(dense="f32"))
    stored = load_file(tmp_path / "out" / "out-00000.safetensors")
    np.testing.assert_array_equal(stored["model.layers.0.self_attn.q_proj.weight"], w)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mixtral"
    tensors["blk.0.attn_q.weight"] = (np.zeros((HIDDEN - 1, HIDDEN), np.float32), Type.F32)
    file = write_gguf(tmp_path / "odd.gguf", tensors, "llama", attention__head_count=heads)
    with pytest.raises(
        pycoli.CheckpointError, match=r"blk.0.attn_q.weight: \[511, 512\] does not go with 4 attention heads"
    ):
        convert(file, tmp_path / "odd")


@pytest.mark.parametrize(
    ("architecture", "fields", "config"),
    [
        ("olmoe", {}, {"norm_topk_prob": False}),
        ("qwen3moe", {}, {"norm_topk_prob": True}),
        ("llama", {"attention__head_count": 4}, {"norm_topk_prob": True}),
        (
            "deepseek2",
            {"expert_weights_norm": 1, "expert_gating_func": 2, "expert_group_count": 8, "expert_group_used_count": 4},
            {"norm_topk_prob": True, "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4},
        ),
    ],
)
def test_how_a_model_routes_comes_in_and_goes_out(tmp_path, rng, architecture, fields, config):
    file = write_gguf(tmp_path / "model.gguf", whole_model(rng)[0], architecture, **fields)
    convert(file, tmp_path / "out")
    read = json.loads((tmp_path / "out" / "config.json").read_text())
    assert read["num_experts_per_tok"] == 2
    assert {key: read[key] for key in config} == config
    with pycoli.Container(tmp_path / "out") as container:
        export_gguf(container, tmp_path / "back.gguf")
        router = container.router(0)
    assert router["renormalise"] == config["norm_topk_prob"]
    convert(tmp_path / "back.gguf", tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: again[key] for key in config} == config


def beside_the_experts(rng, architecture):
    """Tensors of a layer but its experts, under the names that the architecture has, float32."""
    norm = "post_attention_norm" if architecture == "glm4moe" else "ffn_norm"
    shapes = {
        "attn_norm": (HIDDEN,),
        norm: (HIDDEN,),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate_inp": (EXPERTS, HIDDEN),
    }
    if architecture != "deepseek2":
        shapes |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN)}
    if architecture in ("qwen2moe", "deepseek2", "glm4moe"):
        shapes |= {f"ffn_{role}_shexp": (INNER, HIDDEN) for role in ("gate", "up")}
        shapes["ffn_down_shexp"] = (HIDDEN, INNER)
    if architecture == "qwen2moe":
        shapes["ffn_gate_inp_shexp"] = (HIDDEN,)
    tensors = {f"blk.0.{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    if architecture in ("deepseek2", "glm4moe"):
        tensors["blk.0.exp_probs_b.bias"] = rng.standard_normal(EXPERTS)
    return {name: (w.astype(np.float32), Type.F32) for name, w in tensors.items()}


@pytest.mark.parametrize("architecture", ["olmoe", "qwen2moe", "qwen3moe", "llama", "deepseek2", "glm4moe"])
def test_every_tensor_of_an_architecture_comes_back(tmp_path, rng, architecture):
    """Under the name that ggml knows it by, with the same values."""
    tensors = layer_tensors(rng, (Type.IQ3_XXS,) * 3)[0] | beside_the_experts(rng, architecture)
    known = gguf.MODEL_TENSORS[next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)]
    stems = {gguf.TENSOR_NAMES[kind].format(bid=0) for kind in known}
    assert {name.rpartition(".")[0] for name in tensors} <= stems
    fields = {"attention__head_count": 4, "attention__head_count_kv": 2}
    file = write_gguf(tmp_path / "model.gguf", tensors, architecture, **fields)
    assert len(convert(file, tmp_path / "out", Settings(dense="f32")).warnings) == 2  # all names are known
    with pycoli.Container(tmp_path / "out") as container:
        export_gguf(container, tmp_path / "back.gguf")
    back = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "back.gguf").tensors}
    assert back.keys() == tensors.keys()
    for name, (array, kind) in tensors.items():
        assert back[name].tensor_type == kind
        assert list(back[name].data.shape) == list(array.shape), name
        assert back[name].data.tobytes() == array.tobytes(), name


def test_the_factor_of_a_shared_expert_is_found(tmp_path, rng):
    tensors = layer_tensors(rng, (Type.IQ3_XXS,) * 3)[0] | beside_the_experts(rng, "qwen2moe")
    convert(write_gguf(tmp_path / "model.gguf", tensors, "qwen2moe"), tmp_path / "out")
    with pycoli.Container(tmp_path / "out") as container:
        np.testing.assert_array_equal(
            container.shared_expert(0)[1], tensors["blk.0.ffn_gate_inp_shexp.weight"][0].reshape(-1)
        )
    assert main(["run", str(tmp_path / "out"), "--layer-forward", "--device", "cpu", "--tokens", "3"]) == 0


def test_float64_is_not_rounded(tmp_path, rng):
    tensors = whole_model(rng)[0]
    exact = rng.standard_normal((2, 5))
    tensors["blk.0.scale.weight"] = (exact, Type.F64)
    file = write_gguf(tmp_path / "model.gguf", tensors)
    convert(file, tmp_path / "out")
    np.testing.assert_array_equal(load_file(tmp_path / "out" / "out-00000.safetensors")["blk.0.scale.weight"], exact)
    assert not [result for result in verify(tmp_path / "out", open_source(file)) if result.problem]


def test_super_scales_that_cannot_be_doubled_are_named(tmp_path, rng):
    tensors, _ = layer_tensors(rng, (Type.IQ3_XXS,) * 3)
    tensors["blk.0.ffn_up_exps.weight"][0][1, 5, :2] = np.array([0x7C00], "<u2").view(np.uint8)
    file = write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(
        pycoli.CheckpointError, match=r"experts.1.up_proj.weight .*super-scale inf of block 10 \(row 5\)"
    ):
        convert(file, tmp_path / "out")
    assert not list((tmp_path / "out").glob("out-*"))


def test_what_cannot_be_exported(tmp_path, rng, capsys):
    tensors, _ = layer_tensors(rng, (Type.F32,) * 3)
    convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out", Settings("e8"))
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back.gguf")]) == 2
    assert "its rows are stored rotated, which GGUF cannot say" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.gguf", "out"]
    (tmp_path / "there.gguf").write_text("mine")
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "there.gguf")]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "there.gguf").read_text() == "mine"


@pytest.mark.parametrize(
    "option",
    [["--dry-run"], ["--experts", "int8"], ["--jobs", "2"], ["--shard-size", "4M"], ["--imatrix", "x"]],
    ids=str,
)
def test_options_that_an_export_does_not_know(tmp_path, rng, capsys, option):
    convert(write_gguf(tmp_path / "model.gguf", whole_model(rng)[0]), tmp_path / "out")
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back.gguf"), *option]) == 2
    assert f"{option[0]}: is for making a container" in capsys.readouterr().err
    assert not list(tmp_path.glob("back.gguf*"))


@pytest.mark.parametrize("model_type", [None, "my_moe"])
def test_an_architecture_that_ggml_does_not_know_is_warned_of(tmp_path, rng, capsys, model_type):
    convert(write_gguf(tmp_path / "model.gguf", whole_model(rng)[0]), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back.gguf")]) == 0
    wanted = f"{model_type!r} goes out as the architecture {model_type or 'unknown'!r}, which ggml does not know"
    assert wanted in capsys.readouterr().err


def test_every_option_of_a_conversion_is_known_by_its_default():
    parser = argparse.ArgumentParser()
    convert_command.add_parser(parser.add_subparsers())
    given = vars(parser.parse_args(["convert", "SRC", "DST"]))
    assert {name: given[name] for name in given.keys() - {"source", "destination", "json", "output"}} == (
        convert_command._OF_CONVERSIONS
    )


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits of files are POSIX's")
def test_an_export_without_room_names_the_file(tmp_path, rng, capsys):
    convert(write_gguf(tmp_path / "model.gguf", whole_model(rng)[0]), tmp_path / "out")
    with file_size_limit(300_000):
        assert main(["convert", str(tmp_path / "out"), str(tmp_path / "back.gguf")]) == 2
    assert "back.gguf: cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("back.gguf*"))


# Files that nobody vouches for


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def tensor_info(name="x", shape=(8,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def raw_gguf(infos, fields=b"", field_count=0, data=bytes(32), count=None, version=3, magic=b"GGUF"):
    head = magic + struct.pack("<IQQ", version, len(infos) if count is None else count, field_count) + fields
    head += b"".join(infos)
    return head + bytes(-len(head) % 32) + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable GGUF file"),
        (b"GGU", "the file ends within it"),
        (raw_gguf([], magic=b"GGML"), "it does not begin with GGUF"),
        (raw_gguf([], version=1), "expected version 2 or 3, little-endian, got 1"),
        (raw_gguf([], version=3 << 24), "expected version 2 or 3"),
        (raw_gguf([], count=2**63), "the name of tensor|tensor : "),
        (raw_gguf([], field_count=2**63), "metadata"),
        (raw_gguf([tensor_info(shape=(9,))]), "tensor x: 36 bytes at offset 0 of the data, but the file has 32"),
        (raw_gguf([tensor_info(offset=2**63)]), "tensor x: 32 bytes at offset 9223372036854775808"),
        (raw_gguf([tensor_info(offset=4)]), "tensor x: 32 bytes at offset 4"),
        (raw_gguf([tensor_info(shape=(2**62, 2**62))]), "tensor x: .* bytes at offset 0"),
        (raw_gguf([tensor_info(shape=(1,) * 9)]), "tensor x: expected up to 8 dimensions, got 9"),
        (raw_gguf([tensor_info(kind=999)]), "tensor x: unknown type 999"),
        (raw_gguf([tensor_info(kind=18)]), "tensor x: rows of 8 are no whole blocks of 256 of IQ3_XXS"),
        (raw_gguf([tensor_info(), tensor_info()]), "tensor x is there twice"),
        (raw_gguf([tensor_info(), tensor_info("y")]), "tensor y: overlaps x"),
        (
            raw_gguf([], text("a") + struct.pack("<II", 4, 1) + text("a") + struct.pack("<II", 4, 1), 2),
            "metadata a is there twice",
        ),
        (raw_gguf([], text("a") + struct.pack("<I", 99), 1), "metadata a: unknown type 99"),
        (raw_gguf([], text("a") + struct.pack("<IIQ", 9, 4, 2**61), 1), "metadata a: the file ends within it"),
        (raw_gguf([], text("a") + struct.pack("<IIQ", 9, 8, 2**61), 1), "metadata a: the file ends within it"),
        (raw_gguf([], text("a") + struct.pack("<IQ", 8, 2**40), 1), "metadata a: the file ends within it"),
        (raw_gguf([], text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", 1), "metadata a: not UTF-8"),
        (
            raw_gguf([], text("general.alignment") + struct.pack("<II", 4, 3), 1),
            "general.alignment: expected a power of two, got 3",
        ),
        (raw_gguf([tensor_info()]), r"no routed experts \(such as"),
    ],
)
def test_hostile_files(tmp_path, content, message):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(pycoli.CheckpointError, match=rf"model.gguf: .*{message}|{message}"):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.0.ffn_up_exps.weight"), "no tensor .*experts.0.up_proj.weight"),
        (
            lambda t: t.update({"blk.0.ffn_up_exps.weight": (np.zeros((2, INNER, HIDDEN), np.float32), Type.F32)}),
            "no tensor .*experts.2.up_proj.weight",
        ),
        (
            lambda t: t.update({"blk.0.ffn_up_exps.weight": (np.zeros((3, 8, HIDDEN), np.float32), Type.F32)}),
            r"up_proj.weight .*expected shape \[256, 512\].*got \[8, 512\]",
        ),
        (
            lambda t: t.update({"blk.0.ffn_up_exps.weight": (np.zeros((INNER, HIDDEN), np.float32), Type.F32)}),
            "blk.0.ffn_up_exps.weight .*expected a matrix for each expert",
        ),
        (
            lambda t: t.update({"blk.0.ffn_gate_up_exps.weight": (np.zeros((3, 2, 32), np.float32), Type.F32)}),
            "experts of this kind are not supported",
        ),
        (
            lambda t: t.update({"blk.0.ffn_up_exps.bias": (np.zeros((3, 32), np.float32), Type.F32)}),
            "experts of this kind are not supported",
        ),
    ],
)
def test_experts_that_are_not_right(tmp_path, rng, change, message):
    tensors, _ = layer_tensors(rng, (Type.F32,) * 3)
    change(tensors)
    with pytest.raises(pycoli.CheckpointError, match=message):
        convert(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out", Settings("int8"))
    assert not (tmp_path / "out").exists()


def test_random_damage(tmp_path, rng):
    """Any byte of the header may be anything: an error of ours, or a file that is still sound."""
    tensors, _ = layer_tensors(rng, (Type.F32,) * 3)
    small = {name: (np.ascontiguousarray(array[:1, :4, :4]), kind) for name, (array, kind) in tensors.items()}
    content = write_gguf(tmp_path / "model.gguf", small).read_bytes()
    outcomes = set()
    for _ in range(400):
        raw = bytearray(content)
        for position in rng.integers(0, len(raw) - 192, rng.integers(1, 4)):
            raw[position] = rng.integers(0, 256)
        (tmp_path / "damaged.gguf").write_bytes(raw[: rng.integers(0, len(raw))] if rng.random() < 0.1 else raw)
        try:
            ours.GgufFile(tmp_path / "damaged.gguf")
            outcomes.add("sound")
        except pycoli.CheckpointError:
            outcomes.add("refused")
    assert outcomes == {"sound", "refused"}


def test_a_model_of_the_same_shapes_is_another_source(tmp_path, rng):
    tensors, _ = layer_tensors(rng, (Type.Q8_0,) * 3)
    file = write_gguf(tmp_path / "model.gguf", tensors)
    convert(file, tmp_path / "out", Settings("int8"))
    name = "blk.0.ffn_up_exps.weight"
    write_gguf(file, {**tensors, name: quantised(rng, (EXPERTS, INNER, HIDDEN), Type.Q8_0)[0]})
    with pytest.raises(pycoli.CheckpointError, match="is of other files"):
        convert(file, tmp_path / "out", Settings("int8"))


def test_split_files(tmp_path, rng):
    tensors, values = layer_tensors(rng, (Type.Q8_0,) * 3)
    names = list(tensors)
    for number, part in enumerate((names[:1], names[1:]), 1):
        write_gguf(tmp_path / f"m-{number:05}-of-00002.gguf", {name: tensors[name] for name in part})
    convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out", Settings("int8"))
    with pycoli.Container(tmp_path / "out") as container:
        assert container.expert(0, 1).up.data.tobytes() == pycoli.encode(values["up"][1], "int8").data.tobytes()
    with pytest.raises(pycoli.CheckpointError, match=r"give the first, m-00001-of-00002\.gguf"):
        open_source(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(pycoli.CheckpointError, match=r"m-00002-of-00002\.gguf: no such file"):
        open_source(tmp_path / "m-00001-of-00002.gguf")


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(raw_gguf([]))
    with pytest.raises(pycoli.NotProvidedError, match=r"pip install 'pycoli\[convert\]'"):
        open_source(tmp_path / "model.gguf")
