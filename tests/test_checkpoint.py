"""Reading experts from Hugging Face checkpoints: namings, shards, types, and files that are damaged."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pycoli.checkpoint import Checkpoint, CheckpointError

EXPERTS, INNER, HIDDEN = 3, 6, 10
CONFIG = {
    "model_type": "olmoe",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_experts": EXPERTS,
}

QWEN = "model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
MIXTRAL = "model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"
MATRICES = {QWEN: ("gate_proj", "up_proj", "down_proj"), MIXTRAL: ("w1", "w3", "w2")}


def random_experts(count=EXPERTS, inner=INNER, hidden=HIDDEN, seed=0):
    """Experts as (gate, up, down) of float32 values that bfloat16 and float16 hold exactly."""
    generator = np.random.default_rng(seed)
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return [
        tuple(generator.integers(-127, 128, shape).astype(np.float32) / 64 for shape in shapes) for _ in range(count)
    ]


def separate(experts, naming=QWEN, layer=1, dtype=np.float32, prefix=""):
    """Tensors of a layer, one a matrix."""
    return {
        prefix + naming.format(layer=layer, expert=number, matrix=matrix): weights.astype(dtype)
        for number, expert in enumerate(experts)
        for matrix, weights in zip(MATRICES[naming], expert, strict=True)
    }


def write_folder(folder, tensors, config=CONFIG, shards=1):
    """A Hugging Face folder; tensors go to the shards in turn."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def assert_same(read, expected):
    for got, want in zip((read.gate, read.up, read.down), expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("naming", [QWEN, MIXTRAL])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_separate_tensors(tmp_path, naming, dtype, shards, prefix):
    experts = random_experts()
    tensors = separate(experts, naming, dtype=dtype, prefix=prefix)
    tensors["model.layers.1.mlp.gate.weight"] = np.zeros((EXPERTS, HIDDEN), np.float32)
    tensors["model.layers.1.mlp.shared_experts.gate_proj.weight"] = np.zeros((INNER, HIDDEN), np.float32)
    checkpoint = Checkpoint(write_folder(tmp_path / "model", tensors, shards=shards))
    assert checkpoint.model_type == "olmoe"
    assert checkpoint.moe_layers() == [1]
    assert checkpoint.expert_count(1) == EXPERTS
    for number, expert in enumerate(experts):
        assert_same(checkpoint.expert(1, number), expert)
    assert checkpoint.recorded_input(1) is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize(("inner", "hidden"), [(INNER, HIDDEN), (4, 8), (8, 8), (8, 4)])  # also D = 2 I and D = I
def test_all_experts_in_one_tensor(tmp_path, transposed, suffix, inner, hidden):
    experts = random_experts(inner=inner, hidden=hidden)
    gate_up = np.stack([np.concatenate([gate, up]) for gate, up, _ in experts])
    down = np.stack([down for _, _, down in experts])
    if transposed:
        gate_up, down = (np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (gate_up, down))
    stem = "model.language_model.layers.0.mlp.experts."
    tensors = {
        f"{stem}gate_up_proj{suffix}": gate_up.astype(ml_dtypes.bfloat16),
        f"{stem}down_proj{suffix}": down.astype(ml_dtypes.bfloat16),
    }
    config = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": hidden, "num_experts": EXPERTS}}
    checkpoint = Checkpoint(write_folder(tmp_path / "model", tensors, config))
    assert checkpoint.model_type == "qwen3_vl_moe"
    assert checkpoint.expert_count(0) == EXPERTS
    for number, expert in enumerate(experts):
        assert_same(checkpoint.expert(0, number), expert)
    with pytest.raises(CheckpointError, match="layer 0 has experts 0 to 2, got 3"):
        checkpoint.expert(0, EXPERTS)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_fp8_blocks(tmp_path, scale_dtype):
    generator = np.random.default_rng(1)
    inner, hidden = 130, 300
    tensors, expected = {}, []
    for matrix, (rows, columns) in zip(
        MATRICES[QWEN], ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
    ):
        codes = generator.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
        blocks = (-(-rows // 128), -(-columns // 128))
        scales = (2.0 ** generator.integers(-9, 3, blocks)).astype(scale_dtype)
        name = QWEN.format(layer=0, expert=0, matrix=matrix)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        decoded = codes.astype(np.float64)
        for row in range(rows):
            for block in range(blocks[1]):
                decoded[row, 128 * block : 128 * block + 128] *= float(scales[row // 128, block])
        expected.append(decoded.astype(np.float32))
    config = {"model_type": "deepseek_v3", "hidden_size": hidden, "moe_intermediate_size": inner, "n_routed_experts": 1}
    folder = write_folder(tmp_path / "model", tensors, config)
    assert_same(Checkpoint(folder).expert(0, 0), expected)

    name = QWEN.format(layer=0, expert=0, matrix="up_proj") + "_scale_inv"
    whole = dict(tensors)
    tensors[name] = tensors[name][:1]
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv .*expected shape \[2, 3\].*got \[1, 3\]"):
        Checkpoint(write_folder(tmp_path / "short", tensors, config)).expert(0, 0)
    del whole[name]
    with pytest.raises(CheckpointError, match=r"its block scales .*up_proj.weight_scale_inv are missing"):
        Checkpoint(write_folder(tmp_path / "none", whole, config)).expert(0, 0)


def test_single_file_with_config_and_recorded_inputs(tmp_path):
    experts, inputs = random_experts(), np.ones((5, HIDDEN), np.float32)
    file = tmp_path / "sample.safetensors"
    save_file(separate(experts) | {"layer1.x": inputs}, file, {"config": json.dumps(CONFIG)})
    checkpoint = Checkpoint(file)
    assert checkpoint.model_type == "olmoe"
    assert_same(checkpoint.expert(1, 2), experts[2])
    np.testing.assert_array_equal(checkpoint.recorded_input(1), inputs)


def test_single_file_beside_a_config_and_without_any(tmp_path):
    folder = write_folder(tmp_path / "model", separate(random_experts()))
    assert Checkpoint(folder / "model.safetensors").model_type == "olmoe"
    (folder / "config.json").unlink()
    checkpoint = Checkpoint(folder)
    assert checkpoint.model_type == "unknown"
    assert checkpoint.expert_count(1) == EXPERTS
    assert checkpoint.expert(1, 0).gate.shape == (INNER, HIDDEN)


def test_speculative_heads_do_not_hide_the_model(tmp_path):
    experts, heads = random_experts(), random_experts(seed=9)
    tensors = separate(experts, layer=0) | separate(experts, layer=3)
    tensors |= {name.replace("model.", "mtp.", 1): w for name, w in separate(heads, layer=0).items()}
    checkpoint = Checkpoint(write_folder(tmp_path / "model", tensors))
    assert checkpoint.moe_layers() == [0, 3]
    assert_same(checkpoint.expert(0, 1), experts[1])


def test_shards_are_opened_when_needed(tmp_path):
    tensors = separate(random_experts(), layer=0) | separate(random_experts(), layer=1)
    folder = write_folder(tmp_path / "model", tensors, shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = {name: f"{'a' if '.layers.0.' in name else 'b'}.safetensors" for name in tensors}
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file(separate(random_experts(), layer=0), folder / "a.safetensors")
    checkpoint = Checkpoint(folder)
    assert checkpoint.expert(0, 0).gate.shape == (INNER, HIDDEN)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: no such file, but .*index\.json places .*gate_proj"):
        checkpoint.expert(1, 0)


def test_activation(tmp_path):
    tensors = separate(random_experts())
    for number, (config, name) in enumerate(
        (({}, "silu"), ({"hidden_act": None}, "silu"), ({"hidden_act": "gelu"}, "gelu"))
    ):
        assert Checkpoint(write_folder(tmp_path / str(number), tensors, config)).activation == name


# What is refused


def test_tensor_that_is_there_twice(tmp_path):
    entry = '"model.layers.0.mlp.experts.0.w1.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}'
    header = f"{{{entry}, {entry}}}".encode()
    file = tmp_path / "twice.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    message = r"twice\.safetensors: not a readable safetensors file: its header has model\..*\.w1\.weight twice"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(file)


def test_fp8_blocks_of_any_size(tmp_path):
    """A block that is larger than the matrix, however much, is the matrix."""
    experts = random_experts(1)
    tensors = separate(experts, dtype=ml_dtypes.float8_e4m3fn)
    expected = [tuple(2 * w.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for w in experts[0])]
    tensors |= {f"{name}_scale_inv": np.full((1, 1), 2, np.float32) for name in list(tensors)}
    config = {"quantization_config": {"weight_block_size": [10**30, 10**30]}}
    assert_same(Checkpoint(write_folder(tmp_path / "model", tensors, config)).expert(1, 0), expected[0])


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="absent: no such file or folder"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", r"PyTorch \.bin files are not read; convert to safetensors"),
        ("model.pt", r"PyTorch \.pt files are not read; convert to safetensors"),
        ("model.pth", r"PyTorch \.pth files are not read; convert to safetensors"),
        (
            "model-q4_0.gguf",
            "GGUF files are read by pycoli convert; convert it, or give the checkpoint that it was made from",
        ),
    ],
)
def test_weights_of_other_kinds(tmp_path, name, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=rf"{name}: {message}"):
        Checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"found neither, but {name}: {message}"):
        Checkpoint(tmp_path)


def test_a_part_in_place_of_the_folder(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model", separate(random_experts()), shards=2)
    with pytest.raises(CheckpointError, match=rf"config\.json: .*only the configuration.*give its folder, {folder}$"):
        Checkpoint(folder / "config.json")
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match=rf"index\.json: .*only the index.*give its folder, {folder}$"):
        Checkpoint("model.safetensors.index.json")


def test_where_an_expert_is_from(tmp_path):
    tensors = separate(random_experts())
    folder = write_folder(tmp_path / "model", tensors, shards=2)
    stem = "model.layers.1.mlp.experts.2"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = [f"{stem}.{matrix}.weight" for matrix in MATRICES[QWEN]]
    assert Checkpoint(folder).expert(1, 2).sources == tuple(f"{name} in {folder / index[name]}" for name in names)


def test_a_layer_or_expert_that_is_not_there(tmp_path):
    tensors = (
        separate(random_experts(), layer=0) | separate(random_experts(), layer=1) | separate(random_experts(), layer=4)
    )
    checkpoint = Checkpoint(write_folder(tmp_path / "model", tensors))
    for call in (checkpoint.expert_count, lambda layer: checkpoint.expert(layer, 0)):
        with pytest.raises(CheckpointError, match="layers with routed experts are 0-1, 4, got layer 2"):
            call(2)
    for expert in (EXPERTS, -1):
        with pytest.raises(CheckpointError, match=f"layer 4 has experts 0-2, got {expert}"):
            checkpoint.expert(4, expert)


def test_dense_models_and_unknown_namings(tmp_path):
    with pytest.raises(CheckpointError, match="no routed experts"):
        Checkpoint(write_folder(tmp_path / "dense", {"model.layers.0.mlp.gate_proj.weight": np.zeros((2, 2), "f4")}))
    name = "model.layers.0.mlp.experts.0.gate_proj.qweight"
    with pytest.raises(CheckpointError, match=f"the closest is {name}"):
        Checkpoint(write_folder(tmp_path / "gptq", {name: np.zeros((2, 2), np.int32)}))


def test_experts_with_biases(tmp_path):
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": np.zeros((2, 4, 6), np.float32),
        "model.layers.0.mlp.experts.gate_up_proj_bias": np.zeros((2, 6), np.float32),
        "model.layers.0.mlp.experts.down_proj": np.zeros((2, 3, 4), np.float32),
    }
    with pytest.raises(CheckpointError, match=r"biases are not supported: .*gate_up_proj_bias"):
        Checkpoint(write_folder(tmp_path / "model", tensors)).expert(0, 0)


def test_missing_tensor(tmp_path):
    tensors = separate(random_experts())
    name = QWEN.format(layer=1, expert=1, matrix="down_proj")
    del tensors[name]
    checkpoint = Checkpoint(write_folder(tmp_path / "model", tensors))
    assert checkpoint.expert(1, 0).gate.shape == (INNER, HIDDEN)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: no tensor {name}"):
        checkpoint.expert(1, 1)


def test_tensor_that_its_shard_lacks(tmp_path):
    tensors = separate(random_experts())
    folder = write_folder(tmp_path / "model", tensors, shards=2)
    name = next(iter(tensors))
    save_file({"other": np.zeros(1, np.float32)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"00001-of-00002\.safetensors: no tensor {name}, but .*index\.json"):
        Checkpoint(folder).expert(1, 0)


def test_missing_experts(tmp_path):
    tensors = {name: w for name, w in separate(random_experts(6)).items() if "experts.1." not in name}
    with pytest.raises(CheckpointError, match="layer 1 has experts up to 5 but not 1"):
        Checkpoint(write_folder(tmp_path / "gap", tensors)).expert_count(1)
    with pytest.raises(CheckpointError, match=r"layer 1: expected 3 experts \(.*config\.json\), got 6"):
        Checkpoint(write_folder(tmp_path / "many", separate(random_experts(6)))).expert_count(1)


@pytest.mark.parametrize("matrix", MATRICES[QWEN])
def test_wrong_shape(tmp_path, matrix):
    tensors = separate(random_experts())
    name = QWEN.format(layer=1, expert=0, matrix=matrix)
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name][:, :-1].copy()
    with pytest.raises(
        CheckpointError,
        match=rf"{name} in .*model\.safetensors: expected shape \[{rows}, {columns}\].*got \[{rows}, {columns - 1}\]",
    ):
        Checkpoint(write_folder(tmp_path / "model", tensors)).expert(1, 0)
    tensors[name] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError, match=r"expected a matrix, got shape \[3\]"):
        Checkpoint(write_folder(tmp_path / "vector", tensors)).expert(1, 0)


def test_fused_shapes_that_do_not_fit(tmp_path):
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": np.zeros((2, 12, 10), np.float32),
        "model.layers.0.mlp.experts.down_proj": np.zeros((2, 10, 7), np.float32),
    }
    with pytest.raises(CheckpointError, match=r"gate_up_proj \[2, 12, 10\] and .*down_proj \[2, 10, 7\]"):
        Checkpoint(write_folder(tmp_path / "model", tensors)).expert(0, 0)
    tensors["model.layers.0.mlp.experts.down_proj"] = np.zeros((2, 10, 6), np.float32)
    config = {"hidden_size": 10, "moe_intermediate_size": 5}
    with pytest.raises(CheckpointError, match=r"with hidden_size 10 \(D\) and moe_intermediate_size 5 \(I\)"):
        Checkpoint(write_folder(tmp_path / "config", tensors, config)).expert(0, 0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float64, ml_dtypes.float8_e5m2, bool])
