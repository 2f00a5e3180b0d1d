"""Conversion: it writes what encode() gives, in the hosts' layout, and nothing half, whatever stops it."""

import errno
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import olmoe
import oracle
import pytest
from containers import file_size_limit, write_imatrix
from safetensors.numpy import load_file, save_file

import pycoli
from pycoli import convert as conversion
from pycoli.checkpoint import Checkpoint
from pycoli.convert import Imatrix, Recording, Settings, convert, manifest, open_source, shard
from pycoli.convert.verify import NMSE_LIMITS, verify

HIDDEN, INNER, EXPERTS, LAYERS = 512, 256, 3, 2
CONFIG = {
    "model_type": "olmoe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_hidden_layers": LAYERS,
    "vocab_size": 40,
}
COMMON = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


def random_matrix(rng, *shape):
    return (rng.standard_normal(shape) / 16).astype(ml_dtypes.bfloat16)


def model_tensors(rng, *, layers=LAYERS, matrices=COMMON, block="mlp", hidden=HIDDEN, inner=INNER, experts=EXPERTS):
    """A small model, Hugging Face names."""
    tensors = {
        "model.embed_tokens.weight": random_matrix(rng, 40, hidden),
        "lm_head.weight": random_matrix(rng, 40, hidden),
        "model.norm.weight": random_matrix(rng, hidden),
    }
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        tensors[f"{stem}.self_attn.q_proj.weight"] = random_matrix(rng, hidden, hidden)
        tensors[f"{stem}.input_layernorm.weight"] = random_matrix(rng, hidden)
        tensors[f"{stem}.{block}.gate.weight"] = random_matrix(rng, experts, hidden)
        for expert in range(experts):
            for matrix, shape in zip(matrices, shapes, strict=True):
                tensors[f"{stem}.{block}.experts.{expert}.{matrix}.weight"] = random_matrix(rng, *shape)
    return tensors


