"""MoE layers on the CPU and on GPUs: routing, every path, faults on each of them, placement, repinning."""

import gc
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import oracle
import pytest
from experts import expected_expert, expert_weights, gaussian, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from overlap import overlap
from simulator import Simulator

import pycoli
from pycoli import cpu, moe
from pycoli._arrays import floats
from pycoli._lib import ffi, lib
from pycoli.moe import RESERVE

D, H = 128, 64
FORMATS = ["e8", "int8", "e8", "int4", "mxfp4", "int4-g32", "fp8-e4m3-b128", "f32"]
LIMIT = 5e-6  # of a sum of experts, each of which may be off by 3e-6


def mixed_experts(count=8):
    """Experts of every format, some with a down matrix of another than gate and up."""
    formats = [(FORMATS[i % 8],) * 2 + (FORMATS[(i + i // 4) % 8],) for i in range(count)]
    return [expert_weights(f, D, H, seed=i) for i, f in enumerate(formats)]


def e8_experts(count=8):
    return [expert_weights(dim=D, hidden=H, seed=i) for i in range(count)]


def random_pairs(rng, rows, top_k, experts):
    ids = rng.integers(0, experts, (rows, top_k)).astype(np.int32)
    return ids, rng.uniform(0.1, 1, (rows, top_k)).astype(np.float32)


def expected_layer(x, ids, weights, experts, shared=None, shared_weights=None):
    """The layer's definition, in float64."""
    y = np.zeros(x.shape)
    for e, expert in enumerate(experts):
        factors = np.where(ids == e, weights, 0).astype(np.float64).sum(axis=1)
        rows = factors != 0
        y[rows] += factors[rows, None] * expected_expert(x[rows].astype(np.float64), *expert)
    if shared:
        factors = np.ones(len(x)) if shared_weights is None else shared_weights.astype(np.float64)
        y += factors[:, None] * expected_expert(x.astype(np.float64), *shared)
    return y


def check_layer(layer, experts, rng, rows=5, top_k=3):
    """One random call is right; gives what it was and what came."""
    x = gaussian(rows, D, seed=int(rng.integers(1 << 30)))
    ids, weights = random_pairs(rng, rows, top_k, len(experts))
    y = layer(x, ids, weights)
    assert oracle.relative_rms(y, expected_layer(x, ids, weights, experts)) < LIMIT
    return x, ids, weights, y


def room_for(experts, count):
    """A budget of device memory for so many of the experts, and not for one more."""
    assert len({tuple((m.fmt, m.shape) for m in expert) for expert in experts}) == 1
    with ExitStack() as stack:
        tensors = [stack.enter_context(pycoli.Tensor(matrix, "cuda:0")) for matrix in experts[0]]
        return count * sum(tensor.vram for tensor in tensors)


def backend_without(library, folder, *names):
    """The GPU library once more, lacking some of its entry points."""
    content = library.read_bytes()
    for name in names:
        symbol = f"\0coli_cuda_{name}\0".encode()
        assert content.count(symbol) >= 1
        content = content.replace(symbol, symbol.replace(b"coli_cuda", b"none_cuda"))
    (folder / "libcoli_cuda.so").write_bytes(content)
    return pycoli.open_backend(folder / "libcoli_cuda.so")


def with_codebook(expert, codebook):
    """E8 matrices with another codebook: their bytes mean something else then."""
    return [pycoli.Weights.from_bytes(m.data, fmt="e8", shape=m.shape, codebook=codebook) for m in expert]


OWN_CODEBOOK = bytes(range(4, 60)) * 18 + bytes(range(4, 20))


def paths(layer, which="last", what="experts"):
    """The paths that did something: {"issue": 3, "cpu": 1}."""
    return {path: n for path, n in layer.stats()[which][what].items() if n}


class TestRouter:
    @given(st.data())
    @settings(max_examples=150, deadline=None)
    def test_against_the_definition(self, data):
        kind = data.draw(st.sampled_from(["softmax", "sigmoid"]))
        groups = data.draw(st.sampled_from([0, 1, 2, 4]))
        experts = (groups or 1) * data.draw(st.integers(1, 6))
        top_groups = data.draw(st.integers(1, groups)) if groups else 0
        room = experts // groups * top_groups if groups else experts
        top_k = data.draw(st.integers(1, room))
        renormalise = data.draw(st.booleans())
        scale = data.draw(st.sampled_from([1.0, 2.5]))
        values = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])  # few, so that there are ties
        logits = data.draw(arrays.arrays(np.float32, (3, experts), elements=values))
        bias = data.draw(st.none() | arrays.arrays(np.float32, experts, elements=values))
        router = pycoli.Router(
            np.eye(experts, dtype=np.float32),
            top_k,
            kind=kind,
            renormalise=renormalise,
            groups=groups,
            top_groups=top_groups,
            bias=bias,
            scale=scale,
        )
        ids, weights = router(logits)
        for row in range(3):
            wanted = oracle.route(logits[row], kind, top_k, renormalise, groups, top_groups, bias, scale)
            assert list(ids[row]) == wanted[0]
            np.testing.assert_allclose(weights[row], wanted[1], rtol=1e-6)

    def test_a_masked_expert_is_never_chosen(self):
        router = pycoli.Router(np.eye(4, dtype=np.float32), 2)
        ids, weights = router.choose(np.array([[-np.inf, 1, -np.inf, 0.5]], np.float32))
        assert sorted(ids[0]) == [1, 3]
        assert weights.sum() == pytest.approx(1)

    def test_masked_experts_of_groups(self):
        """They do not count for their group, and nobody from a group that was left out comes in for them."""
        router = pycoli.Router(np.eye(4, dtype=np.float32), 2, kind="sigmoid", groups=2, top_groups=1)
        masked = -np.inf
        for logits, first, second in [([masked, masked, 3, masked], 2, 3), ([-3, -4, 3, masked], 2, 3)]:
            ids, weights = router.choose(np.array([logits], np.float32))
            assert list(ids[0]) == [first, second]
            np.testing.assert_allclose(weights[0], [1 / (1 + np.exp(-3)), 0], rtol=1e-6)

    @pytest.mark.parametrize(
        ("logits", "message"),
        [
            ([[0, 1], [np.nan, 0]], "row 1 of the logits has nan for expert 0"),
            ([[0, np.inf]], "row 0 of the logits has inf for expert 1"),
            ([[-np.inf, -np.inf]], "row 0 of the logits has no finite value"),
        ],
    )
    def test_logits_that_are_not_finite(self, logits, message):
        with refused(pycoli.NotFiniteError, message):
            pycoli.Router(np.eye(2, dtype=np.float32), 1).choose(np.array(logits, np.float32))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"top_k": 0}, pycoli.ShapeError, "top_k must be 1 ... 6"),
            ({"top_k": 7}, pycoli.ShapeError, "top_k must be 1 ... 6"),
            ({"top_k": 1.5}, pycoli.DtypeError, "top_k must be a whole number"),
            ({"top_k": 2**40}, pycoli.ArgumentError, "top_k must be 0 ... 2147483647"),
            ({"groups": -1, "top_groups": 0}, pycoli.ArgumentError, "groups must be 0 ..."),
            ({"scale": float("nan")}, pycoli.NotFiniteError, "the router's scale is nan"),
            ({"scale": 1e300}, pycoli.NotFiniteError, "the router's scale is inf"),
            ({"scale": "1"}, pycoli.DtypeError, "scale must be a real number"),
            ({"kind": ["softmax"]}, pycoli.ArgumentError, "kind must be"),
            ({"kind": "tanh"}, pycoli.ArgumentError, "kind must be 'softmax' or 'sigmoid'"),
            ({"groups": 4, "top_groups": 1}, pycoli.ShapeError, "6 experts do not make 4 equal groups"),
            ({"groups": 3, "top_groups": 4}, pycoli.ShapeError, "top_groups must be 1 ... 3"),
            ({"groups": 3, "top_groups": 1, "top_k": 3}, pycoli.ShapeError, "do not hold top_k = 3"),
            ({"bias": np.zeros(5, np.float32)}, pycoli.ShapeError, "bias must be [6]"),
            ({"bias": np.array([0, 0, np.nan, 0, 0, 0], np.float32)}, pycoli.NotFiniteError, "nan for expert 2"),
        ],
    )
    def test_settings_that_do_not_fit(self, options, error, message):
        with refused(error, message):
            pycoli.Router(np.eye(6, dtype=np.float32), **{"top_k": 2, **options})


