"""Products, tensors, experts and groups on the CPU and on GPUs: the simulated one, and a real one if there is one."""

import gc
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import oracle
import pytest
from experts import expected_expert, expert_weights, gaussian, limit, refused

import pycoli

FORMATS = [f.name for f in pycoli.formats()]
ON_GPU = [f.name for f in pycoli.formats() if f.on_gpu]


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """No GPU library to be found."""
    monkeypatch.setenv("COLI_CUDA_LIB", str(tmp_path / "no_such_library.so"))


class TestMatmul:
    @pytest.mark.parametrize("fmt", [*FORMATS, "int4-g32"])
    @pytest.mark.parametrize("rows", [1, 3, 17])
    def test_every_format(self, fmt, rows, device):
        weights = pycoli.encode(gaussian(40, 300), fmt)
        x = gaussian(rows, 300, seed=1)
        if device != "cpu" and fmt == "int3-g64":
            with refused(pycoli.NotProvidedError, "int3-g64"):
                pycoli.matmul(x, weights, device)
            return
        y = pycoli.matmul(x, weights, device)
        assert y.dtype == np.float32
        assert y.shape == (rows, 40)
        assert oracle.relative_rms(y, x.astype(np.float64) @ weights.decode().T.astype(np.float64)) < limit(rows)

    @pytest.mark.parametrize("rotate", [True, False])
    def test_rotation_is_handled(self, device, rotate):
        w, x = gaussian(8, 96), gaussian(4, 96, seed=1)
        y = pycoli.matmul(x, pycoli.encode(w, "e8", rotate=rotate), device)
        assert oracle.relative_rms(y, x @ w.T) < 0.25
        stored = pycoli.encode(w, "e8", rotate=rotate).decode(stored=True).astype(np.float64)
        assert oracle.relative_rms(y, (oracle.rotate(x) if rotate else x.astype(np.float64)) @ stored.T) < 3e-6

    @pytest.mark.parametrize("leading", [(), (0,), (2, 0), (1,), (2, 3)])
    def test_leading_dimensions(self, device, leading):
        weights = pycoli.encode(gaussian(5, 64), "e8")
        y = pycoli.matmul(gaussian(*leading, 64), weights, device)
        assert y.shape == (*leading, 5)
        assert y.dtype == np.float32

    @pytest.mark.parametrize("shape", [(), (65,), (64, 1), (0,), (2, 63)])
    def test_wrong_width(self, device, shape):
        weights = pycoli.encode(gaussian(5, 64), "int8")
        with refused(pycoli.ShapeError, "x must be [..., 64]", f"got shape {list(shape)}"):
            pycoli.matmul(np.zeros(shape, np.float32), weights, device)

    def test_nan_stays_in_its_row(self, device):
        weights = pycoli.encode(gaussian(5, 64), "int8")
        x = gaussian(3, 64)
        clean = pycoli.matmul(x, weights, device)
        x[1, 7] = np.nan
        y = pycoli.matmul(x, weights, device)
        assert np.isnan(y[1]).all()
        np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])

    def test_weights_of_another_type(self):
        with refused(pycoli.DtypeError, "weights must be Weights or a Tensor, got ndarray"):
            pycoli.matmul(gaussian(1, 64), gaussian(5, 64))

    @pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:\u0660", "cuda:" + 5000 * "9", "", -1, 1.5, True])
    def test_device_names_that_are_none(self, name):
        with refused(pycoli.ArgumentError, "device must be 'cpu', 'cuda' (cuda:0), 'cuda:N' or an ordinal", repr(name)):
            pycoli.matmul(gaussian(1, 64), pycoli.encode(gaussian(5, 64), "int8"), name)


MIXTURES = [
    (("e8", "e8", "e8"), (True, True, True)),
    (("e8", "e8", "e8"), (True, True, False)),
    (("e8", "e8", "e8"), (False, False, True)),
    (("e8", "e8", "e8"), (True, False, True)),
    (("e8", "int8", "e8"), (False, True, False)),
    (("int4-g32", "int8", "e8"), (True, True, True)),
    (("e8", "f32", "mxfp4"), (True, True, True)),
    (("fp8-e4m3-b128", "int2", "int4"), (True, True, True)),
]