def write_model(folder, tensors, config=CONFIG):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": "bytes"}')
    names = sorted(tensors)
    index = {}
    for number in range(2):
        part = {name: tensors[name] for name in names[number::2]}
        save_file(part, folder / f"model-{number}.safetensors")
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture
def model(tmp_path, rng):
    tensors = model_tensors(rng)
    return write_model(tmp_path / "model", tensors), tensors


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model that converts in a fraction of a second, in several shards."""
    rng = np.random.default_rng(3)
    sizes = {"hidden": 128, "inner": 64, "experts": 2}
    config = {**CONFIG, "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 2}
    return write_model(tmp_path_factory.mktemp("small") / "model", model_tensors(rng, **sizes), config)


SMALL = Settings(experts="int4-g32", shard_bytes=20_000)


def content(folder):
    """SHA-256 of every file of a container."""
    files = sorted(file for file in folder.iterdir() if file.name != manifest.LOCK)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def header(file):
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


# The result


def test_layout_of_existing_hosts(tmp_path, model):
    folder, tensors = model
    report = convert(folder, tmp_path / "out", jobs=3)
    assert report.warnings == []
    assert sorted(content(tmp_path / "out")) == [
        ".out-progress.json",
        "config.json",
        "out-00000.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    entries, data = header(tmp_path / "out" / "out-00000.safetensors")
    stored = load_file(tmp_path / "out" / "out-00000.safetensors")
    metadata = entries.pop("__metadata__")
    assert "colibri.fmt" not in metadata  # sizes say all of these formats, and existing converters write none
    checksums = json.loads(metadata["colibri.sha256"])
    assert checksums.keys() == entries.keys() == stored.keys()
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        assert checksums[name] == hashlib.sha256(data[start:end]).hexdigest()
        assert start % 4 == 0 or entry["dtype"] == "U8"
    for name, w in tensors.items():
        w = w.astype(np.float32)
        if "experts" in name:
            assert stored[name].dtype == np.uint8
            assert stored[name].tobytes() == pycoli.encode(w, "e8").data.tobytes()
            assert stored[f"{name}.qs"].tolist() == [6.0]
            assert stored[name].size == w.shape[0] * w.shape[1] // 256 * 98
        elif w.ndim == 2 and "gate" not in name:
            codes, scales = oracle.quantise("int8", w)
            assert stored[name].tobytes() == np.asarray(codes).astype(np.int8).tobytes()
            np.testing.assert_array_equal(stored[f"{name}.qs"], np.asarray(scales).reshape(-1))
        else:
            assert f"{name}.qs" not in stored
            np.testing.assert_array_equal(stored[name], w)


@pytest.mark.parametrize("fmt", [fmt.name for fmt in pycoli.formats()])
def test_experts_in_every_format(tmp_path, model, fmt):
    folder, tensors = model
    convert(folder, tmp_path / "out", Settings(experts=fmt))
    with pycoli.Container(tmp_path / "out") as container:
        assert container.layers == [0, 1]
        for layer in container.layers:
            for index, expert in enumerate(container.experts(layer)):
                for weights, name in zip(expert, COMMON, strict=True):
                    w = tensors[f"model.layers.{layer}.mlp.experts.{index}.{name}.weight"]
                    wanted = pycoli.encode(w, fmt)
                    assert weights.fmt == wanted.fmt
                    assert weights.data.tobytes() == wanted.data.tobytes()
                    if wanted.scales is not None:
                        np.testing.assert_array_equal(weights.scales, wanted.scales)


def fused(rng, transposed, layers=LAYERS):
    experts = [
        [
            [random_matrix(rng, *shape) for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))]
            for _ in range(EXPERTS)
        ]
        for _ in range(layers)
    ]
    tensors = {}
    for layer, members in enumerate(experts):
        gate_up = np.stack([np.concatenate([gate, up]) for gate, up, _ in members])
        down = np.stack([down for _, _, down in members])
        if transposed:
            gate_up, down = (np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (gate_up, down))
        stem = f"model.layers.{layer}.mlp.experts."
        tensors |= {f"{stem}gate_up_proj": gate_up, f"{stem}down_proj": down}
    return tensors, experts


@pytest.mark.parametrize("transposed", [False, True])
def test_all_experts_in_one_tensor(tmp_path, rng, transposed):
    tensors, experts = fused(rng, transposed)
    convert(write_model(tmp_path / "model", tensors), tmp_path / "out", Settings(experts="int8"))
    with pycoli.Container(tmp_path / "out") as container:
        for layer, members in enumerate(experts):
            for index, expert in enumerate(members):
                for weights, w in zip(container.expert(layer, index), expert, strict=True):
                    assert weights.data.tobytes() == pycoli.encode(w, "int8").data.tobytes()


def test_mixtral_keeps_its_names(tmp_path, rng):
    tensors = model_tensors(rng, layers=1, matrices=MIXTRAL, block="block_sparse_moe")
    convert(write_model(tmp_path / "model", tensors), tmp_path / "out", Settings(experts="int8"))
    with pycoli.Container(tmp_path / "out") as container:
        expert = container.expert(0, 1)
        for weights, name in zip(expert, MIXTRAL, strict=True):
            w = tensors[f"model.layers.0.block_sparse_moe.experts.1.{name}.weight"]
            assert weights.data.tobytes() == pycoli.encode(w, "int8").data.tobytes()
        assert (
            container.file("model.layers.0.block_sparse_moe.gate.weight").dtype(
                "model.layers.0.block_sparse_moe.gate.weight"
            )
            == "F32"
        )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm_moe_dsa"])
def test_names_of_deepseek_and_glm(tmp_path, rng, family):
    """A dense layer first, shared experts, routers with a bias, a head for further tokens; in GLM-5 an indexer."""
    layers, experts = 2, 4
    config = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    }
    tensors = model_tensors(rng, layers=layers + 1, experts=experts)
    shapes = dict(zip(COMMON, ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)), strict=True))
    tensors = {name: w for name, w in tensors.items() if not name.startswith("model.layers.0.mlp.")}
    for matrix, shape in shapes.items():
        tensors[f"model.layers.0.mlp.{matrix}.weight"] = random_matrix(rng, *shape)
        tensors[f"model.layers.1.mlp.shared_experts.{matrix}.weight"] = random_matrix(rng, *shape)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = rng.standard_normal(experts).astype(np.float32)
    tensors["model.layers.2.eh_proj.weight"] = random_matrix(rng, HIDDEN, 2 * HIDDEN)
    if family == "glm_moe_dsa":
        tensors["model.layers.1.self_attn.indexer.wq_b.weight"] = random_matrix(rng, 64, HIDDEN)
        tensors["model.layers.1.self_attn.indexer.k_norm.bias"] = random_matrix(rng, 64)

    report = convert(write_model(tmp_path / "model", tensors, config), tmp_path / "out")
    assert report.warnings == []
    stored = {}
    for file in (tmp_path / "out").glob("out-*.safetensors"):
        stored |= load_file(file)
    for name, w in tensors.items():
        w = w.astype(np.float32)
        if ".experts." in name:
            assert stored[name].tobytes() == pycoli.encode(w, "e8").data.tobytes(), name
        elif w.ndim == 2 and not name.endswith("mlp.gate.weight"):
            assert stored[name].tobytes() == pycoli.encode(w, "int8").data.tobytes(), name
        else:
            np.testing.assert_array_equal(stored[name], w, err_msg=name)
    with pycoli.Container(tmp_path / "out") as container:
        assert container.layers == [1, 2]
        assert len(container.experts(1)) == experts


@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (300, 200)])
def test_fp8_with_block_scales(tmp_path, rng, rows, columns):
    shapes = {"gate_proj": (rows, columns), "up_proj": (rows, columns), "down_proj": (columns, rows)}
    tensors, wanted = {}, {}
    for matrix, shape in shapes.items():
        name = f"model.layers.3.mlp.experts.0.{matrix}.weight"
        codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.01, 0.02, [-(-n // 128) for n in shape]).astype(np.float32)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        wanted[name] = (
            codes.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))[: shape[0], : shape[1]]
        )
    config = {"model_type": "deepseek_v3", "hidden_size": columns, "moe_intermediate_size": rows, "n_routed_experts": 1}
    convert(write_model(tmp_path / "model", tensors, config), tmp_path / "out", Settings(experts="int8"))
    stored = load_file(tmp_path / "out" / "out-00000.safetensors")
    assert len(stored) == 6
    for name, w in wanted.items():
        assert stored[name].tobytes() == pycoli.encode(w, "int8").data.tobytes()


def test_matrices_that_are_worked_on_in_parts(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(shard, "_CHUNK_FLOATS", 1)
    for number, fmt in enumerate(("e8", "int8", "fp8-e4m3-b128", "int4-g64", "mxfp4", "f32")):
        tensors = model_tensors(rng, layers=1, hidden=512, inner=400, experts=1)
        config = {**CONFIG, "moe_intermediate_size": 400, "num_experts": 1}
        convert(
            write_model(tmp_path / f"model{number}", tensors, config), tmp_path / f"out{number}", Settings(fmt), jobs=2
        )
        with pycoli.Container(tmp_path / f"out{number}") as container:
            for weights, name in zip(container.expert(0, 0), COMMON, strict=True):
                wanted = pycoli.encode(tensors[f"model.layers.0.mlp.experts.0.{name}.weight"], fmt)
                assert weights.fmt == fmt
                assert weights.data.tobytes() == wanted.data.tobytes()
                assert wanted.scales is None or weights.scales.tobytes() == wanted.scales.tobytes()


def test_speculative_heads_and_indexers_have_files_of_their_own(tmp_path, rng):
    tensors = model_tensors(rng, layers=3, experts=EXPERTS)
    tensors["model.layers.0.self_attn.indexer.wq_b.weight"] = random_matrix(rng, 64, HIDDEN)
    convert(write_model(tmp_path / "model", tensors), tmp_path / "out", Settings("int8"))
    names = {file.name: set(load_file(file)) for file in (tmp_path / "out").glob("out-*.safetensors")}
    assert sorted(names) == ["out-00000.safetensors", "out-idx-00000.safetensors", "out-mtp-00000.safetensors"]
    assert all(".layers.2." in name for name in names["out-mtp-00000.safetensors"])
    assert all(".indexer." in name for name in names["out-idx-00000.safetensors"])
    assert pycoli.Container(tmp_path / "out").layers == [0, 1, 2]


def test_keep_and_dense(tmp_path, model):
    folder, tensors = model
    report = convert(folder, tmp_path / "out", Settings("int8", dense="int4-g64", keep=r"embed|experts\.1\."))
    stored = load_file(tmp_path / "out" / "out-00000.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.experts.1.up_proj.weight"):
        np.testing.assert_array_equal(stored[name], tensors[name].astype(np.float32))
    head = pycoli.encode(tensors["lm_head.weight"], "int4-g64")
    assert stored["lm_head.weight"].tobytes() == head.data.tobytes()
    np.testing.assert_array_equal(stored["lm_head.weight.qs"], head.scales.reshape(-1))
    with pycoli.Container(tmp_path / "out") as container:
        assert [container.expert(0, i).up.fmt for i in range(3)] == ["int8", "f32", "int8"]
    assert {key for key in report.losses if key.startswith("dense embedding")} == {
        "dense embedding|f32",
        "dense embedding|int4-g64",
    }


def test_losses_are_those_of_the_encoding(tmp_path, model):
    folder, tensors = model
    report = convert(folder, tmp_path / "out")
    ups = [w.astype(np.float32) for name, w in tensors.items() if "up_proj" in name]
    error = sum(((pycoli.encode(w, "e8").decode().astype(float) - w) ** 2).sum() for w in ups)
    loss = report.losses["expert up|e8"]
    assert loss.nmse == pytest.approx(error / sum((w.astype(float) ** 2).sum() for w in ups), rel=1e-6)
    assert (loss.tensors, loss.weights) == (6, 6 * HIDDEN * INNER)
    assert loss.nbytes == loss.weights * 98 / 256
    assert report.losses["vector|f32"].nmse == 0


@pytest.mark.parametrize(
    ("inner", "hidden", "gate", "down", "warning"),
    [
        (256, 400, "e8", "e8", "rows of 400 are padded to whole super-blocks of 256, 3.92 bits a weight"),
        (128, 512, "e8", "int4-g64", "rows of 128 padded to whole super-blocks take 6.12 bits"),
        (
            96,
            256,
            "e8",
            "int8",
            r"int4-g64 matrix \[256, 96\] cannot be told by its sizes from int4-g48|int8 in place of e8",
        ),
    ],
)
def test_rows_that_are_no_whole_super_blocks(tmp_path, rng, inner, hidden, gate, down, warning):
    tensors = model_tensors(rng, layers=1, hidden=hidden, inner=inner)
    config = {**CONFIG, "hidden_size": hidden, "moe_intermediate_size": inner}
    report = convert(write_model(tmp_path / "model", tensors, config), tmp_path / "out")
    assert any(pytest.importorskip("re").search(warning, line) for line in report.warnings), report.warnings
    with pycoli.Container(tmp_path / "out") as container:
        expert = container.expert(0, 0)
        assert (expert.gate.fmt, expert.up.fmt, expert.down.fmt) == (gate, gate, down)
        for weights, name in zip(expert, COMMON, strict=True):
            wanted = pycoli.encode(tensors[f"model.layers.0.mlp.experts.0.{name}.weight"], weights.fmt)
            assert weights.data.tobytes() == wanted.data.tobytes()


def test_ambiguous_sizes_are_stamped_for_hosts(tmp_path, rng):
    tensors = model_tensors(rng, layers=1, hidden=98, inner=256, experts=1)
    config = {**CONFIG, "hidden_size": 98, "moe_intermediate_size": 256, "num_experts": 1}
    settings = Settings("fp8-e4m3-b128", dense="f32")
    convert(write_model(tmp_path / "model", tensors, config), tmp_path / "out", settings)
    with pycoli.Container(tmp_path / "out") as container:
        assert {weights.fmt for weights in container.expert(0, 0)} == {"fp8-e4m3-b128"}
    shutil.rmtree(tmp_path / "model")
    tensors = model_tensors(rng, layers=1, hidden=64, inner=1, experts=1)  # [1, 64] in fp8 has the sizes of int8
    config |= {"hidden_size": 64, "moe_intermediate_size": 1}
    convert(write_model(tmp_path / "model", tensors, config), tmp_path / "one", settings)
    stamps = json.loads(header(tmp_path / "one" / "out-00000.safetensors")[0]["__metadata__"]["colibri.fmt"])
    assert stamps["model.layers.0.mlp.experts.0.gate_proj.weight"] == "fp8-e4m3-b128"
    with pycoli.Container(tmp_path / "one") as container:
        assert container.expert(0, 0).gate.fmt == "fp8-e4m3-b128"


def test_tensors_that_are_not_float_stay_as_they_are(tmp_path, rng):
    tensors = model_tensors(rng, layers=1)
    tensors["model.layers.0.table"] = np.arange(7, dtype=np.int64)
    tensors["model.layers.0.scalar"] = np.array(3.5, np.float32)
    tensors["model.layers.0.conv.weight"] = rng.standard_normal((3, 4, 5)).astype(np.float32)
    tensors["model.layers.0.empty"] = np.zeros((0, 4), np.float32)
    tensors["model.layers.0.hollow"] = np.zeros((2**50, 0), np.float32)
    convert(write_model(tmp_path / "model", tensors), tmp_path / "out", Settings("int8"))
    stored = load_file(tmp_path / "out" / "out-00000.safetensors")
    for name in ("table", "scalar", "conv.weight", "empty", "hollow"):
        np.testing.assert_array_equal(stored[f"model.layers.0.{name}"], tensors[f"model.layers.0.{name}"])
        assert stored[f"model.layers.0.{name}"].shape == tensors[f"model.layers.0.{name}"].shape


def test_memory_does_not_grow_with_the_matrix(tmp_path, rng):
    """Less than twice the largest matrix in float32 above what the program takes without any, by its own account."""
    big = 4096, 2048
    tensors = {"model.embed_tokens.weight": np.zeros(big, ml_dtypes.bfloat16)} | model_tensors(rng, layers=1)
    tensors["model.embed_tokens.weight"] = np.broadcast_to(random_matrix(rng, 1, big[1]), big).copy()
    folder = write_model(tmp_path / "model", tensors, {**CONFIG, "vocab_size": big[0]})
    code = (
        "import sys, resource, pycoli.convert as c; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "c.convert(sys.argv[1], sys.argv[2], c.Settings('int8'));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path / "out"], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) * 1024 < 2 * 4 * big[0] * big[1]


# Nothing half written


def test_a_second_run_finds_everything_done(tmp_path, small):
    out = tmp_path / "out"
    first = convert(small, out, SMALL)
    assert len(first.plan.shards) > 5
    before, times = content(out), {file: file.stat().st_mtime_ns for file in out.glob("out-*")}
    second = convert(small, out, SMALL)
    assert second.resumed == len(first.plan.shards)
    assert second.losses == first.losses
    assert content(out) == before
    assert {file: file.stat().st_mtime_ns for file in out.glob("out-*")} == times


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failure_at_any_step_is_made_good_by_the_next_run(tmp_path, small, monkeypatch, function):
    convert(small, tmp_path / "whole", SMALL)
    wanted = content(tmp_path / "whole")
    real, calls = getattr(os, function), 0

    def fail(*arguments):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise OSError("no more")
        return real(*arguments)

    monkeypatch.setattr(os, function, fail)
    stop, out = 0, tmp_path / "out"
    convert(small, tmp_path / "count", SMALL)
    steps = calls
    assert steps > 10
    for stop in range(1, steps + 1, 1 if function == "replace" else 3):
        shutil.rmtree(out, ignore_errors=True)
        calls = 0
        with pytest.raises(OSError, match="no more"):
            convert(small, out, SMALL)
        left = list(out.iterdir()) if out.exists() else []
        assert not [file for file in left if file.name.endswith(".partial")]
        if left and stop < steps - 1:
            with pytest.raises(pycoli.CheckpointError, match=r"not finished|no out-"):
                pycoli.Container(out)
        calls = steps + 1
        convert(small, out, SMALL)
        assert content(out) == wanted


def test_killed_at_many_moments(tmp_path, small):
    """The process is killed without warning, again and again, until a run gets to the end."""
    convert(small, tmp_path / "whole", SMALL)
    wanted = content(tmp_path / "whole")
    out = tmp_path / "out"
    code = (
        "import sys, time, pycoli.convert as c; from pycoli.convert import shard; real = shard._write_chunk\n"
        "def slow(*a):\n    time.sleep(0.004)\n    return real(*a)\n"
        "shard._write_chunk = slow; print('ready', flush=True)\n"
        f"c.convert(sys.argv[1], sys.argv[2], c.Settings({SMALL.experts!r}, shard_bytes={SMALL.shard_bytes}), jobs=2)"
    )
    killed = 0
    for attempt in range(60):
        process = subprocess.Popen([sys.executable, "-c", code, small, out], stdout=subprocess.PIPE)
        process.stdout.readline()
        try:
            process.wait(0.005 * attempt)  # later and later, whatever the machine's speed
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.stdout.close()
        if process.wait() == 0:
            break
        for file in out.glob("out-*.safetensors") if out.exists() else ():
            assert hashlib.sha256(file.read_bytes()).hexdigest() == wanted[file.name]
    else:
        pytest.fail("no run got to the end")
    assert killed >= 3
    assert content(out) == wanted


def test_a_finished_file_that_was_damaged_is_written_again(tmp_path, small):
    out = tmp_path / "out"
    convert(small, out, SMALL)
    wanted = content(out)
    file = out / "out-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    report = convert(small, out, SMALL)
    assert report.warnings[-1] == "out-00002.safetensors: not what the manifest says, and written again"
    assert content(out) == wanted


def test_other_settings_or_another_source_are_refused(tmp_path, small, model):
    out = tmp_path / "out"
    convert(small, out, SMALL)
    before = content(out)
    with pytest.raises(
        pycoli.CheckpointError, match="other settings: experts 'int4-g32', now 'int8'; give a new folder"
    ):
        convert(small, out, Settings("int8", shard_bytes=SMALL.shard_bytes))
    with pytest.raises(pycoli.CheckpointError, match="is of other files"):
        convert(model[0], out, SMALL)
    assert content(out) == before


def test_a_model_of_the_same_shapes_is_another_source(tmp_path, small):
    """As after training further: what is finished must not be mixed with tensors of the other model."""
    out, other = tmp_path / "out", tmp_path / "other" / "model"
    convert(small, out, SMALL)
    shutil.copytree(small, other)
    file = other / "model-1.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts" in name)
    tensors[name] = (tensors[name].astype(np.float32) * 1.01).astype(ml_dtypes.bfloat16)
    save_file(tensors, file)
    with pytest.raises(pycoli.CheckpointError, match="is of other files"):
        convert(other, out, SMALL)
    copy = shutil.copytree(small, tmp_path / "copy" / "model")
    assert convert(copy, out, SMALL).resumed > 5  # a copy is the same source, whatever the dates of its files


def test_a_folder_with_other_things_is_refused(tmp_path, small):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(pycoli.CheckpointError, match=r"expected a new or empty folder, found thesis\.txt"):
        convert(small, out, SMALL)
    (out / ".out-progress.json").write_text('{"other": 1}')
    with pytest.raises(pycoli.CheckpointError, match="not a manifest of pycoli"):
        convert(small, out, SMALL)
    assert sorted(file.name for file in out.iterdir()) == [".out-progress.json", "thesis.txt"]


@pytest.mark.parametrize("text", ["{", "[]", '{"program": "pycoli"}'])
def test_a_damaged_manifest_is_refused(tmp_path, small, text):
    out = tmp_path / "out"
    convert(small, out, SMALL)
    (out / ".out-progress.json").write_text(text)
    with pytest.raises(pycoli.CheckpointError, match=r"out-progress\.json"):
        convert(small, out, SMALL)


def test_a_manifest_whose_shards_are_damaged(tmp_path, small):
    out = tmp_path / "out"
    convert(small, out, SMALL)
    saved = json.loads((out / ".out-progress.json").read_text())
    name, result = next(iter(saved["shards"].items()))
    key, loss = next(iter(result["losses"].items()))
    for shards in (
        [],
        {name: {"bytes": 3}},
        {name: 5},
        {name: {**result, "losses": {"a|b|c": loss}}},
        {name: {**result, "losses": {key: {**loss, "error": float("nan")}}}},
        {name: {**result, "losses": {key: {**loss, "error": float("inf")}}}},
        {name: {**result, "losses": {key: {**loss, "error": 10**400}}}},
        {name: {**result, "bytes": float("inf")}},
        {name: {**result, "wrong": [3]}},
    ):
        (out / ".out-progress.json").write_text(json.dumps({**saved, "shards": shards}))
        with pytest.raises(pycoli.CheckpointError, match=r"out-progress\.json: damaged"):
            convert(small, out, SMALL)


def test_two_conversions_at_once(tmp_path, small):
    out = tmp_path / "out"
    out.mkdir()
    with conversion._locked(out), pytest.raises(pycoli.StateError, match="another conversion is writing there"):
        convert(small, out, SMALL)
    convert(small, out, SMALL)


def test_a_conversion_that_fails_leaves_the_folder_of_another(tmp_path, small, monkeypatch):
    """Both may have found no folder; who comes second to the lock must not remove what the first is about to fill."""
    out = tmp_path / "out"
    real = manifest.Manifest.open.__func__
    others = []

    def open_manifest(cls, *arguments):
        if not out.exists():  # the first look; another conversion begins right after it
            opened = real(cls, *arguments)
            out.mkdir()
            others.append(conversion._locked(out))
            others[-1].__enter__()
            return opened
        return real(cls, *arguments)

    monkeypatch.setattr(manifest.Manifest, "open", classmethod(open_manifest))
    monkeypatch.setattr(pathlib.Path, "exists", lambda path: path != out and os.path.exists(path))
    with pytest.raises(pycoli.StateError, match="another conversion is writing there"):
        convert(small, out, SMALL)
    assert os.listdir(out) == [manifest.LOCK]
    others[-1].__exit__(None, None, None)


def test_a_lock_that_was_removed_is_none(tmp_path, monkeypatch):
    """Whoever opened it before, and locks it after, would be alone with it while others lock the next one."""
    real = conversion._lock

    def removed_before(file):
        (tmp_path / manifest.LOCK).unlink()
        return real(file)

    monkeypatch.setattr(conversion, "_lock", removed_before)
    with pytest.raises(pycoli.StateError, match="another conversion"), conversion._locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path, small, monkeypatch):
    fcntl = pytest.importorskip("fcntl", reason="POSIX has it")

    def refuse(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available") as caught:
        convert(small, tmp_path / "out", SMALL)
    assert caught.value.filename == str(tmp_path / "out" / manifest.LOCK)


def test_room_is_checked_first(tmp_path, small, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10**5))
    with pytest.raises(pycoli.CheckpointError, match="bytes are needed, but only 100,000 are free"):
        convert(small, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_and_made_good(tmp_path, small):
    """What is free when a conversion begins may be gone later."""
    out = tmp_path / "out"
    for limit, file in ((15_000, "out-00000.safetensors.partial"), (100, ".out-progress.json.partial")):
        shutil.rmtree(out, ignore_errors=True)
        with file_size_limit(limit), pytest.raises(OSError, match="File too large") as caught:
            convert(small, out, SMALL)
        assert caught.value.filename == str(out / file)
        assert not list(tmp_path.glob("out/*.partial"))
    convert(small, out, SMALL)
    assert not [result for result in verify(out, open_source(small)) if result.problem]


def test_dry_run_writes_nothing(tmp_path, small):
    report = convert(small, tmp_path / "out", SMALL, dry_run=True)
    assert not (tmp_path / "out").exists()
    convert(small, tmp_path / "out", SMALL)
    files = list((tmp_path / "out").glob("out-*.safetensors"))
    assert len(files) == len(report.plan.shards)
    assert sum(file.stat().st_size for file in files) == report.plan.nbytes == report.needed


def test_folders_within_each_other(tmp_path, small):
    for destination in (small, small / "out", small.parent):
        with pytest.raises(pycoli.ArgumentError, match="neither holds the source nor lies in it"):
            convert(small, destination, SMALL)
    (tmp_path / "file").write_text("")
    with pytest.raises(pycoli.ArgumentError, match="expected a folder, got a file"):
        convert(small, tmp_path / "file", SMALL)


# What is refused


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tmp_path, rng, value, monkeypatch):
    monkeypatch.setattr(shard, "_CHUNK_FLOATS", 1)
    tensors = model_tensors(rng)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name][200, 7] = value
    with pytest.raises(
        pycoli.CheckpointError, match=rf"{name} in .*: expected finite weights, got -?(nan|inf) at \[200, 7\]"
    ):
        convert(write_model(tmp_path / "model", tensors), tmp_path / "out", Settings("int8"))
    assert not list((tmp_path / "out").glob("out-*.safetensors"))
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize("scale", [1e20, 1e-20])
def test_weights_that_a_format_cannot_hold_are_warned_of(tmp_path, rng, scale):
    """E8 has fp16 super-scales: such weights are clipped, or become zeros. The next run still says so."""
    tensors = model_tensors(rng)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name] = (tensors[name].astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    folder = write_model(tmp_path / "model", tensors)
    for _ in range(2):
        (warning,) = convert(folder, tmp_path / "out").warnings
        assert warning.startswith(f"{name}: lost more than a matrix should in its format")
    wrong = [result.name for result in verify(tmp_path / "out", open_source(folder)) if result.problem]
    assert wrong == [name]


def damaged(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            "no tensor model.layers.1.mlp.experts.2.up_proj.weight",
        ),
        (lambda t: [t.pop(n) for n in list(t) if ".1.mlp.experts.1." in n], "layer 1 has experts up to 2 but not 1"),
        (lambda t: [t.pop(n) for n in list(t) if ".1.mlp.experts.2." in n], "layer 1: expected 3 experts .*got 2"),
        (
            damaged("model.layers.1.mlp.experts.2.up_proj.weight", lambda w: w[:, :-1]),
            r"experts.2.up_proj.weight.*expected shape \[256, 512\].*got \[256, 511\]",
        ),
        (
            damaged("model.layers.1.mlp.experts.2.up_proj.weight", lambda w: w[0]),
            r"experts.2.up_proj.weight.*expected .*got .*\[512\]",
        ),
        (
            damaged("model.layers.0.mlp.experts.0.up_proj.weight", lambda w: w.astype(np.int8)),
            "experts.0.up_proj.weight.*expected a float type that float32 can hold, got I8",
        ),
        (
            damaged("model.layers.0.mlp.experts.0.up_proj.weight", lambda w: w.astype(np.float64)),
            "experts.0.up_proj.weight.*expected a float type that float32 can hold, got F64",
        ),
        (
            damaged("model.layers.0.mlp.experts.0.up_proj.weight", lambda w: w.astype(ml_dtypes.float8_e4m3fn)),
            "experts.0.up_proj.weight is F8_E4M3, but its block scales .* are missing",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.bias": np.zeros(256, np.float32)}),
            "experts with biases are not supported: .*up_proj.bias",
        ),
    ],
)
def test_experts_that_are_not_right(tmp_path, rng, change, message):
    tensors = model_tensors(rng)
    change(tensors)
    with pytest.raises(pycoli.CheckpointError, match=message):
        convert(write_model(tmp_path / "model", tensors), tmp_path / "out", Settings("int8"))
    assert not list(tmp_path.glob("out/out-*.safetensors"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": "e9"}, "e9"),
        ({"dense": "e8"}, "dense: e8 is for experts alone"),
        ({"fallback": "e8"}, "fallback: e8 is for experts alone"),
        ({"keep": "("}, r"keep: '\(' is no regular expression"),
        ({"shard_bytes": 0}, "shard_bytes: expected a positive integer, got 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(pycoli.ColiError, match=message):
        Settings(**options)


def test_bad_jobs(tmp_path, small):
    with pytest.raises(pycoli.ArgumentError, match="jobs: expected a number above 0, got 0"):
        convert(small, tmp_path / "out", SMALL, jobs=0)


# verify()


@pytest.fixture
def verified(tmp_path, small):
    convert(small, tmp_path / "out", SMALL)
    return tmp_path / "out", open_source(small)


def test_a_right_container(verified):
    results = list(verify(*verified))
    assert len(results) == 3 + 2 * (3 + 6)
    assert [result.problem for result in results if result.problem] == []
    assert all(0 < result.loss.nmse < 0.02 for result in results if result.kind.startswith("expert"))
    assert all(result.largest > 0 for result in results if result.kind.startswith("expert"))


def rewrite(folder, name, change, metadata=None):
    """Changes tensors of the file that holds `name`; checksums go, as after an edit by somebody else."""
    file = next(file for file in sorted(folder.glob("out-*.safetensors")) if name in load_file(file))
    tensors = load_file(file)
    entries = header(file)[0]["__metadata__"]
    entries.pop("colibri.sha256")
    change(tensors)
    save_file(tensors, file, metadata or entries)
    (folder / ".out-progress.json").unlink()


NORM, UP = "model.norm.weight", "model.layers.1.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (UP, lambda t: t.update({UP: t[UP] ^ 255}), "NMSE .*, above the limit of 0.08"),
        (UP, lambda t: t.update({UP: t[UP][:-1]}), "is no format that is known"),
        (UP, lambda t: [t.pop(name) for name in (UP, f"{UP}.qs")], "no tensor"),
        (UP, lambda t: t.update({f"{UP}.qs": t[f"{UP}.qs"] * np.float32(np.nan)}), "NMSE nan"),
        (NORM, lambda t: t.update({NORM: t[NORM] + np.float32(1e-3)}), "its values differ from the source's"),
        (NORM, lambda t: t.update({NORM: t[NORM][:-1]}), r"expected shape \[128\], got \[127\]"),
        (NORM, lambda t: t.update({"extra": t[NORM]}), "the source has no such tensor"),
    ],
)
def test_what_is_wrong_with_a_tensor(verified, name, change, message):
    folder, source = verified
    rewrite(folder, name, change)
    wrong = [result for result in verify(folder, source) if result.problem]
    assert len(wrong) == 1
    assert wrong[0].name in (name, "extra")
    assert pytest.importorskip("re").search(message, wrong[0].problem)


def test_checksums_find_a_changed_bit(verified):
    folder, source = verified
    file = next(file for file in folder.glob("out-*.safetensors") if UP in load_file(file))
    raw, (entries, _) = bytearray(file.read_bytes()), header(file)
    start = len(raw) - len(header(file)[1]) + entries[UP]["data_offsets"][0]
    raw[start] ^= 1
    file.write_bytes(raw)
    wrong = [result for result in verify(folder, source) if result.problem]
    assert [(result.name, result.problem) for result in wrong] == [(UP, f"{UP} is not what its checksum says")]


def test_a_limit_of_the_caller(verified):
    wrong = [result for result in verify(*verified, limit=1e-4) if result.problem]
    assert {result.fmt for result in wrong} == {"int4-g32"}
    assert len(wrong) == 12
    with pytest.raises(pycoli.ArgumentError, match="limit: expected"):
        list(verify(*verified, limit=float("nan")))


# The model in the shared folder


def test_tiny_olmoe(tmp_path, shared):
    """Three experts' worth of work: int8, as E8 has the same path and test_experts_in_every_format its bytes."""
    model = shared / "models" / "tiny-olmoe"
    started = time.monotonic()
    convert(model, tmp_path / "out", Settings("int8"), jobs=2)
    assert time.monotonic() - started < 120
    assert not [result for result in verify(tmp_path / "out", open_source(model)) if result.problem]
    checkpoint = pycoli.checkpoint.Checkpoint(model)
    with pycoli.Container(tmp_path / "out") as container:
        assert container.layers == checkpoint.moe_layers()
        original = checkpoint.expert(2, 5)
        for weights, w in zip(container.expert(2, 5), (original.gate, original.up, original.down), strict=True):
            assert weights.data.tobytes() == pycoli.encode(w, "int8").data.tobytes()


