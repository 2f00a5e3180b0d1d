"""Calls that fail on request, by environment or by the simulated runtime: they say why, write nothing and leak nothing,
and the next call works."""

import numpy as np
import oracle
import pytest
from abi import NULL, Refused
from samples import EXACT, gaussian, random_expert

D, H = 40, 24


@pytest.fixture
def expert(rng):
    return random_expert(rng, D, H, ("e8", "int4-g16", "e8"))


def refusal_of(call):
    """The Refused that a call raises, or None when it is done."""
    try:
        call()
    except Refused as refused:
        return refused
    return None


# ---- COLI_GPU_FAIL_AFTER ----


def test_fail_after_covers_every_compute_call(gpu, rng, expert, monkeypatch):
    tensors = gpu.upload_expert(expert)
    x = gaussian(rng, 2, D)
    calls = [
        lambda: gpu.matmul(tensors[0], x, expert[0]),
        lambda: gpu.expert_mlp(tensors, x),
        lambda: gpu.group([tensors], [2], x),
        lambda: gpu.group([tensors], [2], x, pinned=1),
        lambda: gpu.issue([tensors], [2], x),
        lambda: gpu.take(x.shape),
        lambda: gpu.issue_sum([tensors], [2], x, [0, 1], 1, [0, 0], [1, 1]),
        lambda: gpu.take((1, D)),
        lambda: gpu.encode(x, "reference"),
    ]

    def run():
        """How many calls were done before one was refused; a refused issue leaves nothing to take."""
        for done, call in enumerate(calls):
            refused = refusal_of(call)
            if refused:
                assert refused.status == "INJECTED"
                assert "COLI_GPU_FAIL_AFTER" in refused.text
                return done
        return len(calls)

    for wanted in range(len(calls) + 1):
        monkeypatch.setenv("COLI_GPU_FAIL_AFTER", str(wanted))
        assert run() == wanted
        with pytest.raises(Refused, match="COLI_GPU_FAIL_AFTER"):
            gpu.expert_mlp(tensors, x)
        monkeypatch.delenv("COLI_GPU_FAIL_AFTER")
        assert run() == len(calls), "calls still fail after the switch was taken away"


def test_fail_after_leaves_uploads_and_queries_alone(gpu, rng, monkeypatch):
    monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
    matrix = oracle.random_encoded(rng, "e8", (4, 256))
    tensor = gpu.upload(matrix)
    gpu.update(tensor, matrix)
    gpu.download(tensor, matrix)
    gpu.memory()
    assert gpu.stats() == (1, matrix.nbytes)


# ---- no GPU ----


def test_a_machine_without_a_gpu(closed_gpu, faults, monkeypatch):
    monkeypatch.setenv("SIMT_NO_DEVICE", "1")
    assert closed_gpu.lib.coli_cuda_available_device_count() == 0
    assert closed_gpu.refusal().status == "NO_DEVICE"
    assert "no GPU" in closed_gpu.refusal().text
    with pytest.raises(Refused, match="no device"):
        closed_gpu.init(0)
    monkeypatch.delenv("SIMT_NO_DEVICE")
    closed_gpu.init(0)


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("0", "no device: no NVIDIA driver is installed"),
        ("12080", "no device: the NVIDIA driver offers CUDA 12.8, this library needs 13.0; update the driver"),
    ],
)
def test_a_driver_that_will_not_do(closed_gpu, faults, monkeypatch, driver, said):
    monkeypatch.setenv("SIMT_DRIVER", driver)
    with pytest.raises(Refused) as refused:
        closed_gpu.init(0)
    assert refused.value.status == "NO_DEVICE"
    assert refused.value.text == said


# ---- every call of the runtime ----


def fail_every_runtime_call(gpu, faults, *, prepare, action, after_refusal, after_success=None):
    """Runs `action` again and again, each time with another one of its runtime calls failing.

    `prepare` starts from the shut down library and returns what the other steps receive. An action may survive the
    failure of a call that does not matter; its own checks then hold. In the end everything that was allocated is
    released.
    """

    def start_over():
        gpu.free_all()
        gpu.shutdown()
        return prepare()

    state = start_over()
    first = faults.calls()
    action(state)
    count = faults.calls() - first
    assert count > 0
    start_over()
    gpu.free_all()
    gpu.shutdown()
    live = faults.live()

    refusals = 0
    for nth in range(1, count + 1):
        state = start_over()
        before = gpu.stats()
        faults.fail(b"*", nth)
        refused = refusal_of(lambda: action(state))  # noqa: B023 - called at once
        faults.fail(b"*", 0)
        if refused:
            refusals += 1
            assert refused.status in ("DEVICE", "MEMORY", "NO_DEVICE"), refused
            after_refusal(state, before)
        elif after_success:
            after_success(state)
        gpu.free_all()
        gpu.shutdown()
        assert faults.live() == live, f"memory was left after failing call {nth} of {count}"
    assert refusals > 0


