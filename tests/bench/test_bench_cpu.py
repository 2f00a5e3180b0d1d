"""CPU times of single calls for pytest-benchmark, after a check of their results."""

import pytest

from pycoli.cli.bench.cases import Shape
from pycoli.cli.bench.samples import Sample, limit
from pycoli.products import expert, product

SHAPE = Shape(512, 256)
QUICK = {"min_rounds": 3, "max_time": 0.1, "min_time": 1e-4}


@pytest.fixture(scope="module", params=["e8", "int4", "int8", "fp8-e4m3-b128"])
def sample(request):
    return Sample(request.param, SHAPE)


@pytest.mark.benchmark(**QUICK)
@pytest.mark.parametrize("rows", [1, 16])
def test_product(benchmark, sample, rows):
    y = benchmark(product, sample.rows(rows), sample.experts[0][0])
    assert sample.product_error(y, 0) <= limit(rows)


@pytest.mark.benchmark(**QUICK)
@pytest.mark.parametrize("rows", [1, 16])
def test_expert(benchmark, sample, rows):
    y = benchmark(expert, sample.rows(rows), *sample.experts[0])
    assert sample.error(y, [0]) <= limit(rows)
