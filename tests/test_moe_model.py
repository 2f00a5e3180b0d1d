"""MoELayer in a real model: the loss of tiny-olmoe with its experts in each format, and its MoE blocks one by one."""

import functools

import numpy as np
import olmoe
import oracle
import pytest

import pycoli
from pycoli.convert import convert
from pycoli.tensorfile import TensorFile

PUBLISHED = {"f32": 0.91166, "int8": 0.91169, "int4": 0.91493, "int4-g64": 0.91372, "e8": 0.92178}
"""Losses that others have measured with experts in these formats (E8 with the reference encoder)."""

ALL = 96
ON_CPU = {"f32": ALL, "e8": ALL, "int8": 16, "int4": 16, "int4-g64": 16}
"""Windows that the CPU computes: for the sake of time, some formats on some alone."""


@pytest.fixture(scope="module")
def model(shared):
    return olmoe.Olmoe(shared / "models" / "tiny-olmoe")


@pytest.fixture(scope="module")
def windows(shared):
    return olmoe.evaluation_windows(shared / "models")


@pytest.fixture(scope="module")
def encoded(model):
    """A function from a format to the experts of every layer in it, encoded once."""

    @functools.cache
    def experts_in(fmt):
        return [[tuple(pycoli.encode(m, fmt) for m in expert) for expert in experts] for experts in model.experts]

    return experts_in


def layers_of(model, experts, devices):
    """The model's MoE blocks with these experts."""
    return [
        pycoli.MoELayer(
            of_layer,
            pycoli.Router(model.router(number), model.top_k, renormalise=model.config["norm_topk_prob"]),
            devices=devices,
        )
        for number, of_layer in enumerate(experts)
    ]


def losses(model, windows, layers):
    """Nats a byte, window by window."""
    return model.losses(windows, lambda number, x: layers[number](x))


def as_float32(model, windows):
    """The mean loss of the model as it is."""
    return PUBLISHED["f32"] if len(windows) == ALL else model.losses(windows).mean()


def check_loss(fmt, where, measured, as_float32, capsys):
    """A format's distance from float32 on the same windows is what others have measured.

    An encoder may do better than the published one, not worse; few windows spread.
    """
    difference, published = measured.mean() - as_float32, PUBLISHED[fmt] - PUBLISHED["f32"]
    with capsys.disabled():
        print(
            f"\n{fmt} on {where}: {measured.mean():.5f} nats a byte on {len(measured)} windows, {difference:+.5f}; "
            f"published {PUBLISHED[fmt]:.5f}, {published:+.5f}"
        )
    if fmt == "f32":
        assert abs(difference) < 1e-4
    else:
        assert -1e-3 < difference < published + (1e-4 if len(measured) == ALL else 2e-3)


@pytest.mark.parametrize("layer", range(4))
def test_blocks_give_the_recorded_outputs(model, encoded, shared, device, layer):
    recorded = TensorFile(shared / "models" / "tiny-olmoe" / "moe_io.safetensors")
    x, y = (recorded.view(f"layer{layer}.{name}").astype(np.float32) for name in "xy")
    with layers_of(model, encoded("f32"), device)[layer] as block:
        assert oracle.relative_rms(block(x), y) < 1e-5
        assert set(block.where) == {device}


@pytest.mark.parametrize("fmt", PUBLISHED)
def test_loss_on_the_cpu(model, encoded, windows, fmt, capsys):
    windows = windows[: ON_CPU[fmt]]
    measured = losses(model, windows, layers_of(model, encoded(fmt), "cpu"))
    check_loss(fmt, "the CPU", measured, as_float32(model, windows), capsys)


@pytest.mark.parametrize("fmt", PUBLISHED)
def test_loss_on_a_gpu(model, encoded, windows, backend, fmt, capsys):
    """All windows on a real GPU, and the CPU's share of them there; some bytes on the simulated one, which is slow."""
    simulated = "simt" in backend.path
    windows = windows[:1, :9] if simulated else windows
    layers = layers_of(model, encoded(fmt), "cuda:0")
    on_gpu = losses(model, windows, layers)
    assert all(not layer.stats()["total"]["pairs"]["cpu"] for layer in layers)
    on_cpu = losses(model, windows[: ON_CPU[fmt]], layers_of(model, encoded(fmt), "cpu"))
    assert on_gpu[: len(on_cpu)].mean() == pytest.approx(on_cpu.mean(), abs=1e-5)
    if not simulated:
        check_loss(fmt, "the GPU", on_gpu, PUBLISHED["f32"], capsys)


def is_kept(name):
    """Whether a conversion leaves a tensor that is no expert's in float32."""
    return "norm" in name or ".mlp.gate." in name


def test_a_container_gives_the_loss_of_encoding_in_memory(model, encoded, windows, shared, tmp_path, capsys):
    """All of the model as `pycoli convert` writes it by default: every tensor is read back, and the experts run."""
    convert(shared / "models" / "tiny-olmoe", tmp_path / "model", jobs=2)
    windows = windows[:4]
    with pycoli.Container(tmp_path / "model") as container:
        assert container.layers == list(range(model.layers))
        read = {
            name: container.file(name).view(name) if is_kept(name) else container.stored(name).weights().decode()
            for name in model.weights()
        }
        experts = [[tuple(w.decode() for w in e) for e in container.experts(n)] for n in container.layers]
        from_file = model.changed(read, experts)
        stored = from_file.losses(windows)
        layers = [
            pycoli.MoELayer(list(container.experts(n)), pycoli.Router(**container.router(n)), devices="cpu")
            for n in container.layers
        ]
        run = losses(from_file, windows, layers)
    dense = {n: w if is_kept(n) else pycoli.encode(w, "int8").decode() for n, w in model.weights().items()}
    in_memory = model.changed(dense, [[tuple(w.decode() for w in e) for e in layer] for layer in encoded("e8")])
    expected = in_memory.losses(windows)
    with capsys.disabled():
        print(f"\na container: {stored.mean():.5f} nats a byte, in memory {expected.mean():.5f}, run {run.mean():.5f}")
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    np.testing.assert_allclose(run, expected, rtol=1e-4)
    check_loss("e8", "the CPU, dense matrices in int8", stored, model.losses(windows).mean(), capsys)