class TestForward:
    @pytest.mark.parametrize("rows", [1, 2, 5, 17, 70])
    def test_mixed_formats_and_a_shared_expert(self, device, rng, rows):
        experts, shared = mixed_experts(), expert_weights(("e8", "e8", "int8"), D, 96, seed=99)
        with pycoli.MoELayer(experts, shared=shared, devices=device) as layer:
            assert set(layer.where) == {device}
            x, factors = gaussian(rows, D), rng.uniform(0, 2, rows).astype(np.float32)
            ids, weights = random_pairs(rng, rows, 4, len(experts))
            y = layer(x, ids, weights, factors)
            wanted = expected_layer(x, ids, weights, experts, shared, factors)
            assert oracle.relative_rms(y, wanted) < LIMIT
            np.testing.assert_array_equal(layer(x, ids, weights, factors), y)
            assert layer.stats()["total"]["calls"] == 2

    def test_4096_rows(self, device, rng):
        experts = e8_experts(2)
        with pycoli.MoELayer(experts, devices=device) as layer:
            check_layer(layer, experts, rng, rows=4096, top_k=1)

    @pytest.mark.parametrize("top_k", [1, 3, 16])
    def test_every_number_of_experts_a_row(self, device, rng, top_k):
        experts = e8_experts(4)
        with pycoli.MoELayer(experts, devices=device) as layer:
            check_layer(layer, experts, rng, rows=3, top_k=top_k)

    def test_no_expert_and_weight_zero(self, device):
        experts = e8_experts(4)
        x = gaussian(3, D)
        ids = np.array([[-1, 2], [0, 1], [-1, -1]], np.int32)
        weights = np.array([[np.nan, 0.5], [0.0, 2.0], [1.0, 1.0]], np.float32)
        with pycoli.MoELayer(experts, devices=device) as layer:
            y = layer(x, ids, weights)
            assert sum(paths(layer).values()) == 2
            assert not y[2].any()
            np.testing.assert_array_equal(y[1], layer(x[1:2], [[1]], np.array([[2.0]], np.float32))[0])

    def test_rows_do_not_depend_on_each_other(self, device, rng):
        experts = e8_experts(4)
        with pycoli.MoELayer(experts, devices=device) as layer:
            x, ids, weights, y = check_layer(layer, experts, rng, rows=4, top_k=2)
            for row in range(4):
                np.testing.assert_array_equal(layer(x[row], ids[row], weights[row]), y[row])

    def test_threads_do_not_change_bits(self, rng):
        experts = mixed_experts()
        results = []
        with pycoli.MoELayer(experts, devices="cpu") as layer:
            x, (ids, weights) = gaussian(300, D), random_pairs(rng, 300, 4, 8)
            for threads in (1, 2):
                cpu.set_threads(threads)
                results.append(layer(x, ids, weights))
            cpu.set_threads(0)
        np.testing.assert_array_equal(*results)

    def test_x_is_rotated_once_or_never(self, device, rng):
        experts = [*e8_experts(3), expert_weights(("int8", "int8", "e8"), D, H)]
        with pycoli.MoELayer(experts, devices=device) as layer:
            x, one = gaussian(2, D), np.ones((2, 3), np.float32)
            layer(x, np.array([[0, 1, 2], [2, 1, 3]]), one)
            assert layer.stats()["last"]["rotations"] == 1
            layer(x, np.array([[3, 3, 3], [3, 3, 3]]), one)
            assert layer.stats()["last"]["rotations"] == 0

    def test_gate_and_up_that_are_rotated_differently(self, device, rng):
        experts = [expert_weights(("e8", "int8", "e8"), D, H), expert_weights(("int4", "e8", "f32"), D, H, seed=1)]
        with pycoli.MoELayer(experts, devices=device) as layer:
            check_layer(layer, experts, rng)
            assert layer.where == ["cpu", "cpu"]
            wanted = "the CPU was asked for" if device == "cpu" else "need different inputs"
            assert wanted in layer.why_cpu(0)

    def test_unrotated_e8(self, device, rng):
        experts = [expert_weights(dim=D, hidden=H, rotate=(False,) * 3), expert_weights(dim=D, hidden=H, seed=1)]
        with pycoli.MoELayer(experts, devices=device) as layer:
            check_layer(layer, experts, rng)

    def test_leading_dimensions(self, device):
        with pycoli.MoELayer(e8_experts(2), devices=device) as layer:
            assert layer(gaussian(2, 3, D), np.zeros((2, 3, 1), int), np.ones((2, 3, 1), np.float32)).shape == (2, 3, D)
            assert layer(gaussian(0, D), np.zeros((0, 1), int), np.ones((0, 1), np.float32)).shape == (0, D)

    def test_with_its_router(self, device):
        experts = e8_experts(4)
        router = pycoli.Router(gaussian(4, D, seed=5), 2)
        x = gaussian(6, D)
        with pycoli.MoELayer(experts, router, devices=device) as layer:
            y = layer(x)
            np.testing.assert_array_equal(y, layer(x, *router(x)))
            np.testing.assert_array_equal(layer.heat > 0, np.isin(np.arange(4), router(x)[0]))

    def test_more_rows_than_a_block_holds(self, rng):
        wide, rows, top_k = 2048, 2100, 16
        experts = [expert_weights(("int8", "int8", "int8"), wide, 2, seed=i) for i in range(24)]
        x, (ids, weights) = gaussian(rows, wide), random_pairs(rng, rows, top_k, 24)
        with pycoli.MoELayer(experts, devices="cpu") as layer:
            y = x.copy()  # in place, as a C host may do it
            with layer._live() as handle:
                numbers = ffi.from_buffer("int[]", ids)
                args = (floats(y), rows, numbers, floats(weights), top_k, ffi.NULL, floats(y))
                assert lib.coli_moe_forward(handle, *args) == lib.COLI_OK
            some = slice(1000, 1010)
            np.testing.assert_array_equal(y[some], layer(x[some], ids[some], weights[some]))
        assert oracle.relative_rms(y[some], expected_layer(x[some], ids[some], weights[some], experts)) < LIMIT

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (([[8]], [[1]]), pycoli.ArgumentError, "ids[0, 0] must be -1 ... 7, got 8"),
            (([[-2]], [[1]]), pycoli.ArgumentError, "ids[0, 0] must be -1 ... 7, got -2"),
            (([[2**40]], [[1]]), pycoli.ArgumentError, "ids must be numbers of experts"),
            (([[0.5]], [[1]]), pycoli.DtypeError, "ids must be whole numbers, got float64"),
            (([[0, 1]], [[1]]), pycoli.ShapeError, "ids and weights must be [..., K] for 1 rows"),
            (([[0], [1]], [[1], [1]]), pycoli.ShapeError, "must be [..., K] for 1 rows"),
            (([[0]], None), pycoli.ArgumentError, "ids need weights"),
            ((None, [[1]]), pycoli.ArgumentError, "weights need ids"),
            ((None, None), pycoli.ArgumentError, "the layer has no router"),
            (([[]], [[]]), pycoli.ArgumentError, "K must be 1 or more, got 0"),
            (([[0]], [[1]], [1]), pycoli.ArgumentError, "the layer has no shared expert"),
            (([[0]], [[1]], [1, 1]), pycoli.ShapeError, "shared_weights must be one for each of 1 rows"),
        ],
    )
    def test_arguments_that_do_not_fit(self, arguments, error, message):
        def array(values, dtype):
            return None if values is None else np.array(values, dtype)

        ids, *floats = arguments
        ids = array(ids, int if ids == [[]] else None)
        with pycoli.MoELayer(mixed_experts(), devices="cpu") as layer, refused(error, message):
            layer(gaussian(1, D), ids, *(array(f, np.float32) for f in floats))

    def test_numbers_that_do_not_fit(self):
        with pycoli.MoELayer(e8_experts(2), devices="cpu") as layer:
            for act, error, message in [
                (lambda: layer.repin(max_swaps=2**40), pycoli.ArgumentError, "max_swaps must be 0 ..."),
                (lambda: layer.repin("much"), pycoli.DtypeError, "hysteresis must be a real number"),
                (lambda: layer.set_half_life("long"), pycoli.DtypeError, "rows must be a real number"),
                (lambda: layer.set_half_life(-1), pycoli.ArgumentError, "rows >= 0"),
                (lambda: layer.place("cpu", reserve=-1), pycoli.ArgumentError, "reserve must be 0 ..."),
            ]:
                with refused(error, message):
                    act()
            for act in (pycoli.place, pycoli.repin):
                with refused(pycoli.ArgumentError, "at least 1 layer is needed, got 0"):
                    act([])
            for heat in (["a", "b"], [1j, 1j]):
                with refused(pycoli.DtypeError, "heat must be real numbers"):
                    layer.heat = heat
            with refused(pycoli.ArgumentError, "nan for expert 0"):
                layer.heat = [np.nan, 1]

    def test_budgets_that_do_not_fit(self, backend):
        for budget, error, message in [
            (2**64, pycoli.ArgumentError, "vram_budget must be 0 ..."),
            (-1, pycoli.ArgumentError, "vram_budget must be 0 ..."),
            ("1G", pycoli.DtypeError, "vram_budget must be a whole number"),
            ({"cuda:7": 0}, pycoli.ArgumentError, "vram_budget names cuda:7; the devices are cuda:0"),
        ]:
            with refused(error, message):
                pycoli.MoELayer(e8_experts(1), devices=["cuda:0"], vram_budget=budget)

    def test_a_gate_that_does_not_fit(self):
        shared = expert_weights(dim=D, hidden=H)
        with refused(pycoli.ShapeError, f"shared_gate must be [{D}], got shape [3]"):
            pycoli.MoELayer([], shared=shared, devices="cpu", shared_gate=np.zeros(3, np.float32))
        with refused(pycoli.ArgumentError, "no shared expert"):
            pycoli.MoELayer([shared], devices="cpu", shared_gate=np.zeros(D, np.float32))

    def test_experts_that_do_not_fit(self):
        good, other = expert_weights(dim=D, hidden=H), expert_weights(dim=D, hidden=32)
        for experts, error, message in [
            ([good, other], pycoli.ShapeError, "expert 1: gate must be [64, 128] as that of the first, got [32, 128]"),
            ([good[:2]], pycoli.ShapeError, "experts[0] must be (gate, up, down), got 2 matrices"),
            ([(*good[:2], np.zeros(3))], pycoli.DtypeError, "experts[0]: down must be Weights"),
            (5, pycoli.DtypeError, "experts must be a sequence"),
            ([], pycoli.ArgumentError, "at least 1 expert"),
        ]:
            with refused(error, message):
                pycoli.MoELayer(experts, devices="cpu")
        with refused(pycoli.ShapeError, "router must be for [1, 128]"):
            pycoli.MoELayer([good], pycoli.Router(np.eye(D, dtype=np.float32), 2), devices="cpu")

    def test_a_layer_of_a_shared_expert_alone(self, device):
        shared = expert_weights(dim=D, hidden=H)
        x = gaussian(3, D)
        with pycoli.MoELayer([], shared=shared, devices=device) as layer:
            y = layer(x, np.zeros((3, 0), int), np.zeros((3, 0), np.float32))
            np.testing.assert_array_equal(layer(x), y)
        assert oracle.relative_rms(y, expected_expert(x.astype(np.float64), *shared)) < LIMIT

    def test_freed(self):
        layer = pycoli.MoELayer(e8_experts(2), devices="cpu")
        layer.free()
        layer.free()
        with refused(pycoli.FreedError, "the layer of 2 experts has been freed"):
            layer(gaussian(1, D), [[0]], np.ones((1, 1), np.float32))


