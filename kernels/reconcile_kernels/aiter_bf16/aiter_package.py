"""The real aiter: its published Triton kernel, natively on gfx95, elsewhere interpreted."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reconcile.exceptions import KernelError
from reconcile.kernel import Support
from reconcile_kernels.aiter_bf16 import interpreter

DISTRIBUTION = "amd-aiter"
KNOWN_VERSIONS = ("0.1.7.post2.dev18",)
"""Published versions whose kernel was read and is run by the interpreter's tests."""
MODULES = (
    "aiter.ops.triton.gemm.batched.batched_gemm_bf16",
    "aiter.ops.triton.batched_gemm_bf16",
)
"""Where the function lives, newest layout first."""
PARENTS = ("aiter", "aiter.ops", "aiter.ops.triton")
"""Packages whose own code needs ROCm; the interpreter gets them empty."""

BatchedGemm = Callable[..., Tensor]
"""``batched_gemm_bf16(XQ [B, M, K], WQ [B, N, K], bias=None or [B, 1, N]) -> [B, M, N]``."""


def version() -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def architecture() -> str:
    """The GPU's name by ROCm, e.g. ``gfx950:sramecc+``; empty where there is none."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(0).gcnArchName)


def runs_natively() -> Support:
    """Whether aiter is here, and a gfx95 for it."""
    if version() is None:
        return Support(False, f"{DISTRIBUTION} is not installed")
    if not architecture().startswith("gfx95"):
        return Support(False, f"no gfx95: torch sees {architecture() or 'no ROCm device'}")
    return Support(True, f"{DISTRIBUTION} {version()} on {architecture()}")


def runs_interpreted() -> Support:
    """Whether the published kernel can run in Triton's interpreter."""
    found = version()
    if found is None:
        return Support(
            False, f"{DISTRIBUTION} is not installed; `make triton` makes an environment with it"
        )
    if found not in KNOWN_VERSIONS:
        return Support(
            False,
            f"{DISTRIBUTION} {found}: its layout was not read; known: {', '.join(KNOWN_VERSIONS)}",
        )
    support = interpreter.is_supported()
    return Support(support.ok, f"{DISTRIBUTION} {found}, {support.reason}")


def native() -> BatchedGemm:
    """The function, imported as its users import it."""
    return _function()


def interpreted() -> BatchedGemm:
    """The function over empty parent packages, which would need ROCm, in the interpreter.

    aiter reads its tile sizes for a device; here that is gfx942, the newest that this version has
    a file for under a name that it derives from the target alone.

    Raises:
        KernelError: it does not run here.
    """
    if not (support := runs_interpreted()):
        raise KernelError(support.reason)
    interpreter.repair(assume=False)
    spec = importlib.util.find_spec("aiter")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    for name in PARENTS:
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = module
    driver: Any = importlib.import_module("triton.runtime").driver
    driver.set_active(_Driver())
    return _function()


def _function() -> BatchedGemm:
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                continue
            raise
        function: BatchedGemm = module.batched_gemm_bf16
        return function
    raise KernelError(f"{DISTRIBUTION} {version()}: none of {', '.join(MODULES)}")


class _Target:
    arch = "gfx942"
    backend = "hip"
    warp_size = 64


class _Driver:
    """A device that is only asked what it is."""

    def get_current_target(self) -> _Target:
        """Gfx942."""
        return _Target()

    def get_current_device(self) -> int:
        """The first."""
        return 0
