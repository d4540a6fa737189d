"""DeepSeek-V4's ``wo_a`` routed to the batched GEMM: when, and what happens when it cannot be.

The route is the product of four facts, decided once when it is made and off by default. In decode
an open route calls the kernel, everything else is einsum. A kernel that cannot be imported, or
that fails once, closes the route for the rest of the process with one warning, and einsum computes
the call that failed; the route says so with `reconcile.fell_back`. A call reads no environment and
imports nothing.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from reconcile.fallback import fell_back
from reconcile_kernels.aiter_bf16.aiter_package import architecture

FLAG = "SGLANG_OPT_USE_AITER_BATCHED_GEMM"
USE_AITER = "SGLANG_USE_AITER"
"""Names of the two switches, as SGLang has them."""

Batched = Callable[[Tensor, Tensor], Tensor]
"""x [G, T, D], w [G, R, D] to y [G, T, R]."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides whether the route is open."""

    flag: bool
    """The switch of this optimisation."""
    use_aiter: bool
    """The switch of aiter as a whole."""
    is_hip: bool
    """Whether torch is built for ROCm."""
    is_gfx95: bool
    """Whether the GPU is one."""

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Facts:
        """Read them, once: ``environment`` is the process's by default; a switch is 1 or true."""
        read = os.environ if environment is None else environment
        flag, use_aiter = (read.get(n, "").lower() in ("1", "true") for n in (FLAG, USE_AITER))
        is_hip = torch.version.hip is not None
        return cls(flag, use_aiter, is_hip, architecture().startswith("gfx95"))

    @property
    def missing(self) -> str:
        """What keeps the route closed; empty where nothing does."""
        names = (
            (self.flag, f"{FLAG} is not set"),
            (self.use_aiter, f"{USE_AITER} is not set"),
            (self.is_hip, "torch is not built for ROCm"),
            (self.is_gfx95, "the GPU is no gfx95"),
        )
        return "; ".join(text for holds, text in names if not holds)


def eligible(flag: bool, use_aiter: bool, is_hip: bool, is_gfx95: bool) -> bool:
    """Whether the route is open: all four must hold."""
    return not Facts(flag, use_aiter, is_hip, is_gfx95).missing


def einsum(o: Tensor, wo_a: Tensor) -> Tensor:
    """O [T, G, D], wo_a [G, R, D] to [T, G, R]: what the route leaves to torch."""
    return torch.einsum("tgd,grd->tgr", o, wo_a)


class Route:
    """[T, G, D] to [T, G, R], by the kernel or by einsum. Safe to call from several threads."""

    def __init__(self, facts: Facts, load: Callable[[], Batched]) -> None:
        """Decide now; ``load`` imports the kernel, and is called only if the route is open."""
        self._facts, self._load = facts, load
        self._lock = Lock()
        self.reset()

    def reset(self) -> None:
        """As after the import: for tests, which must not see what an earlier one did."""
        self.calls: Counter[str] = Counter()
        """Results by what computed them: ``kernel`` or ``einsum``."""
        self.warned = 0
        """Warnings that the route gave."""
        self.closed = self._facts.missing
        """Why the route is closed; empty while it is open."""
        self._kernel: Batched | None = None
        if self.closed:
            return
        try:
            self._kernel = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, serving must go on
            self._close(f"the kernel could not be imported: {type(error).__name__}: {error}")

    @property
    def enabled(self) -> bool:
        """Whether decode calls go to the kernel."""
        return self._kernel is not None

    def __call__(self, o: Tensor, wo_a: Tensor, is_decode: bool) -> Tensor:
        """O [T, G, D] and wo_a [G, R, D] to [T, G, R]; the kernel's result is contiguous."""
        kernel = self._kernel
        if kernel is not None and is_decode:
            try:
                y = kernel(o.transpose(0, 1).contiguous(), wo_a)
                y = y.transpose(0, 1).contiguous()
            except Exception as error:  # noqa: BLE001 - whatever it is, serving must go on
                self._close(f"the kernel failed: {type(error).__name__}: {error}")
            else:
                self._count("kernel")
                return y
        if is_decode:
            fell_back(f"einsum computed it: {self.closed}")
        self._count("einsum")
        return einsum(o, wo_a)

    def _count(self, what: str) -> None:
        with self._lock:
            self.calls[what] += 1

    def _close(self, reason: str) -> None:
        """Close the route for the process; only the first of several that fail says so."""
        with self._lock:
            if self.closed:
                return
            self._kernel, self.closed = None, reason
            self.warned += 1
        warnings.warn(f"wo_a: {reason}; einsum from now on", RuntimeWarning, stacklevel=3)
