"""``pycoli doctor``: what is installed, what was found, what works, and why the rest does not."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path

import pycoli

from .. import _bindings, cpu
from .._lib import lib
from ..backend import NOT_INSTALLED
from ..errors import ColiError
from .plans import plans, plans_as_text
from .report import RIGHT, check_output, sections, write_report

PACKAGES = ("numpy", "cffi", "ml_dtypes", "safetensors", "tqdm")

INSTRUCTION_SETS = ("avx512", "avx2", "scalar")

ENVIRONMENT = (
    "COLI_LIB",
    "COLI_CUDA_LIB",
    "COLI_ISA",
    "COLI_LOG",
    "COLI_GPU_FAIL_AFTER",
    "COLI_CUDA_PROFILE",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
)


def command(options: argparse.Namespace) -> int:
    """The command itself; returns the exit code, which is 0 whatever the state of the machine."""
    check_output(options)
    report = examine()
    text = _as_text(report)
    if options.plans:
        report["plans"] = _plans()
        text += f"\n\n{plans_as_text(report['plans'])}"
    write_report(report, text, options)
    return RIGHT


def examine() -> dict:
    """The report, in values that JSON can hold."""
    return {
        "pycoli": {
            "version": pycoli.__version__,
            "path": str(Path(pycoli.__file__).parent),
            "hidden_installation": _hidden_installation(),
        },
        "system": {
            "os": _operating_system(),
            "platform": platform.platform(),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "packages": {name: _package_version(name) for name in PACKAGES},
            "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        },
        "driver": driver_report(),
        **_libraries(),
    }


def _plans() -> dict:
    """The GPU library's plans, or why there are none."""
    try:
        return plans(pycoli.open_backend())
    except ColiError as error:
        return {"why_not": str(error), "plans": []}


def isa_warning() -> str | None:
    """What to say when COLI_ISA has no effect; None when it has, or is not set."""
    wanted = os.environ.get("COLI_ISA")
    if not wanted or wanted == cpu.isa():
        return None
    reason = "build or processor lack it" if wanted in INSTRUCTION_SETS else f"known are {', '.join(INSTRUCTION_SETS)}"
    return f"COLI_ISA={wanted} is ignored ({reason}); {cpu.isa()} is used"


def _hidden_installation() -> str | None:
    """The installed package, where a checkout's modules come first and have only bindings and libraries from it."""
    bindings = str(Path(_bindings.__file__).parent)
    return bindings if bindings in pycoli.__path__[1:] else None


def _libraries() -> dict:
    """What libcoli says of itself, the processor and the GPU library; or why it cannot be loaded, and nothing works."""
    model = processor_model()
    try:
        libcoli = {"path": cpu.library_path(), "version": cpu.version(), "build": cpu.build_info()}
        use = {
            "instruction_sets": _instruction_sets(),
            "used": cpu.isa(),
            "threads": cpu.threads(),
            "warning": isa_warning(),
        }
    except ColiError as error:
        unusable = _unusable_gpu_library("libcoli, which loads it, is not loaded", [])
        return {"libcoli": {"path": None, "why_not": str(error)}, "processor": {"model": model}, **unusable}
    return {"libcoli": libcoli, "processor": {"model": model, **use}, **_gpu_library()}


def _gpu_library() -> dict:
    """The GPU library's part of the report: file, entry points, features, devices."""
    names = sorted(name for name in dir(lib) if name.startswith("coli_cuda_"))
    try:
        backend = pycoli.open_backend()
    except ColiError as error:
        return _unusable_gpu_library(str(error), names)
    devices = backend.devices()
    return {
        "libcoli_cuda": {"path": backend.path, "version": backend.version, "build": backend.build_info},
        "entry_points": {name: backend.has(name) for name in names},
        "features": {feature: backend.why_not(feature) for feature in backend.features()},
        "devices": [_device(name) for name in devices],
        "why_no_device": backend.why_no_device(),
    }


def _unusable_gpu_library(reason: str, names: list[str]) -> dict:
    return {
        "libcoli_cuda": {"path": None, "why_not": reason},
        "entry_points": dict.fromkeys(names, False),
        "features": {},
        "devices": [],
        "why_no_device": reason,
    }


def _device(name: str) -> dict:
    try:
        device = pycoli.Device(name)
        model, memory = device.model, device.memory()
    except ColiError as error:
        return {"name": name, "error": str(error)}
    return {"name": name, "model": model, "free_bytes": memory.free, "total_bytes": memory.total}


