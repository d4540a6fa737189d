"""Make empty CANN libraries, with which torch_npu imports on a machine without CANN.

Usage: npu_stubs.py SITE_PACKAGES FOLDER

torch_npu is linked against libraries of the NPU's driver. What it needs of them is read from its
own binaries (``ldd``, ``nm``); every missing symbol becomes a function that returns 0. With them on
LD_LIBRARY_PATH and TORCH_DEVICE_BACKEND_AUTOLOAD=0 its operator schemas are there; no NPU is.
"""

import subprocess
import sys
from pathlib import Path

SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0")
SYSTEM += ("libdl.so.2", "librt.so.1")
OWN = ("Py", "_Py", "__cxa", "_ITM", "__gmon", "__tls", "_GLOBAL")
"""Starts of symbols that the interpreter and the C runtime bring."""


def symbols(library: Path, kind: str) -> set[str]:
    """Names of a library's dynamic symbols, ``--undefined-only`` or ``--defined-only``."""
    done = subprocess.run(["nm", "-D", kind, library], capture_output=True, text=True, check=False)
    return {line.split()[-1].split("@")[0] for line in done.stdout.splitlines()}


def needed(library: Path, path: str) -> set[str]:
    """Libraries that the loader does not find."""
    done = subprocess.run(
        ["ldd", library], capture_output=True, text=True, check=False, env={"LD_LIBRARY_PATH": path}
    )
    return {line.split()[0] for line in done.stdout.splitlines() if "not found" in line}


def system_libraries() -> list[Path]:
    """Those of `SYSTEM` that the linker's cache knows."""
    done = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True)
    known = {
        line.split()[0]: line.split()[-1] for line in done.stdout.splitlines()[1:] if line.strip()
    }
    return [Path(known[name]) for name in SYSTEM if name in known]


def main() -> None:
    """Write the stub libraries to FOLDER."""
    site, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    npu = [*site.glob("torch_npu/lib/*.so"), *site.glob("torch_npu/_C*.so")]
    torch = [*site.glob("torch/lib/*.so*")]
    path = f"{site}/torch/lib:{site}/torch_npu/lib"
    names = sorted(set().union(*(needed(library, path) for library in npu)))
    wanted = set().union(*(symbols(library, "--undefined-only") for library in npu))
    found = [symbols(f, "--defined-only") for f in (*npu, *torch, *system_libraries())]
    missing = sorted(name for name in wanted - set().union(*found) if not name.startswith(OWN))
    source = folder / "stubs.c"
    source.write_text(
        "".join(
            f'long long s{i}(void) __asm__("{name}"); long long s{i}(void) {{ return 0; }}\n'
            for i, name in enumerate(missing)
        )
    )
    empty = folder / "empty.c"
    empty.write_text("")
    for i, name in enumerate(names):
        content = source if i == 0 else empty
        command = [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            f"-Wl,-soname,{name}",
            "-o",
            folder / name,
            content,
        ]
        subprocess.run(command, check=True)
    print(f"{len(names)} libraries, {len(missing)} symbols: {folder}")


if __name__ == "__main__":
    main()
