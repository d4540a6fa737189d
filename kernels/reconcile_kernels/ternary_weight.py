"""Ternary weights of any registered format as values and one scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from reconcile import registry
from reconcile.exceptions import KernelError
from reconcile.weight import Format, QuantizedWeight

VECTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of scales and biases: those that float32 holds exactly."""


def is_ternary(form: Format) -> bool:
    """Whether the legal codes of a format stand for -1, 0 and +1 only."""
    legal = {value for code, value in enumerate(form.table) if code not in form.invalid}
    return legal <= {-1.0, 0.0, 1.0}


def row_scaled_formats() -> tuple[str, ...]:
    """Names of the registered ternary formats with one scale, or one per output row."""
    return tuple(form.name for form in _ternary_formats() if form.granularity != "block")


def block_scaled_formats(step: int) -> tuple[str, ...]:
    """Names of those with one scale per row and block of K that is a multiple of ``step``."""
    return tuple(form.name for form in _ternary_formats() if span_of(form) and fits(form, step))


def span_of(form: Format) -> int:
    """Values of K that share a scale; 0: all."""
    return 0 if form.block is None else form.block[1]


def fits(form: Format, step: int) -> bool:
    """Whether a scale belongs to one row, and to a multiple of ``step`` values of K."""
    return form.block is None or (form.block[0] == 1 and form.block[1] % step == 0)


def _ternary_formats() -> list[Format]:
    return [form for form in registry.formats().values() if is_ternary(form)]


def ternary_values(weight: QuantizedWeight, where: str) -> Tensor:
    """The weight before its scale, int8 [N, K] in {-1, 0, +1}; KernelError for another value."""
    codes, table = weight.unpacked(), weight.format.table
    plus, minus, zero = (_any_of(codes, table, value) for value in (1.0, -1.0, 0.0))
    other = ~(plus | minus | zero)
    if bool(other.any()):
        row, column = (int(i) for i in other.nonzero()[0])
        raise KernelError(
            f"{where}: expected values -1, 0 and +1, got {table[int(codes[row, column])]:g} at "
            f"[n={row}, k={column}], {int(other.sum())} of {other.numel()} in all"
        )
    return plus.to(torch.int8) - minus.to(torch.int8)


def _any_of(codes: Tensor, table: tuple[float, ...], value: float) -> Tensor:
    """Where a code stands for ``value``."""
    found = torch.zeros_like(codes, dtype=torch.bool)
    for code, meaning in enumerate(table):
        if meaning == value:
            found |= codes == code
    return found


def widened(vector: Tensor, n: int, what: str) -> Tensor:
    """``vector`` [N] as contiguous float32, exactly; KernelError for what float32 cannot hold."""
    if vector.dtype not in VECTOR_DTYPES or tuple(vector.shape) != (n,):
        raise KernelError(
            f"{what}: expected [{n}] in {', '.join(map(str, VECTOR_DTYPES))}, got "
            f"{vector.dtype} {list(vector.shape)}"
        )
    return vector.to(torch.float32).contiguous()


def row_scales(weight: QuantizedWeight, rows: int) -> Tensor:
    """One scale per row as float32 [rows]; rows beyond N, which no result uses, get 1.

    Exact, since scales are stored as float32, bfloat16 or float16.
    """
    stored = weight.format.scale_values(weight.scales).to(torch.float32)
    padded = torch.ones(rows, dtype=torch.float32)
    padded[: weight.shape[0]] = stored.expand(weight.shape[0])
    return padded
