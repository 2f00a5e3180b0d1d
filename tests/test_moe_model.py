"""MoELayer in a real model: the loss of tiny-olmoe with its experts in each format, and its MoE blocks one by one."""

import numpy as np
import olmoe
import oracle
import pytest

import pycoli
from pycoli.tensorfile import TensorFile

PUBLISHED = {"f32": 0.91166, "int8": 0.91169, "int4": 0.91493, "int4-g64": 0.91372, "e8": 0.92178}
"""Losses that others have measured with experts in these formats (E8 with the reference encoder)."""


@pytest.fixture(scope="module")
def model(shared):
    return olmoe.Olmoe(shared / "models" / "tiny-olmoe")


@pytest.fixture(scope="module")
def windows(shared):
    return olmoe.evaluation_windows(shared / "models")


def layers_of(model, fmt, devices):
    """The model's MoE blocks, experts encoded as the format says."""
    return [
        pycoli.MoELayer(
            [tuple(pycoli.encode(matrix, fmt) for matrix in expert) for expert in experts],
            pycoli.Router(model.router(number), model.top_k, renormalise=model.config["norm_topk_prob"]),
            devices=devices,
        )
        for number, experts in enumerate(model.experts)
    ]


def loss(model, windows, layers):
    return model.losses(windows, lambda number, x: layers[number](x)).mean()


@pytest.mark.parametrize("layer", range(4))
def test_blocks_give_the_recorded_outputs(model, shared, device, layer):
    recorded = TensorFile(shared / "models" / "tiny-olmoe" / "moe_io.safetensors")
    x, y = (recorded.view(f"layer{layer}.{name}").astype(np.float32) for name in "xy")
    with layers_of(model, "f32", device)[layer] as block:
        assert oracle.relative_rms(block(x), y) < 1e-5
        assert set(block.where) == {device}


@pytest.mark.parametrize(("fmt", "count"), [("f32", 96), ("e8", 96), ("int8", 16), ("int4", 16), ("int4-g64", 16)])
def test_loss_on_the_cpu(model, windows, fmt, count, record_property):
    """Some formats on some windows alone, for the sake of time, by their distance from float32 there."""
    measured = loss(model, windows[:count], layers_of(model, fmt, "cpu"))
    expected = model.losses(windows[:count]).mean() if count < 96 else PUBLISHED["f32"]
    difference, published = measured - expected, PUBLISHED[fmt] - PUBLISHED["f32"]
    print(f"{fmt}: {measured:.5f} nats a byte on {count} windows, {difference:+.5f}, published {published:+.5f}")
    record_property("loss", measured)
    if fmt == "f32":
        assert abs(difference) < 1e-4
    else:  # an encoder may do better than the published one, not worse; few windows spread
        assert -1e-3 < difference < published + (1e-4 if count == 96 else 2e-3)


def test_e8_loss_is_the_same_on_a_gpu(model, windows, backend):
    if "simt" in backend.path:  # which is slow
        windows = windows[:1, :9]
    on_cpu = loss(model, windows, layers_of(model, "e8", "cpu"))
    layers = layers_of(model, "e8", "cuda:0")
    on_gpu = loss(model, windows, layers)
    assert all(not layer.stats()["total"]["pairs"]["cpu"] for layer in layers)
    assert on_gpu == pytest.approx(on_cpu, abs=1e-5)
