"""Calls that this library adds for engines and for measurements: sums over tokens, plans in words, limits, probes."""

import itertools
import re

import numpy as np
import oracle
import pytest
from abi import NULL, Refused, ffi, tensor_array
from device_memory import DeviceMemory
from samples import EXACT, ON_GPU, gaussian, random_expert

D, H = 300, 40  # more than a block's columns
CAPABILITIES = {75: "plain", 80: "ampere", 86: "ampere", 89: "ampere", 90: "hopper", 100: "hopper", 120: "hopper"}


@pytest.fixture
def memory(gpu, simulator):
    memory = DeviceMemory(gpu.path if simulator else None)
    yield memory
    memory.close()


@pytest.fixture
def limits(closed_gpu):
    """The library, whose limits are lifted again."""
    yield closed_gpu
    closed_gpu.limit_path("hopper")
    closed_gpu.require_exact(True)


def on_device(where, ctype="float *"):
    return ffi.cast(ctype, where)


# ---- sums over tokens ----


class Sums:
    """A group whose rows are summed up to those of tokens; its y begins as garbage."""

    def __init__(self, gpu, memory, experts, rows, tokens, row_tokens, weights, x):
        columns = [tensor_array(column) for column in zip(*experts, strict=True)]
        self.group = (*columns, list(rows), len(rows))
        self.gpu, self.memory, self.shape = gpu, memory, (tokens, D)
        self.x, self.weights = memory.put(x), memory.put(np.asarray(weights, np.float32))
        self.row_tokens = memory.put(np.asarray(row_tokens, np.int32))
        self.y = memory.put(np.full((max(tokens, 1), D), 99, np.float32))
        self.size = gpu.lib.coli_cuda_expert_group_combine_workspace(*self.group)
        if self.size == 0:
            raise gpu.refusal()
        self.workspace = memory.allocate(self.size)

    def run(self, **changes):
        given = {name: getattr(self, name) for name in ("y", "x", "row_tokens", "weights", "workspace", "size")}
        given["tokens"] = self.shape[0]
        given |= changes
        self.gpu.check(
            self.gpu.lib.coli_cuda_expert_group_combine_dev(
                *self.group,
                on_device(given["y"]),
                given["tokens"],
                on_device(given["x"]),
                on_device(given["row_tokens"], "int *"),
                on_device(given["weights"]),
                on_device(given["workspace"], "void *"),
                given["size"],
                NULL,
            )
        )
        self.memory.synchronize(None)
        return self.result()

    def result(self):
        return self.memory.get(self.y, self.shape)


def expected_sums(experts, rows, tokens, row_tokens, weights, x):
    parts = np.split(x, np.cumsum(rows)[:-1])
    outputs = np.concatenate([oracle.expert(part, *expert) for part, expert in zip(parts, experts, strict=True)])
    sums = np.zeros((tokens, D))
    for token, weight, output in zip(row_tokens, weights, outputs, strict=True):
        if 0 <= token < tokens:
            sums[token] += np.float64(weight) * output
    return sums


@pytest.mark.parametrize(
    ("tokens", "row_tokens"),
    [
        (1, [0] * 9),
        (9, [8, 7, 6, 5, 4, 3, 2, 1, 0]),
        (4, [2, 0, 2, 2, 0, 3, 3, 0, 2]),
        (3, [0, -1, 2, 3, 1, 2**31 - 1, -(2**31), 0, 3]),
        (2, [-1] * 9),
    ],
    ids=["one token", "a row each", "tokens repeated and without rows", "tokens out of range", "no token in range"],
)
def test_sums_over_tokens(gpu, rng, memory, tokens, row_tokens):
    formats = [("e8",) * 3, ("int8",) * 3, ("int4", "mxfp4", "e8"), ("e8",) * 3]
    rows = [3, 1, 0, 5]
    experts = [random_expert(rng, D, H, expert_formats) for expert_formats in formats]
    x, weights = gaussian(rng, 9, D), gaussian(rng, 9)
    tensors = [gpu.upload_expert(expert) for expert in experts]
    sums = Sums(gpu, memory, tensors, rows, tokens, row_tokens, weights, x)
    before = gpu.group_stats()[0]
    y = sums.run()
    assert tuple(a - b for a, b in zip(gpu.group_stats()[0], before, strict=True)) == (1, 4, 9)
    expected = expected_sums(experts, rows, tokens, row_tokens, weights, x)
    assert oracle.relative_rms(y, expected) <= EXACT
    assert not y[~np.isin(np.arange(tokens), row_tokens)].any(), "a token without rows is not zero"
    assert np.array_equal(sums.run(), y), "another run gave other bits"


