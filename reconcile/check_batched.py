"""Batched and grouped linears: each group by all the probes of `check_linear`, among the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reconcile.check import check_linear
from reconcile.exceptions import ConfigError
from reconcile.report import Coverage, Report, Row
from reconcile.rounding import bitwise_equal

MOST = 4
"""Groups that are checked by default: all up to this number, else spread over them."""


def check_batched_linear(
    kernel: Callable[..., Tensor],
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    groups: Iterable[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> Report:
    """Check Y[g] = X[g] W[g]^T (+ b[g]) group by group.

    While one group is probed the others carry random activations and their own weights (in a
    probe that makes up a weight, random ones), so that a group that reads its neighbour's memory
    shows.

    Args:
        kernel: ``f(x, weight, bias=None)`` for x [G, M, K], weight [G, N, K], bias [G, N],
            giving [G, M, N].
        weight: floating-point [G, N, K].
        bias: [G, N] or None.
        groups: groups to probe; default: all of up to 4, else 4 of them including the first and
            the last, which the notices say.
        options: those of `check_linear`.

    Raises:
        ConfigError: as `check_linear`, or a shape or group that does not fit.
    """
    started = time.perf_counter()
    given: tuple[object, ...] = (weight, *(() if bias is None else (bias,)))
    if not all(isinstance(tensor, Tensor) for tensor in given):
        raise ConfigError("expected weight and bias as tensors")
    if weight.dim() != 3 or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:2])):
        raise ConfigError(
            f"expected weight [G, N, K] and bias [G, N], got {list(weight.shape)} and "
            f"{None if bias is None else list(bias.shape)}"
        )
    count = weight.shape[0]
    if not isinstance(groups, Iterable | None):
        raise ConfigError(f"groups: expected numbers of groups, got {groups!r}")
    chosen = _spread(count) if groups is None else tuple(groups)
    if not chosen or not all(type(group) is int and 0 <= group < count for group in chosen):
        raise ConfigError(f"groups: expected some of 0 ... {count - 1}, got {list(chosen)}")
    rows: list[Row] = []
    notices = [f"probed groups {list(chosen)} of {count}"]
    for group in chosen:
        report = check_linear(
            _one_group(kernel, weight, bias, group, chosen),
            weight[group],
            bias=None if bias is None else bias[group],
            **options,
        )
        rows += [replace(row, tap=f"linear.{group}:out") for row in report.rows]
        notices += report.notices
    compared = len({row.tap for row in rows if row.stats})
    return Report(
        case=f"check_batched_linear {getattr(kernel, '__name__', type(kernel).__name__)}",
        rows=tuple(rows),
        coverage=Coverage(expected=len(chosen), compared=compared),
        command="reconcile.check_batched_linear",
        created=report.created,
        seconds=round(time.perf_counter() - started, 3),
        notices=tuple(dict.fromkeys(notices)),
    )


def _spread(count: int) -> tuple[int, ...]:
    if count <= MOST:
        return tuple(range(count))
    return tuple(sorted({round(i * (count - 1) / (MOST - 1)) for i in range(MOST)}))


def _one_group(
    kernel: Callable[..., Tensor],
    weight: Tensor,
    bias: Tensor | None,
    group: int,
    chosen: tuple[int, ...],
) -> Callable[..., Tensor]:
    """The batched kernel as a plain one whose operands stand in place ``group``.

    What it does to the other groups is raised: it must leave their operands alone and keep their
    outputs finite whatever the probed group holds. An output that is not finite although all
    operands are is left to the probes of its own group, where that is among the ``chosen``.
    """
    count = weight.shape[0]
    unwritten: set[int] = set()
    others = torch.arange(count) != group

    def plain(x: Tensor, own: Tensor, own_bias: Tensor | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(group)
        rows = x.reshape(-1, x.shape[-1])
        known = own.shape == weight.shape[1:]
        operands = [
            torch.randn(count, *rows.shape, generator=generator).to(x.dtype),
            weight if known else torch.randn(count, *own.shape, generator=generator).to(own.dtype),
        ]
        mine = [rows, own]
        if own_bias is not None:
            drawn = torch.randn(count, own.shape[0], generator=generator).to(own_bias.dtype)
            operands.append(bias if known and bias is not None else drawn)
            mine.append(own_bias)
        given = [operand.clone() for operand in operands]
        for operand, part in zip(given, mine, strict=True):
            operand[group] = part
        kept = [operand.clone() for operand in given]
        y: Any = kernel(*given)
        for operand, before, part in zip(given, kept, mine, strict=True):
            if not bitwise_equal(operand[others], before[others]):
                raise RuntimeError("the kernel changed an operand of another group")
            part.copy_(operand[group])  # what it changed of this group is seen by the caller
        x.copy_(rows.view_as(x))
        if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[0] != count:
            return y  # type: ignore[no-any-return]
        spoilt = [g for g in range(count) if g != group and not bool(y[g].isfinite().all())]
        spread = not all(bool(part.isfinite().all()) for part in mine)
        if not spread and set(spoilt) <= set(chosen):
            unwritten.update(spoilt)
        elif strange := sorted(set(spoilt) - unwritten):
            raise RuntimeError(
                f"outputs of other groups, whose operands are finite, are not: groups {strange}"
            )
        return y[group].reshape(*x.shape[:-1], y.shape[-1])

    plain.__name__ = getattr(kernel, "__name__", type(kernel).__name__)
    if (contract := getattr(kernel, "contract", None)) is not None:
        plain.contract = contract  # type: ignore[attr-defined]
    return plain
