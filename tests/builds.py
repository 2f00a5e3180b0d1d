"""Commands that tests of the build run: meson, compilers and the tools of tools/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(*command, **environment):
    """Runs a command, which finds ninja beside this Python, with extra environment variables."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **environment}
    return subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)


def meson(*arguments, **environment):
    return run(sys.executable, "-m", "mesonbuild.mesonmain", *arguments, **environment)


def check(result):
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]
    return result.stdout
