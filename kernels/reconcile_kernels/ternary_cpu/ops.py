"""The native library, and the custom ops that call it.

``reconcile_kernels::ternary_avx512_bf16`` and ``reconcile_kernels::ternary_avx512_vnni``, both
``(Tensor x, Tensor words, Tensor scales, Tensor? bias, int n, bool divide) -> Tensor``, for CPU
tensors and for fake ones.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from reconcile.exceptions import KernelError
from reconcile.native import NativeLibrary

DTYPES: dict[str, dict[torch.dtype, str]] = {
    "bfloat16": {torch.bfloat16: "bfloat16"},
    "int8": {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"},
}
"""For each kind of product the dtypes of x, and what the native function of each ends in."""
ROWS = 128
"""Packed rows come in multiples of this; scales are padded to them."""
BLOCK = 16
"""Codes of one row in a packed word."""

_FOLDER = Path(__file__).parent
_INSTRUCTIONS = ("f", "bw", "vl", "dq", "vnni", "bf16")
LIBRARY = NativeLibrary(
    name="ternary_cpu",
    sources=(_FOLDER / "gemm.cpp",),
    headers=tuple(_FOLDER / f"{name}.h" for name in ("activations", "numbers", "panels")),
    flags=(*(f"-mavx512{name}" for name in _INSTRUCTIONS), "-pthread"),
)
_PAGE = 1 << 21
_SCHEMA = "(Tensor x, Tensor words, Tensor scales, Tensor? bias, int n, bool divide) -> Tensor"
_library = torch.library.Library("reconcile_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]


def pack(values: Tensor, kind: str) -> Tensor:
    """Ternary values, int8 [N, K], to packed words, int32 (their order is in ``panels.h``).

    The words begin on a large page where they fill one: a call reads each of them once, and with
    small pages the look-ups of addresses take a share of that time.
    """
    n, k = values.shape
    library = LIBRARY.load()
    library.ternary_words.restype = ctypes.c_int64
    count = library.ternary_words(ctypes.c_int64(n), ctypes.c_int64(k))
    words = _on_large_pages(count) if 4 * count >= _PAGE else torch.empty(count, dtype=torch.int32)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (values.contiguous(), words)]
    sizes = [ctypes.c_int64(size) for size in (n, k)]
    library.ternary_pack(ctypes.c_int(kind == "int8"), *pointers, *sizes)
    return words


def _on_large_pages(count: int) -> Tensor:
    """Room for ``count`` words in fresh memory: pages that were touched before stay small."""
    memory = mmap.mmap(-1, 4 * count + _PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.int32)
    return whole[-whole.data_ptr() % _PAGE // 4 :][:count]


def _check(
    kind: str, x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, n: int
) -> None:
    """KernelError unless the native code can read these tensors as they are."""
    rows = -(-n // ROWS) * ROWS
    fits = (
        x.dim() == 2
        and x.dtype in DTYPES[kind]
        and n > 0
        and words.dtype == torch.int32
        and words.shape == (rows * -(-x.shape[1] // BLOCK),)
        and scales.dtype == torch.float32
        and scales.shape == (rows,)
        and (bias is None or (bias.dtype == torch.float32 and bias.shape == (n,)))
        and all(t.device == x.device for t in (words, scales, *([] if bias is None else [bias])))
    )
    if not fits:
        tensors = {"x": x, "words": words, "scales": scales, "bias": bias}
        got = ", ".join(
            f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
            for name, t in tensors.items()
            if t is not None
        )
        raise KernelError(
            f"ternary_cpu: expected x [M, K] in {', '.join(DTYPES[kind].values())}, words int32 "
            f"[R * ceil(K/{BLOCK})] and scales float32 [R] with R = {rows}, bias float32 [{n}] or "
            f"None on one device; got {got}"
        )


@functools.cache
def _function(kind: str, dtype: torch.dtype) -> Callable[..., None]:
    function = getattr(LIBRARY.load(), f"ternary_{kind}_{DTYPES[kind][dtype]}")
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 2
    function.restype = None
    return function  # type: ignore[no-any-return]


def multiply(
    kind: str,
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    n: int,
    divide: bool,
) -> Tensor:
    """Y [M, N] of operands that fit together (`_check`), without a look at them.

    A kernel whose `prepare` made ``words`` and ``scales`` calls this rather than the op: the
    dispatcher's way to Python takes longer than a small product.
    """
    x = x.contiguous()
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype)
    if m:
        _function(kind, x.dtype)(
            x.data_ptr(),
            words.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            m,
            n,
            k,
            divide,
            torch.get_num_threads(),
        )
    return y


def _define(name: str, kind: str) -> None:
    def on_cpu(
        x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, n: int, divide: bool
    ) -> Tensor:
        _check(kind, x, words, scales, bias, n)
        bias = None if bias is None else bias.contiguous()
        return multiply(kind, x, words.contiguous(), scales.contiguous(), bias, n, divide)

    def fake(
        x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, n: int, divide: bool
    ) -> Tensor:
        del divide
        _check(kind, x, words, scales, bias, n)
        return x.new_empty((x.shape[0], n))

    _library.define(f"{name}{_SCHEMA}")  # type: ignore[no-untyped-call]
    _library.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"reconcile_kernels::{name}", fake, lib=_library)


_define("ternary_avx512_bf16", "bfloat16")
_define("ternary_avx512_vnni", "int8")