class TestPaths:
    def test_few_rows_are_issued_and_many_are_a_group(self, backend, rng):
        experts = e8_experts(8)
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            for rows in (1, 3):
                check_layer(layer, experts, rng, rows=rows, top_k=8)
                assert set(paths(layer)) == {"issue"}
            check_layer(layer, experts, rng, rows=40, top_k=8)
            assert set(paths(layer)) == {"group"}

    def test_formats_that_meet_different_rows_are_issued_by_rows(self, backend, rng):
        """The library sums up rows of one x alone."""
        experts = mixed_experts(8)
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            check_layer(layer, experts, rng, rows=1, top_k=8)
            assert set(paths(layer)) == {"issue"}
            check_layer(layer, experts, rng, rows=3, top_k=8)
            assert set(paths(layer)) == {"group"}

    @pytest.mark.parametrize(("count", "rows"), [(65, 1), (130, 2)])
    def test_more_experts_than_a_group_holds(self, backend, rng, count, rows):
        experts = [expert_weights(("int8",) * 3, 16, 8, seed=i % 5) for i in range(count)]
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            x, ids = gaussian(rows, 16), np.stack([rng.permutation(count) for _ in range(rows)])
            weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
            y = layer(x, ids, weights)
            assert oracle.relative_rms(y, expected_layer(x, ids, weights, experts)) < LIMIT
            assert paths(layer) == {"group": count}
            assert paths(layer, what="pairs") == {"group": count * rows}
            assert not paths(layer, what="failed")

    def test_the_cpu_has_its_share(self, backend, rng):
        experts = e8_experts(6)
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts, 4)) as layer:
            assert set(layer.where) == {"cuda:0", "cpu"}
            x, one = gaussian(1, D), np.ones((1, 6), np.float32)
            layer(x, [range(6)], one)
            on_gpu = layer.where.count("cuda:0")
            assert paths(layer) == {"issue": on_gpu, "cpu": 6 - on_gpu}
            size = sum(m.nbytes for m in experts[0])
            assert layer.stats()["last"]["cpu_bytes"] == size * (6 - on_gpu)
            check_layer(layer, experts, rng, rows=100, top_k=6)
            assert set(paths(layer)) == {"group", "cpu"}

    def test_an_old_library_keeps_what_it_can(self, old_backend, rng):
        experts = [expert_weights(("int8",) * 3, D, H), expert_weights(("int4",) * 3, D, H), *e8_experts(1)]
        with pycoli.MoELayer(experts, vram_budget=10**6) as layer:
            assert layer.where == ["cuda:0", "cuda:0", "cpu"]
            assert "coli_cuda_e8_set_grid" in layer.why_cpu(2)
            x, one = gaussian(1, D), np.ones((1, 3), np.float32)
            y = layer(x, [[0, 1, 2]], one)
            assert oracle.relative_rms(y, expected_layer(x, np.array([[0, 1, 2]]), one, experts)) < LIMIT
            assert paths(layer) == {"issue": 2, "cpu": 1}

    @pytest.mark.parametrize(
        ("lacking", "one_row", "many_rows"),
        [
            (["expert_group_issue"], {"group"}, {"group"}),
            (["expert_group_take"], {"group"}, {"group"}),
            (["expert_group_issue_sum"], {"issue"}, {"group"}),
            (["expert_group"], {"issue"}, {"issue"}),
            (["expert_group", "expert_group_issue_sum"], {"issue"}, {"single"}),
            (["expert_group", "expert_group_issue"], {"single"}, {"single"}),
            (["expert_mlp"], {"issue"}, {"issue"}),
            (["expert_group", "expert_group_issue", "expert_mlp"], {"cpu"}, {"cpu"}),
            (["e8_set_grid"], {"cpu"}, {"cpu"}),
        ],
    )
    def test_a_library_that_lacks_entry_points(self, simt_lib, tmp_path, rng, lacking, one_row, many_rows):
        backend = backend_without(simt_lib, tmp_path, *lacking)
        experts = e8_experts(4)
        with pycoli.MoELayer(experts, devices=[pycoli.Device(0, backend)]) as layer:
            check_layer(layer, experts, rng, rows=1, top_k=4)
            assert set(paths(layer)) == one_row
            check_layer(layer, experts, rng, rows=20, top_k=2)
            assert set(paths(layer)) == many_rows
            why = layer.why_cpu(0)
            assert (lacking[0] in why) if one_row == {"cpu"} else why is None
        backend.shutdown()

    def test_no_path_for_many_rows_is_said(self, simt_lib, tmp_path, rng):
        """A library that can only issue takes few rows: the CPU does the rest, and not in silence."""
        backend = backend_without(simt_lib, tmp_path, "expert_group", "expert_mlp")
        experts = e8_experts(2)
        with pycoli.MoELayer(experts, devices=[pycoli.Device(0, backend)]) as layer:
            check_layer(layer, experts, rng, rows=200, top_k=2)
            assert set(paths(layer)) == {"cpu"}
            assert "coli_cuda_expert_mlp" in layer.why_cpu(0)
            assert "coli_cuda_expert_mlp" in layer.stats()["why_failed"]["single"]
            assert paths(layer, what="failed") == {"single": 2}
            check_layer(layer, experts, rng, rows=1, top_k=2)
            assert layer.why_cpu(0) is None
        backend.shutdown()

    def test_a_library_that_cannot_tell_what_is_free(self, simt_lib, tmp_path, rng):
        backend = backend_without(simt_lib, tmp_path, "mem_info")
        with pycoli.MoELayer(e8_experts(1), devices=[pycoli.Device(0, backend)]) as layer:
            assert layer.where == ["cpu"]
            assert "lacks coli_cuda_mem_info, so give a budget in bytes" in layer.why_cpu(0)
            layer.place([pycoli.Device(0, backend)], 10**6)
            assert layer.where == ["cuda:0"]
        backend.shutdown()

    def test_a_layer_is_freed_after_the_calls_in_progress(self, backend, rng):
        x, ids, one = gaussian(1, D), [[0, 1]], np.ones((1, 2), np.float32)
        experts = e8_experts(2)
        for _ in range(10):
            layer = pycoli.MoELayer(experts, devices=["cuda:0"])

            def work(layer=layer):
                while True:
                    layer(x, ids, one)
                    layer.repin()
                    assert len(layer.where) == 2

            with ThreadPoolExecutor(3) as pool:
                ends = [pool.submit(work) for _ in range(3)]
                layer(x, ids, one)
                layer.free()
            assert all(isinstance(end.exception(), pycoli.FreedError) for end in ends)
            assert pycoli.Device(0).stats().tensors == 0

    def test_a_fork_is_refused(self, backend):
        if not hasattr(os, "fork"):
            pytest.skip("needs fork")
        x, ids, one = gaussian(1, D), [[0, 1]], np.ones((1, 2), np.float32)
        layer = pycoli.MoELayer(e8_experts(2), devices=["cuda:0"])
        on_cpu = pycoli.MoELayer(e8_experts(2), devices="cpu")
        y = layer(x, ids, one)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                with refused(pycoli.DeviceError, "its fork"):
                    layer(x, ids, one)
                with refused(pycoli.DeviceError, "its fork"):
                    layer.unplace()
                layer.free()
                assert oracle.relative_rms(on_cpu(x, ids, one), y) < LIMIT
                os.write(writer, b"fine")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert pipe.read() == b"fine"
        np.testing.assert_array_equal(layer(x, ids, one), y)
        layer.free()
        on_cpu.free()

    def test_bits_do_not_depend_on_who_has_the_device(self, backend, rng):
        """Rows that the GPU sums up, and rows that the layer does because another group is outstanding there."""
        experts = e8_experts(8)
        x, (ids, weights) = gaussian(3, D), random_pairs(rng, 3, 5, 8)
        with (
            pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts, 5)) as layer,
            pycoli.Expert(*experts[0], device="cuda:0") as rival,
        ):
            wanted = layer(x, ids, weights)
            assert set(paths(layer)) == {"issue", "cpu"}
            group = pycoli.ExpertGroup([rival])
            group.issue([x])
            np.testing.assert_array_equal(layer(x, ids, weights), wanted)
            assert set(paths(layer)) == {"group", "cpu"}
            assert "not taken yet" in layer.stats()["why_failed"]["issue"]
            assert oracle.relative_rms(group.take()[0], expected_expert(x.astype(np.float64), *experts[0])) < LIMIT
            np.testing.assert_array_equal(layer(x, ids, weights), wanted)
            assert set(paths(layer)) == {"issue", "cpu"}

    def test_four_threads_call_four_layers(self, backend):
        experts = e8_experts(8)
        layers = [pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=10**9) for _ in range(4)]
        wrong = []

        def work(number):
            rng = np.random.default_rng(number)
            try:
                for turn in range(6):
                    check_layer(layers[number], experts, rng, rows=1 + 2 * (turn % 2), top_k=8)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for layer in layers:
            assert sum(layer.stats()["total"]["failed"].values()) == 0
            layer.free()
        assert not wrong


