"""The command ``pycoli``: ``run`` does the main job on a checkpoint or container; ``convert``, ``inspect`` and
``verify`` make containers and look into them; ``bench`` measures, ``doctor`` reports on the environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import _lib
from ..errors import ColiError, DeviceError
from . import bench, convert, doctor, inspect, run, verify
from .bench.cases import SHAPES
from .report import BAD_INPUT, INTERRUPTED, NOBODY_READS, WRONG_RESULT, add_options, natural, say

_COMMANDS = {
    "run": run.command,
    "convert": convert.command,
    "inspect": inspect.command,
    "verify": verify.command,
    "bench": bench.command,
    "doctor": doctor.command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (that of the process by default) and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return NOBODY_READS
    except KeyboardInterrupt:
        say(f"pycoli {options.command}: interrupted", sys.stderr)
        return INTERRUPTED
    except (ColiError, OSError, MemoryError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        line = " ".join((text or "out of memory").splitlines())
        say(f"pycoli {options.command}: {line}", sys.stderr)
        return WRONG_RESULT if isinstance(error, (DeviceError, MemoryError)) else BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pycoli", description="Low-bit expert weights of mixture-of-experts models on GPUs and CPUs."
    )
    parser.add_argument("--version", action="version", version=f"pycoli {_lib.version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="encode the experts of a MoE layer, run them and check the results",
        description="Encodes the routed experts of one MoE layer, runs activations through each of them on the GPU and "
        "on the CPU, and compares with float64. Without arguments: on a small sample that comes with the package.",
        epilog="Exit code: 0 when every result is right, 1 when one is wrong or a device failed, 2 for input that "
        "cannot be used.",
    )
    run.add_argument(
        "checkpoint",
        nargs="?",
        metavar="CHECKPOINT",
        help="Hugging Face folder, .safetensors file or container; the sample without it",
    )
    run.add_argument(
        "--layer", type=natural, metavar="N", help="layer to take; the first one with routed experts by default"
    )
    run.add_argument(
        "--format", metavar="NAME", help="weight format to encode in, such as int8 or int4-g64 (default e8)"
    )
    run.add_argument("--experts", default="all", metavar="LIST", help="such as 0,3,5-7 (default all)")
    run.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto (default: the GPU where there is one), cpu, cuda (cuda:0), or cuda:N",
    )
    run.add_argument("--tokens", type=_positive, metavar="N", help="activation rows to use (default: at most 64)")
    run.add_argument(
        "--activations",
        metavar="FILE",
        help="float rows [tokens, hidden size]: a .npy file, or FILE.safetensors[:TENSOR]; without it the rows "
        "recorded in the checkpoint, else Gaussian ones",
    )
    run.add_argument(
        "--layer-forward",
        action="store_true",
        help="run the whole layer of a CHECKPOINT with its router in place of its experts one by one, and show which "
        "paths they took",
    )
    run.add_argument("--seed", type=natural, default=0, metavar="N", help="of the Gaussian rows (default 0)")
    add_options(run)

    convert.add_parser(commands)
    inspect.add_parser(commands)
    verify.add_parser(commands)
    _add_bench(commands)

    doctor = commands.add_parser(
        "doctor",
        help="report on libraries, devices and processor, for bug reports",
        description="Prints versions, the libraries found, which entry points and features the GPU library offers and "
        "why not, devices and the processor.",
    )
    doctor.add_argument(
        "--plans", action="store_true", help="also print how groups of experts would run on GPUs of each capability"
    )
    add_options(doctor)
    return parser


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure experts on the GPU or the CPU, beside what memory allows",
        description="Times layers of experts on the GPU, their weights out of the cache, and kernels that read and "
        "copy the same bytes. Every result is checked against float64 first. The defaults take about a minute.",
        epilog="Exit code: 0 when every result is right, 1 when one is wrong or a device failed, 2 for arguments "
        "that cannot be used, or no GPU.",
    )
    where = bench.add_mutually_exclusive_group()
    where.add_argument(
        "--host", action="store_true", help="measure calls with host pointers, uploads and encoding instead"
    )
    where.add_argument("--cpu", action="store_true", help="measure the CPU instead")
    bench.add_argument("--formats", default="all", metavar="LIST", help="such as e8,int4-g64 (default all)")
    bench.add_argument(
        "--shapes",
        metavar="LIST",
        help=f"of {', '.join(SHAPES)}, or such as 6144x2048 (default all; on the CPU glm)",
    )
    bench.add_argument("--rows", metavar="LIST", help="of each expert (default 1,2,4,8,16,32; on the CPU 1,4,16)")
    bench.add_argument("--experts", type=_positive, metavar="N", help="in a layer (default 8)")
    bench.add_argument(
        "--layers", type=_positive, metavar="N", help="in turn (default: so many that no weights stay in the cache)"
    )
    bench.add_argument("--reps", type=_positive, metavar="N", help="interleaved repetitions, at least 8 (default 10)")
    bench.add_argument("--device", type=natural, metavar="N", help="the GPU's CUDA ordinal (default 0)")
    bench.add_argument("--compare", metavar="FILE", help="also print ratios to an earlier run's JSON")
    bench.add_argument("--plot", metavar="FILE", help="also draw rooflines to a .png, .svg or .pdf (needs matplotlib)")
    add_options(bench)


def _positive(text: str) -> int:
    if natural(text) == 0:
        raise argparse.ArgumentTypeError("expected a number above 0, got 0")
    return int(text)