def _instruction_sets() -> list[str]:
    """Those that both the processor and the build have."""
    usable = []
    for name in INSTRUCTION_SETS:
        try:
            cpu.set_isa(name)
        except ColiError:
            continue
        usable.append(name)
    cpu.set_isa(None)
    return usable


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def processor_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def driver_report(root: Path = Path("/")) -> dict:
    """The kernel drivers: NVIDIA's and the boards it knows, in its own order; AMD's, which may have no version."""
    version = next(_lines(root / "proc/driver/nvidia/version"), None)
    boards = []
    for information in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        boards += [line.partition(":")[2].strip() for line in _lines(information) if line.startswith("Model:")]
    amd = root / "sys/module/amdgpu"
    return {
        "nvidia": version,
        "boards": boards,
        "amdgpu": next(_lines(amd / "version"), "loaded") if amd.exists() else None,
    }


def _driver_lines(driver: dict) -> list[str]:
    amd = [f"amdgpu {driver['amdgpu']}"] if driver["amdgpu"] else []
    return [driver["nvidia"] or "no NVIDIA kernel driver", *driver["boards"], *amd]


def _lines(path: str | Path):
    """Lines of a file of the system; none where it is not there."""
    try:
        yield from Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _as_text(report: dict) -> str:
    system = report["system"]
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in system["packages"].items())
    environment = ", ".join(f"{name}={value}" for name, value in system["environment"].items())
    entries = [
        ("pycoli", _package_lines(report["pycoli"])),
        ("system", [f"{system['os']}, {system['platform']}", f"{system['python']}, {packages}"]),
        ("environment", [environment or "none of " + ", ".join(ENVIRONMENT)]),
        ("libcoli", _library_lines(report["libcoli"])),
        ("processor", _processor_lines(report["processor"])),
        ("driver", _driver_lines(report["driver"])),
        ("libcoli_cuda", _library_lines(report["libcoli_cuda"])),
        ("entry points", _entry_point_lines(report["entry_points"])),
        ("features", _feature_lines(report["features"])),
        ("devices", _device_lines(report)),
    ]
    return sections(entries)


def _package_lines(package: dict) -> list[str]:
    lines = [f"{package['version']}, {package['path']}"]
    if hidden := package["hidden_installation"]:
        lines.append(f"a checkout: its modules hide the installed ones, bindings and libraries are those of {hidden}")
    return lines


def _library_lines(library: dict) -> list[str]:
    if library["path"] is None:
        return [f"not loaded: {library['why_not']}"]
    return [library["path"], library["build"] or f"version {library['version'] or 'unknown'}: an older library"]


def _processor_lines(processor: dict) -> list[str]:
    if "used" not in processor:
        return [processor["model"]]
    sets = f"instruction sets {', '.join(processor['instruction_sets'])}; {processor['used']} is used"
    return [
        processor["model"],
        f"{sets}, with {processor['threads']} threads",
        *filter(None, [processor["warning"]]),
    ]


def _entry_point_lines(entry_points: dict[str, bool]) -> list[str]:
    if not entry_points:
        return ["unknown without libcoli"]
    missing = [name for name, resolved in entry_points.items() if not resolved]
    lines = [f"{len(entry_points) - len(missing)} of {len(entry_points)} resolved"]
    if 0 < len(missing) < len(entry_points):
        lines.append(f"missing: {', '.join(missing)}")
    return lines


def _feature_lines(features: dict[str, str | None]) -> list[str]:
    return [f"{name:16}{reason or 'yes'}" for name, reason in features.items()] or ["none without a GPU library"]


def _device_lines(report: dict) -> list[str]:
    lines = []
    for device in report["devices"]:
        if "error" in device:
            lines.append(f"{device['name']}: {device['error']}")
        else:
            free, total = (device[key] / 2**30 for key in ("free_bytes", "total_bytes"))
            model = device["model"] or "a GPU of unknown name"
            lines.append(f"{device['name']}: {model}, {free:.1f} of {total:.1f} GiB free")
    reason = report["why_no_device"]
    if report["libcoli_cuda"]["path"] is None:
        reason = NOT_INSTALLED if reason.startswith(NOT_INSTALLED) else "no GPU library is loaded"
    return lines or [f"no GPU is used: {reason}"]
