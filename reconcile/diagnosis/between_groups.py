"""What goes wrong between the groups of a batched linear: each fault as the result it gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reconcile.report import Diagnosis

ENOUGH = 0.99
"""Share of the error's energy that an explanation must take away."""

NAMES = ("strided_output", "strided_input", "group_shifted", "group_bias")
"""Diagnoses that this file can give."""

Fault = tuple[str, str, Tensor, dict[str, int]]
"""Name, text, the result [G, M, N] that it gives, and its parameters."""


def explain_groups(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Diagnosis, ...]:
    """The faults that explain a wrong result of all groups, best first; empty where none does.

    Args:
        y: what came, [G, M, N], with the strides that it came with.
        x: [M, G, K]; the kernel got its view [G, M, K].
        weight: [G, N, K].
        bias: [G, N] or None.
    """
    came = y.to(torch.float64)
    error = (came - _exact(x.transpose(0, 1), weight, bias)).square().sum()
    found = [
        Diagnosis(name=name, explains=explains, text=text, parameters=parameters)
        for name, text, result, parameters in _faults(y, x, weight, bias)
        if (explains := float(1 - (came - result).square().sum() / error)) >= ENOUGH
    ]
    return tuple(sorted(found, key=lambda item: -item.explains))


def explain_one(
    y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, group: int
) -> tuple[Diagnosis, ...]:
    """The operands of another group that explain a wrong result of one, all as above."""
    came, view = y[group].to(torch.float64), x.transpose(0, 1).to(torch.float64)
    wide = weight.to(torch.float64)
    extra = torch.zeros(weight.shape[:2]) if bias is None else bias
    added = extra.to(torch.float64)
    error = (came - view[group] @ wide[group].T - added[group]).square().sum()
    found = []
    for other in (g for g in range(len(weight)) if g != group):
        for what, result in (
            ("weight", view[group] @ wide[other].T + added[group]),
            ("weight and bias", view[group] @ wide[other].T + added[other]),
            ("activations", view[other] @ wide[group].T + added[group]),
            ("result", view[other] @ wide[other].T + added[other]),
        ):
            explains = float(1 - (came - result).square().sum() / error)
            text = f"group {group} has the {what} of group {other}"
            where = {"group": group, "source": other, "operand": what}
            found.append(
                Diagnosis(name="group_shifted", explains=explains, text=text, parameters=where)
            )
    best = sorted(found, key=lambda item: -item.explains)[:1]
    return tuple(item for item in best if item.explains >= ENOUGH)


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("gmk,gnk->gmn", x.to(torch.float64), weight.to(torch.float64))
    return y if bias is None else y + bias.to(torch.float64)[:, None]


def _faults(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Fault]:
    groups, rows = weight.shape[0], x.shape[0]
    view = x.transpose(0, 1)
    right = _exact(view, weight, bias)
    if sorted(y.stride()) == sorted(torch.empty(y.transpose(0, 1).shape).stride()):
        text = "the output's elements lie where those of a contiguous [G, M, N] do"
        order = right.flatten().as_strided(y.shape, y.stride())
        yield "strided_output", text, order, {}
    turned = right.transpose(0, 1)
    text = "the output is written as [M, G, N] and read as [G, M, N]"
    yield "strided_output", text, turned.reshape(right.shape), {}
    text = "the output is written as [G, M, N] and read as [M, G, N]"
    yield "strided_output", text, right.reshape(turned.shape).transpose(0, 1), {}
    text = "x is read as if it were contiguous [G, M, K]"
    yield "strided_input", text, _exact(x.reshape(groups, rows, -1), weight, bias), {}
    for shift in range(1, groups):
        text = f"group g multiplies the weight of group g - {shift}"
        yield "group_shifted", text, _exact(view, weight.roll(shift, 0), bias), {"shift": shift}
    for group in range(groups if bias is not None else 0):
        assert bias is not None
        text = f"the bias of group {group} is added to every group"
        moved = right + (bias[group] - bias.to(torch.float64))[:, None]
        yield "group_bias", text, moved, {"group": group}
