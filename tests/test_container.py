"""Containers: what existing hosts write is read, experts come without copies, and nothing in a file is believed."""

import json
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import oracle
import pytest
from containers import CONFIG, EXPERTS, HIDDEN, INNER, MATRICES, STEM, random_layer, tensors_of, write_container
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import pycoli
from pycoli.layout import HOST_GROUP_SIZES, Encoding, by_sizes, candidates, sizes
from pycoli.tensorfile import TensorFile

FORMATS = (*oracle.FORMATS[:4], "int4-g16", "int4-g32", *oracle.FORMATS[4:])


def assert_same(weights, matrix, fmt):
    assert weights.fmt == fmt
    assert weights.shape == matrix.shape
    assert weights.data.tobytes() == np.ascontiguousarray(matrix.data).tobytes()
    if matrix.scales is not None:
        np.testing.assert_array_equal(weights.scales, matrix.scales)


@pytest.fixture
def e8(tmp_path, rng):
    matrices = random_layer(rng, "e8", 1) | random_layer(rng, "e8", 3)
    return write_container(tmp_path / "model", matrices, shards=2), matrices


# What hosts write


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_is_told_by_its_sizes(tmp_path, rng, fmt):
    matrices = random_layer(rng, fmt)
    with pycoli.Container(write_container(tmp_path / "model", matrices)) as container:
        assert container.layers == [0]
        for index in range(EXPERTS):
            for weights, name in zip(container.expert(0, index), MATRICES, strict=True):
                assert_same(weights, matrices[STEM.format(layer=0, expert=index, matrix=name)], fmt)


def test_experts_of_a_layer_are_a_sequence(e8):
    folder, matrices = e8
    with pycoli.Container(folder) as container:
        assert container.layers == [1, 3]
        assert container.config == CONFIG
        experts = container.experts(3)
        assert len(experts) == EXPERTS
        for index, (gate, up, down) in enumerate(experts):
            for weights, name in zip((gate, up, down), MATRICES, strict=True):
                assert_same(weights, matrices[STEM.format(layer=3, expert=index, matrix=name)], "e8")
                assert weights.rotated
        assert experts[-1].down.data.tobytes() == experts[2].down.data.tobytes()
        assert [e.gate.shape for e in experts[1:]] == [(INNER, HIDDEN)] * 2
        with pytest.raises(IndexError):
            experts[EXPERTS]


def test_an_expert_computes(e8, rng):
    folder, matrices = e8
    x = rng.standard_normal((2, HIDDEN)).astype(np.float32)
    with pycoli.Container(folder) as container:
        expert = container.expert(1, 0)
    parts = (matrices[STEM.format(layer=1, expert=0, matrix=name)] for name in MATRICES)
    wanted = oracle.expert(oracle.rotate(x.astype(np.float64)), *parts)
    assert oracle.relative_rms(pycoli.expert_mlp(x, *expert, device="cpu"), wanted) < 3e-6


def test_weights_are_the_map_of_the_file(e8):
    container = pycoli.Container(e8[0])
    first, second = container.expert(1, 0).gate, container.expert(1, 0).gate
    assert np.shares_memory(first.data, second.data)
    copy = first.data.tobytes()
    container.close()
    container.close()
    assert first.data.tobytes() == copy
    with pytest.raises(pycoli.StateError, match="is closed"):
        container.expert(1, 0)
    with pytest.raises(pycoli.StateError, match="is closed"):
        container.experts(1)


def resident_bytes(file):
    """How much of a file this process has mapped and touched."""
    nbytes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            nbytes += 1024 * int(line.split()[1])
    return nbytes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what is mapped")
def test_one_expert_is_read_and_nothing_of_the_others(tmp_path):
    count, shape = 64, (256, 2048)
    data = np.random.default_rng(2).integers(0, 256, oracle.row_bytes("int8", shape[1]) * shape[0], dtype=np.uint8)
    tensors = {}
    for expert in range(count):
        for name in MATRICES:
            stem = STEM.format(layer=0, expert=expert, matrix=name)
            rows = shape[name == "down_proj"]
            tensors |= {stem: data, f"{stem}.qs": np.ones(rows, np.float32)}
    config = {"hidden_size": shape[1], "moe_intermediate_size": shape[0], "num_experts": count}
    file = write_container(tmp_path / "model", {}, config, extra=tensors) / "out-00000.safetensors"
    with pycoli.Container(file.parent) as container:
        assert resident_bytes(file) < 2**20
        one = container.expert_nbytes(0, 40)
        assert sum(int(weights.data.sum()) for weights in container.expert(0, 40)) == 3 * int(data.sum())
        touched = resident_bytes(file)
        assert one <= touched < one + 2**21  # the system brings neighbouring pages along
        container.read_into(0, 7, bytearray(one))
        assert resident_bytes(file) == touched