def test_sums_of_more_rows_than_a_block_looks_at_together(gpu, rng, memory):
    expert = random_expert(rng, D, H, ("int8",) * 3)
    rows, row_tokens = [16] * 20, rng.integers(-1, 6, 320)
    x, weights = gaussian(rng, 320, D), gaussian(rng, 320)
    sums = Sums(gpu, memory, [gpu.upload_expert(expert)] * 20, rows, 5, row_tokens, weights, x)
    y = sums.run()
    assert oracle.relative_rms(y, expected_sums([expert] * 20, rows, 5, row_tokens, weights, x)) <= EXACT
    assert np.array_equal(sums.run(), y)


def test_sums_of_more_experts_than_a_launch_takes(gpu, rng, memory):
    pair = [random_expert(rng, D, H, ("e8", "int4", "e8")), random_expert(rng, D, H, ("int8",) * 3)]
    tensors = [gpu.upload_expert(expert) for expert in pair]
    rows = [c % 3 for c in range(130)]
    row_tokens = rng.integers(0, 7, sum(rows))
    x, weights = gaussian(rng, sum(rows), D), gaussian(rng, sum(rows))
    y = Sums(gpu, memory, tensors * 65, rows, 7, row_tokens, weights, x).run()
    assert oracle.relative_rms(y, expected_sums(pair * 65, rows, 7, row_tokens, weights, x)) <= EXACT


def test_sums_of_no_rows_are_zero(gpu, rng, memory):
    tensors = gpu.upload_expert(random_expert(rng, D, H, ("e8",) * 3))
    sums = Sums(gpu, memory, [tensors] * 2, [0, 0], 3, [0], [1], gaussian(rng, 1, D))
    assert not sums.run().any()


def test_sums_for_no_tokens_write_nothing(gpu, rng, memory):
    tensors = gpu.upload_expert(random_expert(rng, D, H, ("e8",) * 3))
    sums = Sums(gpu, memory, [tensors], [1], 0, [0], [1], gaussian(rng, 1, D))
    sums.run()
    assert (memory.get(sums.y, (1, D)) == 99).all()


def test_refused_sums(gpu, rng, memory):
    tensors = gpu.upload_expert(random_expert(rng, D, H, ("e8",) * 3))
    sums = Sums(gpu, memory, [tensors], [2], 2, [0, 1], [1, 1], gaussian(rng, 2, D))
    group_size = gpu.lib.coli_cuda_expert_group_workspace(*sums.group)
    assert sums.size > group_size
    for changes, text in (
        ({"size": sums.size - 1}, str(sums.size - 1)),
        ({"size": group_size}, str(group_size)),
        ({"workspace": 0}, "workspace"),
        ({"workspace": sums.workspace + 16}, "aligned"),
        ({"tokens": -1}, "-1"),
        ({"y": 0}, "NULL"),
        ({"x": 0}, "NULL"),
        ({"row_tokens": 0}, "NULL"),
        ({"weights": 0}, "NULL"),
    ):
        with pytest.raises(Refused) as refused:
            sums.run(**changes)
        assert refused.value.status == "ARGUMENT"
        assert text in refused.value.text
        assert (sums.result() == 99).all()
    with pytest.raises(Refused, match="-1"):
        Sums(gpu, memory, [tensors], [-1], 2, [0], [1], gaussian(rng, 1, D))


# ---- issued sums ----


