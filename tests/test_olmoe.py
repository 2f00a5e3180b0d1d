"""The plain OLMoE forward pass against what the model itself gave, so that losses measured with it mean something."""

import numpy as np
import olmoe
import pytest

from pycoli.tensorfile import TensorFile


@pytest.fixture(scope="module")
def model(shared):
    return olmoe.Olmoe(shared / "models" / "tiny-olmoe")


@pytest.mark.parametrize("layer", range(4))
def test_moe_blocks_give_the_recorded_outputs(model, shared, layer):
    recorded = TensorFile(shared / "models" / "tiny-olmoe" / "moe_io.safetensors")
    x, y = (recorded.view(f"layer{layer}.{name}").astype(np.float32) for name in "xy")
    np.testing.assert_allclose(model.moe(layer, x), y, rtol=2e-4, atol=2e-5 * np.abs(y).max())


def test_loss_is_that_of_the_model(model, shared):
    losses = model.losses(olmoe.evaluation_windows(shared / "models"))
    assert losses.shape == (96,)
    assert losses.mean() == pytest.approx(0.9116615, abs=1e-4)
