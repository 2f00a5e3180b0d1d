"""Groups of experts on the GPU library: synchronous, issued and taken, on several devices."""

import threading

import numpy as np
import oracle
import pytest
from abi import NULL, Refused, floats, tensor_array
from samples import EXACT, MANY_ROWS, MIXED, gaussian, random_expert

D, H = 64, 48


def expected(experts, rows, x):
    parts = np.split(x, np.cumsum(rows)[:-1])
    return np.concatenate([oracle.expert(part, *expert) for part, expert in zip(parts, experts, strict=True)])


def make_group(gpu, rng, formats, rows, device=0):
    """Experts, their tensors and activations."""
    experts = [random_expert(rng, D, H, expert_formats) for expert_formats in formats]
    tensors = [gpu.upload_expert(expert, device) for expert in experts]
    return experts, tensors, gaussian(rng, sum(rows), D)


def check_group(gpu, rng, formats, rows, **options):
    experts, tensors, x = make_group(gpu, rng, formats, rows)
    y = gpu.group(tensors, rows, x, **options)
    exact = max(rows) <= 16 or options.get("pinned")
    error = oracle.relative_rms(y, expected(experts, rows, x))
    assert error <= (EXACT if exact else MANY_ROWS), f"relative error {error:.3g}"
    return y


@pytest.mark.parametrize("fmt", ["f32", "int8", "int4", "int2", "int4-g16", "int4-g5", "e8", "mxfp4", "fp8-e4m3-b128"])
def test_one_format(gpu, rng, fmt):
    check_group(gpu, rng, [(fmt,) * 3] * 3, [1, 2, 1])


def test_mixed_formats(gpu, rng):
    check_group(gpu, rng, [*MIXED, ("e8",) * 3, ("int4",) * 3], [1, 3, 2, 1, 4, 1, 2, 1])


@pytest.mark.parametrize("rows", [[1], [5, 1, 16], [17, 2], [1, 40], [8, 9, 8]])
@pytest.mark.parametrize("pinned", [None, 0, 1])
def test_ragged_rows(gpu, rng, rows, pinned):
    check_group(gpu, rng, [("e8",) * 3, ("int4",) * 3, ("e8",) * 3][: len(rows)], rows, pinned=pinned)


def test_the_most_experts(gpu, rng):
    experts, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4",) * 3], [1] * 64)
    y = gpu.group(tensors * 32, [1] * 64, x)
    assert oracle.relative_rms(y, expected(experts * 32, [1] * 64, x)) <= EXACT


def test_an_expert_gives_the_same_bits_alone_and_in_a_group(gpu, rng):
    rows = [1, 3, 2, 16, 5]
    formats = [("e8",) * 3, ("int4",) * 3, ("int8", "int8", "e8"), ("e8",) * 3, ("mxfp4", "int4", "mxfp4")]
    _, tensors, x = make_group(gpu, rng, formats, rows)
    together = gpu.group(tensors, rows, x)
    assert np.array_equal(gpu.group(tensors, rows, x), together)
    assert np.array_equal(gpu.group(tensors, rows, x, pinned=1), together)
    parts = np.split(x, np.cumsum(rows)[:-1])
    alone = [gpu.expert_mlp(expert, np.ascontiguousarray(part)) for expert, part in zip(tensors, parts, strict=True)]
    assert np.array_equal(np.concatenate(alone), together)
    backwards = gpu.group(tensors[::-1], rows[::-1], np.concatenate(parts[::-1]))
    assert np.array_equal(np.concatenate(alone[::-1]), backwards)


# Experts that Hopper's batch kernels take, and pairs of gate and up that share their warps or must not.
BATCHED = [
    ("e8", "e8", "e8"),
    ("int8", "int8", "int8"),
    ("int4", "int4", "int4"),
    ("int2", "int2", "int2"),
    ("int4-g32", "int4-g32", "int4-g64"),
    ("mxfp4", "mxfp4", "mxfp4"),
    ("e8", "mxfp4", "int8"),
    ("int4-g64", "int2", "e8"),
]