def test_init(closed_gpu, faults):
    gpu = closed_gpu

    def after_refusal(_state, _before):
        assert gpu.lib.coli_cuda_device_count() == 0
        gpu.init(0)

    fail_every_runtime_call(
        gpu, faults, prepare=lambda: None, action=lambda _: gpu.init(0), after_refusal=after_refusal
    )


def test_init_of_two_devices(two_gpus, faults):
    gpu = two_gpus

    def after_refusal(_state, _before):
        assert gpu.lib.coli_cuda_device_count() == 0
        gpu.init(0, 1)

    fail_every_runtime_call(
        gpu, faults, prepare=lambda: None, action=lambda _: gpu.init(0, 1), after_refusal=after_refusal
    )


@pytest.mark.parametrize("fmt", ["e8", "int4-g16", "mxfp4", "f32"])
def test_upload(closed_gpu, rng, faults, fmt):
    gpu, matrix = closed_gpu, oracle.random_encoded(rng, fmt, (6, 300))

    def after_refusal(_state, before):
        assert gpu.stats() == before == (0, 0)
        tensor = gpu.upload(matrix)
        assert gpu.download(tensor, matrix)[0].tobytes() == matrix.data.tobytes()

    fail_every_runtime_call(
        gpu,
        faults,
        prepare=lambda: gpu.init(0),
        action=lambda _: gpu.upload(matrix),
        after_refusal=after_refusal,
        after_success=lambda _: gpu.download(gpu.tensors[-1], matrix),
    )


@pytest.mark.parametrize("fmt", ["e8", "int4-g16"])
def test_update(closed_gpu, rng, faults, fmt):
    gpu = closed_gpu
    old, new = (oracle.random_encoded(rng, fmt, (6, 300)) for _ in range(2))
    x = gaussian(rng, 2, 300)

    def prepare():
        gpu.init(0)
        return gpu.upload(old)

    def after_refusal(tensor, before):
        assert gpu.stats() == before == (1, old.nbytes)
        refused = refusal_of(lambda: gpu.matmul(tensor, x, old))
        if refused:
            assert refused.status == "STATE"
            assert "update" in refused.text
            with pytest.raises(Refused, match="update"):
                gpu.download(tensor, old)
        else:
            y = gpu.matmul(tensor, x, old)
            assert oracle.relative_rms(y, x @ old.decode().T) <= EXACT, "half of an update was computed with"
        gpu.update(tensor, new)
        holds_new(tensor)

    def holds_new(tensor):
        assert gpu.download(tensor, new)[0].tobytes() == new.data.tobytes()
        assert oracle.relative_rms(gpu.matmul(tensor, x, new), x @ new.decode().T) <= EXACT

    fail_every_runtime_call(
        gpu,
        faults,
        prepare=prepare,
        action=lambda tensor: gpu.update(tensor, new),
        after_refusal=after_refusal,
        after_success=holds_new,
    )


@pytest.mark.parametrize("call", ["matmul", "expert_mlp", "group", "download"])
def test_compute(closed_gpu, rng, faults, expert, call):
    gpu, x = closed_gpu, gaussian(rng, 3, D)
    expected = {"matmul": x @ expert[0].decode().T, "download": None}.get(call, oracle.expert(x, *expert))

    def prepare():
        gpu.init(0)
        return gpu.upload_expert(expert)

    def action(tensors):
        if call == "matmul":
            return gpu.matmul(tensors[0], x, expert[0])
        if call == "expert_mlp":
            return gpu.expert_mlp(tensors, x)
        if call == "group":
            return gpu.group([tensors, tensors], [1, 2], x)
        data, _ = gpu.download(tensors[0], expert[0])
        assert data.tobytes() == expert[0].data.tobytes()
        return None

    def check(tensors):
        y = action(tensors)
        assert expected is None or oracle.relative_rms(y, expected) <= EXACT

    fail_every_runtime_call(
        gpu,
        faults,
        prepare=prepare,
        action=check,
        after_refusal=lambda tensors, before: (check(tensors), check_unchanged(gpu, before)),
    )


def check_unchanged(gpu, before):
    assert gpu.stats() == before


def test_failed_groups_are_not_counted(gpu, rng, faults, expert):
    tensors, x = gpu.upload_expert(expert), gaussian(rng, 2, D)
    before = gpu.group_stats()[0]
    faults.fail(b"launch", 1)
    with pytest.raises(Refused):
        gpu.group([tensors], [2], x)
    faults.fail(b"launch", 1)
    with pytest.raises(Refused):
        gpu.issue([tensors], [2], x)
    assert gpu.group_stats()[0] == before


@pytest.mark.parametrize("call", ["rows", "sums"])
def test_issue_and_take(closed_gpu, rng, faults, expert, call):
    gpu, x = closed_gpu, gaussian(rng, 3, D)
    expected = oracle.expert(x, *expert)

    def prepare():
        gpu.init(0)
        return gpu.upload_expert(expert)

    def action(tensors):
        if call == "rows":
            gpu.issue([tensors, tensors], [1, 2], x)
        else:
            gpu.issue_sum([tensors, tensors], [1, 2], x, [0, 1, 2], 3, [0, 1, 2], [1, 1, 1])
        assert oracle.relative_rms(gpu.take(x.shape), expected) <= EXACT

    def after_refusal(tensors, _before):
        # Whichever half failed, nothing is outstanding.
        assert gpu.lib.coli_cuda_expert_group_take(0) == NULL
        assert gpu.refusal().status == "STATE"
        action(tensors)
        assert oracle.relative_rms(gpu.expert_mlp(tensors, x), expected) <= EXACT

    fail_every_runtime_call(gpu, faults, prepare=prepare, action=action, after_refusal=after_refusal)