def test_a_single_file(tmp_path, rng):
    matrices = random_layer(rng, "int8")
    folder = write_container(tmp_path / "model", matrices)
    container = pycoli.Container(folder / "out-00000.safetensors")
    assert_same(container.expert(0, 1).up, matrices[STEM.format(layer=0, expert=1, matrix="up_proj")], "int8")


def test_read_into_memory_of_the_caller(tmp_path, rng):
    for fmt in ("e8", "int4-g64", "mxfp4", "f32"):
        folder = write_container(tmp_path / fmt, random_layer(rng, fmt))
        with pycoli.Container(folder) as container:
            needed = container.expert_nbytes(0, 1)
            out = np.zeros(needed + 5, np.uint8)
            read, mapped = container.read_into(0, 1, out), container.expert(0, 1)
            for got, want in zip(read, mapped, strict=True):
                assert np.shares_memory(got.data, out)
                assert (got.fmt, got.shape, got.rotated) == (want.fmt, want.shape, want.rotated)
                assert got.data.tobytes() == want.data.tobytes()
                assert (got.scales is None) == (want.scales is None)
                if got.scales is not None:
                    np.testing.assert_array_equal(got.scales, want.scales)
                np.testing.assert_array_equal(got.decode(), want.decode())
            container.read_into(0, 2, out)  # what was read before lies in the same memory
            assert read.gate.data.tobytes() == container.expert(0, 2).gate.data.tobytes()
            assert not out[needed:].any()


def test_read_into_memory_that_does_not_do(e8):
    with pycoli.Container(e8[0]) as container:
        needed = container.expert_nbytes(1, 0)
        small = np.zeros(needed - 1, np.uint8)
        with pytest.raises(pycoli.ArgumentError, match=f"at least {needed} bytes, got {needed - 1}"):
            container.read_into(1, 0, small)
        assert not small.any()
        for out in (bytes(needed), np.zeros(needed, np.int8), np.zeros((1, needed), np.uint8), "text", None):
            with pytest.raises(pycoli.ArgumentError, match="writable uint8"):
                container.read_into(1, 0, out)
        container.read_into(1, 0, bytearray(needed))


def test_many_threads(e8):
    folder, matrices = e8
    wrong = []
    with pycoli.Container(folder) as container:

        def read():
            out = bytearray(container.expert_nbytes(1, 0))
            for turn in range(60):
                layer, index = (1, 3)[turn % 2], turn % EXPERTS
                name = STEM.format(layer=layer, expert=index, matrix="down_proj")
                wanted = matrices[name].data.tobytes()
                got = container.expert(layer, index).down, container.read_into(layer, index, out).down
                wrong.extend(name for weights in got if weights.data.tobytes() != wanted)

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


# Sizes and stamps