@pytest.mark.parametrize("tokens", [3, 900])  # 900: more than kernels write to pinned memory themselves
def test_issued_sums(gpu, rng, tokens):
    formats = [("e8",) * 3, ("int8",) * 3, ("int4", "mxfp4", "e8"), ("e8",) * 3]
    rows = [3, 1, 2, 14]
    experts = [random_expert(rng, D, H, expert_formats) for expert_formats in formats]
    tensors = [gpu.upload_expert(expert) for expert in experts]
    x, weights = gaussian(rng, 4, D), gaussian(rng, 20)
    x_index, row_tokens = rng.integers(0, 4, 20), rng.integers(0, 3, 20)
    before = gpu.group_stats()[0]
    gpu.issue_sum(tensors, rows, x, x_index, tokens, row_tokens, weights)
    assert tuple(a - b for a, b in zip(gpu.group_stats()[0], before, strict=True)) == (1, 4, 20)
    other = gpu.group(tensors[:1], [1], x[:1])  # a synchronous call between does not disturb it
    y = gpu.take((tokens, D))
    assert oracle.relative_rms(y, expected_sums(experts, rows, tokens, row_tokens, weights, x[x_index])) <= EXACT
    assert not y[3:].any()
    assert oracle.relative_rms(other, oracle.expert(x[:1], *experts[0])) <= EXACT
    gpu.issue_sum(tensors, rows, x, x_index, tokens, row_tokens, weights)
    np.testing.assert_array_equal(gpu.take((tokens, D)), y)


def test_issued_sums_that_are_refused(gpu, rng):
    tensors = [gpu.upload_expert(random_expert(rng, D, H, ("int8",) * 3))]
    x = gaussian(rng, 2, D)
    good = {"x_index": [0, 1], "tokens": 2, "row_tokens": [0, 1], "weights": [1, 1]}
    for change, message in [
        ({"x_index": [0, 2]}, r"x_index\[1\] is 2, expected 0 \.\.\. 1"),
        ({"x_index": [-1, 0]}, r"x_index\[0\] is -1"),
        ({"row_tokens": [0, 2]}, r"row_tokens\[1\] is 2, expected 0 \.\.\. 1"),
        ({"tokens": 0}, "0 tokens, expected 1 or more"),
    ]:
        with pytest.raises(Refused, match=message):
            gpu.issue_sum(tensors, [2], x, **(good | change))
        with pytest.raises(Refused, match="no issued group"):
            gpu.take((2, D))
    gpu.issue_sum(tensors, [2], x, **good)
    with pytest.raises(Refused, match="not taken yet"):
        gpu.issue_sum(tensors, [2], x, **good)
    with pytest.raises(Refused, match="not taken yet"):
        gpu.issue(tensors, [1], x)
    gpu.take((2, D))


# ---- plans in words ----


ALL_E8 = ("e8",) * 3


def plan_call(gpu, text, capacity, *, capability=90, formats=ALL_E8, shape=(6144, 2048), experts=8, rows=1, device=0):
    numbers = NULL if formats is None else [fmt if isinstance(fmt, int) else oracle.abi_number(fmt) for fmt in formats]
    length = gpu.lib.coli_cuda_plan_text(device, capability, numbers, *shape, experts, rows, text, capacity)
    if length == 0:
        raise gpu.refusal()
    return length


def plan_lines(gpu, **arguments):
    length = plan_call(gpu, NULL, 0, **arguments)
    text = ffi.new("char []", length + 1)
    assert plan_call(gpu, text, length + 1, **arguments) == length
    text = ffi.string(text).decode()
    assert len(text) == length
    assert text.endswith("\n")
    return text.splitlines()


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("fmt", ON_GPU)
def test_plans_name_their_launches(limits, fmt, capability, rows):
    """No device is needed, nor any call before."""
    lines = plan_lines(limits, capability=capability, formats=(fmt,) * 3, rows=rows)
    names = [line.split()[0] for line in lines]
    assert names in (["hidden", "down"], ["hidden", "rotate", "down"])
    assert fmt == "e8" or "rotate" not in names
    if rows <= 16:
        limits.require_exact(True)
        assert plan_lines(limits, capability=capability, formats=(fmt,) * 3, rows=rows) == lines
        path = CAPABILITIES[capability]
        if path == "hopper" and capability != 90 and fmt in ("f32", "fp8-e4m3-b128"):
            path = "ampere"  # what is no bytes wants more registers than such a GPU has beside the copy engine
        assert all(f" {path}" in line for line in lines if not line.startswith("rotate")), lines
        assert not any("prefill" in line for line in lines)


