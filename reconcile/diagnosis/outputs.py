"""Outputs that are right but elsewhere, old, or not there at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import named, parameters
from reconcile.diagnosis.model import Fit, LinearModel, Map


def with_rows(base: LinearModel, after: Map) -> LinearModel:
    """The base with its outputs changed before the store; what was changed already stays so."""
    if base.after is None:
        return replace(base, after=after)
    first = base.after
    return replace(base, after=lambda y: after(first(y)))


@named("m_tail_dropped", "unwritten", cost=1)
def tails(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The last rows of a call, or the last columns of them, are zero or were never written."""
    y = evidence.rows.y
    m = len(y)
    for name, empty, value in (
        ("m_tail_dropped", (y == 0).all(1), 0.0),
        ("unwritten", y.isnan().all(1), torch.nan),
    ):
        start = m
        while start > 0 and bool(empty[start - 1]):
            start -= 1
        if 0 < start < m:
            what = "zero" if value == 0 else "not written"
            yield Fit(
                name,
                with_rows(base, _filled(start, value)),
                f"rows m >= {int(evidence.places[start])} of {evidence.m} are {what}",
                parameters(start=evidence.places[start], of=evidence.m),
                1,
            )
    columns = y.isnan().all(0)
    if bool(columns.any()) and not bool(columns.all()):
        places = columns.nonzero().flatten()
        yield Fit(
            "unwritten",
            with_rows(base, lambda exact: torch.where(columns, torch.nan, exact)),
            f"{len(places)} of {len(columns)} output columns are not written, first n = "
            f"{int(places[0])}",
            parameters(columns=places),
            1,
        )


