"""Failing taps explained from two traces alone: neither weights nor model nor kernel is here.

What can be told is what other tensors of the traces would give: the neighbouring layer's output,
the input of the same module, another element of its output, or the same numbers elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.diagnosis.engine import SURE
from reconcile.diagnosis.hypothesis import few
from reconcile.diagnosis.ratios import snapped
from reconcile.report import Diagnosis, Reason, Row
from reconcile.tracing.trace import Tap

MOST = 16
"""Failing rows of one comparison that are explained, the first ones."""
MOST_PRODUCTS = 1 << 31
"""Products that the search for a permutation may take."""
NAMES = (
    "layer_shift",
    "tuple_element",
    "residual_missing",
    "residual_doubled",
    "final_norm",
    "norm_missing",
    "constant_ratio",
    "row_permutation",
    "column_permutation",
    "head_order",
)
Tensors = Mapping[str, Tensor]
Found = tuple[str, Tensor, str]
"""Name, what it predicts, and words."""


def explained(rows: Sequence[Row], passes: Mapping[str, tuple[Tensors, Tensors]]) -> list[Row]:
    """The rows, failing ones with what explains them; ``passes``: by key, (candidate, reference).

    Never raises: a row that cannot be explained stays as it is.
    """
    done, left = [], MOST
    for row in rows:
        c, r = passes.get(row.pass_, ({}, {}))
        if row.reason is Reason.OVER_LIMIT and left and row.tap in c and row.tap in r:
            left -= 1
            try:
                row = replace(row, diagnosis=explain_tap(row.tap, c, r))
            except Exception:  # noqa: BLE001 - the verdict must stand whatever happens here
                done.append(row)
                continue
        done.append(row)
    return done


def explain_tap(tap: str, c: Tensors, r: Tensors) -> tuple[Diagnosis, ...]:
    """Best explanation and runner-up of c[tap] against r[tap]; empty where none explains it."""
    got, right = c[tap].double(), r[tap].double()
    error = float((got - right).square().sum())
    if not error > 0 or got.shape != right.shape:
        return ()
    found = []
    for name, predicted, text in _predictions(tap, got, right, r):
        if predicted.shape == got.shape:
            share = 1 - float((got - predicted).square().sum()) / error
            found.append(
                Diagnosis(
                    name=name,
                    explains=max(0.0, min(1.0, share)),
                    parameters={"tap": tap},
                    text=text,
                )
            )
    found.sort(key=lambda item: -item.explains)
    if not found or not found[0].explains >= SURE:
        return ()
    others = [item for item in found[1:] if item.name != found[0].name and item.explains > 0]
    return (found[0], *(replace(item, role="runner_up") for item in others[:1]))


def _predictions(tap: str, got: Tensor, right: Tensor, r: Tensors) -> Iterator[Found]:
    yield from _shifted(tap, r)
    yield from _elements(tap, right, r)
    yield from _streams(tap, right, r)
    ratio = snapped(float((got * right).sum() / right.square().sum()), 2.0**-8)
    yield "constant_ratio", ratio * right, f"every element is {ratio:.6g} times the right one"
    yield from _permuted(got, right)


def _shifted(tap: str, r: Tensors) -> Iterator[Found]:
    """The same tap of the layers before and after."""
    number = re.search(r"(?<=\.)\d+(?=[.:])", tap)
    if number is None:
        return
    for step in (-1, 1):
        other = f"{tap[: number.start()]}{int(number[0]) + step}{tap[number.end() :]}"
        if other in r:
            yield "layer_shift", r[other].double(), f"it is what the reference has at {other}"


def _elements(tap: str, right: Tensor, r: Tensors) -> Iterator[Found]:
    """Other outputs of the same module."""
    here = Tap.parse(tap)
    for name, tensor in r.items():
        other = Tap.parse(name)
        same = other.module == here.module and other.port.startswith("out") and name != tap
        if same and tensor.is_floating_point() and tensor.shape == right.shape:
            yield "tuple_element", tensor.double(), f"it is what the reference has at {name}"


def _streams(tap: str, right: Tensor, r: Tensors) -> Iterator[Found]:
    """The module's input left out, added again, or passed on as it is."""
    module = Tap.parse(tap).module
    x = next((r[n] for n in (f"{module}:in0", f"{module}:in.hidden_states") if n in r), None)
    if x is not None and x.shape == right.shape:
        x = x.double()
        yield "residual_missing", right - x, "its own input is not added"
        yield "residual_doubled", right + x, "its own input is added twice"
        if "norm" in module.rpartition(".")[2]:
            final = not re.search(r"\.\d+\.", module)
            name = "final_norm" if final else "norm_missing"
            yield name, x, "the norm is left out: the output is the input"
    for name, tensor in r.items():
        other = Tap.parse(name)
        final = other.module.rpartition(".")[2] in ("norm", "final_layernorm", "ln_f")
        if final and other.port.startswith("out") and other.module != module:
            yield (
                "final_norm",
                tensor.double(),
                f"it is what the reference has after {other.module}",
            )


def _permuted(got: Tensor, right: Tensor) -> Iterator[Found]:
    """The same columns or rows in another order; whole heads where they move together."""
    c, r = (side.reshape(-1, side.shape[-1]) for side in (got, right))
    for name, what, a, b in (
        ("column_permutation", "columns", c.T, r.T),
        ("row_permutation", "rows", c, r),
    ):
        if len(a) < 2 or len(a) ** 2 * a.shape[1] > MOST_PRODUCTS:
            continue
        order = (_unit(a) @ _unit(b).T).argmax(1)
        moved = (order != torch.arange(len(order))).nonzero().flatten()
        if len(set(order.tolist())) != len(order) or not len(moved):
            continue
        size = _head_size(order) if name == "column_permutation" else 1
        predicted = b[order]
        shaped = (predicted.T if name == "column_permutation" else predicted).reshape(got.shape)
        if size > 1:
            heads = (order[::size] // size).tolist()
            yield "head_order", shaped, f"heads of {size} are in the order {few(heads)}"
        else:
            listed = [f"{int(i)} from {int(order[i])}" for i in moved[:8]]
            yield name, shaped, f"{len(moved)} of {len(order)} {what} are exchanged: {few(listed)}"


def _unit(rows: Tensor) -> Tensor:
    return rows / rows.square().sum(1, keepdim=True).sqrt().clamp_min(1e-300)


def _head_size(order: Tensor) -> int:
    """The largest run of columns that always move together; 1: they move one by one."""
    breaks = (order[1:] != order[:-1] + 1).nonzero().flatten() + 1
    size = len(order)
    for place in breaks.tolist():
        size = math.gcd(size, place)
    return size
