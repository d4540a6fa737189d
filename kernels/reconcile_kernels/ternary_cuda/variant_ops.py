"""The native libraries of the variants, and the custom op that calls them.

``reconcile_kernels::ternary_cuda(Tensor x, Tensor words, Tensor scales, Tensor? bias, str variant,
int n, int span, bool divide) -> Tensor`` is registered for CPU tensors (the grid is emulated), for
CUDA tensors (on the current stream) and for fake tensors. It decides nothing by values and waits
for nothing, so a CUDA graph can hold it; besides its launch it allocates y, from torch's own pool.
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
from reconcile_kernels.ternary_cuda.ops import DTYPES

VARIANTS = ("vectorised", "tiled", "masks", "mma")
"""Names of the sources."""

_FOLDER = Path(__file__).parent
_HEADERS = tuple(_FOLDER / f"{name}.h" for name in ("emulator", "grid", "numbers", "ternary"))
_ALIGNED = 16
_SCHEMA = (
    "(Tensor x, Tensor words, Tensor scales, Tensor? bias, str variant, int n, int span, "
    "bool divide) -> Tensor"
)


def _library(variant: str, language: Language) -> NativeLibrary:
    return NativeLibrary(
        name=f"ternary_{variant}-{'cuda' if language == 'cuda' else 'cpu'}",
        sources=(_FOLDER / f"{variant}.cu",),
        headers=_HEADERS,
        language=language,
    )


CPU = {name: _library(name, "c++") for name in VARIANTS if name != "mma"}
"""The sources as C++ on the emulated grid; tensor cores are not emulated."""
CUDA = {name: _library(name, "cuda") for name in VARIANTS}
"""The sources as CUDA C++."""


@torch.library.custom_op(
    "reconcile_kernels::ternary_cuda", mutates_args=(), device_types="cpu", schema=_SCHEMA
)
def ternary_cuda(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    variant: str,
    n: int,
    span: int,
    divide: bool,
) -> Tensor:
    """The linear layer of one variant on the emulated grid.

    Args:
        x: [M, K], bfloat16, float32 or float16; copied where it is not contiguous or does not
            begin on 16 bytes.
        words: int32, w as the variant reads it.
        scales: float32 [N], or [N, ceil(K / span)].
        bias: float32 [N] or None.
        variant: one of `VARIANTS`.
        n: output features.
        span: values of K that share a scale; 0: all.
        divide: whether the scale divides.

    Returns:
        A new tensor [M, N] in the dtype of x.

    Raises:
        KernelError: operands that do not fit together, or what the emulated grid found wrong.
    """
    _check(x, words, scales, bias, n, span)
    return _call(CPU, (x, words, scales, bias), variant, (n, span, divide), (0, None))


@ternary_cuda.register_kernel("cuda")
def _on_cuda(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    variant: str,
    n: int,
    span: int,
    divide: bool,
) -> Tensor:
    """The same on the device of x, on its current stream."""
    _check(x, words, scales, bias, n, span)
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream(x.device).cuda_stream
        place = (x.device.index, stream)
        return _call(CUDA, (x, words, scales, bias), variant, (n, span, divide), place)


@ternary_cuda.register_fake
def _fake(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    variant: str,  # noqa: ARG001
    n: int,
    span: int,
    divide: bool,  # noqa: ARG001
) -> Tensor:
    """Shape and dtype of the result."""
    _check(x, words, scales, bias, n, span)
    return x.new_empty((x.shape[0], n))


def _call(
    libraries: dict[str, NativeLibrary],
    operands: tuple[Tensor, Tensor, Tensor, Tensor | None],
    variant: str,
    what: tuple[int, int, bool],
    place: tuple[int, int | None],
) -> Tensor:
    """Allocate y [M, N] and let the variant write all of it."""
    if variant not in libraries:
        raise KernelError(f"ternary_cuda: {variant!r} does not run on {operands[0].device.type}")
    x, words, scales = map(_aligned, operands[:3])
    bias = None if operands[3] is None else _aligned(operands[3])
    (m, k), (n, span, divide) = x.shape, what
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    function, error_text = functions(libraries[variant], variant, DTYPES[x.dtype])
    status = function(
        x.data_ptr(),
        words.data_ptr(),
        words.numel(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        m,
        n,
        k,
        span,
        divide,
        *place,
    )
    if status != 0:
        raise KernelError(
            f"ternary_cuda {variant} on {x.device}, x [{m}, {k}], y [{m}, {n}]: CUDA error "
            f"{status}, {error_text(status).decode()}"
        )
    return y


def _aligned(operand: Tensor) -> Tensor:
    """The operand without gaps, on a boundary that vector loads may use."""
    operand = operand.contiguous()
    return operand.clone() if operand.data_ptr() % _ALIGNED else operand


@functools.cache
def functions(
    library: NativeLibrary, variant: str, dtype: str
) -> tuple[Callable[..., int], Callable[[int], bytes]]:
    """The native function of a variant for a dtype, and the one that names an error."""
    loaded = library.load()
    function = getattr(loaded, f"ternary_{variant}_{dtype}")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, size, pointer, pointer, pointer, *[size] * 4]
    function.argtypes += [ctypes.c_int, ctypes.c_int, pointer]
    function.restype = ctypes.c_int
    error_text = getattr(loaded, f"ternary_{variant}_error")
    error_text.argtypes = [ctypes.c_int]
    error_text.restype = ctypes.c_char_p
    return function, error_text


def _check(
    x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, n: int, span: int
) -> None:
    """KernelError unless these tensors fit together."""
    k = x.shape[-1] if x.dim() else 0
    tensors = {"x": x, "words": words, "scales": scales} | ({} if bias is None else {"bias": bias})
    fits = (
        x.dim() == 2
        and x.dtype in DTYPES
        and words.dtype == torch.int32
        and words.dim() == 1
        and 16 * words.numel() >= n * k
        and scales.dtype == torch.float32
        and tuple(scales.shape) == ((n, -(-k // span)) if span else (n,))
        and (bias is None or (bias.dtype == torch.float32 and tuple(bias.shape) == (n,)))
        and all(tensor.device == x.device for tensor in tensors.values())
    )
    if not fits:
        got = ", ".join(
            f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
            for name, t in tensors.items()
        )
        raise KernelError(
            f"ternary_cuda: expected x [M, K] in {', '.join(DTYPES.values())}, words int32 of all "
            f"codes, scales float32 [{n}] or [{n}, K/{span}], bias float32 [{n}] or None on one "
            f"device; got {got}"
        )