def test_quality_of_e8(tmp_path):
    """The qualities give other bytes, those of pycoli.encode, and a conversion does not go on with another one."""
    tensors = model_tensors(np.random.default_rng(4), hidden=256, inner=256, experts=1)
    config = {**CONFIG, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 1}
    model = write_model(tmp_path / "model", tensors, config)
    original = Checkpoint(model)
    layer = original.moe_layers()[0]
    for quality in ("search", "reference"):
        out = tmp_path / quality
        convert(model, out, Settings(quality=quality))
        gate = pycoli.Container(out).expert(layer, 0).gate
        wanted = pycoli.encode(original.expert(layer, 0).gate, "e8", quality=quality)
        assert gate.data.tobytes() == wanted.data.tobytes()
    assert content(tmp_path / "search") != content(tmp_path / "reference")
    with pytest.raises(pycoli.CheckpointError, match="quality"):
        convert(model, tmp_path / "search", Settings(quality="reference"))
    with pytest.raises(pycoli.ArgumentError, match="quality: expected search, reference or calibrated, got 'best'"):
        Settings(quality="best")


# Calibration


def recording(path, rng, layers=range(LAYERS), rows=300, hidden=HIDDEN, **replaced):
    """Recorded inputs whose columns are related, bfloat16 as models have them."""
    tensors = {}
    for layer in layers:
        mixing = rng.standard_normal((16, hidden))
        x = rng.standard_normal((rows, 16)) @ mixing + 0.3 * rng.standard_normal((rows, hidden))
        tensors[f"layer{layer}.x"] = x.astype(ml_dtypes.bfloat16)
    save_file(tensors | replaced, path)
    return path


