"""Check an installed tree as a C host finds it: two libraries, headers, two pkg-config files.

PKG_CONFIG_PATH names PREFIX/lib/pkgconfig.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

# A host links the GPU library and finds no device, or uses the one there is.
GPU_HOST = """
#include <coli/coli_cuda.h>
#include <stdio.h>
int main(void) {
    int count = coli_cuda_available_device_count();
    printf("%s\\n", coli_cuda_build_info());
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


def run_host(name: str, source: str, prefix: Path, **variables: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / name
        program.with_suffix(".c").write_text(source)
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", name], capture_output=True, text=True, check=True)
        command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", program.with_suffix(".c"), "-o", program]
        subprocess.run([*command, *flags.stdout.split(), f"-Wl,-rpath,{prefix / 'lib'}"], check=True)
        subprocess.run([program], check=True, env=os.environ | variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--gpu", choices=["coli_cuda", "coli_hip"], default="coli_cuda", help="the GPU library")
    options = parser.parse_args()
    prefix = options.prefix.resolve()
    headers = {path.name for path in (prefix / "include" / "coli").iterdir()}
    expected = {"coli.h", "coli_common.h", "coli_cuda.h", "coli_moe.h", "coli_version.h"}
    if headers != expected:
        raise SystemExit(f"installed headers {sorted(headers)}, expected {sorted(expected)}")
    # libcoli finds coli_cuda beside itself, and any other where it is told to look
    named = {} if options.gpu == "coli_cuda" else {"COLI_CUDA_LIB": str(prefix / "lib" / f"lib{options.gpu}.so")}
    run_host("coli", CORE_HOST, prefix, **named)
    run_host(options.gpu, GPU_HOST, prefix)
    print(f"{prefix} serves a C host")


if __name__ == "__main__":
    main()