@pytest.fixture
def simulated(simt_lib, monkeypatch):
    """The simulated GPU library with fault injection; nothing may be left on its devices."""
    monkeypatch.setenv("COLI_CUDA_LIB", str(simt_lib))
    backend = pycoli.open_backend()
    simulator = Simulator(backend.path)
    yield simulator
    simulator.fail(b"*", 0)
    left = {name: pycoli.Device(name).stats() for name in backend.devices()}
    backend.shutdown()
    assert set(left.values()) == {(0, 0)}, left


ENTRY_POINTS = {
    "issue": "coli_cuda_expert_group_issue_sum: ",
    "take": "coli_cuda_expert_group_take: ",
    "group": "coli_cuda_expert_group: ",
    "single": "coli_cuda_expert_mlp: ",
}
"""What a layer calls for a step, in front of why it failed."""


class TestFaults:
    @pytest.mark.parametrize(("rows", "top_k"), [(1, 4), (70, 4)])
    def test_every_call_that_fails(self, backend, monkeypatch, rng, rows, top_k):
        experts = e8_experts(6)
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            x, ids, weights, clean = check_layer(layer, experts, rng, rows, top_k)
            wanted = expected_layer(x, ids, weights, experts)
            seen = set()
            for allowed in range(20):
                monkeypatch.setenv("COLI_GPU_FAIL_AFTER", str(allowed))
                y = layer(x, ids, weights)
                monkeypatch.delenv("COLI_GPU_FAIL_AFTER")
                assert oracle.relative_rms(y, wanted) < LIMIT
                failed = sum(paths(layer, what="failed").values())
                assert ("cpu" in paths(layer)) <= (failed > 0)
                if not failed:
                    break
                for step, count in paths(layer, what="failed").items():
                    assert 1 <= count <= len(np.unique(ids))
                    why = layer.stats()["why_failed"][step]
                    assert why.startswith(ENTRY_POINTS[step])
                    assert "COLI_GPU_FAIL_AFTER" in why
                    seen.add(step)
                np.testing.assert_array_equal(layer(x, ids, weights), clean)
                assert layer.why_cpu(int(ids[0, 0])) is None
            assert 1 <= allowed < 19
            assert seen == ({"issue", "take", "group", "single"} if rows == 1 else {"group", "single"})
            why_failed = layer.stats()["why_failed"]
            assert {step for step, why in why_failed.items() if why} == seen  # kept after good calls

    @pytest.mark.parametrize(("rows", "top_k"), [(1, 4), (70, 4)])
    def test_every_runtime_call_that_fails(self, simulated, rng, rows, top_k):
        experts = e8_experts(6)
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            x, ids, weights, clean = check_layer(layer, experts, rng, rows, top_k)
            wanted = expected_layer(x, ids, weights, experts)
            before = simulated.calls()
            layer(x, ids, weights)
            calls = simulated.calls() - before
            assert calls > 3
            seen = set()
            for nth in range(1, calls + 1):
                simulated.fail(b"*", nth)
                y = layer(x, ids, weights)
                simulated.fail(b"*", 0)
                assert oracle.relative_rms(y, wanted) < LIMIT
                seen |= set(paths(layer, what="failed"))
                np.testing.assert_array_equal(layer(x, ids, weights), clean)
            assert seen == ({"issue", "take"} if rows == 1 else {"group"})

    @pytest.mark.parametrize(("rows", "top_k"), [(1, 4), (70, 4)])
    def test_a_device_that_is_lost_at_every_call(self, simulated, rng, rows, top_k):
        """From then on nothing works there: the CPU does the work, and a swap leaves both experts to it."""
        experts = e8_experts(6)
        budget = room_for(experts, 4)
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=budget) as layer:
            x, ids, weights, clean = check_layer(layer, experts, rng, rows, top_k)
            wanted = expected_layer(x, ids, weights, experts)
            before = simulated.calls()
            layer(x, ids, weights)
            calls = simulated.calls() - before
            for nth in range(1, calls + 1):
                simulated.lose_devices(nth)
                for _ in range(2):
                    assert oracle.relative_rms(layer(x, ids, weights), wanted) < LIMIT
                assert set(paths(layer)) == {"cpu"}
                simulated.fail(b"*", 0)
                np.testing.assert_array_equal(layer(x, ids, weights), clean)
            cold = layer.where.index("cpu")
            layer.heat = np.where(np.arange(6) == cold, 9, 0)
            simulated.lose_devices(1)
            assert layer.repin()["failed"] == 1
            assert oracle.relative_rms(layer(x, ids, weights), wanted) < LIMIT
            simulated.fail(b"*", 0)
            assert layer.where.count("cuda:0") == 3
            layer.place(["cuda:0"], budget)
            assert layer.where.count("cuda:0") == 4
            assert layer.where[cold] == "cuda:0"
            check_layer(layer, experts, rng)

    def test_every_allocation_that_fails(self, simulated, rng):
        experts = e8_experts(4)
        pycoli.Device(0).memory()
        for nth in range(1, 20):
            simulated.fail(b"cudaMalloc", nth)
            with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
                simulated.fail(b"*", 0)
                where = layer.where
                check_layer(layer, experts, rng)
                if "cpu" in where:
                    assert "memory" in layer.why_cpu(where.index("cpu"))
            if "cpu" not in where:
                break
        assert nth == 13  # one for each matrix, and then none fails

    def test_a_full_device_hands_on_to_the_next(self, simulated, rng):
        experts = e8_experts(4)
        pycoli.Device(0).memory()
        simulated.fail(b"cudaMalloc", 2)
        with pycoli.MoELayer(experts, devices=["cuda:0", "cuda:1"]) as layer:
            simulated.fail(b"*", 0)
            assert len(set(layer.where)) == 1
            assert layer.where[0] != "cpu"
            check_layer(layer, experts, rng)

    def test_shutdown_and_a_new_start(self, backend, rng):
        experts = e8_experts(4)
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            check_layer(layer, experts, rng)
            backend.shutdown()
            assert layer.where == ["cpu"] * 4
            check_layer(layer, experts, rng)
            assert set(paths(layer)) == {"cpu"}
            assert "taken off the GPU" in layer.why_cpu(0)
            layer.place(["cuda:0"])
            check_layer(layer, experts, rng)
            assert set(paths(layer)) == {"issue"}

    def test_a_shutdown_while_threads_call(self, backend, rng):
        """They go on, on the CPU at last."""
        experts = e8_experts(4)
        x, (ids, weights) = gaussian(2, D), random_pairs(rng, 2, 3, 4)
        wanted = expected_layer(x, ids, weights, experts)
        layer = pycoli.MoELayer(experts, devices=["cuda:0"])
        ended = threading.Event()

        def work():
            at_the_end = False
            while not at_the_end:  # the last call begins after the last shutdown
                at_the_end = ended.is_set()
                assert oracle.relative_rms(layer(x, ids, weights), wanted) < LIMIT
            return paths(layer)

        with layer, ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(work) for _ in range(2)]
            for _ in range(3):
                layer.place(["cuda:0"])
                layer(x, ids, weights)
                backend.shutdown()
            ended.set()
            assert [set(end.result()) for end in ends] == [{"cpu"}] * 2

    def test_a_shutdown_behind_its_back(self, simulated, rng):
        """What a C host may do: the tensors are gone, and the layer goes on from host memory."""
        experts = e8_experts(4)
        backend = pycoli.open_backend()
        with pycoli.MoELayer(experts, devices=["cuda:0"]) as layer:
            backend._entry("coli_cuda_shutdown")()
            check_layer(layer, experts, rng)
            assert set(paths(layer)) == {"cpu"}
            assert layer.why_cpu(0)
            backend._started_in = None
            layer.place(["cuda:0"])  # tensors that are gone do not count as placed
            assert layer.where == ["cuda:0"] * 4
            check_layer(layer, experts, rng)
            assert set(paths(layer)) == {"issue"}

    @pytest.mark.parametrize(("rows", "step"), [(1, "take"), (300, None)])
    def test_a_shutdown_with_work_in_flight(self, simulated, rng, rows, step):
        """The host does it while the layer computes its CPU experts, GPU experts being under way."""
        experts, shut_down = e8_experts(4), pycoli.open_backend()._entry("coli_cuda_shutdown")
        ends = []

        def reread(number):
            if ends:
                ends.pop()()
            return experts[number]

        budget = room_for(experts, 2)
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=budget, reread=reread) as layer:
            ends.append(shut_down)
            check_layer(layer, experts, rng, rows=rows, top_k=16)
            assert not ends
            if step:
                assert paths(layer, what="failed")[step] == 2
                assert set(paths(layer)) == {"cpu"}
            check_layer(layer, experts, rng, rows=rows, top_k=16)
            assert set(paths(layer)) == {"cpu"}
            pycoli.open_backend()._started_in = None
            layer.place(["cuda:0"], budget)
            check_layer(layer, experts, rng, rows=rows, top_k=16)
            assert set(paths(layer)) == {"issue" if rows == 1 else "group", "cpu"}

    @pytest.mark.parametrize("nth", range(1, 7))
    def test_an_update_that_fails_half_way(self, simulated, rng, nth):
        experts = e8_experts(4)
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts, 2)) as layer:
            assert layer.where.count("cuda:0") == 2
            cold = layer.where.index("cpu")
            heat = np.zeros(4)
            heat[cold] = 10
            layer.heat = heat
            simulated.fail(b"cudaMemcpyAsync", nth)
            done = layer.repin()
            simulated.fail(b"*", 0)
            assert done["swaps"] + done["failed"] == 1
            stats = layer.stats()
            assert stats["total"]["failed"]["update"] == stats["total"]["repinned"]["failed"] == done["failed"]
            if done["failed"]:
                assert layer.where[cold] == "cpu"
                assert layer.where.count("cuda:0") == 1
                assert "was lost" in layer.why_cpu(cold)
                assert stats["why_failed"]["update"] == layer.why_cpu(cold)
            check_layer(layer, experts, rng)
            layer.place(["cuda:0"], room_for(experts, 2))
            assert "cuda:0" in layer.where
            check_layer(layer, experts, rng)

    def test_an_e8_codebook_cannot_change_under_a_layer(self, backend):
        table = bytes(range(256)) * 4
        with pycoli.MoELayer(e8_experts(2), devices=["cuda:0"]), refused(pycoli.StateError, "2 E8 matrices"):
            backend.set_e8_codebook(table)
        backend.set_e8_codebook(table)
        with refused(pycoli.StateError, "another codebook"):
            pycoli.MoELayer(e8_experts(2), devices=["cuda:0"])


