"""Containers that tests write by hand, after docs/containers.md, with the safetensors library alone."""

import json
import struct
from contextlib import contextmanager

import numpy as np
import oracle
from safetensors.numpy import save_file

HIDDEN, INNER, EXPERTS = 512, 256, 3
CONFIG = {"model_type": "olmoe", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_experts": EXPERTS}
STEM = "model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
MATRICES = ("gate_proj", "up_proj", "down_proj")


def tensors_of(name, matrix):
    """The tensors that hold an encoded matrix of oracle.random_encoded()."""
    if matrix.fmt == "f32":
        return {name: matrix.data.view("<f4").reshape(matrix.shape)}
    scales = np.array([6], np.float32) if matrix.scales is None else np.ascontiguousarray(matrix.scales).reshape(-1)
    return {name: np.ascontiguousarray(matrix.data).reshape(-1).view(np.uint8), f"{name}.qs": scales}


def random_layer(rng, fmt, layer=0, experts=EXPERTS, hidden=HIDDEN, inner=INNER):
    """Encoded experts of a layer: {name: matrix of oracle.random_encoded()}."""
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    return {
        STEM.format(layer=layer, expert=expert, matrix=matrix): oracle.random_encoded(rng, fmt, shape)
        for expert in range(experts)
        for matrix, shape in zip(MATRICES, shapes, strict=True)
    }


def write_container(folder, matrices, config=CONFIG, shards=1, metadata=None, extra=None):
    """A container as existing hosts write it: tensors go to the shards in turn, nothing says a format or a shape."""
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    names = list(matrices)
    for shard in range(shards):
        tensors = {} if shard else dict(extra or {})
        for name in names[shard::shards]:
            tensors |= tensors_of(name, matrices[name])
        save_file(tensors, folder / f"out-{shard:05}.safetensors", metadata)
    return folder


def write_imatrix(path, vectors):
    """An importance matrix of ggml, binary: count of entries; then name, calls and sums of squares of each."""
    content = struct.pack("<i", len(vectors))
    for name, sums in vectors.items():
        content += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, sums.size)
        content += np.ascontiguousarray(sums, "<f4").tobytes()
    path.write_bytes(content)
    return path


@contextmanager
def file_size_limit(nbytes):
    """As on a disk that is full at a moment nobody expects: no file of this process may become larger."""
    import resource  # POSIX alone has it

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