class TestExpert:
    @pytest.mark.parametrize(("formats", "rotate"), MIXTURES)
    @pytest.mark.parametrize("rows", [0, 1, 5])
    def test_mixtures(self, formats, rotate, rows, device):
        matrices = expert_weights(formats, rotate=rotate)
        x = gaussian(rows, 128, seed=3)
        y = pycoli.expert_mlp(x, *matrices, device=device)
        assert y.shape == x.shape
        assert oracle.relative_rms(y, expected_expert(x, *matrices)) < 3e-6 if rows else y.size == 0
        with pycoli.Expert(*matrices, device=device) as expert:
            assert expert.device == device
            assert expert.gpu == (None if device == "cpu" else pycoli.Device(device))
            assert (expert.why_cpu is None) == (device != "cpu")
            assert (expert.dim, expert.hidden) == (128, 64)
            assert expert.nbytes == sum(m.nbytes for m in matrices)
            np.testing.assert_array_equal(expert(x), y)
            np.testing.assert_array_equal(expert(x.reshape(1, rows, 128)), y.reshape(1, rows, 128))
            if rows:
                np.testing.assert_array_equal(expert(x[0]), y[0])

    def test_large_activations_saturate(self, device):
        gate, up, down = (pycoli.encode(np.eye(4, dtype=np.float32), "f32") for _ in range(3))
        x = np.array([[-200, 200, 0, -1]], np.float32)
        y = pycoli.expert_mlp(x, gate, up, down, device)
        np.testing.assert_allclose(y, [[0, 40000, 0, 1 / (1 + np.e)]], rtol=1e-6, atol=1e-30)

    def test_shapes_that_do_not_fit(self):
        gate, up, down = expert_weights()
        other = pycoli.encode(gaussian(64, 64), "int8")
        for call in (pycoli.Expert, lambda *m: pycoli.expert_mlp(gaussian(1, 128), *m)):
            with refused(pycoli.ShapeError, "up must have gate's shape [64, 128], got [64, 64]"):
                call(gate, other, down)
            with refused(pycoli.ShapeError, "down must be [128, 64] for a gate of [64, 128], got [64, 64]"):
                call(gate, up, other)
            with refused(pycoli.DtypeError, "down must be Weights or a Tensor, got NoneType"):
                call(gate, up, None)

    def test_after_free(self, device):
        expert = pycoli.Expert(*expert_weights(), device=device)
        group = pycoli.ExpertGroup([expert])
        expert.free()
        expert.free()
        assert "freed" in repr(expert)
        for call in (lambda: expert(gaussian(1, 128)), lambda: group(gaussian(1, 128), [1])):
            with refused(pycoli.FreedError, f"the expert [64, 128] on {device} has been freed"):
                call()

    def test_tensors_stay_their_owners(self, backend):
        with pycoli.Tensor(expert_weights()[0]) as gate:
            expert = pycoli.Expert(gate, *expert_weights()[1:])
            assert expert.device == gate.device == "cuda:0"
            assert expert.gpu == gate.gpu == pycoli.Device()
            assert pycoli.Device().stats().tensors == 3
            expert.free()
            assert pycoli.Device().stats() == (1, gate.nbytes)


class TestChoice:
    def test_without_a_gpu_library(self, no_gpu):
        weights = pycoli.encode(gaussian(5, 64), "e8")
        device, reason = pycoli.explain(weights)
        assert device == "cpu"
        assert "no_such_library.so" in reason
        assert pycoli.matmul(gaussian(1, 64), weights).shape == (1, 5)
        expert = pycoli.Expert(*expert_weights())
        assert (expert.device, expert.why_cpu) == (device, reason)
        for call in (
            lambda: pycoli.matmul(gaussian(1, 64), weights, "cuda:0"),
            lambda: pycoli.explain(weights, 0),
            lambda: pycoli.Device("cuda:0"),
            lambda: pycoli.Tensor(weights),
            lambda: pycoli.Expert(*expert_weights(), device="cuda:0"),
        ):
            with refused(pycoli.DeviceError, "cuda:0 cannot be used", "no_such_library.so"):
                call()

    def test_the_cpu_when_asked_for(self, backend):
        weights = pycoli.encode(gaussian(5, 64), "e8")
        assert pycoli.explain(weights, "cpu") == ("cpu", "the CPU was asked for")

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_the_gpu_where_it_takes_the_format(self, backend, fmt):
        weights = pycoli.encode(gaussian(5, 64), fmt)
        device, reason = pycoli.explain(weights)
        if fmt in ON_GPU:
            assert (device, reason) == ("cuda:0", None)
            assert pycoli.explain(weights, "cuda:0") == (device, reason)
        else:
            assert device == "cpu"
            assert fmt in reason
            with refused(pycoli.NotProvidedError, fmt):
                pycoli.explain(weights, "cuda:0")

    def test_a_tensor_decides(self, backend):
        with pycoli.Tensor(pycoli.encode(gaussian(5, 64), "e8")) as tensor:
            assert pycoli.explain(tensor) == ("cuda:0", None)
            assert pycoli.explain(tensor, pycoli.Device(0)) == ("cuda:0", None)
            with refused(pycoli.DeviceError, "the matrices are on cuda:0, got device='cpu'"):
                pycoli.matmul(gaussian(1, 64), tensor, "cpu")

    def test_matrices_on_two_devices(self, backend):
        if len(backend.devices()) < 2:
            pytest.skip("needs two GPUs")
        gate, up, down = expert_weights()
        on_two = refused(pycoli.DeviceError, "on one device, got cuda:0 and cuda:1")
        with pycoli.Tensor(gate, 0) as first, pycoli.Tensor(up, "cuda:1") as second, on_two:
            pycoli.Expert(first, second, down)
        with pycoli.Expert(*expert_weights()) as first, pycoli.Expert(*expert_weights(), device="cuda:1") as second:
            np.testing.assert_array_equal(first(gaussian(2, 128)), second(gaussian(2, 128)))
            with refused(pycoli.DeviceError, "experts[1] must be on cuda:0 like experts[0], got cuda:1"):
                pycoli.ExpertGroup([first, second])

    def test_matrices_of_two_libraries(self, backend, another_backend):
        gate, up, down = expert_weights()
        x, devices = gaussian(1, 128), (pycoli.Device(0, backend), pycoli.Device(0, another_backend))
        two = (f"cuda:0 of {backend.path}", f"cuda:0 of {another_backend.path}")
        with pycoli.Tensor(gate, devices[0]) as first, pycoli.Tensor(up, devices[1]) as second:
            with refused(pycoli.DeviceError, f"the matrices must be on one device, got {two[0]} and {two[1]}"):
                pycoli.Expert(first, second, down)
            with refused(pycoli.DeviceError, f"the matrices are on {two[1]}, got device {two[0]}"):
                pycoli.matmul(x, second, devices[0])
            assert pycoli.matmul(x, second, devices[1]).shape == pycoli.matmul(x, second, 0).shape == (1, 64)
        with pycoli.Expert(gate, up, down, devices[0]) as first, pycoli.Expert(gate, up, down, devices[1]) as second:
            np.testing.assert_allclose(first(x), second(x), rtol=1e-5, atol=1e-6)  # bits hold within one library
            with refused(pycoli.DeviceError, f"experts[1] must be on {two[0]} like experts[0], got {two[1]}"):
                pycoli.ExpertGroup([first, second])

    def test_a_gpu_that_fails(self, backend, monkeypatch):
        weights, x = pycoli.encode(gaussian(5, 64), "e8"), gaussian(2, 64)
        monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
        with pytest.raises(pycoli.DeviceError):
            pycoli.matmul(x, weights, "cuda:0")
        with pytest.warns(RuntimeWarning, match="computed on the CPU: "):
            y = pycoli.matmul(x, weights)
        np.testing.assert_array_equal(y, pycoli.matmul(x, weights, "cpu"))
        assert pycoli.Device().stats() == (0, 0)