class TestMemory:
    @staticmethod
    def resident() -> int:
        """Megabytes of this process that are in memory."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    def test_calls_of_all_layers_share_what_is_kept(self, rng):
        wide, rows, top_k = 2048, 512, 8
        experts = [expert_weights(("int8",) * 3, wide, 2, seed=i) for i in range(top_k)]
        x, (ids, weights) = gaussian(rows, wide), random_pairs(rng, rows, top_k, top_k)
        gc.collect()
        assert not moe._LIVE
        layers = [pycoli.MoELayer(experts, devices="cpu") for _ in range(2)]
        wanted = layers[0](x, ids, weights)
        after_one = self.resident()
        np.testing.assert_array_equal(layers[1](x, ids, weights), wanted)
        assert self.resident() - after_one < 20
        pycoli.trim_memory()
        assert after_one - self.resident() > 50  # packed rows and results have 64
        np.testing.assert_array_equal(layers[0](x, ids, weights), wanted)
        layers[0].free()
        after_one = self.resident()
        layers[1].free()
        assert after_one - self.resident() > 50


class TestHostCopies:
    def test_released_on_a_gpu_and_read_again(self, backend, rng, monkeypatch):
        experts, asked = e8_experts(4), []

        def reread(number):
            asked.append(number)
            return experts[number]

        with pycoli.MoELayer(experts, devices=["cuda:0"], reread=reread) as layer:
            assert sorted(asked) == [0, 1, 2, 3]
            assert not layer._host._held
            check_layer(layer, experts, rng)
            assert len(asked) == 4
            monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
            for _ in range(3):
                layer(gaussian(1, D), [[0, 1]], np.ones((1, 2), np.float32))
            assert sorted(asked[4:]) == [0, 1]  # and kept as long as the GPU fails
            monkeypatch.delenv("COLI_GPU_FAIL_AFTER")
            layer(gaussian(1, D), [[0, 1]], np.ones((1, 2), np.float32))
            assert not layer._host._held
            layer.unplace()
            assert len(asked) == 6
            check_layer(layer, experts, rng, rows=5, top_k=4)
            assert len(asked) == 10

    def test_on_the_cpu_they_are_read_when_needed(self, rng):
        experts, asked = e8_experts(4), []
        with pycoli.MoELayer(experts, devices="cpu", reread=lambda n: asked.append(n) or experts[n]) as layer:
            assert asked == []
            for _ in range(2):
                layer(gaussian(1, D), [[2]], np.ones((1, 1), np.float32))
            assert asked == [2]

    def test_a_reread_that_fails(self, rng):
        experts = e8_experts(2)

        def fails(number):
            raise OSError("the disk is gone")

        with pycoli.MoELayer(experts, devices="cpu", reread=fails) as layer:
            with pytest.raises(pycoli.StateError, match="expert 1 cannot be had") as caught:
                layer(gaussian(1, D), [[1]], np.ones((1, 1), np.float32))
            assert "the disk is gone" in str(caught.value.__cause__)

    @pytest.mark.parametrize("act", ["call", "stats", "other"])
    def test_a_reread_that_uses_a_layer(self, act):
        experts, x, one = e8_experts(2), gaussian(1, D), np.ones((1, 1), np.float32)
        other = pycoli.MoELayer(experts, devices="cpu")

        def reread(number):
            if act == "stats":
                layer.stats()
            else:
                (other if act == "other" else layer)(x, [[0]], one)

        with pycoli.MoELayer(experts, devices="cpu", reread=reread) as layer:
            with pytest.raises(pycoli.StateError) as caught:
                layer(x, [[1]], one)
            assert "must not use a layer" in str(caught.value.__cause__)
        other.free()

    @pytest.mark.parametrize(("stub", "room_for_one"), [("stub_old", 30_000), (None, 80_000)])
    def test_a_reread_that_frees_layers(self, build_dir, simt_lib, rng, stub, room_for_one):
        """Itself and another; collection may do the same at any time. Old libraries are locked meanwhile."""
        backend = pycoli.open_backend(build_dir / "tests" / "stubs" / f"{stub}.so" if stub else simt_lib)
        experts = [expert_weights(("int8",) * 3, D, H, seed=i) for i in range(2)]
        gpu = pycoli.Device(0, backend)
        other = pycoli.MoELayer(experts, devices=[gpu], vram_budget=10**6)
        layer = pycoli.MoELayer(experts, devices=[gpu], vram_budget=room_for_one, reread=lambda number: experts[number])
        assert sorted(layer.where) == ["cpu", "cuda:0"]

        def reread(number):
            other.free()
            layer.free()
            return experts[number]

        layer._host._reread = reread
        x, ids, one = gaussian(1, D), np.array([[0, 1]]), np.ones((1, 2), np.float32)
        y = layer(x, ids, one)
        assert oracle.relative_rms(y, expected_layer(x, ids, one, experts)) < LIMIT
        for freed in (layer, other):
            with refused(pycoli.FreedError, "has been freed"):
                freed(x, ids, one)
        with pycoli.MoELayer(experts, devices=[gpu], vram_budget=10**6) as again:
            assert again.where == ["cuda:0"] * 2
        backend.shutdown()

    def test_a_reread_that_fails_while_placing(self, backend):
        experts, raised = e8_experts(2), [OSError("the disk is gone")]

        def reread(number):
            if raised:
                raise raised[0]
            return experts[number]

        with pytest.warns(RuntimeWarning, match="the disk is gone"):
            layer = pycoli.MoELayer(experts, devices=["cuda:0"], reread=reread)
        assert layer.where == ["cpu", "cpu"]
        layer.heat = [5, 5]
        raised[0] = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            layer.place(["cuda:0"])
        with pytest.raises(KeyboardInterrupt):
            layer(gaussian(1, D), [[0]], np.ones((1, 1), np.float32))
        raised.clear()
        with pytest.raises(pycoli.ArgumentError) as caught:
            layer(gaussian(1, D), [[9]], np.ones((1, 1), np.float32))
        assert caught.value.__cause__ is None
        layer.free()

    def test_what_failed_in_a_call_that_fails_is_counted(self, backend, monkeypatch):
        experts, works = e8_experts(2), [True]

        def reread(number):
            if not works[0]:
                raise OSError("gone")
            return experts[number]

        with pycoli.MoELayer(experts, devices=["cuda:0"], reread=reread) as layer:
            works[0] = False
            monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
            with refused(pycoli.StateError, "cannot be had back"):
                layer(gaussian(1, D), [[0, 1]], np.ones((1, 2), np.float32))
            stats = layer.stats()
            failed = {step: 2 if why else 0 for step, why in stats["why_failed"].items()}
            assert failed["single"] == 2
            assert stats["last"]["failed"] == stats["total"]["failed"] == failed
            assert stats["last"]["calls"] == stats["total"]["calls"] == sum(paths(layer).values()) == 0

    def test_codebooks_of_their_own(self, rng):
        """The layer has them for good, and no matrix is decoded with another."""
        experts = e8_experts(2)
        own = [with_codebook(expert, OWN_CODEBOOK) for expert in experts]

        def reread(number):
            return with_codebook(experts[number], bytes(OWN_CODEBOOK))

        layer = pycoli.MoELayer([reread(0), reread(1)], devices="cpu", reread=reread)
        gc.collect()
        others = [bytes([7]) * 1024 for _ in range(100)]  # where the first ones were
        check_layer(layer, own, rng)
        assert len(others) == 100
        layer.free()
        with pycoli.MoELayer(experts, devices="cpu", reread=reread) as layer:
            with pytest.raises(pycoli.StateError) as caught:
                layer(gaussian(1, D), [[0]], np.ones((1, 1), np.float32))
            assert "codebooks that the layer was made with" in str(caught.value.__cause__)

    def test_a_reread_of_another_kind(self):
        experts, other = e8_experts(1), expert_weights(("int8",) * 3, D, H)
        with pycoli.MoELayer(experts, devices="cpu", reread=lambda n: other) as layer:
            with pytest.raises(pycoli.StateError) as caught:
                layer(gaussian(1, D), [[0]], np.ones((1, 1), np.float32))
            assert "reread(0) must give" in str(caught.value.__cause__)


class TestPlacement:
    def test_padding_counts_in_the_budget(self, backend):
        """Columns are padded to 256 on a GPU, so that these take nearly twice their bytes."""
        experts = [expert_weights(("int8",) * 3, D, H, seed=i) for i in range(4)]
        taken = room_for(experts, 1)
        assert taken > 1.5 * sum(matrix.nbytes for matrix in experts[0])
        for budget, count in [(taken - 1, 0), (taken, 1), (3 * taken - 1, 2)]:
            with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=budget) as layer:
                assert layer.where.count("cuda:0") == count
                assert f"it takes {taken} bytes of GPU 0" in layer.why_cpu(count) or count == 1
                assert layer.why_cpu(3)
                layer.place(["cuda:0"], budget)
                assert layer.where.count("cuda:0") == count

    def test_heat_halves(self):
        x, one = gaussian(8, D), np.ones((8, 1), np.float32)
        with pycoli.MoELayer(e8_experts(2), devices="cpu") as layer:
            layer.set_half_life(8)
            layer(x[:4], np.zeros((4, 1), int), one[:4])
            np.testing.assert_allclose(layer.heat, [4, 0])
            layer(x, np.ones((8, 1), int), one)
            np.testing.assert_allclose(layer.heat, [2, 8])
            layer(x[:4], np.zeros((4, 1), int), one[:4])
            np.testing.assert_allclose(layer.heat, [4 + 2 / 2**0.5, 8 / 2**0.5])
            layer.set_half_life(0)
            before = layer.heat
            layer(x, np.ones((8, 1), int), one)
            np.testing.assert_allclose(layer.heat, np.add(before, [0, 8]))

    def test_an_automatic_budget_is_what_is_free_less_the_reserve(self, simulated):
        experts, device = e8_experts(4), pycoli.Device(0)
        room = room_for(experts, 3)
        reserve = device.memory().free - room
        with pycoli.MoELayer(experts, devices=[device], reserve=reserve) as layer:
            assert layer.where == ["cuda:0"] * 3 + ["cpu"]

    def test_the_hottest_first_within_the_budget(self, backend):
        experts = e8_experts(6)
        with pycoli.MoELayer(experts, devices="cpu") as layer:
            layer.heat = [1, 6, 2, 5, 3, 4]
            layer.place(["cuda:0"], room_for(experts, 4))
            assert [i for i, name in enumerate(layer.where) if name == "cuda:0"] == [1, 3, 4, 5]
            assert "bytes of room" in layer.why_cpu(0)
            layer.place(["cuda:0"], room_for(experts, 4))  # those placed before count
            assert layer.where.count("cuda:0") == 4
            layer.place(["cuda:0"], 10**9)
            assert layer.where == ["cuda:0"] * 6

    def test_the_log_says_who_stays_and_why(self, backend, monkeypatch, capfd):
        experts = [*e8_experts(4), expert_weights(("e8", "int8", "e8"), D, H)]
        monkeypatch.setenv("COLI_LOG", "1")
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts[:4], 2)):
            lines = [line for line in capfd.readouterr().err.splitlines() if "stay on the CPU" in line]
        assert len(lines) == 2
        assert any("2 of 5 experts stay on the CPU: no GPU of the call has the" in line for line in lines)
        assert any("1 of 5 experts stay on the CPU: its gate and up matrices" in line for line in lines)

    def test_many_reasons_are_cut_short(self, backend, monkeypatch, capfd):
        formats = ["f32", "int8", "int4", "int2", *["int3-g64"] * 2, ("e8", "int8", "e8")]
        experts = [expert_weights((f,) * 3 if isinstance(f, str) else f, D, H) for f in formats]
        monkeypatch.setenv("COLI_LOG", "1")
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=0):
            lines = [line for line in capfd.readouterr().err.splitlines() if "stay on the CPU" in line]
        assert len(lines) == 5
        assert "3 of 7 experts stay on the CPU: other reasons" in lines[-1]

    def test_what_no_gpu_takes_leaves_the_room_to_others(self, backend, rng):
        """It is hottest, and the GPU is not to blame."""
        own = with_codebook(expert_weights(dim=D, hidden=H), OWN_CODEBOOK)
        experts = [expert_weights(("int3-g64",) * 3, D, H), expert_weights(("f32", "f32", "int3-g64"), D, H), own]
        experts += e8_experts(2)
        with pycoli.MoELayer(experts, devices="cpu") as layer:
            layer.heat = [9, 8, 7, 1, 1]
            layer.place(["cuda:0"])
            assert layer.where == ["cpu"] * 3 + ["cuda:0"] * 2
            assert layer.why_cpu(0) == layer.why_cpu(1) == "the GPU ABI has no int3-g64"
            assert "its codebook is not the published one" in layer.why_cpu(2)
            check_layer(layer, experts, rng, rows=2, top_k=5)

    def test_what_an_old_library_does_not_take(self, old_backend):
        experts = [*e8_experts(1), expert_weights(("int8",) * 3, D, H)]
        with pycoli.MoELayer(experts, vram_budget=10**6) as layer:
            assert layer.where == ["cpu", "cuda:0"]

    @pytest.mark.parametrize("budget", [0, 1000])
    def test_no_room_at_all(self, backend, budget):
        with pycoli.MoELayer(e8_experts(2), devices=["cuda:0"], vram_budget=budget) as layer:
            assert layer.where == ["cpu", "cpu"]
            assert pycoli.Device(0).stats().tensors == 0

    def test_a_reserve_larger_than_the_device(self, backend):
        with pycoli.MoELayer(e8_experts(2), devices=["cuda:0"], reserve=1 << 60) as layer:
            assert layer.where == ["cpu", "cpu"]
            assert re.fullmatch(rf"of GPU 0, \d+ bytes are free, and the reserve is {1 << 60}", layer.why_cpu(0))
        assert RESERVE < 1 << 60

    def test_two_devices_share_the_load(self, backend, rng):
        if len(backend.devices()) < 2:
            pytest.skip("needs two GPUs")
        experts = e8_experts(8)
        with pycoli.MoELayer(experts, devices=["cuda:0", "cuda:1"], vram_budget=10**9) as layer:
            assert layer.where.count("cuda:0") == layer.where.count("cuda:1") == 4
            check_layer(layer, experts, rng, rows=1, top_k=8)
            assert set(paths(layer)) == {"issue"}
            check_layer(layer, experts, rng, rows=20, top_k=8)
        with pycoli.MoELayer(experts, devices=[0, 1], vram_budget={"cuda:0": 0, "cuda:1": 10**9}) as layer:
            assert layer.where == ["cuda:1"] * 8

    def test_layers_share_a_budget(self, backend):
        experts = e8_experts(4)
        layers = [pycoli.MoELayer(experts, devices="cpu") for _ in range(2)]
        layers[0].heat = [1, 1, 1, 9]
        layers[1].heat = [8, 2, 7, 1]
        pycoli.place(layers, ["cuda:0"], room_for(experts, 4))
        placed = [(i, e) for i, layer in enumerate(layers) for e, name in enumerate(layer.where) if name != "cpu"]
        assert placed == [(0, 3), (1, 0), (1, 1), (1, 2)]
        with refused(pycoli.ArgumentError, "in the list twice"):
            pycoli.place([layers[0], layers[0]], ["cuda:0"])
        for layer in layers:
            layer.free()

    def test_without_a_gpu(self, built_without_cuda, rng):
        experts = e8_experts(2)
        with pycoli.MoELayer(experts) as layer:
            assert layer.where == ["cpu", "cpu"]
            assert "no GPU library is installed" in layer.why_cpu(0)
            check_layer(layer, experts, rng)


class TestRepin:
    def test_a_hot_expert_takes_the_place_of_a_cold_one(self, backend, rng):
        experts = e8_experts(6)
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts, 4)) as layer:
            held = [i for i, name in enumerate(layer.where) if name == "cuda:0"]
            hot = layer.where.index("cpu")
            heat = np.ones(6)
            heat[hot], heat[held[-1]] = 50, 0.5
            layer.heat = heat
            before = pycoli.Device(0).stats()
            done = layer.repin()
            assert (done["swaps"], done["failed"], done["bytes"]) == (1, 0, sum(m.nbytes for m in experts[hot]))
            assert layer.where[hot] == "cuda:0"
            assert layer.where[held[-1]] == "cpu"
            assert pycoli.Device(0).stats() == before
            check_layer(layer, experts, rng, rows=3, top_k=6)
            assert layer.stats()["total"]["repinned"] == done
            assert layer.repin()["swaps"] == 0

    def test_formats_must_be_the_same(self, backend):
        experts = [*e8_experts(1), expert_weights(("int8",) * 3, D, H)]
        with pycoli.MoELayer(experts, devices="cpu") as layer:
            layer.heat = [5, 0]
            layer.place(["cuda:0"], room_for(experts[:1], 1))
            assert layer.where == ["cuda:0", "cpu"]
            layer.heat = [0, 50]
            assert layer.repin()["swaps"] == 0

    def test_codebooks_must_be_the_same(self, backend):
        """An expert that no GPU takes costs none its place there."""
        own = with_codebook(expert_weights(dim=D, hidden=H), OWN_CODEBOOK)
        with pycoli.MoELayer([own, *e8_experts(2)], devices=["cuda:0"]) as layer:
            layer.heat = [50, 1, 1]
            assert layer.repin()["failed"] == 0
            assert layer.where == ["cpu", "cuda:0", "cuda:0"]

    def test_who_may_come_and_who_must_stay(self, backend):
        """What was used for less than a row does not come; the shared expert does not leave, whatever its heat."""
        experts, shared = e8_experts(2), expert_weights(dim=D, hidden=H, seed=9)
        with pycoli.MoELayer(experts, shared=shared, devices=["cuda:0"], vram_budget=room_for(experts, 1)) as layer:
            assert layer.where == ["cpu", "cpu", "cuda:0"]
            layer.heat = [1000, 1000]
            assert layer.repin()["swaps"] == 0
            layer.place(["cuda:0"], room_for(experts, 2))
            assert layer.where == ["cuda:0", "cpu", "cuda:0"]
            layer.heat = [0, 0.99]
            assert layer.repin()["swaps"] == 0
            layer.heat = [0, 1]
            assert layer.repin()["swaps"] == 1
            assert layer.where == ["cpu", "cuda:0", "cuda:0"]

    def test_host_copies_go_and_failures_count_as_swaps(self, backend):
        experts, works = e8_experts(4), [True]

        def reread(number):
            if not works[0]:
                raise OSError("gone")
            return experts[number]

        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts, 2), reread=reread) as layer:
            layer.heat = np.where([name == "cpu" for name in layer.where], 9, 0)
            assert layer.repin(max_swaps=1)["swaps"] == 1
            assert not layer._host._held
            works[0] = False
            layer.heat = np.where([name == "cpu" for name in layer.where], 9, 0)
            before = layer.where
            with pytest.warns(RuntimeWarning, match="gone"):
                done = layer.repin(max_swaps=1)
            assert (done["swaps"], done["failed"]) == (0, 1)
            assert layer.where == before

    def test_small_differences_do_not_swap(self, backend):
        experts = e8_experts(4)
        with pycoli.MoELayer(experts, devices=["cuda:0"], vram_budget=room_for(experts, 2)) as layer:
            heat = np.where([name == "cpu" for name in layer.where], 11.0, 10.0)
            layer.heat = heat
            assert layer.repin(hysteresis=0.25)["swaps"] == 0
            assert layer.repin(hysteresis=0.05, max_swaps=1)["swaps"] == 1
            with refused(pycoli.ArgumentError, "hysteresis must be 0 or more"):
                layer.repin(-1)

    def test_a_trace_that_shifts(self, simulated):
        """After a shift of skewed routing, repinning brings the hit rate to 90 % of the best static placement, and then
        leaves it alone."""
        count, top_k, steps = 32, 4, 120
        experts = [expert_weights(("int8",) * 3, 16, 8, seed=i) for i in range(count)]
        rng = np.random.default_rng(7)
        with pycoli.MoELayer(experts, devices="cpu") as layer:
            layer.set_half_life(64)
            for phase in range(3):
                popularity = rng.permutation(1 / np.arange(1, count + 1) ** 1.2)
                popularity /= popularity.sum()
                hits, swaps = [], []
                for step in range(steps):
                    ids = rng.choice(count, (4, top_k), p=popularity)
                    layer(gaussian(4, 16), ids, np.ones(ids.shape, np.float32))
                    if phase == 0 and step == 20:
                        layer.place(["cuda:0"], room_for(experts, 8))
                    on_gpu = np.array(layer.where) != "cpu"
                    hits.append(on_gpu[ids].mean())
                    if step % 8 == 7:
                        swaps.append(layer.repin()["swaps"])
                best = np.sort(popularity)[::-1][: int(on_gpu.sum())].sum()
                assert np.mean(hits[-40:]) > 0.9 * best
                assert sum(swaps[-5:]) <= 10


class TestOverlap:
    @pytest.mark.parametrize(("rows", "path"), [(1, "issue"), (300, "group")])
    def test_all_devices_work_before_any_is_waited_for(self, build_dir, tmp_path, monkeypatch, rows, path):
        backend = pycoli.open_backend(shutil.copy(build_dir / "tests" / "stubs" / "stub_slow.so", tmp_path / "slow.so"))
        experts = [expert_weights(("int8",) * 3, 16, 8, seed=i) for i in range(4)]
        with pycoli.MoELayer(experts, devices=[pycoli.Device(i, backend) for i in range(2)]) as layer:
            assert sorted(layer.where) == ["cuda:0"] * 2 + ["cuda:1"] * 2
            x, ids, weights = gaussian(rows, 16), np.tile(np.arange(4), (rows, 1)), np.full((rows, 4), 0.25, np.float32)
            monkeypatch.setenv("STUB_DELAY_US", "400000")
            start = time.perf_counter()
            y = layer(x, ids, weights)
            seconds = time.perf_counter() - start
            monkeypatch.delenv("STUB_DELAY_US")
            np.testing.assert_allclose(y, x, rtol=1e-6)  # what the library's experts give
            assert paths(layer) == {path: 4}
            assert 0.4 <= seconds < 0.7  # one after the other, they would take 0.8
            last = layer.stats()["last"]
            assert last["take_seconds"] > 0.3
            assert sum(last[f"{stage}_seconds"] for stage in ("issue", "cpu", "take", "sum")) <= seconds
            layer(x, ids, weights)
            total = layer.stats()["total"]
            assert total["take_seconds"] == last["take_seconds"] + layer.stats()["last"]["take_seconds"]
            assert (total["calls"], total["rows"], total["pairs"][path]) == (2, 2 * rows, 8 * rows)
        backend.shutdown()

    def test_the_gpu_works_while_the_cpu_does(self, build_dir, tmp_path, monkeypatch):
        with overlap(build_dir, tmp_path, lambda delay: monkeypatch.setenv("STUB_DELAY_US", delay)) as measured:
            assert measured.on_gpu
            assert measured.on_cpu
            shares = measured.hidden_shares(2)
            assert max(shares) >= 0.8, shares
