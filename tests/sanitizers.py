"""What programs under ThreadSanitizer need."""

import functools
import shutil
import subprocess

import pytest


@functools.cache
def without_address_randomisation():
    """The command prefix that ThreadSanitizer's memory map needs; skips where the system forbids it."""
    prefix = ["setarch", "-R"]
    if shutil.which(prefix[0]) is None:
        pytest.skip("no setarch, which ThreadSanitizer needs to run without address randomisation")
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"`setarch -R true` is refused here: {probe.stderr.strip()}")
    return prefix
