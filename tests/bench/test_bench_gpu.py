"""Times of expert layers on a real GPU for pytest-benchmark: the measuring code of ``pycoli bench``."""

import pytest

from pycoli.cli.bench.cases import SHAPES
from pycoli.cli.bench.layers import Group
from pycoli.cli.bench.resident import Layers, layers_needed
from pycoli.cli.bench.samples import Sample, limit
from pycoli.cli.bench.timing import LEAST_REPETITIONS

EXPERTS = 8

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("fmt", ["e8", "int4", "int8"])
def test_layer(benchmark, real, fmt, rows):
    """Replays of a graph of layers out of the cache; `extra_info` has the device's own time of a layer."""
    device, driver = real
    sample = Sample(fmt, SHAPES["qwen"])
    count = layers_needed(EXPERTS * sample.nbytes, driver.l2_bytes)
    taken = []
    with Layers(sample, device, count, EXPERTS) as layers, Group(layers, rows, driver) as group:
        assert group.eager_error() <= limit(rows)
        benchmark.pedantic(lambda: taken.append(group.run(1)), rounds=LEAST_REPETITIONS, warmup_rounds=2)
        assert group.graph_error() <= limit(rows)
    benchmark.extra_info["device_us_per_layer"] = 1e6 * min(taken) / count