class TestTensor:
    def test_upload_is_the_constructor(self, backend):
        with pycoli.Tensor.upload(pycoli.encode(gaussian(5, 64), "int8")) as tensor:
            assert type(tensor) is pycoli.Tensor
            assert tensor.device == "cuda:0"

    @pytest.mark.parametrize("fmt", [*ON_GPU, "int4-g32"])
    def test_download_is_what_was_uploaded(self, backend, fmt):
        weights = pycoli.encode(gaussian(9, 300), fmt, rotate=False)
        with pycoli.Tensor(weights, "cuda:0") as tensor:
            assert (tensor.fmt, tensor.shape, tensor.nbytes) == (fmt, (9, 300), weights.nbytes)
            assert tensor.vram >= tensor.nbytes
            assert pycoli.Device("cuda:0").stats() == (1, weights.nbytes)
            down = tensor.download()
        np.testing.assert_array_equal(down.data, weights.data)
        if weights.scales is not None:
            np.testing.assert_array_equal(down.scales, weights.scales)
        assert (down.fmt, down.shape, down.rotated) == (weights.fmt, weights.shape, weights.rotated)

    @pytest.mark.parametrize("fmt", ON_GPU)
    def test_update(self, backend, fmt):
        first, second = (pycoli.encode(gaussian(9, 300, seed=s), fmt) for s in (0, 1))
        x = gaussian(2, 300)
        with pycoli.Tensor(first) as tensor:
            tensor.update(second)
            np.testing.assert_array_equal(pycoli.matmul(x, tensor), pycoli.matmul(x, second, "cuda:0"))
            np.testing.assert_array_equal(tensor.download().data, second.data)

    def test_update_with_something_else(self, backend):
        w = gaussian(8, 64)
        with pycoli.Tensor(pycoli.encode(w, "e8")) as tensor:
            before = pycoli.matmul(w, tensor)
            with refused(pycoli.ShapeError, "the tensor has shape [8, 64], the new weights [4, 64]"):
                tensor.update(pycoli.encode(w[:4], "e8"))
            with refused(pycoli.FormatError, "the tensor is e8, the new weights are int8"):
                tensor.update(pycoli.encode(w, "int8"))
            with refused(pycoli.FormatError, "the tensor is e8, the new weights are unrotated e8"):
                tensor.update(pycoli.encode(w, "e8", rotate=False))
            with refused(pycoli.DtypeError, "weights must be Weights", "got ndarray"):
                tensor.update(w)
            np.testing.assert_array_equal(pycoli.matmul(w, tensor), before)

    def test_after_free(self, backend):
        weights = pycoli.encode(gaussian(9, 300), "int8")
        tensor = pycoli.Tensor(weights)
        assert not tensor.freed
        tensor.free()
        tensor.free()
        assert tensor.freed
        assert "freed" in repr(tensor)
        uses = [
            lambda: pycoli.matmul(gaussian(1, 300), tensor),
            lambda: pycoli.matmul(gaussian(0, 300), tensor),
            lambda: tensor.update(weights),
            lambda: tensor.download(),
            lambda: tensor.nbytes,
            lambda: tensor.vram,
        ]
        for use in uses:
            with refused(pycoli.FreedError, "the int8 tensor [9, 300] on cuda:0 has been freed"):
                use()

    def test_forgotten_tensors_are_freed(self, backend):
        weights = pycoli.encode(gaussian(9, 300), "e8")
        for _ in range(100):
            pycoli.Tensor(weights)
        gc.collect()
        assert pycoli.Device().stats() == (0, 0)

    def test_forgetting_a_tensor_does_not_wait_for_the_device(self, backend):
        """Finalizers run anywhere: one that waits for a device while another thread waits for this one hangs both."""
        device = pycoli.Device()
        tensor = pycoli.Tensor(pycoli.encode(gaussian(9, 300), "e8"))
        busy, done = threading.Event(), threading.Event()

        def keep_the_device_busy():
            with device._turn():
                busy.set()
                done.wait(60)

        thread = threading.Thread(target=keep_the_device_busy)
        thread.start()
        assert busy.wait(60)
        del tensor
        assert thread.is_alive()
        done.set()
        thread.join()
        assert device.stats() == (0, 0)

    def test_wrong_arguments(self, backend):
        weights = pycoli.encode(gaussian(9, 300), "e8")
        with refused(pycoli.DtypeError, "weights must be Weights (see pycoli.encode), got ndarray"):
            pycoli.Tensor(gaussian(9, 300))
        with refused(pycoli.DeviceError, "there is no device cuda:99; there are cuda:0"):
            pycoli.Tensor(weights, "cuda:99")
        with refused(pycoli.ArgumentError, "a Device is a GPU such as 'cuda:0', got 'cpu'"):
            pycoli.Tensor(weights, "cpu")
        with refused(pycoli.NotProvidedError, "int3-g64"):
            pycoli.Tensor(pycoli.encode(gaussian(9, 300), "int3-g64"))

    def test_one_that_was_never_made(self, recwarn):
        object.__new__(pycoli.Tensor).__del__()

    def test_shutdown_frees(self, backend):
        tensor = pycoli.Tensor(pycoli.encode(gaussian(9, 300), "e8"))
        backend.shutdown()
        assert tensor.freed
        assert pycoli.Device().stats() == (0, 0)

    def test_another_codebook(self, backend):
        plain = pycoli.encode(gaussian(4, 256), "e8")
        own = bytes(b ^ 1 for b in oracle.CODEBOOK.tobytes())
        weights = pycoli.Weights.from_bytes(plain.data, fmt="e8", shape=plain.shape, codebook=own)
        x = gaussian(2, 256)
        with refused(pycoli.FormatError, "another codebook"):
            pycoli.Tensor(weights)
        assert "another codebook" in pycoli.explain(weights).reason
        on_cpu = pycoli.matmul(x, weights)
        with pycoli.Tensor(plain), refused(pycoli.StateError, "1 E8 matrices on devices use the present codebook"):
            backend.set_e8_codebook(own)
        with refused(pycoli.SizeError, "needs 1024 bytes", "got 3"):
            backend.set_e8_codebook(b"abc")
        backend.set_e8_codebook(own)
        with pycoli.Tensor(weights) as tensor:
            assert oracle.relative_rms(pycoli.matmul(x, tensor), on_cpu) < 1e-6
            assert tensor.download().codebook == own
            with refused(pycoli.FormatError, "another codebook"):
                pycoli.Tensor(plain)