@given(st.sampled_from(FORMATS), st.integers(1, 400), st.integers(1, 400))
def test_sizes_never_give_another_format(fmt, rows, columns):
    """Without a stamp a matrix is its own format, or int4 of the same bytes, or refused; fp8 passes for int8, as hosts
    have it, and a group size for a finer one with as many groups."""
    nbytes = sizes(fmt, (rows, columns))
    if fmt == "f32":
        return
    assert nbytes[0] == rows * oracle.row_bytes(fmt, columns)
    found = candidates((rows, columns), *nbytes, "U8" if fmt == "mxfp4" else "F32")
    group = oracle.split_name(fmt)[1]
    if group and group >= columns:
        assert Encoding("int4") in found
    elif group:
        same = [f"int4-g{g}" for g in HOST_GROUP_SIZES if g <= group and -(-columns // g) == -(-columns // group)]
        assert Encoding(same[0]) in found
    else:
        assert Encoding(fmt, rotated=fmt == "e8") in found
    if fmt == "fp8-e4m3-b128" and by_sizes(found) not in (None, Encoding(fmt)):
        assert by_sizes(found) == Encoding("int8")


def one_matrix(tmp_path, fmt, shape, rng, metadata=None):
    """A container of one expert whose gate has a format and shape; up and down are int8 of random bytes."""
    inner, hidden = shape
    config = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": 1}
    matrices = random_layer(rng, "int8", experts=1, hidden=hidden, inner=inner)
    gate = STEM.format(layer=0, expert=0, matrix="gate_proj")
    matrices[gate] = oracle.random_encoded(rng, fmt, shape)
    stamps = {
        STEM.format(layer=0, expert=0, matrix=name): {"format": "int8", "shape": list(s)}
        for name, s in (("up_proj", shape), ("down_proj", (hidden, inner)))
    }
    metadata = {"coli.tensors": json.dumps(stamps)} if metadata is None else metadata
    return write_container(tmp_path / "model", matrices, config, metadata=metadata), matrices[gate], gate


@pytest.mark.parametrize(
    ("fmt", "shape", "others"),
    [("e8", (1, 98), "e8 or int8"), ("e8", (129, 98), None), ("fp8-e4m3-b128", (128, 98), "e8 or fp8-e4m3-b128")],
)
def test_ambiguous_sizes_need_a_stamp(tmp_path, rng, fmt, shape, others):
    folder, matrix, gate = one_matrix(tmp_path, fmt, shape, rng)
    if others is None:
        assert pycoli.Container(folder).expert(0, 0).gate.fmt == fmt
        return
    with pytest.raises(pycoli.CheckpointError, match=rf"{gate}.* may be {others}.*; a stamp"):
        pycoli.Container(folder).expert(0, 0)
    shutil.rmtree(folder)
    host = {"e8": "e8-iq3-lattice"}.get(fmt, fmt)
    up, down = (STEM.format(layer=0, expert=0, matrix=name) for name in MATRICES[1:])
    metadata = {"colibri.fmt": json.dumps({gate: host, up: "int8-row", down: "int8-row"})}
    folder, matrix, _ = one_matrix(tmp_path, fmt, shape, rng, metadata)
    assert_same(pycoli.Container(folder).expert(0, 0).gate, matrix, fmt)


def test_a_stamp_that_contradicts_the_sizes(tmp_path, rng):
    gate = STEM.format(layer=0, expert=0, matrix="gate_proj")
    for number, metadata in enumerate(
        (
            {"colibri.fmt": json.dumps({gate: "int8-row"})},
            {"colibri.fmt": json.dumps({gate: "int5-row"})},
            {"coli.tensors": json.dumps({gate: {"format": "int8", "shape": [INNER, HIDDEN]}})},
            {"coli.tensors": json.dumps({gate: {"format": "e8", "shape": [INNER, HIDDEN], "rotated": False}})},
        )
    ):
        folder = write_container(tmp_path / str(number), random_layer(rng, "e8"), metadata=metadata)
        with pytest.raises(pycoli.CheckpointError, match=rf"{gate}.* is stamped .*, but has the sizes of e8"):
            pycoli.Container(folder).expert(0, 0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"coli.tensors": "{"}, "metadata coli.tensors: not readable as JSON"),
        ({"coli.tensors": "[" * 10000}, "metadata coli.tensors: not readable as JSON"),
        ({"coli.tensors": "[]"}, "metadata coli.tensors: expected an object of tensor names"),
        ({"colibri.fmt": '{"x": 3}'}, "metadata colibri.fmt: expected an object of tensor names"),
        ({"coli.tensors": '{"GATE": {"format": "e9", "shape": [256, 512]}}'}, "GATE.*e9"),
        ({"coli.tensors": '{"GATE": {"format": 3, "shape": [256, 512]}}'}, "GATE.*fmt must be a name"),
        ({"coli.tensors": '{"GATE": {"format": "e8", "shape": [256]}}'}, r"GATE.*expected a shape \[O, I\]"),
        ({"coli.tensors": '{"GATE": {"format": "e8", "shape": [256, 1e9]}}'}, r"GATE.*expected a shape \[O, I\]"),
        (
            {"coli.tensors": '{"GATE": {"format": "e8", "shape": [512, 256]}}'},
            r"GATE: its shapes differ: \[256, 512\] \(.*config.json\), \[512, 256\] \(its stamp\)",
        ),
        ({"coli.tensors": '{"GATE": {"format": "e8", "rotated": 1}}'}, "GATE.*expected rotated to be true or false"),
    ],
)
def test_a_bad_stamp(tmp_path, rng, metadata, message):
    gate = STEM.format(layer=0, expert=0, matrix="gate_proj")
    metadata = {key: text.replace("GATE", gate) for key, text in metadata.items()}
    folder = write_container(tmp_path / "model", random_layer(rng, "e8"), metadata=metadata)
    with pytest.raises(pycoli.CheckpointError, match=message.replace("GATE", gate)):
        pycoli.Container(folder).expert(0, 0)