CALIBRATED = Settings(quality="calibrated")


def with_top_k(folder, top_k=2):
    config = json.loads((folder / "config.json").read_text()) | {"num_experts_per_tok": top_k}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_are_calibrated_with_the_rows_that_routers_send_them(tmp_path, model, rng, monkeypatch):
    folder, file = with_top_k(model[0]), recording(tmp_path / "x.safetensors", rng)
    report = convert(folder, tmp_path / "out", CALIBRATED, knowledge=Recording(file), jobs=2)
    totals = report.calibration
    assert (totals.matrices, totals.searched) == (3 * EXPERTS * LAYERS, {})
    assert totals.output_error < 0.7 * totals.search_output_error
    assert totals.peak_bytes > 4 * HIDDEN**2
    assert totals.encode_seconds > 0
    checkpoint, x = Checkpoint(folder), load_file(file)["layer1.x"].astype(np.float32)
    ids, shares = pycoli.Router(**checkpoint.router(1))(x)
    rows, places = np.nonzero(ids == 2)
    original = checkpoint.expert(1, 2)
    wanted, _ = pycoli.encode_expert(original.gate, original.up, original.down, x[rows], shares=shares[rows, places])
    with pycoli.Container(tmp_path / "out") as container:
        for weights, encoded in zip(container.expert(1, 2), wanted, strict=True):
            assert weights.data.tobytes() == encoded.data.tobytes()
    monkeypatch.setitem(NMSE_LIMITS, "e8", 0.05)
    results = list(verify(tmp_path / "out", open_source(folder)))
    assert not [result.problem for result in results if result.problem]
    assert max(result.loss.nmse for result in results) > 0.05  # the limit of what is not calibrated
    again = convert(folder, tmp_path / "out", CALIBRATED, knowledge=Recording(file))
    assert again.resumed == len(again.plan.shards)
    assert again.calibration == totals