@named("unwritten", cost=0)
def missing_elements(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Nothing at all, the last elements in memory, or a corner: NaN where a number belongs."""
    exact, _ = base.exact(evidence.x)
    missing = evidence.rows.y.isnan() & exact.isfinite()
    count, of = int(missing.sum()), missing.numel()
    if not count:
        return
    if count == of:
        model = with_rows(base, lambda y: torch.full_like(y, torch.nan))
        yield Fit("unwritten", model, "no output is written", parameters(count=count))
    elif evidence.whole and bool(missing.flatten()[-count:].all()):
        text = f"the last {count} of {of} outputs in memory are not written"
        model = with_rows(base, _without_last(count))
        yield Fit("unwritten", model, text, parameters(count=count, of=of), 1)
    rows, columns = missing.any(1), missing.any(0)
    whole = bool(rows.all()) or bool(columns.all())
    if not whole and torch.equal(missing, rows[:, None] & columns):
        first = parameters(m=rows.nonzero().flatten(), n=columns.nonzero().flatten())
        text = f"{int(rows.sum())} rows by {int(columns.sum())} columns are not written"
        kept = evidence.rows.y.double()
        model = replace(with_rows(base, _replaced(missing, kept)), rows_only=True)
        yield Fit("unwritten", model, text, first, 4)


def _without_last(count: int) -> Map:
    def after(y: Tensor) -> Tensor:
        changed = y.flatten().clone()
        changed[-count:] = torch.nan
        return changed.view_as(y)

    return after


def _filled(start: int, value: float) -> Map:
    def after(y: Tensor) -> Tensor:
        changed = y.clone()
        changed[start:] = value
        return changed

    return after


@named("shifted_rows", cost=2)
def shifted(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Row m holds the result of row m - 1 or m + 1."""
    if not evidence.whole or len(evidence.x) < 2:
        return
    for step in (1, -1, 2, -2):
        model = with_rows(base, lambda y, step=step: y.roll(step, 0))  # type: ignore[misc]
        text = f"row m holds the result of row m {-step:+d}"
        yield Fit("shifted_rows", model, text, parameters(step=step), 1)


@named("strided_output", cost=2)
def strided(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The result is written as if the output lay in memory the other way round."""
    if not evidence.whole:
        return
    m, n = evidence.rows.y.shape
    if min(m, n) < 2:
        return

    def turned(y: Tensor) -> Tensor:
        return y.T.reshape(y.shape)

    text = "the output is written column by column into row-major memory"
    yield Fit("strided_output", with_rows(base, turned), text)

    def back(y: Tensor) -> Tensor:
        return y.reshape(y.shape[1], y.shape[0]).T

    text = "the output is written row by row into column-major memory"
    yield Fit("strided_output", with_rows(base, back), text)


@named("stale_output", cost=2)
def stale(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The output of an earlier call on other rows, where that tells them apart."""
    y = evidence.rows.y
    telling = (y != y[:, :1]).any(1) & y.isfinite().all(1)  # others may come from anywhere
    telling &= (evidence.excess(base)[1] > 0).any(1)
    for given, old in evidence.others:
        if old.shape[1] != y.shape[1] or given.shape[1] != evidence.x.shape[1]:
            continue
        matches = torch.cdist(old.float(), y.float(), p=torch.inf) == 0  # [earlier M, M]
        matches &= old.isfinite().all(1)[:, None]
        matches &= torch.cdist(given.float(), evidence.x.float(), p=torch.inf) > 0
        same = matches.any(0) & telling
        if not bool(same.any()):
            continue
        kept = y.double()
        model = replace(with_rows(base, _replaced(same[:, None], kept)), rows_only=True)
        text = f"{int(same.sum())} of {len(y)} rows are bit by bit those of an earlier call"
        yield Fit("stale_output", model, text, parameters(rows=same.nonzero().flatten()), 1)


def _replaced(places: Tensor, values: Tensor) -> Map:
    """The values seen at places [M, 1] or [M, N] of one call."""

    def after(y: Tensor) -> Tensor:
        return torch.where(places, values, y) if y.shape == values.shape else y

    return after


@named("strided_input", cost=1)
def memory(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The strides of x are ignored: its memory is read in order."""
    for raw in evidence.raw:

        def read(x: Tensor, raw: Tensor = raw) -> Tensor:
            return base.operands(raw if x.shape == raw.shape else x)

        text = "the strides of the input are ignored: its memory is read as if it were contiguous"
        yield Fit("strided_input", replace(base, quantise=read), text)


@named("activation_scale", cost=1)
def zero_rows(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """A row of zeros has the scale 0, and 0 / 0 is NaN."""
    zero = (evidence.x == 0).all(1)
    if not bool(evidence.rows.y[zero].isnan().any()):
        return

    def divided(x: Tensor) -> Tensor:
        return torch.where((x == 0).all(1, keepdim=True), torch.nan, base.operands(x))

    text = "a row of zeros becomes NaN: its scale is 0, and is divided by"
    where = parameters(rows=zero.nonzero().flatten())
    yield Fit("activation_scale", replace(base, quantise=divided), text, where)


@named("activation_scale", cost=6)
def row_factors(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Each row of the output under a factor of its own, as a missing activation scale gives.

    Impulses are rows too, of which the factors would be others: then `activations` says more.
    """
    if not evidence.whole or len(evidence.columns):
        return
    exact, _ = base.exact(evidence.x)
    if base.bias is not None:
        exact = exact - base.bias
    got = evidence.rows.y.double() - (0.0 if base.bias is None else base.bias)
    usable = torch.isfinite(got) & torch.isfinite(exact)
    power = torch.where(usable, exact.square(), 0.0).sum(1)
    found = torch.where(usable, got * exact, 0.0).sum(1)
    factor = torch.where(power > 0, found / power, 1.0)[:, None]
    if bool(((factor - 1).abs() < 2.0**-6).all()):
        return
    added = 0.0 if base.bias is None else base.bias

    def after(y: Tensor) -> Tensor:
        return (y - added) * factor + added if len(y) == len(factor) else y

    listed = [float(f"{v:.4g}") for v in factor.flatten()[:8].tolist()]
    text = f"each row is multiplied by a factor of its own, the first by {listed[0]}"
    model = with_rows(base, after)
    yield Fit("activation_scale", model, text, parameters(factors=listed), len(factor))


HYPOTHESES = (missing_elements, tails, shifted, strided, stale, memory, zero_rows, row_factors)
