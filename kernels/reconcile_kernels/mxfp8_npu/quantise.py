"""The MXFP8 quantiser in one native pass, and the same in torch where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from reconcile.exceptions import BuildError, KernelError
from reconcile.native import NativeLibrary
from reconcile.numbers import mx

NATIVE_RULES = {"floor": 0, "rceil": 1, "ceil": 2, "even": 3, "ascend_0": 4, "ascend_1": 1}
"""Rules of `reconcile.numbers.mx` that the native pass has, by its number."""
LEVELS = ("portable", "avx512")
"""Instructions for which there is code, worst first."""
THREADS_FROM = 1 << 20
"""Fewer elements are quantised by one thread: starting another takes as long."""

LIBRARY = NativeLibrary(
    name="mx_quantise",
    sources=(Path(__file__).with_name("quantise.cpp"),),
    flags=("-pthread",),
)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def implementation() -> str:
    """Which code quantises here: ``native`` and one of `LEVELS`, or ``torch`` with the reason."""
    library, reason = _load()
    return f"torch ({reason})" if library is None else f"native {LEVELS[library.mx_level()]}"


def quantise(
    x: Tensor,
    rule: str,
    *,
    pair: bool = False,
    threads: int | None = None,
    level: str = LEVELS[-1],
    native: bool = True,
) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of x [..., K].

    Args:
        x: bfloat16 or float32; made contiguous where it is not.
        rule: a name of `reconcile.numbers.mx.RULES`; those outside `NATIVE_RULES` run in torch.
        pair: pad an odd number of scale bytes per row with 0, as the NPU's operator does.
        threads: torch's number by default, or 1 below `THREADS_FROM` elements.
        level: the best instructions to use, where the processor has them.
        native: False: in torch, whatever is here.

    Returns:
        uint8 [..., K], E4M3FN, and uint8 [..., G]; G = ceil(K / 32), even with ``pair``.

    Raises:
        KernelError: another dtype, an unknown rule, or no last dimension.
    """
    if x.dtype not in _DTYPES or x.dim() == 0:
        raise KernelError(f"quantise: expected bfloat16 or float32 [..., K], got {x.dtype}")
    if rule not in mx.RULES:
        raise KernelError(f"quantise: unknown rule {rule!r}; known: {', '.join(mx.RULES)}")
    groups = -(-x.shape[-1] // mx.GROUP)
    width = groups + groups % 2 if pair else groups
    library = _load()[0] if native and rule in NATIVE_RULES and x.device.type == "cpu" else None
    if library is None:
        found = mx.quantise(x, mx.RULES[rule])
        return found.codes, pad(found.scales, (0, width - groups))
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty((*x.shape[:-1], width), dtype=torch.uint8)
    if x.numel() == 0:
        return codes, scales
    if threads is None:
        threads = 1 if x.numel() < THREADS_FROM else torch.get_num_threads()
    library.mx_quantise(
        _DTYPES[x.dtype],
        x.data_ptr(),
        x.numel() // x.shape[-1],
        x.shape[-1],
        NATIVE_RULES[rule],
        width,
        codes.data_ptr(),
        scales.data_ptr(),
        threads,
        LEVELS.index(level),
    )
    return codes, scales


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The native library, or None and why."""
    try:
        library = LIBRARY.load()
    except BuildError as error:
        return None, str(error)
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.mx_quantise.argtypes = [
        ctypes.c_int, pointer, size, size, ctypes.c_int, size, pointer, pointer,
        ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    library.mx_quantise.restype = None
    library.mx_level.argtypes = []
    library.mx_level.restype = ctypes.c_int
    return library, ""