@pytest.fixture
def recorded(tmp_path, rng):
    """A smaller model, and a recording of its inputs."""
    config = {**CONFIG, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts_per_tok": 2}
    folder = write_model(tmp_path / "model", model_tensors(rng, hidden=256, inner=256), config)
    return folder, recording(tmp_path / "x.safetensors", rng, hidden=256)


def test_the_size_of_shards_does_not_change_calibrated_experts(tmp_path, recorded):
    """An expert whose matrices are in several files is encoded once."""
    folder, file = recorded
    stored = {}
    for shard_bytes in (2**31, 20_000):
        out = tmp_path / str(shard_bytes)
        settings = Settings(quality="calibrated", shard_bytes=shard_bytes)
        report = convert(folder, out, settings, knowledge=Recording(file))
        assert report.calibration.count == 3 * EXPERTS * LAYERS
        with pycoli.Container(out) as container:
            stored[shard_bytes] = [w.data.tobytes() for expert in container.experts(0) for w in expert]
    assert len(report.plan.shards) > 5
    assert stored[2**31] == stored[20_000]


def test_experts_without_activations_are_searched_and_counted(tmp_path, model, rng):
    folder, file = with_top_k(model[0], 1), recording(tmp_path / "x.safetensors", rng, layers=[1], rows=70)
    report = convert(folder, tmp_path / "out", CALIBRATED, knowledge=Recording(file))
    assert report.calibration.count == 3 * EXPERTS * LAYERS
    assert report.calibration.searched["no layer0.x in x.safetensors"] == 3 * EXPERTS
    assert report.calibration.searched["fewer than 64 activations"] >= 3 * (EXPERTS - 1)
    gate = Checkpoint(folder).expert(0, 0).gate
    with pycoli.Container(tmp_path / "out") as container:
        assert container.expert(0, 0).gate.data.tobytes() == pycoli.encode(gate, "e8").data.tobytes()


def test_an_imatrix_calibrates(tmp_path, model, rng):
    folder, _ = model
    squares = {"gate": HIDDEN, "up": HIDDEN, "down": INNER}
    vectors = {
        f"blk.{layer}.ffn_{role}_exps.weight": np.exp(3 * rng.standard_normal((EXPERTS, columns)))
        for layer in range(LAYERS)
        for role, columns in squares.items()
    }
    vectors["blk.0.ffn_up_exps.weight"][1] = 0
    del vectors["blk.1.ffn_down_exps.weight"]
    file = write_imatrix(tmp_path / "imatrix.dat", vectors)
    report = convert(folder, tmp_path / "out", CALIBRATED, knowledge=Imatrix(file))
    assert report.calibration.searched == {"no activations in the imatrix": 1, "not in the imatrix": EXPERTS}
    assert report.calibration.matrices == 3 * EXPERTS * LAYERS - 1 - EXPERTS
    assert report.calibration.output_error < report.calibration.search_output_error
    w = Checkpoint(folder).expert(1, 2).up
    importance = vectors["blk.1.ffn_up_exps.weight"][2].astype(np.float32)
    wanted = pycoli.encode(w, "e8", quality="calibrated", importance=importance)
    with pycoli.Container(tmp_path / "out") as container:
        assert container.expert(1, 2).up.data.tobytes() == wanted.data.tobytes()


def test_another_calibration_is_refused(tmp_path, recorded, rng):
    folder, file = recorded
    convert(folder, tmp_path / "out", CALIBRATED, knowledge=Recording(file))
    other = recording(tmp_path / "other.safetensors", rng, hidden=256)
    with pytest.raises(pycoli.CheckpointError, match=r"other settings: calibration '[0-9a-f]{64}', now"):
        convert(folder, tmp_path / "out", CALIBRATED, knowledge=Recording(other))
    with pytest.raises(pycoli.CheckpointError, match=r"other settings: calibration .*, now None, quality"):
        convert(folder, tmp_path / "out")


def test_killed_while_calibrating(tmp_path, recorded, monkeypatch):
    folder, file = recorded
    settings = Settings(quality="calibrated", shard_bytes=20_000)
    whole = convert(folder, tmp_path / "whole", settings, knowledge=Recording(file))
    written = conversion.write_shard

    def stop(shard_plan, *arguments):
        if shard_plan.name == "out-00003.safetensors":
            raise KeyboardInterrupt
        return written(shard_plan, *arguments)

    monkeypatch.setattr(conversion, "write_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "out", settings, knowledge=Recording(file))
    monkeypatch.undo()
    report = convert(folder, tmp_path / "out", settings, knowledge=Recording(file))
    assert report.resumed == 3
    assert report.calibration.count == whole.calibration.count
    for name in (shard_plan.name for shard_plan in whole.plan.shards):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"hidden": np.ones((3, HIDDEN), np.float32)}, r"expected tensors such as layer0.x, found hidden"),
        ({"layer1.x": np.ones((3, HIDDEN + 1), np.float32)}, r"layer1.x .* \[tokens, 512\], got F32 \[3, 513\]"),
        ({"layer0.x": np.ones((3, HIDDEN), np.int32)}, r"layer0.x .* got I32"),
        ({"layer0.x": np.full((99, HIDDEN), np.nan, np.float32)}, r"layer0.x .*nan"),
    ],
)
def test_recordings_that_do_not_do(tmp_path, model, tensors, message):
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(pycoli.CheckpointError, match=message):
        convert(with_top_k(model[0]), tmp_path / "out", CALIBRATED, knowledge=Recording(tmp_path / "x.safetensors"))
    assert not list(tmp_path.glob("out/out-*"))


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ({"blk.0.attn_q.weight": np.ones(HIDDEN)}, "nothing on the experts of this model, such as blk.0.ffn_"),
        ({"blk.0.ffn_up_exps.weight": np.ones(HIDDEN + 1)}, "ffn_up_exps.weight: expected 512 numbers an expert"),
        ({"blk.0.ffn_up_exps.weight": np.ones(2 * HIDDEN)}, "expected 512 numbers an expert, for at least 3, got 1024"),
        (
            {"blk.0.ffn_up_exps.weight": np.ones(3 * HIDDEN), "blk.1.ffn_down_exps.weight": np.ones(2 * INNER)},
            "blk.1.ffn_down_exps.weight: expected 256 numbers an expert, for at least 3, got 512",
        ),
    ],
)
def test_imatrices_that_do_not_do(tmp_path, model, vectors, message):
    with pytest.raises(pycoli.CheckpointError, match=message):
        convert(model[0], tmp_path / "out", CALIBRATED, knowledge=Imatrix(write_imatrix(tmp_path / "i.dat", vectors)))
    assert not (tmp_path / "out").exists()  # found before the work, which takes hours