@pytest.mark.parametrize(("wide", "tall"), [(64, 48), (600, 330), (512, 1024), (1300, 40)])
@pytest.mark.parametrize("formats", BATCHED, ids=" ".join)
def test_bits_do_not_depend_on_the_number_of_rows(gpu, rng, formats, wide, tall):
    expert = random_expert(rng, wide, tall, formats)
    tensors, x = gpu.upload_expert(expert), gaussian(rng, 16, wide)
    x[3] *= np.float32(1e5)
    x[9, wide // 2 :] = 0
    alone = np.concatenate([gpu.expert_mlp(tensors, x[i : i + 1]) for i in range(16)])
    assert oracle.relative_rms(alone, oracle.expert(x, *expert)) <= EXACT
    for rows in (2, 3, 4, 5, 8, 9, 13, 16):
        assert np.array_equal(gpu.expert_mlp(tensors, x[:rows]), alone[:rows]), f"{rows} rows"


def test_experts_of_few_some_and_many_rows(gpu, rng):
    """Each takes the kernels of its own number of rows, whatever the others take."""
    rows = [3, 4, 17, 1, 16, 8, 33, 2, 9, 5]
    formats = [BATCHED[i % len(BATCHED)] for i in range(len(rows))]
    formats[5] = ("fp8-e4m3-b128", "e8", "e8")
    experts, tensors, x = make_group(gpu, rng, formats, rows)
    y = gpu.group(tensors, rows, x)
    starts = np.cumsum([0, *rows])
    for expert, tensor, begin, end in zip(experts, tensors, starts, starts[1:], strict=False):
        part = np.ascontiguousarray(x[begin:end])
        assert oracle.relative_rms(y[begin:end], oracle.expert(part, *expert)) <= EXACT
        assert np.array_equal(gpu.expert_mlp(tensor, part), y[begin:end])


def test_one_expert_several_times(gpu, rng):
    experts, tensors, x = make_group(gpu, rng, [("e8",) * 3], [4])
    y = gpu.group(tensors * 3, [1, 2, 1], x)
    assert np.array_equal(y, gpu.expert_mlp(tensors[0], x))
    assert oracle.relative_rms(y, oracle.expert(x, *experts[0])) <= EXACT


def test_a_custom_codebook_and_unrotated_down(gpu, rng):
    codebook = rng.integers(0, 64, (256, 4), dtype=np.uint8)
    gpu.set_codebook(codebook)
    experts = [random_expert(rng, D, H, ("e8",) * 3) for _ in range(2)]
    for matrix in (*experts[0], *experts[1]):
        matrix.codebook = codebook
    experts[1][2].rotated = False
    tensors = [gpu.upload_expert(expert) for expert in experts]
    x = gaussian(rng, 3, D)
    assert oracle.relative_rms(gpu.group(tensors, [2, 1], x), expected(experts, [2, 1], x)) <= EXACT


@pytest.mark.parametrize("hidden", [8192, 32768])
def test_rotation_blocks_above_4096(gpu, rng, hidden):
    experts = [random_expert(rng, 4, hidden, ("int8", "int8", fmt)) for fmt in ("e8", "int8")]
    tensors = [gpu.upload_expert(expert) for expert in experts]
    x = gaussian(rng, 2, 4)
    assert oracle.relative_rms(gpu.group(tensors, [1, 1], x), expected(experts, [1, 1], x)) <= EXACT


@pytest.mark.parametrize("formats", [("e8",) * 3, ("int4",) * 3, ("e8", "int4", "e8")], ids="-".join)
def test_glm_sized_group(gpu, rng, simulator, formats):
    if simulator:
        pytest.skip("takes too long on the simulator")
    experts = [random_expert(rng, 6144, 2048, formats) for _ in range(2)]
    tensors = [gpu.upload_expert(expert) for expert in experts]
    for rows in ([1, 16], [64, 3]):
        x = gaussian(rng, sum(rows), 6144)
        error = oracle.relative_rms(gpu.group(tensors, rows, x), expected(experts, rows, x))
        assert error <= (EXACT if max(rows) <= 16 else MANY_ROWS)


# ---- refusals and counters ----


def test_refused_groups(gpu, rng):
    _, tensors, x = make_group(gpu, rng, [("int8",) * 3] * 2, [1, 1])
    odd = gpu.upload_expert(random_expert(rng, D, H + 1, ("int8",) * 3))
    gate, up, down = tensors[0]
    before = gpu.group_stats()
    for experts, rows, text in (
        (tensors, [1, 0], "0"),
        (tensors, [-2, 3], "-2"),
        (tensors * 33, [1] * 66, "66"),
        ([tensors[0], (NULL, up, down)], [1, 1], "gate"),
        ([tensors[0], (gate, up, NULL)], [1, 1], "down"),
        ([tensors[0], odd], [1, 1], str(H + 1)),
        ([tensors[0], (gate, up, gate)], [1, 1], "down"),
    ):
        x = gaussian(rng, max(2, sum(rows)), D)
        with pytest.raises(Refused) as refused:
            gpu.group(experts, rows, x)
        assert text in refused.value.text, refused.value
        with pytest.raises(Refused):
            gpu.issue(experts, rows, x)
    columns = [tensor_array(column) for column in zip(*tensors, strict=True)]
    y = np.full((2, D), 7, np.float32)
    x = gaussian(rng, 2, D)
    group = gpu.lib.coli_cuda_expert_group
    assert group(*columns, [1, 1], 0, floats(y), floats(x)) == 0
    assert group(*columns, NULL, 2, floats(y), floats(x)) == 0
    assert group(*columns, [1, 1], 2, NULL, floats(x)) == 0
    assert group(*columns, [1, 1], 2, floats(y), NULL) == 0
    assert group(NULL, *columns[1:], [1, 1], 2, floats(y), floats(x)) == 0
    assert (y == 7).all()
    assert gpu.group_stats() == before


def test_group_statistics(gpu, rng):
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4",) * 3], [1, 3])
    (calls, experts, rows), _ = gpu.group_stats()
    device_before, _ = gpu.group_stats(0)

    def moved():
        now, _ = gpu.group_stats()
        return now[0] - calls, now[1] - experts, now[2] - rows

    gpu.group(tensors, [1, 3], x)
    assert moved() == (1, 2, 4)
    gpu.group(tensors, [2, 2], x, pinned=1)
    assert moved() == (2, 4, 8)
    gpu.issue(tensors, [1, 3], x)
    assert moved() == (3, 6, 12), "an issued group counts when it is issued"
    gpu.take(x.shape)
    gpu.expert_mlp(tensors[0], x)
    assert moved() == (3, 6, 12), "only groups are counted"
    device_now, _ = gpu.group_stats(0)
    assert tuple(a - b for a, b in zip(device_now, device_before, strict=True)) == (3, 6, 12)
    assert gpu.group_stats(4711)[0] == (0, 0, 0)
    gpu.lib.coli_cuda_group_stats(*[NULL] * 6)
    total = gpu.group_stats()
    gpu.free_all()
    gpu.shutdown()
    gpu.init(0)
    assert gpu.group_stats() == total, "counters of groups survive a shutdown"


def test_group_times_need_the_profile_switch(gpu, rng, monkeypatch):
    _, tensors, x = make_group(gpu, rng, [("int8",) * 3], [2])
    _, before = gpu.group_stats(0)
    gpu.group(tensors, [2], x)
    assert gpu.group_stats(0)[1] == before
    monkeypatch.setenv("COLI_CUDA_PROFILE", "1")
    for _ in range(3):
        gpu.group(tensors, [2], x)
    _, after = gpu.group_stats(0)
    assert all(a >= b for a, b in zip(after, before, strict=True))
    assert sum(after) > sum(before)


# ---- issue and take ----


@pytest.mark.parametrize("formats", [[("e8",) * 3] * 3, [("int4",) * 3] * 3, MIXED[:3]], ids=["e8", "int4", "mixed"])
def test_issue_and_take_give_the_bits_of_the_synchronous_call(gpu, rng, formats):
    rows = [2, 5, 1]
    experts, tensors, x = make_group(gpu, rng, formats, rows)
    synchronous = gpu.group(tensors, rows, x)
    given = x.copy()
    gpu.issue(tensors, rows, given)
    given[:] = np.nan  # x may be reused at once
    taken = gpu.take(x.shape)
    assert np.array_equal(taken, synchronous)
    assert oracle.relative_rms(taken, expected(experts, rows, x)) <= EXACT


def test_synchronous_calls_between_issue_and_take(gpu, rng):
    rows = [4, 4]
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4",) * 3], rows)
    reference = gpu.group(tensors, rows, x)
    others, other_tensors, other_x = make_group(gpu, rng, [("int8", "int4", "e8")] * 2, [9, 1])
    gpu.issue(tensors, rows, x)
    for _ in range(2):
        y = gpu.group(other_tensors, [9, 1], other_x)
        assert oracle.relative_rms(y, expected(others, [9, 1], other_x)) <= EXACT
        gpu.expert_mlp(other_tensors[0], other_x)
        gpu.matmul(other_tensors[0][0], other_x, others[0][0])
    gpu.free(gpu.upload(oracle.random_encoded(rng, "e8", (64, 512))))
    view = gpu.take_view(x.shape)
    assert np.array_equal(view, reference)
    # The rows live until the next issue.
    gpu.group(other_tensors, [9, 1], other_x)
    assert np.array_equal(view, reference)


def test_issue_limits(gpu, rng):
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3] * 2, [5, 4])
    with pytest.raises(Refused, match="9") as refused:
        gpu.issue(tensors, [5, 4], x)
    assert refused.value.status in ("ARGUMENT", "SHAPE")
    gpu.issue(tensors, [4, 4], x[:8])
    with pytest.raises(Refused, match="take") as refused:
        gpu.issue(tensors, [1, 1], x[:2])
    assert refused.value.status == "STATE"
    first = gpu.take((8, D))
    assert np.array_equal(first, gpu.group(tensors, [4, 4], x[:8]))
    with pytest.raises(Refused) as refused:
        gpu.take((8, D))
    assert refused.value.status == "STATE"
    gpu.issue(tensors, [1, 1], x[:2])
    gpu.take((2, D))
    with pytest.raises(Refused, match="4711"):
        gpu.take((1, D), device=4711)


