"""Results that are right but lie elsewhere in the output: in another row, or at another stride."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import few, named, parameters
from reconcile.diagnosis.model import Fit, LinearModel, Map
from reconcile.diagnosis.outputs import with_rows

ALIKE = 2.0**-5
"""Relative distance up to which two rows of outputs count as one and the same."""
WINDOW = 32
"""Outputs that are compared to find where a row begins."""


@named("shifted_rows", "m_tail_dropped", "stale_output", cost=3)
def repeated(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Rows that hold the result of another row of the same call: which one is solved for."""
    m = len(evidence.x)
    if not evidence.whole or m < 2:
        return
    exact, _ = base.exact(evidence.x)
    wrong = (evidence.excess(base)[1] > 0).any(1)
    source = _sources(evidence.rows.y.double(), exact, wrong)
    places = (source != torch.arange(m)).nonzero().flatten()
    if not len(places):
        return
    name, text = _described(source, places, m)
    found = parameters(rows=places, sources=source[places])
    yield Fit(name, with_rows(base, _taken(source)), text, found, 2)


def _sources(y: Tensor, exact: Tensor, wrong: Tensor) -> Tensor:
    """The row [M] whose result each row holds; its own where none is like it."""
    own = torch.arange(len(y))
    known = torch.nan_to_num(exact, 0.0, 0.0, 0.0)
    got = torch.nan_to_num(y, 0.0, 0.0, 0.0)
    apart = torch.cdist(got, known)  # [M, M]
    nearest = apart.min(1)
    size = got.square().sum(1).sqrt()
    found = wrong & (nearest.values <= ALIKE * size) & (size > 0)
    found &= nearest.values < apart.diagonal() / 4
    return torch.where(found, nearest.indices, own)


def _described(source: Tensor, places: Tensor, m: int) -> tuple[str, str]:
    """Name and words of a map of rows."""
    first, steps = int(places[0]), source[places] - places
    origin = int(source[first])
    if bool((source[places] == origin).all()) and len(places) == m - first:
        return "m_tail_dropped", f"rows m >= {first} of {m} hold the result of row {origin}"
    if bool((steps == steps[0]).all()):
        text = f"{len(places)} of {m} rows hold the result of row m {int(steps[0]):+d}"
        return "shifted_rows", f"{text}: m = {few(places)}"
    pairs = [f"{int(place)} has {int(source[place])}" for place in places[:2]]
    text = f"{len(places)} of {m} rows hold the result of another row: {'; '.join(pairs)}, ..."
    return "stale_output", text


def _taken(source: Tensor) -> Map:
    def after(y: Tensor) -> Tensor:
        index = torch.arange(len(y))
        given = source[: len(y)]
        index[: len(given)] = torch.where(given < len(y), given, index[: len(given)])
        return y[index]

    return after


@named("strided_output", cost=3)
def distances(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Rows at another distance than the output's: its gaps are written over, or gaps are left."""
    m, n = evidence.rows.y.shape
    if not evidence.whole or min(m, n) < 2:
        return
    exact, _ = base.exact(evidence.x)
    y = evidence.rows.y.double()
    closed = _begins(exact.flatten(), y[1])
    if closed not in (None, 0, n):
        fill = _fill(y.flatten(), (m * n) * n // closed if closed > n else m * n)
        text = f"rows of {n} are written {n} apart into an output whose rows are {closed} apart"
        found = parameters(distance=closed, declared=n)
        yield Fit("strided_output", with_rows(base, _read_at(closed, fill)), text, found, 1)
    spread = _begins(y.flatten(), exact[1])
    if spread is not None and spread > n:
        fill = _fill(y.flatten()[n:spread], 0)
        text = f"rows of {n} are written {spread} apart into an output whose rows are {n} apart"
        found = parameters(distance=spread, declared=n)
        yield Fit("strided_output", with_rows(base, _written_at(spread, fill)), text, found, 1)


def _begins(flat: Tensor, row: Tensor) -> int | None:
    """Where the beginning of a row [N] lies in memory [M * N]; None where nowhere."""
    width = min(len(row), WINDOW)
    wanted = row[:width]
    size = float(wanted.norm())
    if not size > 0 or len(flat) < width:
        return None
    windows = flat[: 4 * len(row)].unfold(0, width, 1)
    apart = (windows - wanted).square().sum(1).sqrt().nan_to_num(nan=torch.inf)
    best = int(apart.argmin())
    return best if float(apart[best]) <= ALIKE * size else None


def _fill(values: Tensor, start: int) -> float:
    """What stands where nothing was written: NaN, or else zero."""
    return torch.nan if bool(values[start:].isnan().any()) else 0.0


def _read_at(distance: int, fill: float) -> Map:
    """Elements [M, N] of memory that holds dense rows, read as rows ``distance`` apart."""

    def after(y: Tensor) -> Tensor:
        at = torch.arange(len(y))[:, None] * distance + torch.arange(y.shape[1])
        inside = at < y.numel()
        return torch.where(inside, y.flatten()[at.clamp(max=y.numel() - 1)], fill)

    return after


def _written_at(distance: int, fill: float) -> Map:
    """The reverse: rows written ``distance`` apart, read as dense ones."""

    def after(y: Tensor) -> Tensor:
        at = torch.arange(y.numel())
        row, column = at // distance, at % distance
        written = column < y.shape[1]
        values = y[row, column.clamp(max=y.shape[1] - 1)]
        return torch.where(written, values, fill).view_as(y)

    return after


HYPOTHESES = (repeated, distances)