def test_unrotated_e8_has_a_tag_of_its_own(tmp_path, rng):
    """Existing hosts rotate what meets E8, so that they must not take it: its scales have two floats."""
    matrices = random_layer(rng, "e8")
    tensors, stamps = {}, {}
    for name, matrix in matrices.items():
        tensors |= tensors_of(name, matrix) | {f"{name}.qs": np.array([6, 0], np.float32)}
        stamps[name] = {"format": "e8", "shape": list(matrix.shape), "rotated": False}
    folder = write_container(tmp_path / "model", {})
    save_file(tensors, folder / "out-00000.safetensors")
    for metadata in (None, {"coli.tensors": json.dumps(stamps)}):
        save_file(tensors, folder / "out-00000.safetensors", metadata)
        gate = pycoli.Container(folder).expert(0, 0).gate
        assert (gate.fmt, gate.rotated) == ("e8", False)
    tensors |= {f"{name}.qs": np.array([6, 1], np.float32) for name in matrices}
    save_file(tensors, folder / "out-00000.safetensors")
    with pytest.raises(
        pycoli.CheckpointError, match=r"gate_proj.weight.qs .*expected the tag \[6.0, 0.0\].*got \[6.0, 1"
    ):
        pycoli.Container(folder).expert(0, 0)


# What is refused


def break_tensor(folder, change):
    """Rewrites the first shard after `change` of its tensors."""
    file = folder / "out-00000.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


GATE = STEM.format(layer=1, expert=0, matrix="gate_proj")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({GATE: t[GATE][:-1]}),
            rf"{GATE}: \[256, 512\] in 50175 bytes of weights and 4 of scales is no",
        ),
        (lambda t: t.update({GATE: t[GATE].astype(np.int8)}), rf"{GATE} in .*expected an encoded matrix .*got I8"),
        (
            lambda t: t.update({GATE: t[GATE].reshape(2, 2, -1)}),
            rf"{GATE} in .*expected an encoded matrix .*got U8 \[2, 2",
        ),
        (lambda t: t.pop(f"{GATE}.qs"), rf"its scales {GATE}.qs are missing"),
        (lambda t: t.pop(GATE), "layer 1 has experts up to|no tensor .*gate_proj"),
        (
            lambda t: t.update({f"{GATE}.qs": np.full(1, 5, np.float32)}),
            rf"{GATE}.qs .*expected the tag \[6.0\].*got \[5.0",
        ),
        (lambda t: t.update({f"{GATE}.qs": np.full(1, 6, np.int32)}), rf"{GATE}: .* is no format that is known"),
        (lambda t: t.update({f"{GATE}.qs": np.zeros(3, np.float32)}), rf"{GATE}: .* and 12 of scales is no format"),
        (
            lambda t: t.update({STEM.format(layer=1, expert=1, matrix="down_proj"): t[GATE]}),
            "is in .*00000.* again in .*00001",
        ),
    ],
)
def test_a_tensor_that_is_not_right(e8, change, message):
    folder, _ = e8
    break_tensor(folder, change)
    with pytest.raises(pycoli.CheckpointError, match=message):
        pycoli.Container(folder).expert(1, 0)


