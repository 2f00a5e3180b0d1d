"""The measuring code on the simulated GPU: what it calls, checks and reports. The times mean nothing."""

import json

import numpy as np
import pytest

import pycoli
from pycoli.backend import Backend
from pycoli.cli import main
from pycoli.cli.bench import driver as driver_module
from pycoli.cli.bench import host, layers
from pycoli.cli.bench.cases import Settings, Shape
from pycoli.cli.bench.driver import Driver

SHAPE = Shape(64, 48)
SETTINGS = Settings(["e8"], [SHAPE], (1, 3), experts=2, layers=2, repetitions=8)


def by_name(results):
    return {(result.what, result.rows): result for result in results}


@pytest.mark.parametrize("fmt", ["e8", "int4-g32", "fp8-e4m3-b128"])
def test_layers(simulated, fmt):
    device, driver = simulated
    before = device.stats()
    results = by_name(layers.measure(fmt, SHAPE, SETTINGS, device, driver))
    assert device.stats() == before, "tensors stayed behind"
    for rows in (1, 3):
        layer = results["layer", rows]
        assert layer.wrong is None
        assert 0 < layer.error < 3e-6
        assert len(layer.seconds) == 8
        assert layer.weights == 2 * 3 * 64 * 48
        assert layer.flops == 2 * rows * layer.weights
    probed = device.backend.has(layers.PROBE)
    assert set(results) == {("layer", 1), ("layer", 3), *([("read", None), ("copy", None)] if probed else [])}
    assert (results["layer", 1].of_ceiling is not None) == probed


def test_host_calls(simulated):
    device, driver = simulated
    before = device.stats()
    results = by_name(host.measure("e8", SHAPE, SETTINGS, device, driver))
    assert device.stats() == before
    computed = ["expert_mlp", "expert_group", "issue", "issue + take"]
    moved = ["upload", "update", "pinned copy"]
    encoded = ["encode reference", "encode reference, CPU", "encode search", "encode search, CPU"]
    assert set(results) == {*((what, 1) for what in computed), *((what, None) for what in moved + encoded)}
    assert all(result.wrong is None and len(result.seconds) == 8 for result in results.values())
    assert results["expert_mlp", 1].experts == 1
    assert results["expert_group", 1].experts == 2
    assert results["upload", None].of_ceiling > 0
    for what in encoded:
        assert results[what, None].weights == 48 * 64
        assert results[what, None].flops == 0


def test_issue_is_left_out_where_it_takes_fewer_rows(simulated):
    results = host.measure("e8", SHAPE, SETTINGS._replace(experts=9), *simulated)
    assert not any("issue" in result.what for result in results)


def test_encoding_in_other_bytes(simulated, monkeypatch):
    encode = pycoli.encode

    def reference_on_the_gpu(w, fmt, quality="search", device=None):
        return encode(w, fmt, quality=quality if device is None else "reference", device=device)

    monkeypatch.setattr(pycoli, "encode", reference_on_the_gpu)
    results = by_name(host.measure("e8", SHAPE, SETTINGS, *simulated))
    assert results["encode search", None].wrong
    assert not results["encode search", None].seconds
    for what in ("encode reference", "encode search, CPU"):
        assert results[what, None].seconds


@pytest.fixture
def library_that_swaps_experts(monkeypatch):
    """A library whose groups give every expert the matrices of the first one."""
    call = Backend._call

    def swapped(self, name, *arguments):
        if name.startswith("coli_cuda_expert_group"):
            count = arguments[4]
            columns = [pycoli._lib.ffi.new("ColiCudaTensor *[]", [column[0]] * count) for column in arguments[:3]]
            arguments = (*columns, *arguments[3:])
        return call(self, name, *arguments)

    monkeypatch.setattr(Backend, "_call", swapped)


def test_wrong_results_have_no_time(simulated, library_that_swaps_experts):
    results = layers.measure("int4", SHAPE, SETTINGS, *simulated)
    assert [result.what for result in results] == ["layer", "layer"]
    assert all(result.wrong and not result.seconds for result in results)
    results = by_name(host.measure("int4", SHAPE, SETTINGS, *simulated))
    assert results["expert_mlp", 1].seconds
    for what in ("expert_group", "issue", "issue + take"):
        assert results[what, 1].wrong
        assert not results[what, 1].seconds


