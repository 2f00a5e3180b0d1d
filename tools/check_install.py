"""Check an installed tree as a C host finds it: two libraries, headers, two pkg-config files.

python tools/check_install.py PREFIX    with PKG_CONFIG_PATH naming PREFIX/lib/pkgconfig
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

# A host links coli_cuda and finds no device, or uses the one there is.
CUDA_HOST = """
#include <coli/coli_cuda.h>
#include <stdio.h>
int main(void) {
    int count = coli_cuda_available_device_count();
    printf("ABI %d, %d device(s) %s\\n", coli_cuda_abi_version(), count, coli_cuda_last_error());
    return count == 0 && coli_cuda_last_status() != COLI_E_NO_DEVICE;
}
"""
CORE_HOST = """
#include <coli/coli.h>
#include <stdio.h>
int main(void) {
    coli_backend *backend = NULL;
    coli_status status = coli_backend_open(NULL, &backend);
    printf("libcoli %s opened %s\\n", coli_version_string(), status ? coli_last_error() : coli_backend_path(backend));
    coli_backend_close(backend);
    return status != COLI_OK;
}
"""


def run_host(name: str, source: str, prefix: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / name
        program.with_suffix(".c").write_text(source)
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", name], capture_output=True, text=True, check=True)
        command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", program.with_suffix(".c"), "-o", program]
        subprocess.run([*command, *flags.stdout.split(), f"-Wl,-rpath,{prefix / 'lib'}"], check=True)
        subprocess.run([program], check=True)


def main() -> None:
    prefix = Path(sys.argv[1]).resolve()
    headers = {path.name for path in (prefix / "include" / "coli").iterdir()}
    expected = {"coli.h", "coli_common.h", "coli_cuda.h", "coli_moe.h", "coli_version.h"}
    if headers != expected:
        raise SystemExit(f"installed headers {sorted(headers)}, expected {sorted(expected)}")
    run_host("coli", CORE_HOST, prefix)
    run_host("coli_cuda", CUDA_HOST, prefix)
    print(f"{prefix} serves a C host")


if __name__ == "__main__":
    main()
