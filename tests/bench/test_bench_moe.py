"""What an MoE layer costs around the work itself: a rotation, and a call with 8 experts on a GPU that takes no
time. And what it hides of the shorter side where both GPU and CPU take time."""

import shutil

import numpy as np
import oracle
import pytest
from overlap import overlap

import pycoli
from pycoli import cpu
from pycoli._lib import ffi, lib

D, H, K = 6144, 64, 8


def floats(array):
    return ffi.from_buffer("float[]", array)


def test_rotation_of_a_row(benchmark, isa):
    x = np.random.default_rng(0).standard_normal((1, D)).astype(np.float32)
    y = np.empty_like(x)
    arguments = floats(x), floats(y), 1, D
    lib.coli_rotate_rows(*arguments)
    assert oracle.relative_rms(y, oracle.rotate(x)) < 2e-7
    benchmark(lib.coli_rotate_rows, *arguments)
    benchmark.extra_info["isa"] = cpu.isa()


@pytest.fixture
def instant_layer(build_dir, tmp_path):
    """A layer of 8 experts on a GPU that gives every row back at once, and the library."""
    backend = pycoli.open_backend(shutil.copy(build_dir / "tests" / "stubs" / "stub_slow.so", tmp_path / "instant.so"))
    rng = np.random.default_rng(1)
    expert = [pycoli.encode(rng.standard_normal(s, np.float32), "e8") for s in ((H, D), (H, D), (D, H))]
    layer = pycoli.MoELayer([expert] * K, devices=[pycoli.Device(0, backend)])
    yield layer, expert, backend
    layer.free()
    backend.shutdown()


@pytest.mark.parametrize("part", ["layer", "backend alone"])
def test_call_of_8_experts(benchmark, instant_layer, part):
    """The difference of the two is the host's share."""
    layer, expert, backend = instant_layer
    x = np.random.default_rng(2).standard_normal((1, D)).astype(np.float32)
    y, ids, weights = np.empty_like(x), np.arange(K, dtype=np.int32), np.full(K, 0.125, np.float32)
    arguments = (floats(x), 1, ffi.from_buffer("int[]", ids), floats(weights), K, ffi.NULL, floats(y))
    if part == "layer":
        with layer._live() as handle:
            assert lib.coli_moe_forward(handle, *arguments) == 0
        assert layer.stats()["last"]["pairs"]["issue"] == K
        np.testing.assert_allclose(y, pycoli.rotate(x), rtol=1e-6, atol=1e-6)
        with layer._live() as handle:
            benchmark(lib.coli_moe_forward, handle, *arguments)
        return
    library = backend._library
    tensors = [pycoli.Tensor(matrix, pycoli.Device(0, backend)) for matrix in expert]
    group = [ffi.new("ColiCudaTensor *[]", [tensor._handle] * K) for tensor in tensors]
    group += [ffi.new("int[]", [1] * K), K]
    zeros = ffi.new("int[]", K)
    sums = floats(pycoli.rotate(x)), 1, zeros, 1, zeros, floats(weights)

    def issue_and_take():
        return library.coli_cuda_expert_group_issue_sum(*group, *sums), library.coli_cuda_expert_group_take(0)

    assert issue_and_take()[0] == 1
    benchmark(issue_and_take)


@pytest.mark.parametrize("gpu_to_cpu", [0.5, 1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_overlap(benchmark, build_dir, tmp_path, monkeypatch, capsys, threads, gpu_to_cpu):
    """Times a call of both sides, and prints how much of the shorter one it hides."""
    with overlap(build_dir, tmp_path, lambda delay: monkeypatch.setenv("STUB_DELAY_US", delay), threads) as measured:
        shares = measured.hidden_shares(gpu_to_cpu)
        benchmark.extra_info["hidden"] = shares
        with capsys.disabled():
            hidden = ", ".join(f"{share:.0%}" for share in shares)
            print(f"\n{threads} CPU threads, GPU {gpu_to_cpu} times as long: {hidden} of the shorter side are hidden")
        assert max(shares) >= 0.8
        benchmark(measured.call, [measured.on_gpu[0], measured.on_cpu[0]])