@pytest.mark.parametrize("fmt", ON_GPU)
def test_plans_of_some_rows(limits, fmt):
    """From 5 rows on, Hopper's matrix unit takes what is multiplied as integers; nobody else does."""

    def batched(rows, capability=90):
        lines = plan_lines(limits, capability=capability, formats=(fmt,) * 3, rows=rows)
        assert len({"batch on wgmma" in line for line in lines if not line.startswith("rotate")}) == 1, lines
        return "batch on wgmma" in lines[0]

    integers = fmt not in ("f32", "fp8-e4m3-b128")  # plans take all groups for 64 columns
    assert [batched(rows) for rows in (1, 4, 5, 8, 9, 16, 17)] == [False] * 2 + [integers] * 4 + [False]
    assert not any(batched(rows, capability) for rows in (5, 16) for capability in CAPABILITIES if capability != 90)
    limits.limit_path("ampere")
    assert not batched(16)


def test_plans_of_many_rows(limits):
    limits.require_exact(0)
    for capability, unit in ((75, None), (80, " mma,"), (86, " mma,"), (90, " wgmma,"), (100, " mma,"), (120, " mma,")):
        lines = plan_lines(limits, capability=capability, rows=64)
        assert all("prefill" in line and unit in line for line in lines) if unit else "plain" in lines[0]
    for exact in (5, -1, 1, 0):
        limits.require_exact(exact)
        lines = plan_lines(limits, capability=90, rows=64)
        assert all(("prefill on wgmma, exact," in line) == (exact != 0) for line in lines), lines


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("fmt", ON_GPU)
def test_every_shape_has_a_plan(limits, fmt, capability):
    """The outputs of a block's share must fit shared memory, whatever the number of experts and rows."""
    limits.require_exact(True)
    for shape in ((6144, 2048), (16384, 53248), (8192, 128256), (128256, 8192)):
        for experts, rows in itertools.product((1, 8, 64), (1, 4, 16, 100)):
            lines = plan_lines(
                limits, capability=capability, formats=(fmt,) * 3, shape=shape, experts=experts, rows=rows
            )
            blocks = r"(?:grid (?=(\d+) x ).* |in (?=(\d+) blocks of ).* )"
            launches = [re.search(blocks + r"(\d+) warps, .* (\d+) bytes shared", line) for line in lines]
            sizes = [[int(number) for number in launch.groups() if number] for launch in launches if launch]
            assert [len(size) for size in sizes] == [3, 3], lines
            assert all(min(size) > 0 for size in sizes), lines


def test_plan_of_a_device(gpu):
    assert plan_lines(gpu, capability=0)[0].startswith("hidden")


def test_a_plan_is_cut_to_the_memory_that_there_is(limits):
    whole = "\n".join(plan_lines(limits)) + "\n"
    for capacity in (0, 1, 2, 10, len(whole) - 1, len(whole), len(whole) + 1):
        text = ffi.new("char []", b"#" * (len(whole) + 8))
        assert plan_call(limits, text, capacity) == len(whole)
        kept = whole[: max(capacity - 1, 0)].encode()
        assert ffi.unpack(text, len(kept)) == kept
        rest = ffi.unpack(text, len(whole) + 8)[len(kept) :]
        assert rest.strip(b"#") == (b"\0" if capacity else b"")


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"capability": 70}, "ARGUMENT", "70"),
        ({"capability": -1}, "ARGUMENT", "-1"),
        ({"capability": 0, "device": 99}, "NO_DEVICE", "99"),
        ({"capability": 0, "device": -1}, "NO_DEVICE", "-1"),
        ({"formats": None}, "ARGUMENT", "formats"),
        ({"formats": ("e8", "int3-g64", "e8")}, "FORMAT", "format"),
        ({"formats": ("e8", "e8", 99)}, "FORMAT", "99"),
        ({"formats": (-1, "e8", "e8")}, "FORMAT", "-1"),
        ({"shape": (0, 8)}, "SHAPE", "0"),
        ({"shape": (8, -2)}, "SHAPE", "-2"),
        ({"experts": 0}, "SHAPE", "0"),
        ({"experts": 65}, "ARGUMENT", "65"),
        ({"rows": 0}, "SHAPE", "0"),
    ],
)
def test_refused_plans(closed_gpu, changes, status, text):
    with pytest.raises(Refused) as refused:
        plan_call(closed_gpu, NULL, 0, **changes)
    assert refused.value.status == status
    assert text in refused.value.text


