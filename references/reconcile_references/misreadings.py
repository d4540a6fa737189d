"""Misreadings that formats share: what is done wrong to the scales, or to any code table.

A misreading replaces one stage of `QuantizedWeight.dequantize`. `reread` keeps the stored tensors
and declares them differently; `rescaled` keeps the codes and changes the values of the scales.
Every other stage stays right, so that a fit of one misreading names one mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reconcile.weight import Misreading, QuantizedWeight

COMMON_CAUSES = {
    "signs_swapped": "sign",
    "sign_ignored": "sign",
    "codes_from_zero": "ternary_table",
    "codes_from_minus_one": "ternary_table",
    "codes_sign_extended": "ternary_table",
    "bytes_as_unsigned": "ternary_table",
    "bit_order_reversed": "bit_order",
    "digits_reversed": "bit_order",
    "read_as_interleaved": "interleaved_planar",
    "read_as_planar": "interleaved_planar",
    "read_as_i2_s_arm": "interleaved_planar",
}
"""Diagnoses that misreadings of these names are cases of, in whatever format."""


def reread(name: str, text: str, *, cause: str = "", **changes: Any) -> Misreading:  # noqa: ANN401
    """The stored tensors read as a format that differs in ``changes``, fields of `Format`."""
    read = partial(_reread, changes=changes)
    return Misreading(name, text, read, cause or COMMON_CAUSES.get(name, ""))


def rescaled(
    name: str, text: str, change: Callable[[Tensor], Tensor], cause: str = ""
) -> Misreading:
    """The right codes under ``change(scales)``: float64 to float64, in the scales' own shape."""
    return Misreading(name, text, partial(_rescaled, change=change), cause)


def _reread(weight: QuantizedWeight, changes: dict[str, Any]) -> Tensor:
    return replace(weight, format=replace(weight.format, **changes)).dequantize()


def _rescaled(weight: QuantizedWeight, change: Callable[[Tensor], Tensor]) -> Tensor:
    form = weight.format
    return weight.scaled_by(form.spread(change(form.scale_values(weight.scales)), weight.shape))


def _without_mantissa(scales: Tensor) -> Tensor:
    """Sign and exponent of float64 numbers, the mantissa's bits cleared."""
    return (scales.view(torch.int64) & -(1 << 52)).view(torch.float64)


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Through float32, as a kernel that holds a float32 scale would."""
    return scales.to(torch.float32).to(dtype).to(torch.float64)


def _first(scales: Tensor, dim: int) -> Tensor:
    return scales.narrow(dim, 0, 1).expand_as(scales)


def _last_is_one(scales: Tensor, dim: int) -> Tensor:
    changed = scales.clone()
    changed.select(dim, -1).fill_(1)
    return changed


def _as_transposed(scales: Tensor) -> Tensor:
    """The grid's memory read column by column: the transpose where the grid is square."""
    rows, columns = scales.shape
    return scales.reshape(columns, rows).t()


def _along_columns(weight: QuantizedWeight) -> Tensor:
    scales = weight.format.scale_values(weight.scales)
    return weight.scaled_by(scales[torch.arange(weight.shape[1]) % len(scales)])


def _even_blocks(weight: QuantizedWeight) -> Tensor:
    """Blocks of N // rows x K // columns; what is left over belongs to the last one."""
    scales = weight.format.scale_values(weight.scales)
    for dim, size in enumerate(weight.shape):
        count = scales.shape[dim]
        block = (torch.arange(size) // (size // count)).clamp(max=count - 1)
        scales = scales.index_select(dim, block.to(scales.device))
    return weight.scaled_by(scales)


def _bytes_as_numbers(weight: QuantizedWeight) -> Tensor:
    numbers = weight.scales.view(torch.uint8).to(torch.float64)
    return weight.scaled_by(weight.format.spread(numbers, weight.shape))


def _shifted_bytes(scales: Tensor) -> Tensor:
    """E8M0 values by shifting the byte into a float32's exponent, whose ends mean 0 and inf."""
    smallest = scales == 2.0**-127
    return scales.masked_fill(smallest, 0).masked_fill(scales.isnan(), torch.inf)


SCALE = (
    rescaled("scale_missing", "the scale is not applied", torch.ones_like),
    rescaled("scale_inverted", "multiplies for divides, or the reverse", torch.reciprocal),
    rescaled("scale_squared", "the scale is applied twice", torch.square),
)
"""Any scale."""

NUMBER_SCALE = (
    rescaled(
        "scale_mantissa_dropped",
        "of the scale only the power of two is used: a float read as E8M0",
        _without_mantissa,
    ),
    rescaled(
        "scale_rounded_to_float16",
        "the scale is rounded to float16",
        partial(_rounded, dtype=torch.float16),
        "scale_low_precision",
    ),
    rescaled(
        "scale_rounded_to_bfloat16",
        "the scale is rounded to bfloat16",
        partial(_rounded, dtype=torch.bfloat16),
        "scale_low_precision",
    ),
)
"""Scales stored as numbers."""

E8M0_SCALE = (
    Misreading(
        "scale_byte_as_number",
        "the byte of an E8M0 scale is used as a number, not as an exponent",
        _bytes_as_numbers,
        "bytes_as_numbers",
    ),
    rescaled(
        "scale_byte_shifted",
        "the byte of an E8M0 scale is shifted into a float32: 0 means 0 and 255 means infinity",
        _shifted_bytes,
        "bytes_as_numbers",
    ),
)
"""Scales stored as E8M0 bytes."""

CHANNEL_SCALE = (
    rescaled(
        "first_scale_for_all_rows",
        "the scale of row 0 is used for all rows",
        partial(_first, dim=0),
        "scale_reused",
    ),
    Misreading(
        "scale_along_columns",
        "scale i is applied to column i, not to row i",
        _along_columns,
        "scale_axis",
    ),
)
"""One scale per row."""

BLOCK_SCALE = (
    rescaled(
        "first_k_block_for_all",
        "the scale of K block 0 is used for all K blocks",
        partial(_first, dim=1),
        "scale_reused",
    ),
    rescaled(
        "first_n_block_for_all",
        "the scale of N block 0 is used for all N blocks",
        partial(_first, dim=0),
        "scale_reused",
    ),
    rescaled(
        "last_k_block_unscaled",
        "the scale of the last K block is dropped",
        partial(_last_is_one, dim=1),
        "last_block_scale_dropped",
    ),
    rescaled(
        "last_n_block_unscaled",
        "the scale of the last N block is dropped",
        partial(_last_is_one, dim=0),
        "last_block_scale_dropped",
    ),
    rescaled(
        "scale_grid_transposed", "the scale grid is read transposed", _as_transposed, "scale_axis"
    ),
    Misreading(
        "block_size_from_shapes",
        "the block is taken for N // scale rows x K // scale columns",
        _even_blocks,
        "block_boundary",
    ),
)
"""One scale per block."""