def test_shutdown_with_a_group_outstanding(gpu, rng):
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3], [2])
    gpu.issue(tensors, [2], x)
    gpu.shutdown()
    gpu.init(0)
    with pytest.raises(Refused):
        gpu.take((2, D))
    gpu.free_all()
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3], [2])
    gpu.issue(tensors, [2], x)
    assert np.array_equal(gpu.take((2, D)), gpu.group(tensors, [2], x))


def test_freeing_waits_for_an_issued_group(gpu, rng):
    experts, tensors, x = make_group(gpu, rng, [("e8",) * 3], [3])
    gpu.issue(tensors, [3], x)
    gpu.free_all()
    assert oracle.relative_rms(gpu.take((3, D)), expected(experts, [3], x)) <= EXACT


# ---- several devices ----


def test_two_devices_at_once(two_gpus, rng):
    work = []
    for device in (0, 1):
        formats = [("e8",) * 3, ("int4", "int8", "e8")] if device == 0 else [("int4",) * 3, ("e8",) * 3]
        work.append(make_group(two_gpus, rng, formats, [3, 2], device))
    references = [two_gpus.group(tensors, [3, 2], x) for _, tensors, x in work]
    before = [two_gpus.group_stats(device)[0] for device in (0, 1)]
    problems = []

    def run(device):
        _, tensors, x = work[device]
        for _ in range(10):
            synchronous = two_gpus.group(tensors, [3, 2], x)
            two_gpus.issue(tensors, [3, 2], x)
            taken = two_gpus.take(x.shape, device)
            if not (np.array_equal(synchronous, references[device]) and np.array_equal(taken, references[device])):
                problems.append(device)

    threads = [threading.Thread(target=run, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for device in (0, 1):
        experts, _, x = work[device]
        assert oracle.relative_rms(references[device], expected(experts, [3, 2], x)) <= EXACT
        now = two_gpus.group_stats(device)[0]
        assert tuple(a - b for a, b in zip(now, before[device], strict=True)) == (20, 40, 100)


def test_two_threads_on_one_device_take_turns(gpu, rng):
    _, tensors, x = make_group(gpu, rng, [("e8",) * 3, ("int4",) * 3], [2, 3])
    reference = gpu.group(tensors, [2, 3], x)
    problems = []

    def run():
        for _ in range(10):
            if not np.array_equal(gpu.group(tensors, [2, 3], x), reference):
                problems.append("bits")

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_errors_belong_to_their_thread(gpu):
    texts = []

    def run():
        try:
            gpu.memory(1234)
        except Refused as refused:
            texts.append(refused.text)

    with pytest.raises(Refused):
        gpu.memory(5678)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "1234" in texts[0]
    assert "5678" in gpu.refusal().text


def test_codebook_and_fp8_table_reach_every_device(two_gpus, rng):
    codebook = rng.integers(0, 256, (256, 4), dtype=np.uint8)
    two_gpus.set_codebook(codebook)
    for device in (0, 1):
        for fmt in ("e8", "fp8-e4m3-b128"):
            matrix = oracle.random_encoded(rng, fmt, (7, 300), codebook=codebook)
            x = gaussian(rng, 2, 300)
            y = two_gpus.matmul(two_gpus.upload(matrix, device), x, matrix)
            assert oracle.relative_rms(y, x @ matrix.decode().T) <= EXACT


def test_tensors_of_two_devices_do_not_mix(two_gpus, rng):
    _, zero, x = make_group(two_gpus, rng, [("int8",) * 3], [2], device=0)
    _, one, _ = make_group(two_gpus, rng, [("int8",) * 3], [2], device=1)
    for call in (
        lambda: two_gpus.expert_mlp((zero[0][0], one[0][1], zero[0][2]), x),
        lambda: two_gpus.group(zero + one, [1, 1], x),
        lambda: two_gpus.issue(zero + one, [1, 1], x),
    ):
        with pytest.raises(Refused, match=r"devices? .*\b1\b"):
            call()


def test_outstanding_groups_are_per_device(two_gpus, rng):
    groups = [make_group(two_gpus, rng, [("e8",) * 3], [2], device) for device in (0, 1)]
    for _, tensors, x in groups:
        two_gpus.issue(tensors, [2], x)
    for device in (1, 0):
        experts, _, x = groups[device]
        assert oracle.relative_rms(two_gpus.take((2, D), device), expected(experts, [2], x)) <= EXACT