# ---- limits ----


def test_limits_of_paths(limits):
    for path, expected in (("plain", "plain"), ("ampere", "ampere"), ("hopper", "hopper")):
        limits.limit_path(path)
        assert f" {expected}" in plan_lines(limits, capability=90)[0]
    limits.limit_path("hopper")
    assert " ampere" in plan_lines(limits, capability=80)[0], "a limit is no wish"


@pytest.mark.parametrize("path", ["", "HOPPER", "hopper ", "turing", None])
def test_refused_limits(limits, path):
    limits.limit_path("ampere")
    assert limits.lib.coli_cuda_limit_path(NULL if path is None else path.encode()) == 0
    refusal = limits.refusal()
    assert refusal.status == "ARGUMENT"
    assert (path or "path") in refusal.text
    assert " ampere" in plan_lines(limits)[0], "a refused limit changed the one before"


# ---- probes ----

PROBED = 16 * 5000


def probe(gpu, a, b, size=PROBED, kind=1, device=0):
    arguments = on_device(a, "void *"), on_device(b, "void *")
    gpu.check(gpu.lib.coli_cuda_probe_dev(device, kind, *arguments, size, NULL))


@pytest.mark.parametrize("size", [16, 16 * 511, PROBED])
def test_a_probe_copies(gpu, rng, memory, size):
    x, old = gaussian(rng, PROBED // 4), gaussian(rng, PROBED // 4 + 4)
    a, b = memory.put(x), memory.put(old)
    probe(gpu, a, b, size)
    memory.synchronize(None)
    y = memory.get(b, len(old))
    assert np.array_equal(y[: size // 4], x[: size // 4])
    assert np.array_equal(y[size // 4 :], old[size // 4 :])
    assert np.array_equal(memory.get(a, len(x)), x)


def test_a_probe_that_reads_writes_nothing(gpu, rng, memory):
    x, old = gaussian(rng, PROBED // 4), gaussian(rng, PROBED // 4)
    a, b = memory.put(x), memory.put(old)
    probe(gpu, a, b, kind=0)
    probe(gpu, a, 0, kind=0)
    probe(gpu, a, b, 0)
    memory.synchronize(None)
    assert np.array_equal(memory.get(b, len(old)), old)


def test_refused_probes(gpu, rng, memory):
    a, b = memory.put(gaussian(rng, PROBED // 4)), memory.put(np.zeros(PROBED // 4, np.float32))
    for changes, status, text in (
        ({"a": a + 4}, "ARGUMENT", "16"),
        ({"b": b + 8}, "ARGUMENT", "16"),
        ({"size": 24}, "ARGUMENT", "24"),
        ({"a": 0}, "ARGUMENT", "a_dev"),
        ({"b": 0}, "ARGUMENT", "b_dev"),
        ({"kind": 2}, "ARGUMENT", "2"),
        ({"kind": -1}, "ARGUMENT", "-1"),
    ):
        with pytest.raises(Refused) as refused:
            probe(gpu, **({"a": a, "b": b} | changes))
        assert refused.value.status == status
        assert text in refused.value.text
    with pytest.raises(Refused, match="7"):
        probe(gpu, a, b, device=7)
    memory.synchronize(None)
    assert not memory.get(b, PROBED // 4).any()
