"""From the checkpoint to codes and scale bytes: resolve the blocks' scales, quantise again.

Source: vllm-ascend, quantization/methods/fp8_block.py (PR 14852).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reconcile.exceptions import KernelError
from reconcile.grouped import GroupedWeight
from reconcile.kernel import Stage
from reconcile.numbers import mx
from reconcile.weight import QuantizedWeight, Shape
from reconcile_kernels.mxfp8_npu.layout import Buffers, pack, unpack
from reconcile_kernels.mxfp8_npu.quantise import quantise

ROWS = 32
"""Rows that are in float32 at a time: one MiB of K = 8192, which a cache holds."""
MX_FORMAT = "mxfp8_e4m3"
BLOCK_FORMATS = ("fp8_e4m3_block", "fp8_e4m3_block_e8m0")
RULES = {0: "ascend_0", 1: "ascend_1"}
"""``scale_alg`` of `npu_dynamic_mx_quant` to the rule of `reconcile.numbers.mx`."""


def resolve_block_scales(
    codes: Tensor, scales: Tensor, block: Shape, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Dense weight [N, K]: float32(code) * float32(scale), one product, one rounding to ``dtype``.

    At most `ROWS` rows are in float32 at a time, so that the memory beside the result stays small.

    Args:
        codes: E4M3FN, float8_e4m3fn or its bytes, [N, K].
        scales: numbers (float32, bfloat16) or E8M0 (float8_e8m0fnu), [ceil(N / bn), ceil(K / bk)].
        block: (bn, bk).
        dtype: the model's.

    Raises:
        ValueError: no matrix, or a grid of another shape; both are named.
    """
    out = torch.empty(_matrix(codes), dtype=dtype)
    for rows, wide in _resolved_rows(codes, scales, block):
        out[rows] = wide
    return out


def requantise_into(
    out: Tensor, codes: Tensor, scales: Tensor, block: Shape, scale_alg: int, dtype: torch.dtype
) -> Tensor:
    """`resolve_block_scales` and the quantiser chunk by chunk, without the dense weight.

    Args:
        out: uint8 [N, K] for the new codes; may be ``codes`` itself.
        codes: E4M3FN bytes, uint8 [N, K].
        scales: of the blocks.
        block: (bn, bk).
        scale_alg: 0 or 1.
        dtype: the model's, to which a weight is rounded before it is quantised.

    Returns:
        The new scale bytes, uint8 [N, ceil(K / 32)].
    """
    n, k = _matrix(codes)
    found = torch.empty((n, -(-k // mx.GROUP)), dtype=torch.uint8)
    for rows, wide in _resolved_rows(codes, scales, block):
        out[rows], found[rows] = quantise(wide.to(dtype), RULES[scale_alg])
    return found


def _resolved_rows(codes: Tensor, scales: Tensor, block: Shape) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of rows with their products code * scale, float32 [rows, K]."""
    (n, k), (bn, bk) = _matrix(codes), block
    expected = (-(-n // bn), -(-k // bk))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"a weight [{n}, {k}] in blocks of {bn} x {bk} has scales {list(expected)}, got "
            f"{list(scales.shape)}"
        )
    numbers = scales.to(torch.float32)
    for first, last in _chunks(n, bn):
        row = numbers[first // bn].repeat_interleave(bk)[:k]
        wide = codes[first:last].view(torch.float8_e4m3fn).to(torch.float32)
        yield slice(first, last), wide.mul_(row)


def _matrix(codes: Tensor) -> Shape:
    if codes.dim() != 2:
        raise ValueError(f"expected a weight [N, K], got {list(codes.shape)}")
    return codes.shape[0], codes.shape[1]


def _chunks(n: int, bn: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `ROWS` rows that lie in one row of blocks."""
    for top in range(0, n, bn):
        bottom = min(top + bn, n)
        for first in range(top, bottom, ROWS):
            yield first, min(first + ROWS, bottom)


def source_scales(weight: QuantizedWeight) -> Tensor:
    """The stored scales in a dtype whose numbers they are: bytes become float8_e8m0fnu."""
    if weight.format.scale_encoding == "e8m0":
        return weight.scales.view(torch.uint8).view(torch.float8_e8m0fnu)
    return weight.scales


def load(weight: QuantizedWeight, scale_alg: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scale bytes [N, G], uint8; a weight that is stored so is taken as it is.

    Raises:
        KernelError: a format without blocks.
        ValueError: a scale grid that does not fit.
    """
    if weight.format.name == MX_FORMAT:
        return weight.codes, weight.scales.view(torch.uint8)
    if weight.format.name not in BLOCK_FORMATS or weight.format.block is None:
        raise KernelError(
            f"{weight.name or 'weight'}: {weight.format.name} has no blocks; expected one of "
            f"{', '.join((*BLOCK_FORMATS, MX_FORMAT))}"
        )
    codes = torch.empty_like(weight.codes)
    block, scales = weight.format.block, source_scales(weight)
    return codes, requantise_into(codes, weight.codes, scales, block, scale_alg, torch.bfloat16)


def resolved(weight: QuantizedWeight | GroupedWeight) -> Tensor:
    """The dense weight in bfloat16, [N, K], of experts [E, N, K]; a stored MXFP8 one decoded."""
    if isinstance(weight, GroupedWeight):
        groups = (group for group in weight.groups if isinstance(group, QuantizedWeight))
        return torch.stack([resolved(group) for group in groups])
    if weight.format.name == MX_FORMAT:
        return _decoded(weight.codes, weight.scales.view(torch.uint8)).to(torch.bfloat16)
    assert weight.format.block is not None
    return resolve_block_scales(weight.codes, source_scales(weight), weight.format.block)


def stages(weight: QuantizedWeight, scale_alg: int) -> Iterator[Stage]:
    """The same, step by step, each step's weight decoded for inspection."""
    if weight.format.name == MX_FORMAT:
        codes, scales = load(weight, scale_alg)
    else:
        dense = resolved(weight)
        yield Stage(name="resolve", values=dense, facts={"dtype": "bfloat16"})
        codes, scales = quantise(dense, RULES[scale_alg])
        yield Stage(name="requantise", values=_decoded(codes, scales), facts=_bytes(scales))
    packed = pack(codes, scales)
    layouts = {"codes": list(packed[0].shape), "scales": list(packed[1].shape)}
    yield Stage(name="repack", values=_decoded(*unpack(*packed)), facts=layouts)
    yield _persisted(packed)


def _persisted(packed: tuple[Tensor, Tensor]) -> Stage:
    """Load twice, the first time something else: the values must be new, the addresses not."""
    buffers = Buffers()
    buffers.load(torch.zeros_like(packed[0]), torch.zeros_like(packed[1]))
    first = buffers.addresses()
    buffers.load(*packed)
    assert buffers.codes is not None
    assert buffers.scales is not None
    moved = buffers.addresses() != first
    return Stage(
        name="persist",
        values=_decoded(*unpack(buffers.codes, buffers.scales)),
        facts={"bytes": sum(tensor.nbytes for tensor in packed)},
        fault="a second load moved the buffers" if moved else "",
    )


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    return mx.Mx(codes=codes, scales=scales).dequantize()


def _bytes(scales: Tensor) -> dict[str, int]:
    return {"byte_min": int(scales.min()), "byte_max": int(scales.max())}
