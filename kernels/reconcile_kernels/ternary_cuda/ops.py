"""The native library of each engine, and the custom op that calls it.

``reconcile_kernels::ternary_naive(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor``
is registered for CPU tensors (the CUDA source compiled by the C++ compiler), for CUDA tensors (the
same source compiled by nvcc, launched on the current stream) and for fake tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from reconcile.exceptions import KernelError
from reconcile.native import Language, NativeLibrary

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float16: "float16",
}
"""Activation dtypes, and what the native function of each ends in."""

_FOLDER = Path(__file__).parent
_SCHEMA = "(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor"


def _library(language: Language) -> NativeLibrary:
    return NativeLibrary(
        name=f"ternary_naive-{'cuda' if language == 'cuda' else 'cpu'}",
        sources=(_FOLDER / "naive.cu",),
        headers=tuple(_FOLDER / name for name in ("grid.h", "emulator.h", "numbers.h")),
        language=language,
    )


CPU = _library("c++")
"""The source as C++: every CUDA thread runs on the CPU, one after the other."""
CUDA = _library("cuda")
"""The source as CUDA C++."""


@torch.library.custom_op(
    "reconcile_kernels::ternary_naive", mutates_args=(), device_types="cpu", schema=_SCHEMA
)
def ternary_naive(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """``scales * (x @ w.T) + bias`` over packed ternary codes, on the CPU.

    Args:
        x: [M, K], bfloat16, float32 or float16; made contiguous where it is not.
        codes: uint8 [N, K/4], format ``ternary_k_interleaved``.
        scales: float32 [N].
        bias: float32 [N] or None.

    Returns:
        A new tensor [M, N] in the dtype of x; the arithmetic is stated in ``naive.cu``.

    Raises:
        KernelError: shapes, dtypes or devices that do not fit together.
    """
    return _call(CPU, 0, None, (x, codes, scales, bias))


@ternary_naive.register_kernel("cuda")
def _on_cuda(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The same on the device of x, on its current stream."""
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream(x.device).cuda_stream
        return _call(CUDA, x.device.index, stream, (x, codes, scales, bias))


@ternary_naive.register_fake
def _fake(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Shape and dtype of the result."""
    _check(x, codes, scales, bias)
    return x.new_empty((x.shape[0], codes.shape[0]))


def _call(
    library: NativeLibrary,
    device: int,
    stream: int | None,
    operands: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> Tensor:
    """Allocate y [M, N] and let ``library`` write all of it."""
    x, codes, scales, bias = operands
    _check(x, codes, scales, bias)
    x, codes, scales = x.contiguous(), codes.contiguous(), scales.contiguous()
    bias = None if bias is None else bias.contiguous()
    (m, k), n = x.shape, codes.shape[0]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    function, error_text = _functions(library, DTYPES[x.dtype])
    status = function(
        x.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        m,
        n,
        k,
        device,
        stream,
    )
    if status != 0:
        raise KernelError(
            f"ternary_naive on {x.device}, x [{m}, {k}], y [{m}, {n}]: CUDA error {status}, "
            f"{error_text(status).decode()}"
        )
    return y


@functools.cache
def _functions(
    library: NativeLibrary, dtype: str
) -> tuple[Callable[..., int], Callable[[int], bytes]]:
    """The native function for a dtype, and the one that names an error."""
    loaded = library.load()
    function = getattr(loaded, f"ternary_naive_{dtype}")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer] * 5 + [size] * 3 + [ctypes.c_int, pointer]
    function.restype = ctypes.c_int
    error_text = loaded.ternary_naive_error
    error_text.argtypes = [ctypes.c_int]
    error_text.restype = ctypes.c_char_p
    return function, error_text


def _check(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """KernelError unless the native code can read these tensors as they are."""
    vectors = [scales] if bias is None else [scales, bias]
    fits = (
        x.dim() == 2
        and codes.dim() == 2
        and x.dtype in DTYPES
        and codes.dtype == torch.uint8
        and x.shape[1] == 4 * codes.shape[1]
        and all(v.dtype == torch.float32 and v.shape == codes.shape[:1] for v in vectors)
        and all(t.device == x.device for t in (codes, *vectors))
    )
    if not fits:
        got = ", ".join(
            f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
            for name, t in zip(("x", "codes", "scales", "bias"), (x, codes, *vectors), strict=False)
        )
        raise KernelError(
            f"ternary_naive: expected x [M, K] in {', '.join(DTYPES.values())}, codes uint8 "
            f"[N, K/4], scales float32 [N], bias float32 [N] or None on one device; got {got}"
        )