def test_transfer_that_loses_bytes(simulated, monkeypatch):
    download = pycoli.Tensor.download

    def damaged(self):
        weights = download(self)
        data = np.array(weights.data)
        data[-1] ^= 1
        return pycoli.Weights.from_bytes(data, fmt=weights.fmt, shape=weights.shape, scales=weights.scales)

    monkeypatch.setattr(pycoli.Tensor, "download", damaged)
    results = by_name(host.measure("int8", SHAPE, SETTINGS, *simulated))
    assert results["upload", None].wrong
    assert results["update", None].wrong
    assert results["pinned copy", None].seconds


ARGUMENTS = ["--shapes", "64x48", "--formats", "int4", "--experts", "2", "--layers", "2", "--reps", "8"]


def command(capsys, *arguments):
    """Exit code, report and warnings of ``pycoli bench --json``."""
    code = main(["bench", *ARGUMENTS, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_command(capsys, simulated_command):
    code, report = command(capsys, "--rows", "1,3")
    assert (code, report["mode"], report["right"]) == (0, "layers", True)
    assert report["machine"]["gpu"] in report["machine"]["name"]
    assert [r["rows"] for r in report["results"] if r["what"] == "layer"] == [1, 3]
    assert any("--layers 2 is less than 4 x the L2 cache" in warning for warning in report["warnings"])
    assert main(["bench", *ARGUMENTS, "--host"]) == 0
    out = capsys.readouterr().out
    assert "pinned copy" in out
    assert "issue + take" in out


def test_command_refuses_wrong_results(capsys, simulated_command, library_that_swaps_experts):
    code, report = command(capsys, "--rows", "1")
    assert (code, report["right"]) == (1, False)
    assert "seconds" not in report["results"][0]
    assert main(["bench", *ARGUMENTS, "--rows", "1"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: layer int4 64x48, 2 x 1 row: relative RMS error " in out
    assert "the limit is 3e-06" in out


def test_device_that_fails(capsys, simulated_command, monkeypatch):
    monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
    assert main(["bench", *ARGUMENTS]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "COLI_GPU_FAIL_AFTER" in captured.err


# The driver


def test_driver_says_what_it_is(simulated):
    _, driver = simulated
    assert driver.version == "13.0"
    assert driver.capability.count(".") == 1
    assert min(driver.multiprocessors, driver.l2_bytes) > 0


def test_device_that_is_not_there(simulated_command):
    with pytest.raises(pycoli.DeviceError, match="cuDeviceGet gave error 101"):
        Driver(9)


def test_more_memory_than_there_is(simulated):
    _, driver = simulated
    with pytest.raises(pycoli.OutOfMemoryError, match="cuMemAlloc_v2 gave error 2"), driver.memory(2**60):
        pass


def test_driver_of_before_graphs(simulated_command, monkeypatch, simt_lib):
    monkeypatch.setattr(driver_module, "LIBRARY", str(simt_lib))
    with pytest.raises(pycoli.DeviceError, match="the NVIDIA driver lacks cuInit: it is too old"):
        Driver(0)


def test_copies_and_graphs(simulated, rng):
    _, driver = simulated
    before, after = rng.integers(0, 256, (2, 1000), np.uint8)
    with driver.memory(1000) as memory, driver.pinned(1000) as pinned:
        driver.put(memory, before)
        assert np.array_equal(driver.get(memory, (1000,), np.uint8), before)
        pinned[:] = after
        with driver.graph(lambda: driver.enqueue_upload(memory, pinned)) as replay:
            assert np.array_equal(driver.get(memory, (1000,), np.uint8), before), "capturing alone copied"
            assert driver.seconds(replay) >= 0
            assert np.array_equal(driver.get(memory, (1000,), np.uint8), after)


def test_error_while_capturing_is_the_one_that_is_raised(simulated):
    def fail():
        raise KeyError("mine")

    _, driver = simulated
    with pytest.raises(KeyError, match="mine"), driver.graph(fail):
        pass
    driver.synchronize()