def test_calibration_where_there_is_nothing_to_calibrate(tmp_path, model, rng):
    knowledge = Recording(recording(tmp_path / "x.safetensors", rng))
    with pytest.raises(pycoli.ArgumentError, match="quality calibrated, and no other, needs"):
        convert(model[0], tmp_path / "out", CALIBRATED)
    with pytest.raises(pycoli.ArgumentError, match="quality calibrated, and no other, needs"):
        convert(model[0], tmp_path / "out", knowledge=knowledge)
    with pytest.raises(pycoli.ArgumentError, match="no matrix is encoded as e8"):
        convert(model[0], tmp_path / "out", Settings("int8", quality="calibrated"), knowledge=knowledge)


def test_a_layer_of_tiny_olmoe_is_calibrated(tmp_path, shared):
    """Rows of the trained model say how to encode it for other rows, too."""
    models, inputs = shared / "models", []
    model = olmoe.Olmoe(models / "tiny-olmoe")
    for windows in (olmoe.calibration_windows(models, 4096), olmoe.evaluation_windows(models)[:4]):
        inputs.append(model.moe_input(0, model.attend(0, model.embed(windows[:, :512]))))
    save_file({"layer0.x": inputs[0]}, tmp_path / "x.safetensors")
    tensors = {"model.layers.0.mlp.gate.weight": model.router(0)[:2]}
    for number in range(2):
        for matrix, w in zip(COMMON, model.experts[0][number], strict=True):
            tensors[f"model.layers.0.mlp.experts.{number}.{matrix}.weight"] = w
    folder = write_model(tmp_path / "model", tensors, {"model_type": "olmoe", "num_experts_per_tok": 1})
    errors = {}
    for quality, knowledge in (("search", None), ("calibrated", Recording(tmp_path / "x.safetensors"))):
        report = convert(folder, tmp_path / quality, Settings(quality=quality), knowledge=knowledge)
        with pycoli.Container(tmp_path / quality) as container:
            error, energy = 0.0, 0.0
            for original, expert in zip(model.experts[0], container.experts(0), strict=False):
                exact = olmoe.hidden_rows(original, inputs[1]) @ original[2].T
                decoded = tuple(weights.decode() for weights in expert)
                error += np.square(olmoe.hidden_rows(decoded, inputs[1]) @ decoded[2].T - exact).sum()
                energy += np.square(exact).sum()
        errors[quality] = error / energy
    assert (report.calibration.matrices, report.calibration.searched) == (6, {})
    assert errors["calibrated"] < 0.7 * errors["search"]
