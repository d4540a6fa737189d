"""The native library of each engine, and the custom op that calls it.

``reconcile_kernels::amx_fp8(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int group,
ScalarType out, str engine) -> Tensor`` is registered for CPU and for fake tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reconcile.exceptions import KernelError
from reconcile.native import NativeLibrary
from reconcile_kernels.amx_fp8.emulator import emulated_tiles
from reconcile_kernels.amx_fp8.packing import refused

K_BLOCK = 128
"""Values of k under one scale, and of one inner sum."""

_TYPES = {torch.bfloat16: 0, torch.float32: 1}
_FOLDER = Path(__file__).parent
_VECTOR = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "vbmi", "bf16"))
_TILES = ("-mamx-tile", "-mamx-bf16")


def _library(name: str, flags: tuple[str, ...] = ()) -> NativeLibrary:
    return NativeLibrary(
        name=f"amx_fp8-{name}",
        sources=(_FOLDER / f"{name}.cpp",),
        headers=(_FOLDER / "linear.h", _FOLDER / "fp8.h"),
        flags=(*_VECTOR, "-mfma", *flags, "-pthread"),
    )


AVX512 = _library("avx512")
"""VDPBF16PS for bfloat16 activations, FMA for float32."""
AMX = _library("amx", _TILES)
"""TDPBF16PS; the same binary on tiles and under the emulator."""

_ENGINES: dict[str, tuple[NativeLibrary, str, tuple[torch.dtype, ...]]] = {
    "avx512_bf16": (AVX512, "amx_fp8_avx512", (torch.bfloat16, torch.float32)),
    "amx": (AMX, "amx_fp8_amx", (torch.bfloat16,)),
    "amx-emulated": (AMX, "amx_fp8_amx", (torch.bfloat16,)),
}

_REGISTERED: Any = torch.library.Library(  # type: ignore[no-untyped-call]
    "reconcile_kernels", "FRAGMENT"
)
_REGISTERED.define(
    "amx_fp8(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int group, ScalarType out, "
    "str engine) -> Tensor"
)


def library(engine: str) -> NativeLibrary:
    """The sources of an engine."""
    return _ENGINES[engine][0]


def activations(engine: str) -> tuple[torch.dtype, ...]:
    """Dtypes of x that an engine reads."""
    return _ENGINES[engine][2]


def amx_fp8(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group: int,
    out: torch.dtype,
    engine: str,
) -> Tensor:
    """``x @ (scale * codes).T + bias`` over packed E4M3FN codes; a new tensor [M, N] in ``out``.

    Args:
        x: [M, K], bfloat16, or float32 where the engine has that path; made contiguous where it
            is not.
        packed: uint8 [N, K] as `reconcile_kernels.amx_fp8.packing.pack` gives it.
        scales: float32; [ceil(N / group), ceil(K / 128)], or [N] with group 1.
        bias: float32 [N] or None.
        group: columns that share a row of scales: a multiple of 32, or 1.
        out: bfloat16 or float32.
        engine: ``avx512_bf16``, ``amx`` or ``amx-emulated``.

    Raises:
        KernelError: tensors that do not fit together, or an unknown engine.
    """
    result: Tensor = torch.ops.reconcile_kernels.amx_fp8(
        x, packed, scales, bias, group, out, engine
    )
    return result


@torch.library.impl(_REGISTERED, "amx_fp8", "CPU")
def _on_cpu(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group: int,
    out: torch.dtype,
    engine: str,
) -> Tensor:
    _check(x, packed, scales, bias, group, out, engine)
    x, packed, scales = x.contiguous(), packed.contiguous(), scales.contiguous()
    bias = None if bias is None else bias.contiguous()
    (m, k), n = x.shape, packed.shape[0]
    y = torch.empty((m, n), dtype=out)
    if m == 0:
        return y
    with emulated_tiles() if engine == "amx-emulated" else nullcontext():
        _function(*_ENGINES[engine][:2])(
            x.data_ptr(),
            packed.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            m,
            n,
            k,
            group,
            _TYPES[x.dtype],
            _TYPES[out],
            torch.get_num_threads(),
        )
    return y


@torch.library.register_fake("reconcile_kernels::amx_fp8")  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group: int,
    out: torch.dtype,
    engine: str,
) -> Tensor:
    _check(x, packed, scales, bias, group, out, engine)
    return x.new_empty((x.shape[0], packed.shape[0]), dtype=out)


@functools.cache
def _function(native: NativeLibrary, name: str) -> Callable[..., None]:
    """The native function of an engine's library."""
    function: Callable[..., None] = getattr(native.load(), name)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [pointer] * 5 + [size] * 4 + [number] * 3  # type: ignore[attr-defined]
    function.restype = None  # type: ignore[attr-defined]
    return function


def _check(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    group: int,
    out: torch.dtype,
    engine: str,
) -> None:
    """KernelError unless the native code can read these tensors as they are."""
    if engine not in _ENGINES:
        raise KernelError(f"amx_fp8: expected an engine of {', '.join(_ENGINES)}, got {engine!r}")
    floats = [scales] if bias is None else [scales, bias]
    fits = (
        x.dim() == 2
        and packed.dim() == 2
        and x.dtype in activations(engine)
        and out in _TYPES
        and packed.dtype == torch.uint8
        and x.shape[1] == packed.shape[1]
        and not refused(*packed.shape)
        and tuple(scales.shape) == _scale_shape(packed, group)
        and (bias is None or tuple(bias.shape) == (packed.shape[0],))
        and all(t.dtype == torch.float32 for t in floats)
        and all(t.device.type == "cpu" for t in (x, packed, *floats))
    )
    if not fits:
        named = zip(("x", "packed", "scales", "bias"), (x, packed, *floats), strict=False)
        got = ", ".join(
            f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in named
        )
        reads = " or ".join(str(t).removeprefix("torch.") for t in activations(engine))
        raise KernelError(
            f"amx_fp8 on {engine}: expected x [M, K] in {reads}, packed uint8 [N, K] with N and K "
            "multiples of 32, scales float32 [ceil(N / group), ceil(K / 128)] with a group that "
            "is a multiple of 32, or [N] with group 1, bias float32 [N] or None, out bfloat16 or "
            f"float32, all on the CPU; got {got}, group {group}, out {out}"
        )


def _scale_shape(packed: Tensor, group: int) -> tuple[int, ...]:
    n, k = packed.shape
    if group == 1:
        return (n,)
    if group < 1 or group % 32:
        return (-1,)  # no tensor has it
    return (-(-n // group), -(-k // K_BLOCK))