class TestDevice:
    def test_properties(self, backend):
        device = pycoli.Device("cuda:0")
        assert device == pycoli.Device(0) == pycoli.Device(device)
        assert len({device, pycoli.Device("cuda")}) == 1
        assert (device.name, device.ordinal, device.backend) == ("cuda:0", 0, backend)
        memory = device.memory()
        assert 0 < memory.free <= memory.total
        assert isinstance(device.integrated, bool)
        assert device.model

    def test_group_stats_count(self, backend):
        device = pycoli.Device()
        before = device.group_stats()
        with pycoli.Expert(*expert_weights()) as expert:
            pycoli.ExpertGroup([expert, expert])(gaussian(5, 128), [2, 3])
        after = device.group_stats()
        assert [b - a for a, b in zip(before[:3], after[:3], strict=True)] == [1, 2, 5]

    def test_threads(self, backend):
        """Uploads, products and frees from several threads at once give what they give alone."""
        weights = [pycoli.encode(gaussian(16, 64, seed=s), "e8") for s in range(4)]
        x = gaussian(2, 64)
        alone = [pycoli.matmul(x, w, "cuda:0") for w in weights]
        failures = []

        def work(w, expected):
            for _ in range(10):
                with pycoli.Tensor(w) as tensor:
                    if not np.array_equal(pycoli.matmul(x, tensor), expected):
                        failures.append(w)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(weights, alone, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def make_group(device, count=3, **options):
    return [pycoli.Expert(*expert_weights(seed=s, **options), device=device) for s in range(count)]


class TestGroup:
    @pytest.mark.parametrize("rows", [[1, 2, 3], [0, 4, 0], [0, 0, 0], [17, 0, 1]])
    def test_both_forms(self, device, rows):
        experts = make_group(device)
        group = pycoli.ExpertGroup(experts)
        x = gaussian(sum(rows), 128)
        parts = np.split(x, np.cumsum(rows)[:-1])
        y = group(x, rows)
        assert y.shape == x.shape
        assert y.dtype == np.float32
        listed = group(parts)
        np.testing.assert_array_equal(np.concatenate(listed), y)
        for expert, part, result in zip(experts, parts, listed, strict=True):
            assert result.shape == part.shape
            if len(part):
                matrices = (m if device == "cpu" else m.download() for m in (expert.gate, expert.up, expert.down))
                assert oracle.relative_rms(result, expected_expert(part, *matrices)) < limit(len(part))
        for expert in experts:
            expert.free()

    def test_mixed_experts(self, device):
        experts = [
            pycoli.Expert(*expert_weights(formats, seed=s, rotate=rotate), device=device)
            for s, (formats, rotate) in enumerate(MIXTURES)
        ]
        parts = [gaussian(1 + s % 3, 128, seed=s) for s in range(len(experts))]
        results = pycoli.ExpertGroup(experts)(parts)
        for s, (part, result) in enumerate(zip(parts, results, strict=True)):
            formats, rotate = MIXTURES[s]
            expected = expected_expert(part, *expert_weights(formats, seed=s, rotate=rotate))
            assert oracle.relative_rms(result, expected) < 3e-6

    def test_more_experts_than_one_call_takes(self, device):
        expert = pycoli.Expert(*expert_weights(("int8", "int8", "int8"), dim=32, hidden=16), device=device)
        x = gaussian(130, 32)
        group = pycoli.ExpertGroup([expert] * 130)
        np.testing.assert_allclose(group(x, [1] * 130), expert(x), rtol=1e-4, atol=1e-6)

    def test_single_rows_without_a_row_dimension(self, device):
        group = pycoli.ExpertGroup(make_group(device, 2))
        results = group([gaussian(128), gaussian(2, 2, 128)])
        assert [r.shape for r in results] == [(128,), (2, 2, 128)]

    def test_issue_and_take(self, device):
        group = pycoli.ExpertGroup(make_group(device))
        x = gaussian(8, 128)
        expected = group(x, [3, 0, 5])
        for _ in range(2):
            scratch = x.copy()
            group.issue(scratch, [3, 0, 5])
            scratch[:] = np.nan
            other = pycoli.matmul(gaussian(1, 64), pycoli.encode(gaussian(5, 64), "int8"), device)
            assert other.shape == (1, 5)
            np.testing.assert_array_equal(group.take(), expected)
        group.issue([x[:1], x[1:1], x[1]])
        assert [r.shape for r in group.take()] == [(1, 128), (0, 128), (128,)]
        group.issue(x[:0], [0, 0, 0])
        assert group.take().shape == (0, 128)

    def test_issue_of_experts_that_take_several_calls(self, device):
        matrices = expert_weights(rotate=(True, False, True))
        group = pycoli.ExpertGroup([pycoli.Expert(*matrices, device=device)])
        group.issue(gaussian(2, 128), [2])
        assert oracle.relative_rms(group.take(), expected_expert(gaussian(2, 128), *matrices)) < 3e-6

    def test_issue_and_take_out_of_turn(self, device):
        experts = make_group(device)
        group = pycoli.ExpertGroup(experts)
        with refused(pycoli.StateError, "nothing is issued"):
            group.take()
        with refused(pycoli.ArgumentError, "issue takes at most 8 rows in total, got 9"):
            group.issue(gaussian(9, 128), [3, 3, 3])
        group.issue(gaussian(3, 128), [1, 1, 1])
        with refused(pycoli.StateError, "the group has been issued already"):
            group.issue(gaussian(3, 128), [1, 1, 1])
        if device != "cpu":
            other = pycoli.ExpertGroup(experts)
            with refused(pycoli.StateError, "another group has been issued on cuda:0"):
                other.issue(gaussian(3, 128), [1, 1, 1])
        group.take()
        with refused(pycoli.StateError, "nothing is issued"):
            group.take()

    def test_an_issue_whose_group_is_gone(self, backend):
        experts = make_group("cuda:0")
        pycoli.ExpertGroup(experts).issue(gaussian(3, 128, seed=1), [1, 1, 1])
        gc.collect()
        group = pycoli.ExpertGroup(experts)
        group.issue(gaussian(3, 128), [1, 1, 1])
        np.testing.assert_array_equal(group.take(), group(gaussian(3, 128), [1, 1, 1]))

    def test_an_issue_that_a_shutdown_ended(self, backend):
        group = pycoli.ExpertGroup(make_group("cuda:0"))
        group.issue(gaussian(3, 128), [1, 1, 1])
        backend.shutdown()
        with refused(pycoli.StateError, "cuda:0 has been shut down since"):
            group.take()

    def test_a_gpu_that_fails(self, backend, monkeypatch):
        group = pycoli.ExpertGroup(make_group("cuda:0"))
        x = gaussian(3, 128)
        expected = group(x, [1, 1, 1])
        monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
        for call in (group, group.issue):
            with pytest.raises(pycoli.DeviceError, match="COLI_GPU_FAIL_AFTER"):
                call(x, [1, 1, 1])
        monkeypatch.delenv("COLI_GPU_FAIL_AFTER")
        group.issue(x, [1, 1, 1])
        monkeypatch.setenv("COLI_GPU_FAIL_AFTER", "0")
        with pytest.raises(pycoli.DeviceError, match="COLI_GPU_FAIL_AFTER"):
            group.take()
        monkeypatch.delenv("COLI_GPU_FAIL_AFTER")
        np.testing.assert_array_equal(group(x, [1, 1, 1]), expected)

    @pytest.mark.parametrize("feature", ["expert_group", "issue_take"])
    def test_why_not_together(self, device, feature):
        group = pycoli.ExpertGroup(make_group(device))
        assert group.why_not(feature) == (
            "experts on the CPU are computed one after the other" if device == "cpu" else None
        )
        apart = pycoli.Expert(*expert_weights(rotate=(True, False, True)), device=device)
        reason = "its gate and up matrices need different inputs: one is stored rotated, the other is not"
        assert apart.why_by_parts == reason
        assert group.experts[0].why_by_parts is None
        if device != "cpu":
            assert pycoli.ExpertGroup([*group.experts, apart]).why_not(feature) == reason
        with refused(pycoli.ArgumentError, "feature must be one of expert_group, issue_take, got 'matmul'"):
            group.why_not("matmul")

    def test_wrong_arguments(self, device):
        expert = make_group(device, 1)[0]
        narrow = pycoli.Expert(*expert_weights(dim=64), device=device)
        with refused(pycoli.ArgumentError, "at least 1 expert, got 0"):
            pycoli.ExpertGroup([])
        with refused(pycoli.DtypeError, "experts[1] must be an Expert, got int"):
            pycoli.ExpertGroup([expert, 3])
        for wrong in (5, None):
            with refused(pycoli.DtypeError, f"experts must be a sequence of Expert, got {type(wrong).__name__}"):
                pycoli.ExpertGroup(wrong)
        with refused(pycoli.ShapeError, "experts[1] must have the shape of experts[0], [64, 128], got [64, 64]"):
            pycoli.ExpertGroup([expert, narrow])
        group = pycoli.ExpertGroup([expert, expert])
        for wrong in (5, None, np.float32(1)):
            for call in (group, group.issue):
                with refused(pycoli.DtypeError, f"one array for each of 2 experts, got {type(wrong).__name__}"):
                    call(wrong)
        with refused(pycoli.ShapeError, "one array for each of 2 experts, got 3"):
            group([gaussian(1, 128)] * 3)
        with refused(pycoli.ShapeError, "x[1] must be [..., 128]", "got shape [1, 64]"):
            group([gaussian(1, 128), gaussian(1, 64)])
        with refused(pycoli.ShapeError, "rows must be 2 numbers of at least 0, got [1]"):
            group(gaussian(1, 128), [1])
        with refused(pycoli.ShapeError, "rows must be 2 numbers of at least 0, got [2, -1]"):
            group(gaussian(1, 128), [2, -1])
        with refused(pycoli.ShapeError, "x must be [3, 128], the sum of rows, got [2, 128]"):
            group(gaussian(2, 128), [1, 2])
        with refused(pycoli.DtypeError, "rows must be whole numbers", "[1.5, 0.5]"):
            group(gaussian(2, 128), [1.5, 0.5])


class TestBackend:
    def test_entry_points_and_features(self, backend):
        assert backend.has("coli_cuda_matmul")
        assert backend.has("matmul")
        for name in ("coli_cuda_no_such_thing", "init\0zzz", "coli_cuda_init\0", "\ud800"):
            assert not backend.has(name)
        for wrong in (None, 5, b"init"):
            with refused(pycoli.DtypeError, "name must be that of an entry point", repr(wrong)):
                backend.has(wrong)
        for wrong in ("e8\0", "matmul\0zzz", "\ud800", 5, None):
            with refused(pycoli.ArgumentError, f"no feature {wrong!r}; there are"):
                backend.why_not(wrong)
        assert {"e8", "int4-g64", "matmul", "expert_group", "download"} <= set(backend.features())
        assert backend.why_not("e8") is None
        assert backend.why_not("int4-g32") is None
        assert "int3-g64" in backend.why_not("int3-g64")
        with refused(pycoli.ArgumentError, "no feature 'warp-drive'; there are", "expert_mlp"):
            backend.why_not("warp-drive")
        assert backend.version == pycoli.__version__
        assert backend.build_info
        assert backend.devices()[0] == "cuda:0"
        assert backend.path in repr(backend)

    def test_the_same_file_is_the_same_backend(self, backend, tmp_path):
        link = tmp_path / "link.so"
        link.symlink_to(backend.path)
        assert pycoli.open_backend() is pycoli.open_backend(backend.path) is pycoli.open_backend(link) is backend

    def test_files_that_are_no_backend(self, build_dir, tmp_path):
        text = tmp_path / "text.so"
        text.write_text("not a library")
        stubs = build_dir / "tests" / "stubs"
        with refused(pycoli.BackendError, tmp_path / "missing.so"):
            pycoli.open_backend(tmp_path / "missing.so")
        with refused(pycoli.BackendError, text):
            pycoli.open_backend(text)
        with refused(pycoli.BackendError, "stub_empty.so", "coli_cuda_init"):
            pycoli.open_backend(stubs / "stub_empty.so")
        with refused(pycoli.BackendError, "stub_future.so", "ABI 99"):
            pycoli.open_backend(stubs / "stub_future.so")
        for name in (f"{stubs / 'stub_old.so'}\0y", "/\ud800"):
            with refused(pycoli.BackendError, f"cannot be loaded from {name!r}: no file can have that name"):
                pycoli.open_backend(name)
        for wrong in (5, 1.5, ["a"]):
            with refused(pycoli.DtypeError, "path must be a str or path, got", repr(wrong)):
                pycoli.open_backend(wrong)

    def test_no_device(self, simt_lib):
        run(
            """
            import numpy as np
            import pycoli
            backend = pycoli.open_backend()
            assert backend.devices() == []
            reason = backend.why_no_device()
            assert reason
            weights = pycoli.encode(np.ones((2, 4), np.float32), "e8")
            assert pycoli.explain(weights) == ("cpu", reason)
            try:
                pycoli.Tensor(weights)
            except pycoli.DeviceError as error:
                assert str(error) == reason
            else:
                raise AssertionError("uploaded without a device")
            """,
            COLI_CUDA_LIB=simt_lib,
            SIMT_NO_DEVICE="1",
        )


class TestOldLibrary:
    """A library without the E8 entry points, the additions, and a way to say what went wrong."""

    @pytest.mark.parametrize("fmt", ["f32", "int8", "int4", "int2", "int4-g64"])
    def test_other_formats_stay_on_the_gpu(self, old_backend, fmt):
        weights = pycoli.encode(gaussian(5, 64), fmt)
        x = gaussian(2, 64)
        assert pycoli.explain(weights) == ("cuda:0", None)
        with pycoli.Tensor(weights) as tensor:
            assert oracle.relative_rms(pycoli.matmul(x, tensor), pycoli.matmul(x, weights, "cpu")) < 1e-6
            assert tensor.vram == tensor.nbytes == weights.nbytes
            with refused(pycoli.NotProvidedError, "coli_cuda_tensor_download"):
                tensor.download()

    @pytest.mark.parametrize(
        ("fmt", "missing"),
        [("e8", "e8_set_grid"), ("mxfp4", "matmul_mxfp4"), ("fp8-e4m3-b128", "fp8_set_lut")],
    )
    def test_what_it_lacks_runs_on_the_cpu(self, old_backend, fmt, missing):
        weights = pycoli.encode(gaussian(5, 64), fmt)
        device, reason = pycoli.explain(weights)
        assert device == "cpu"
        assert f"coli_cuda_{missing}" in reason
        assert old_backend.why_not(fmt) == reason
        x = gaussian(2, 64)
        np.testing.assert_array_equal(pycoli.matmul(x, weights), pycoli.matmul(x, weights, "cpu"))
        with refused(pycoli.NotProvidedError, f"coli_cuda_{missing}"):
            pycoli.matmul(x, weights, "cuda:0")
        experts = [pycoli.Expert(*expert_weights((fmt, fmt, fmt))), pycoli.Expert(*expert_weights(("int8",) * 3))]
        assert [e.device for e in experts] == ["cpu", "cuda:0"]
        assert experts[0].why_cpu == reason

    def test_groups(self, old_backend):
        experts = [pycoli.Expert(*expert_weights(("int8",) * 3, seed=s)) for s in range(2)]
        group = pycoli.ExpertGroup(experts)
        x = gaussian(5, 128)
        y = group(x, [2, 3])
        expected = np.concatenate([e(part) for e, part in zip(experts, (x[:2], x[2:]), strict=True)])
        np.testing.assert_array_equal(y, expected)
        group.issue(x, [2, 3])
        np.testing.assert_array_equal(group.take(), y)
        assert group.why_not("expert_group") is group.why_not("issue_take") is None
        with refused(pycoli.NotProvidedError, "coli_cuda_group_stats_device"):
            pycoli.Device().group_stats()

    def test_a_failure_without_a_reason(self, old_backend, monkeypatch):
        monkeypatch.setenv("STUB_REFUSES_UPLOADS", "1")
        with refused(pycoli.DeviceError, "coli_cuda_tensor_upload returned 0 (this library does not say why)"):
            pycoli.Tensor(pycoli.encode(gaussian(5, 64), "int8"))

    def test_what_it_is(self, old_backend):
        assert old_backend.version is None
        assert old_backend.build_info is None
        assert old_backend.devices() == ["cuda:0"]
        assert not old_backend.has("e8_set_grid")
        assert pycoli.Device().model is None


class TestFirstE8Library:
    """A library from the first days of E8, which computes wrong numbers where later ones refuse or do it right."""

    @pytest.fixture(autouse=True)
    def first_e8_backend(self, build_dir, monkeypatch):
        monkeypatch.setenv("COLI_CUDA_LIB", str(build_dir / "tests" / "stubs" / "stub_old_e8.so"))
        backend = pycoli.open_backend()
        yield backend
        backend.shutdown()

    @pytest.mark.parametrize("fmt", ["e8", "fp8-e4m3-b128"])
    def test_products(self, fmt):
        weights, x = pycoli.encode(gaussian(5, 300), fmt), gaussian(2, 300)
        assert pycoli.explain(weights) == ("cuda:0", None)
        assert oracle.relative_rms(pycoli.matmul(x, weights), pycoli.matmul(x, weights, "cpu")) < 1e-6

    @pytest.mark.parametrize(
        ("hidden", "rotated", "reason"),
        [
            (96, True, None),
            (4096, True, None),
            (8192, True, "rotation blocks above 4096"),
            (96, False, "its down matrix is unrotated e8"),
        ],
    )
    def test_experts(self, hidden, rotated, reason):
        matrices = expert_weights(("int8", "int8", "e8"), dim=32, hidden=hidden, rotate=(True, True, rotated))
        x = gaussian(3, 32)
        with pycoli.Expert(*matrices) as expert:
            assert expert.device == "cuda:0"
            assert reason in expert.why_by_parts if reason else expert.why_by_parts is None
            assert oracle.relative_rms(expert(x), expected_expert(x, *matrices)) < 3e-6

    @pytest.mark.parametrize("formats", [("e8", "e8", "e8"), ("int8", "int8", "fp8-e4m3-b128")])
    def test_groups_of_later_formats(self, formats):
        matrices = [expert_weights(("int8",) * 3), expert_weights(formats, seed=1)]
        group = pycoli.ExpertGroup([pycoli.Expert(*m) for m in matrices])
        x = gaussian(5, 128)
        expected = np.concatenate([expected_expert(p, *m) for p, m in zip((x[:2], x[2:]), matrices, strict=True)])
        assert (group.device, group.gpu) == ("cuda:0", pycoli.Device())
        assert oracle.relative_rms(group(x, [2, 3]), expected) < 3e-6
        group.issue(x, [2, 3])
        assert oracle.relative_rms(group.take(), expected) < 3e-6
        for feature in ("expert_group", "issue_take"):
            assert "without coli_cuda_abi_version may misread e8" in group.why_not(feature)


class TestProcess:
    """What happens around the first use, interpreter exit and fork."""

    def test_first_use_by_two_threads(self, simt_lib):
        """A thread that comes while another prepares the devices waits until they are there."""
        run(
            """
            import threading, time
            import pycoli
            from pycoli import backend

            preparing, prepare = threading.Event(), backend.Slot

            def slowly():
                preparing.set()
                time.sleep(0.3)
                return prepare()

            backend.Slot = slowly
            first = threading.Thread(target=pycoli.Device)
            first.start()
            assert preparing.wait(60)
            assert pycoli.Device("cuda:1").ordinal == 1
            first.join()
            """,
            COLI_CUDA_LIB=simt_lib,
        )

    def test_workers_that_are_forked(self):
        """They compute on the CPU, each with one thread: those of the parent's team are not in the fork."""
        run(
            """
            import multiprocessing
            import warnings
            import numpy as np
            import pycoli

            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is what this is about
            weights = pycoli.encode(np.ones((512, 2048), np.float32), "e8")
            x = np.ones((16, 2048), np.float32)

            def work(_):
                return pycoli.cpu.threads(), pycoli.matmul(x, weights, "cpu")

            pycoli.cpu.set_threads(2)
            expected = work(0)[1]
            with multiprocessing.get_context("fork").Pool(2) as pool:
                for threads, y in pool.map_async(work, range(4)).get(timeout=30):
                    assert threads == 1
                    assert np.array_equal(y, expected)
            assert pycoli.cpu.threads() == 2
            """,
        )

    LEAVE_EVERYTHING_OPEN = """
        import numpy as np
        import pycoli
        weights = pycoli.encode(np.ones((2, 64), np.float32), "int8")
        tensor = pycoli.Tensor(weights)
        expert = pycoli.Expert(weights, weights, pycoli.encode(np.ones((64, 2), np.float32), "e8"))
        group = pycoli.ExpertGroup([expert])
        group.issue(np.ones((1, 64), np.float32), [1])
    """

    def test_exit_with_everything_open(self, simt_lib):
        run(self.LEAVE_EVERYTHING_OPEN, COLI_CUDA_LIB=simt_lib)

    def test_fork(self, simt_lib):
        code = (
            textwrap.dedent(self.LEAVE_EVERYTHING_OPEN)
            + """
import os, sys
child = os.fork()
try:
    pycoli.matmul(np.ones((1, 64), np.float32), tensor)
    assert child, "the fork used the device"
except pycoli.DeviceError as error:
    assert not child and str(os.getppid()) in str(error), error
tensor = None
assert pycoli.matmul(np.ones((1, 64), np.float32), weights, "cpu").shape == (1, 2)
if child:
    assert os.waitpid(child, 0)[1] == 0
sys.exit(0)
"""
        )
        run(code, COLI_CUDA_LIB=simt_lib)


def run(code, **environment):
    """Runs a program in a process of its own; it must end well and say nothing."""
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
