"""Makes pycoli/data/sample.safetensors, the input of ``pycoli run`` without arguments, from an OLMoE checkpoint.

    python tools/make_sample.py CHECKPOINT pycoli/data/sample.safetensors [--layer N] [--experts N]

The sample is a checkpoint in one file: the first experts of one layer in bf16 under their Hugging Face names, the
recorded inputs of that layer's MoE block as ``layerN.x`` (from the checkpoint's ``moe_io.safetensors``), and the
configuration in the metadata.
"""

import argparse
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pycoli.checkpoint import Checkpoint, recorded_input_name
from pycoli.tensorfile import TensorFile

MATRICES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder with the model and its moe_io.safetensors")
    parser.add_argument("output", type=Path)
    parser.add_argument("--layer", type=int, default=1)
    parser.add_argument("--experts", type=int, default=4, help="number of experts to keep")
    arguments = parser.parse_args()

    source = Checkpoint(arguments.checkpoint)
    inputs = recorded_input_name(arguments.layer)
    tensors = {inputs: np.array(TensorFile(arguments.checkpoint / "moe_io.safetensors").view(inputs))}
    for number in range(arguments.experts):
        expert = source.expert(arguments.layer, number)
        for attribute, matrix in MATRICES.items():
            name = f"model.layers.{arguments.layer}.mlp.experts.{number}.{matrix}.weight"
            tensors[name] = getattr(expert, attribute).astype(ml_dtypes.bfloat16)

    config = json.loads((arguments.checkpoint / "config.json").read_text())
    kept = ("architectures", "model_type", "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers")
    sample_config = {key: config[key] for key in kept} | {
        "num_experts": arguments.experts,
        "_source": f"Experts 0 to {arguments.experts - 1} of the {source.expert_count(arguments.layer)} of layer "
        f"{arguments.layer} of a small OLMoE model with a byte vocabulary, trained for tests; {inputs} holds the "
        f"inputs of that layer's MoE block for {len(tensors[inputs])} tokens of text.",
        "_licence": "that of the project that ships this file",
    }
    # One metadata entry: safetensors writes several in random order, and the file should come out the same every time.
    save_file(tensors, arguments.output, {"config": json.dumps(sample_config)})


if __name__ == "__main__":
    main()