@pytest.mark.parametrize("importance", [None, np.linspace(1, 2, 300, dtype=np.float32)], ids=["plain", "importance"])
def test_encode(closed_gpu, rng, faults, importance):
    gpu, w = closed_gpu, gaussian(rng, 2, 300)
    gpu.init(0)
    right = gpu.encode(w, "search", True, importance)

    def action(_state):
        assert np.array_equal(gpu.encode(w, "search", True, importance), right)

    fail_every_runtime_call(
        gpu,
        faults,
        prepare=lambda: gpu.init(0),
        action=action,
        after_refusal=lambda state, _before: action(state),
    )


def test_codebook_is_published_everywhere_or_nowhere(two_gpus, rng, faults):
    gpu, x = two_gpus, gaussian(rng, 1, 256)
    codebook = rng.integers(0, 256, (256, 4), dtype=np.uint8)
    matrix = oracle.random_encoded(rng, "e8", (3, 256))
    replaced = oracle.Encoded("e8", matrix.shape, matrix.data, codebook=codebook)

    def prepare():
        gpu.init(0, 1)
        return [gpu.upload(matrix, device) for device in (0, 1)]

    def all_use(tensors, used):
        for tensor in tensors:
            assert oracle.relative_rms(gpu.matmul(tensor, x, used), x @ used.decode().T) <= EXACT

    def after_refusal(tensors, _before):
        all_use(tensors, matrix)
        gpu.set_codebook(codebook)
        all_use(tensors, replaced)

    fail_every_runtime_call(
        gpu,
        faults,
        prepare=prepare,
        action=lambda _: gpu.set_codebook(codebook),
        after_refusal=after_refusal,
        after_success=lambda tensors: all_use(tensors, replaced),
    )


def test_fp8_table(closed_gpu, rng, faults):
    gpu, matrix = closed_gpu, oracle.random_encoded(rng, "fp8-e4m3-b128", (4, 64))

    def after_refusal(_state, _before):
        with pytest.raises(Refused, match="fp8_set_lut"):
            gpu.upload(matrix)
        gpu.publish_tables()
        gpu.upload(matrix)

    fail_every_runtime_call(
        gpu,
        faults,
        prepare=lambda: gpu.init(0),
        action=lambda _: gpu.publish_tables(),
        after_refusal=after_refusal,
        after_success=lambda _: gpu.upload(matrix),
    )


def test_out_of_memory_says_how_much(gpu, rng, faults):
    matrix = oracle.random_encoded(rng, "int8", (10, 100))
    faults.fail(b"cudaMalloc", 1)
    with pytest.raises(Refused) as refused:
        gpu.upload(matrix)
    assert refused.value.status in ("MEMORY", "DEVICE")
    assert "[10, 100]" in refused.value.text


def test_a_device_that_cannot_be_made_current(two_gpus, rng, faults, expert):
    """cudaSetDevice fails inside every kind of call: each says so, and the next one works."""
    tensors = two_gpus.upload_expert(expert, device=1)
    x = gaussian(rng, 2, expert[0].shape[1])
    right = two_gpus.expert_mlp(tensors, x)
    spare = two_gpus.upload(expert[0], device=1)

    def fails(call):
        faults.fail(b"cudaSetDevice", 1)
        try:
            with pytest.raises(Refused):
                call()
        finally:
            faults.fail(b"*", 0)
        assert np.array_equal(two_gpus.expert_mlp(tensors, x), right)

    fails(lambda: two_gpus.expert_mlp(tensors, x))
    fails(lambda: two_gpus.update(tensors[0], expert[0]))
    fails(lambda: two_gpus.download(tensors[0], expert[0]))
    two_gpus.issue([tensors], [2], x)
    fails(lambda: two_gpus.take(x.shape, device=1))
    two_gpus.issue([tensors], [2], x)  # the failed take has ended the first one
    assert np.array_equal(two_gpus.take(x.shape, device=1), right)
    faults.fail(b"cudaSetDevice", 1)
    two_gpus.free(spare)
    faults.fail(b"*", 0)
    assert np.array_equal(two_gpus.expert_mlp(tensors, x), right)


@pytest.mark.parametrize("value", ["", "junk", "-1", "3x"])
def test_fail_after_that_is_no_number_means_no_limit(gpu, rng, expert, monkeypatch, value):
    monkeypatch.setenv("COLI_GPU_FAIL_AFTER", value)
    tensors, x = gpu.upload_expert(expert), gaussian(rng, 1, expert[0].shape[1])
    for _ in range(3):
        gpu.expert_mlp(tensors, x)