def test_wrong_dtype(tmp_path, dtype):
    tensors = separate(random_experts())
    name = QWEN.format(layer=1, expert=0, matrix="up_proj")
    tensors[name] = tensors[name].astype(dtype)
    with pytest.raises(CheckpointError, match=rf"{name} in .*: expected type F32, BF16, F16 or F8_E4M3, got \w+"):
        Checkpoint(write_folder(tmp_path / "model", tensors)).expert(1, 0)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_file(tmp_path, keep):
    folder = write_folder(tmp_path / "model", separate(random_experts()))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        Checkpoint(folder)


def test_truncated_shard(tmp_path):
    folder = write_folder(tmp_path / "model", separate(random_experts()), shards=2)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors: not a readable"):
        Checkpoint(folder).expert(1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[" * 100000, "not readable as JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"hidden_size": "10"}', "hidden_size: expected a positive integer, got '10'"),
        ('{"hidden_size": true}', "hidden_size: expected a positive integer, got True"),
        ('{"hidden_size": 0}', "hidden_size: expected a positive integer, got 0"),
        ('{"hidden_size": 11}', r"expected shape \[6, 11\].*got \[6, 10\]"),
        ('{"moe_intermediate_size": 7, "intermediate_size": 6}', r"expected shape \[7, 10\].*got \[6, 10\]"),
    ],
)
def test_bad_config(tmp_path, text, message):
    folder = write_folder(tmp_path / "model", separate(random_experts()))
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder).expert(1, 0)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "expected an object weight_map, got NoneType"),
        ([], "expected an object weight_map, got list"),
        ({"x": 3}, "tensor x: expected a file name, got 3"),
        ({"x": "../secret.safetensors"}, "tensor x: expected a file name"),
        ({"x": "/etc/passwd"}, "tensor x: expected a file name"),
        ({"x": ".."}, "tensor x: expected a file name"),
    ],
)
def test_bad_index(tmp_path, weight_map, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)
