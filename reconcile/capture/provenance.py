"""Where one side of a comparison comes from: everything that a second run must have alike."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from reconcile import native
from reconcile.capture.plan import Plan
from reconcile.kernel import FunctionKernel, Kernel
from reconcile.report import Provenance

PACKAGES = ("reconcile-numerics", "torch", "transformers", "numpy", "safetensors", "triton")
"""Packages that compute, whose versions are stated where they are installed."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_INTERPRET",
    "PYTHONHASHSEED",
    "CXX",
    "CXXFLAGS",
)
"""Variables of the environment that may change bits; named in the report where they are set."""
SOURCES = frozenset({".py", ".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".cuh"})
"""Suffixes of files that are hashed as a kernel's sources."""
_EXTENSIONS = ("avx", "amx", "fma", "f16c", "sse4_2", "asimd", "sve", "bf16", "i8mm", "neon")
"""Beginnings of processor flags that are stated."""


def provenance(plan: Plan, side: str, command: str) -> Provenance:
    """Where one side of a case comes from; ``side`` is ``reference`` or the candidate's name."""
    dtype = plan.reference_dtype if side == "reference" else plan.dtype
    judged = None if side == "reference" else plan.kernel
    return environment(
        side,
        str(dtype).removeprefix("torch."),
        command,
        judged,
        model=plan.checkpoint.path.name,
        checkpoint_sha256=plan.checkpoint.sha256,
        notes=() if side == "reference" else plan.notes,
        config=str(plan.case.file or ""),
        seeds={"case": plan.case.seed},
        hashes=_case_hashes(plan),
    )


def environment(
    side: str,
    dtype: str,
    command: str,
    kernel: Kernel | None,
    *,
    model: str,
    checkpoint_sha256: str,
    notes: tuple[str, ...] = (),
    config: str = "",
    seeds: dict[str, int] | None = None,
    hashes: dict[str, str] | None = None,
) -> Provenance:
    """The facts of this machine and process, with what only the caller knows."""
    libraries = native.loaded()
    binaries = {f"binary {item.name}": file_sha256(item.path) for item in libraries}
    return Provenance(
        side=side,
        model=model,
        checkpoint_sha256=checkpoint_sha256,
        dtype=dtype,
        machine=f"{processor()}, {platform.platform()}",
        versions=versions(),
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=notes,
        commit=git_commit(),
        config=config,
        seeds=seeds or {},
        hashes={**(hashes or {}), **kernel_hashes(kernel), **binaries},
        build={item.name: f"{item.compiler}; {item.flags}" for item in libraries},
        settings=settings(),
        cpu=" ".join(extensions()),
    )


def versions() -> dict[str, str]:
    """Versions of the interpreter and of what computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def settings() -> dict[str, str]:
    """What decides whether a second run gives the same bits."""
    found = {
        "torch threads": str(torch.get_num_threads()),
        "torch deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch CPU capability": torch.backends.cpu.get_cpu_capability(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "subnormals": "kept" if _keeps_subnormals() else "flushed to zero",
    }
    return found | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _keeps_subnormals() -> bool:
    return bool(torch.tensor(2.0**-126) * torch.tensor(0.5) > 0)


@cache
def processor() -> str:
    """The processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


@cache
def extensions() -> tuple[str, ...]:
    """Vector and matrix extensions that the processor names, sorted."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return tuple(sorted(flag for flag in flags if flag.startswith(_EXTENSIONS)))


def _cpuinfo(key: str) -> str:
    """The first value of a key of Linux's list of processors; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")


@cache
def git_commit() -> str:
    """Commit of the working directory, ``+changes`` where tracked files differ from it."""
    commit = _git("rev-parse", "HEAD")
    changed = commit and _git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _git(*words: str) -> str:
    """What git says, empty where there is no git or no repository."""
    try:
        done = subprocess.run(
            ("git", *words), capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def kernel_hashes(kernel: Kernel | None) -> dict[str, str]:
    """sha256 of the files that a kernel is written in."""
    return {f"kernel source {file.name}": file_sha256(file) for file in kernel_sources(kernel)}


def kernel_sources(kernel: Kernel | None) -> list[Path]:
    """The files that a kernel is written in: its own, and the sources beside it.

    A function's file alone; of an object with the `Kernel` protocol every source in the folder
    of its module, for native code lies there.
    """
    if kernel is None:
        return []
    place = _file_of(kernel.function if isinstance(kernel, FunctionKernel) else type(kernel))
    if place is None:
        return []
    return [place] if isinstance(kernel, FunctionKernel) else sorted(_sources(place.parent))


def _file_of(thing: object) -> Path | None:
    """The Python file that defines a function or class; None for what has none."""
    try:
        found = inspect.getsourcefile(inspect.unwrap(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError, OSError):
        module = sys.modules.get(getattr(thing, "__module__", "") or "")
        found = getattr(module, "__file__", None)
    return Path(found) if found and Path(found).is_file() else None


def _sources(folder: Path) -> Iterable[Path]:
    return (file for file in folder.iterdir() if file.suffix in SOURCES and file.is_file())


def _case_hashes(plan: Plan) -> dict[str, str]:
    """Of the case file and of the token ids of every prompt."""
    ids = hashlib.sha256(repr(plan.prompts).encode()).hexdigest()
    found = {"inputs (token ids)": ids}
    if plan.case.file is not None and plan.case.file.is_file():
        found["case file"] = file_sha256(plan.case.file)
    return found


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes; ``unreadable`` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "unreadable"