def test_one_bad_expert_does_not_hide_the_others(e8):
    folder, _ = e8
    break_tensor(folder, lambda tensors: tensors.update({GATE: tensors[GATE][:-1]}))
    assert pycoli.Container(folder).expert(3, 0).gate.shape == (INNER, HIDDEN)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "num_experts": 4}, "layer 1: expected 4 experts .*got 3"),
        ({**CONFIG, "hidden_size": 511}, "is no format that is known"),
        ({**CONFIG, "hidden_size": "512"}, "hidden_size: expected a positive integer, got '512'"),
        ({**CONFIG, "hidden_size": 2**40}, "hidden_size"),
        ({}, "the shape of .*gate_proj.* is not known"),
        (None, "the shape of .*gate_proj.* is not known"),
    ],
)
def test_a_configuration_that_does_not_fit(tmp_path, rng, config, message):
    folder = write_container(tmp_path / "model", random_layer(rng, "e8", 1), config)
    with pytest.raises(pycoli.CheckpointError, match=message):
        pycoli.Container(folder).expert(1, 0)


def test_files_that_are_not_there(tmp_path, e8):
    with pytest.raises(pycoli.CheckpointError, match="no such file or folder"):
        pycoli.Container(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(pycoli.CheckpointError, match=r"expected out-\*.safetensors in this folder, found none"):
        pycoli.Container(tmp_path / "empty")
    (e8[0] / "out-00001.safetensors").unlink()
    with pytest.raises(pycoli.CheckpointError, match=r"layer 1 has experts|no tensor"):
        pycoli.Container(e8[0]).expert(1, 0)
    with pytest.raises(pycoli.CheckpointError, match="layers with routed experts are 1, 3, got layer 2"):
        pycoli.Container(e8[0]).experts(2)


def test_an_expert_that_is_not_there(e8):
    with pycoli.Container(e8[0]) as container:
        for index in (-1, EXPERTS):
            with pytest.raises(pycoli.CheckpointError, match=f"layer 1 has experts 0 to 2, got {index}"):
                container.expert(1, index)


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="U8", shape=(8,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry(), "y": entry()}, "tensor y: it starts at byte 0 and overlaps x, which ends at 8"),
        ({"x": entry(), "y": entry(offsets=(4, 12))}, "tensor y: it starts at byte 4 and overlaps x"),
        ({"x": entry(), "y": entry(offsets=(8, 2**63))}, "tensor y: it ends at byte 9223372036854775808"),
        ({"x": entry(), "y": entry(offsets=(9, 17))}, "tensor y: it starts at byte 9 and leaves a hole after x"),
        ({"x": entry(shape=(9,))}, r"tensor x: U8 \[9\] takes 9 bytes, but its data_offsets have 8"),
        ({"x": entry(shape=(2**62, 2**62))}, "tensor x: U8 .*takes .* bytes, but its data_offsets have 8"),
        ({"x": entry(shape=(-8,))}, "tensor x: expected a shape of whole numbers"),
        ({"x": entry(dtype="U9")}, "tensor x: unknown type 'U9'"),
        ({"x": entry(offsets=(8, 0))}, "tensor x: expected data_offsets of a start and an end"),
        ({"x": 3}, "tensor x: expected an object, got 3"),
        (b'{"x": {"dtype":"U8","shape":[8],"data_offsets":[0,8]}, "x": 3}', "its header has x twice"),
        (b"not json", "not a readable safetensors file"),
    ],
)
def test_hostile_files_are_refused_by_the_name_of_the_tensor(tmp_path, header, message):
    file = raw_file(tmp_path / "out-00000.safetensors", header, bytes(17))
    for opened in (TensorFile, lambda path: pycoli.Container(path.parent)):
        with pytest.raises(pycoli.CheckpointError, match=rf"out-00000.safetensors: .*{message}"):
            opened(file)


@given(st.data())
def test_random_damage_ends_in_a_named_error_or_in_weights(tmp_path_factory, data):
    """Whatever bytes of a file change: an error of ours that names the file, or matrices of the right shape."""
    rng = np.random.default_rng(1)
    folder = tmp_path_factory.mktemp("damage")
    config = {"hidden_size": 16, "moe_intermediate_size": 8, "num_experts": 1}
    write_container(folder, random_layer(rng, "int8", experts=1, hidden=16, inner=8), config)
    file = folder / "out-00000.safetensors"
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    shapes, refused = [], None
    try:
        shapes = [weights.shape for weights in pycoli.Container(folder).expert(0, 0)]
    except pycoli.ColiError as error:
        refused = str(error)
    assert str(folder) in refused if refused else shapes == [(8, 16), (8, 16), (16, 8)]
    shutil.rmtree(folder)
