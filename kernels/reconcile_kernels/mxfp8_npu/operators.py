"""The NPU's operators on the CPU: the arithmetic that their documents state, in their signatures.

`npu_dynamic_mx_quant` is exact (op-plugin's schema, CANN's kernel source, compared with the
vendor's golden data). `npu_quant_matmul` computes the documented sum

    y[m, n] = sum_j 2^(a[m, j] - 127) 2^(b[j, n] - 127) sum_{k in group j} x1[m, k] x2[k, n]
              + bias[n]

in float32, group by group from j = 0; in which order and how wide the Cube unit adds is not
documented, so its last bits are those of this order and not of the hardware.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reconcile.numbers.mx import GROUP, NAN_BYTE
from reconcile_kernels.mxfp8_npu.layout import as_float8, paired
from reconcile_kernels.mxfp8_npu.quantise import quantise

E4M3 = (torch.float8_e4m3fn, 292)
"""``dst_type`` of E4M3FN: torch's dtype, or torch_npu's number."""
float8_e8m0fnu = torch.float8_e8m0fnu
"""``scale_dtype`` of scale bytes; torch_npu has a number of the same name in its place."""
E8M0 = (torch.float8_e8m0fnu, 293)
"""The same: torch's dtype, or torch_npu's number."""
GROUP_SIZES = [1, 1, GROUP]
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def npu_dynamic_mx_quant(
    input: Tensor,  # noqa: A002 - the operator's own name
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: object = 296,
    block_size: int = GROUP,
    scale_alg: int = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Codes, float8_e4m3fn in the shape of the input, and scale bytes in pairs, uint8.

    In the scale the quantised axis of length D becomes ceil(ceil(D / 32) / 2) and a last dimension
    of 2 follows; an odd number of groups is padded with byte 0.

    Raises:
        NotImplementedError: FP4 and E5M2 (``dst_type``, whose default is FP4), other block sizes
            and float16, whose way to the shared exponent is not documented.
        ValueError: a ``round_mode`` or ``scale_alg`` that FP8 does not have.
    """
    if dst_type not in E4M3:
        raise NotImplementedError(f"dst_type {dst_type}: only float8_e4m3fn is emulated")
    if block_size != GROUP or dst_type_max or max_low_bound:
        raise NotImplementedError("block_size 32 without dst_type_max and max_low_bound only")
    if input.dtype not in (torch.bfloat16, torch.float32):
        raise NotImplementedError(f"input {input.dtype}: only bfloat16 and float32 are emulated")
    if round_mode != "rint" or scale_alg not in (0, 1):
        raise ValueError(
            f"FP8 has round_mode rint and scale_alg 0, 1; got {round_mode}, {scale_alg}"
        )
    moved = input.movedim(axis, -1)
    codes, scales = quantise(moved, f"ascend_{scale_alg}")
    pairs = paired(scales).movedim(-2, axis - 1 if axis < 0 else axis)
    return as_float8(codes).movedim(-1, axis).contiguous(), pairs.contiguous()


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    x1_dtype: object = None,  # noqa: ARG001 - in the schema; FP8 tensors carry their dtype
    x2_dtype: object = None,  # noqa: ARG001
    pertoken_scale_dtype: object = None,
    scale_dtype: object = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Product [M, N] of codes x1 [M, K] and x2 [K, N] under bytes [M, P, 2] and [P, N, 2].

    P = ceil(ceil(K / 32) / 2).

    Args:
        x1: float8_e4m3fn.
        x2: float8_e4m3fn.
        scale: of x2, uint8.
        offset: not in the MX mode.
        pertoken_scale: of x1, uint8.
        bias: float32 [N] or None.
        output_dtype: bfloat16, float16 or float32; the operator's own default is int8.
        x1_dtype: the dtype that a tensor of bytes stands for; ignored, as ``x2_dtype``.
        x2_dtype: see ``x1_dtype``.
        pertoken_scale_dtype: of `E8M0`: what the bytes stand for.
        scale_dtype: of `E8M0`.
        group_sizes: [1, 1, 32].
        y_scale: not in the MX mode.

    Raises:
        NotImplementedError: another mode than MX, or no ``output_dtype``.
        ValueError: shapes or dtypes that do not fit together, all of them named.
    """
    if (
        group_sizes != GROUP_SIZES
        or pertoken_scale is None
        or offset is not None
        or y_scale is not None
    ):
        raise NotImplementedError(
            f"only the MX mode is emulated: group_sizes {GROUP_SIZES} with pertoken_scale, without "
            f"offset and y_scale; got group_sizes {group_sizes}"
        )
    if scale_dtype not in E8M0 or pertoken_scale_dtype not in E8M0:
        raise NotImplementedError(
            "the MX mode has scale_dtype and pertoken_scale_dtype float8_e8m0fnu; got "
            f"{scale_dtype} and {pertoken_scale_dtype}"
        )
    if output_dtype not in _OUTPUTS:
        raise NotImplementedError(
            f"output_dtype {output_dtype}: without one the operator gives int8"
        )
    _check(x1, x2, scale, pertoken_scale, bias)
    y = grouped_product(x1, x2, pertoken_scale, scale)
    return (y if bias is None else y + bias).to(output_dtype)


def grouped_product(x1: Tensor, x2: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The sum over groups, float32 [M, N], group by group."""
    rows, columns = x1.to(torch.float32), x2.to(torch.float32)
    left, right = a.flatten(-2).to(torch.int32), b.transpose(0, 1).flatten(-2).to(torch.int32)
    total = torch.zeros(x1.shape[0], x2.shape[1], dtype=torch.float32)
    for group, start in enumerate(range(0, x1.shape[1], GROUP)):
        part = rows[:, start : start + GROUP] @ columns[start : start + GROUP]
        total += _scaled(part, left[:, group, None], right[None, :, group])
    return total


def _scaled(part: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Part [M, N] * 2^(left - 127) * 2^(right - 127), rounded once; NaN under byte 255."""
    scaled = torch.ldexp(part.to(torch.float64), left + right - 254)
    return torch.where((left == NAN_BYTE) | (right == NAN_BYTE), torch.nan, scaled).to(
        torch.float32
    )


def _check(x1: Tensor, x2: Tensor, scale: Tensor, pertoken: Tensor, bias: Tensor | None) -> None:
    m, k, n = x1.shape[0], x1.shape[-1], x2.shape[-1]
    pairs = -(-k // (2 * GROUP))
    fits = (
        (x1.dim(), x2.dim()) == (2, 2)
        and x2.shape[0] == k
        and x1.dtype == x2.dtype == torch.float8_e4m3fn
        and scale.dtype == pertoken.dtype == torch.uint8
        and tuple(scale.shape) == (pairs, n, 2)
        and tuple(pertoken.shape) == (m, pairs, 2)
        and (bias is None or (bias.dtype, tuple(bias.shape)) == (torch.float32, (n,)))
    )
    if not fits:
        given = {"x1": x1, "x2": x2, "scale": scale, "pertoken_scale": pertoken, "bias": bias}
        got = ", ".join(f"{n} {t.dtype} {list(t.shape)}" for n, t in given.items() if t is not None)
        raise ValueError(
            "expected x1 float8_e4m3fn [M, K], x2 float8_e4m3fn [K, N], scale uint8 [P, N, 2], "
            f"pertoken_scale uint8 [M, P, 2] with P = ceil(K / 64), bias float32 [N]; got {got}"
        )
