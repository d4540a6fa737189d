"""What was done to the scales: missing, inverted, squared, another block's, another size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reconcile.diagnosis.evidence import LinearEvidence, effective_scale
from reconcile.diagnosis.hypothesis import few, named, parameters
from reconcile.diagnosis.model import Fit, LinearModel
from reconcile.diagnosis.ratios import (
    common_ratio,
    common_value,
    ratios,
    scaled,
    snapped,
    tolerance,
    wrong_lines,
)
from reconcile.weight import QuantizedWeight

Grid = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cells:
    """Scales of a weight as a grid, and the factor by which each was found to be wrong."""

    size: Grid
    """Rows and columns of the weight that share a scale."""
    scale: Tensor
    """What multiplies a code's value, float64 [cells along N, cells along K]."""
    ratio: Tensor
    """Median of read over right in each; NaN where nothing was read."""
    wrong: Tensor
    """Where it is not 1."""

    def spread(self, grid: Tensor, shape: Sequence[int]) -> Tensor:
        """One value per cell to one per weight, [N, K]."""
        rows = grid.repeat_interleave(self.size[0], 0)[: shape[0]]
        return rows.repeat_interleave(self.size[1], 1)[:, : shape[1]]


def cells_of(evidence: LinearEvidence, base: LinearModel) -> Cells | None:
    """The grid of a quantised weight's scales; None of a dense one or where nothing was read."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or not len(evidence.columns):
        return None
    n, k = weight.shape
    size = weight.format.block or ((n, k) if weight.format.granularity == "tensor" else (1, k))
    scale = effective_scale(weight)[:: size[0], :: size[1]]
    ratio = _medians(ratios(evidence, base), evidence.columns, size, scale.shape)
    return Cells(size, scale, ratio, wrong_lines(ratio, tolerance(evidence)))


def _medians(found: Tensor, columns: Tensor, size: Grid, grid: torch.Size) -> Tensor:
    """Median of [N, C] in each cell, [cells along N, cells along K]."""
    n = found.shape[0]
    missing = grid[0] * size[0] - n
    padded = torch.nn.functional.pad(found, (0, 0, 0, missing), value=torch.nan)
    result = torch.full(tuple(grid), torch.nan, dtype=torch.float64)
    for cell in torch.unique(columns // size[1]).tolist():
        part = padded[:, columns // size[1] == cell].reshape(grid[0], -1)
        result[:, cell] = torch.nanmedian(part, 1).values
    return result


SHARED = (2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of neighbours that may be given one scale."""

Law = tuple[str, str, Callable[[Tensor], Tensor]]
LAWS: tuple[Law, ...] = (
    ("scale_missing", "the scale is not applied", torch.ones_like),
    ("scale_inverted", "the inverse of the scale is applied", torch.reciprocal),
    ("scale_squared", "the scale is applied twice", torch.square),
    (
        "scale_mantissa_dropped",
        "the scale is rounded up to a power of two",
        lambda scale: torch.exp2(torch.ceil(torch.log2(scale))),
    ),
    (
        "scale_mantissa_dropped",
        "the scale is rounded down to a power of two",
        lambda scale: torch.exp2(torch.floor(torch.log2(scale))),
    ),
    (
        "scale_mantissa_dropped",
        "the scale is rounded to the nearest power of two",
        lambda scale: torch.exp2(torch.round(torch.log2(scale))),
    ),
)
"""Name, words, and the effective scale as it is to the one that was used."""


@named(
    "scale_missing",
    "scale_inverted",
    "scale_squared",
    "scale_mantissa_dropped",
    "last_block_scale_dropped",
    cost=1,
)
def laws(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """One rule broken in all cells or in some."""
    cells = cells_of(evidence, base)
    if cells is None:
        return
    slack = tolerance(evidence)
    for name, text, law in LAWS:
        wanted = law(cells.scale) / cells.scale
        # a cell whose scale the law would not change neither speaks for nor against it
        follows = cells.wrong & ((cells.ratio / wanted - 1).abs() <= slack)
        if not bool(follows.any()):
            continue
        model = scaled(base, cells.spread(torch.where(follows, wanted, 1.0), base.weight.shape))
        yield from _placed(name, text, model, cells, follows)


def _placed(
    name: str, text: str, model: LinearModel, cells: Cells, follows: Tensor
) -> Iterator[Fit]:
    count, of = int(follows.sum()), follows.numel()
    if count == of or bool((follows | ~cells.wrong & cells.ratio.isnan()).all()):
        yield Fit(name, model, f"{text}, in all {of} places", parameters(places="all"), 0)
        return
    places = follows.nonzero().tolist()
    if name == "scale_missing" and (axis := _last_line(follows)):
        what = f"the scale of the last block along {axis} is dropped"
        yield Fit("last_block_scale_dropped", model, what, parameters(axis=axis), 0)
        return
    where = _where(cells, places)
    yield Fit(name, model, f"{text} in {count} of {of} {where}", _places(cells, places), count)


def _last_line(follows: Tensor) -> str:
    """The axis along which exactly the last blocks are meant, or nothing."""
    for dim, axis in ((1, "K"), (0, "N")):
        if follows.shape[dim] > 1:
            last = follows.select(dim, -1)
            if bool(last.all()) and int(last.sum()) == int(follows.sum()):
                return axis
    return ""


def _where(cells: Cells, places: list[list[int]]) -> str:
    """The kind of cell and which ones."""
    if cells.scale.shape[1] == 1 and cells.size[0] == 1:
        return f"rows: n = {few([n for n, _ in places])}"
    return f"blocks, at (n, k) block {few([tuple(place) for place in places])}"


def _places(cells: Cells, places: list[list[int]]) -> dict[str, object]:
    if cells.scale.shape[1] == 1 and cells.size[0] == 1:
        return parameters(rows=[n for n, _ in places])
    return parameters(blocks=places)


@named("scale_exponent_bias", "block_ratio", cost=3)
def factors(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Some cells under a factor: a power of two is a wrong exponent of an E8M0 scale."""
    cells = cells_of(evidence, base)
    if cells is None or not bool(cells.wrong.any()):
        return
    weight = evidence.weight
    assert isinstance(weight, QuantizedWeight)
    slack = tolerance(evidence)
    found = cells.ratio[cells.wrong]
    places = cells.wrong.nonzero().tolist()
    same = common_value(found, slack)
    if same is not None:
        same = _refined(evidence, base, cells, slack)
    grid = torch.where(cells.wrong, cells.ratio if same is None else found.new_tensor(same), 1.0)
    if weight.format.scale_encoding == "e8m0":
        shift = torch.log2(grid.abs()).round()
        if bool(((grid / 2.0**shift - 1).abs() <= slack).all()) and bool((grid > 0).all()):
            model = scaled(base, cells.spread(2.0**shift, base.weight.shape))
            steps = sorted({int(step) for step in shift[cells.wrong].tolist()})
            free = 1 if len(places) == grid.numel() and len(steps) == 1 else 1 + len(places)
            yield Fit(
                "scale_exponent_bias",
                model,
                f"the exponent of the scale is off by {few(steps)} in {len(places)} of "
                f"{grid.numel()} {_where(cells, places)}",
                _places(cells, places) | parameters(shift=steps),
                free,
            )
            return
    if len(places) == grid.numel() or grid.numel() == 1 or weight.format.block is None:
        return  # constant_ratio and row_ratio say that
    model = scaled(base, cells.spread(grid, base.weight.shape))
    shown = f"{same:.6g}" if same is not None else "factors of their own"
    yield Fit(
        "block_ratio",
        model,
        f"{len(places)} of {grid.numel()} blocks are multiplied by {shown}, at (n, k) block "
        f"{few([tuple(place) for place in places])}",
        _places(cells, places)
        | parameters(ratios=[same] if same is not None else [float(f"{v:.6g}") for v in found[:8]]),
        1 + len(places) + (0 if same is not None else len(places)),
    )


def _refined(evidence: LinearEvidence, base: LinearModel, cells: Cells, slack: float) -> float:
    """The one factor of the wrong cells, from all their elements."""
    wrong = cells.spread(cells.wrong, base.weight.shape)[:, evidence.columns]
    read, weight = evidence.readout[wrong], base.weight[:, evidence.columns][wrong]
    return common_ratio(read, weight, slack)


@named("zero_point", cost=3)
def shifted_cells(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The codes of some cells shifted by one amount before the scale."""
    cells = cells_of(evidence, base)
    if cells is None or cells.scale.numel() < 2:
        return
    weight = evidence.weight
    assert isinstance(weight, QuantizedWeight)
    scale = cells.spread(cells.scale, base.weight.shape)
    at = evidence.columns
    shifts = (evidence.readout - base.weight[:, at]) / scale[:, at]
    found = _medians(shifts, at, cells.size, cells.scale.shape)
    size = float((base.weight[:, at] / scale[:, at]).abs().nanmedian())
    wrong = ~found.isnan() & (found.abs() > 4 * tolerance(evidence) * size)
    if not bool(wrong.any()):
        return
    same = common_value(found[wrong], 2.0**-5)
    if same is None:
        return
    shift = snapped(same, 2.0**-6)
    added = cells.spread(torch.where(wrong, shift, 0.0), base.weight.shape) * scale
    places = wrong.nonzero().tolist()
    text = f"the codes of {len(places)} of {wrong.numel()} {_where(cells, places)} are shifted by "
    yield Fit(
        "zero_point",
        replace(base, weight=base.weight + added),
        f"{text}{shift:.6g} before the scale",
        _places(cells, places) | parameters(zero_point=-shift),
        3,
    )


@named("scale_reused", cost=2)
def reused(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Cells under the scale of another cell: always the same one, or a neighbour."""
    cells = cells_of(evidence, base)
    if cells is None or not bool(cells.wrong.any()):
        return
    slack = tolerance(evidence)
    used = cells.ratio * cells.scale
    one = common_value(used[cells.wrong], slack)
    if one is not None:
        source = ((cells.scale / one - 1).abs() <= slack).nonzero()
        if len(source) and _whole_lines((used / one - 1).abs() <= slack, cells.wrong):
            place = source[0].tolist()
            exact = cells.scale[place[0], place[1]]
            grid = torch.where(cells.wrong, exact / cells.scale, 1.0)
            model = scaled(base, cells.spread(grid, base.weight.shape))
            text = f"{int(cells.wrong.sum())} scales are replaced by the one at {tuple(place)}"
            yield Fit("scale_reused", model, text, parameters(source=place), 2)
    for dim in (0, 1):
        for text, index, found in _sources(cells.scale.shape[dim]):
            moved = cells.scale.index_select(dim, index)
            agrees = (used / moved - 1).abs() <= slack
            differs = (moved / cells.scale - 1).abs() > slack
            if bool(agrees[differs].double().mean() > 0.9):
                grid = torch.where(cells.wrong & agrees, moved / cells.scale, 1.0)
                model = scaled(base, cells.spread(grid, base.weight.shape))
                what = f"each scale is that of {text} along {'NK'[dim]}"
                yield Fit("scale_reused", model, what, found | parameters(axis="NK"[dim]), 1)
    yield from _of_groups(cells, used, base, slack)


def _sources(count: int) -> Iterator[tuple[str, Tensor, dict[str, object]]]:
    """Regular ways to take the scale of another cell: words, its index for each, parameters."""
    places = torch.arange(count)
    if count < 3:
        return
    for step in (1, -1):
        yield f"its neighbour, {step:+d}", places.roll(step), parameters(shift=step)
    yield "the one as far from the other end", places.flip(0), parameters(reversed=True)


def _of_groups(cells: Cells, used: Tensor, base: LinearModel, slack: float) -> Iterator[Fit]:
    """Neighbours that share the scale of the first, or the last, of them."""
    for dim in (0, 1):
        size = cells.scale.shape[dim]
        i = torch.arange(size)
        for length in (length for length in SHARED if length < size):
            for what, source in (
                ("first", i - i % length),
                ("last", (i - i % length + length - 1).clamp(max=size - 1)),
            ):
                moved = cells.scale.index_select(dim, source)
                agrees = (used / moved - 1).abs() <= slack
                differs = (moved / cells.scale - 1).abs() > slack
                if not bool(differs.any()) or float(agrees[differs].double().mean()) <= 0.9:
                    continue
                grid = torch.where(cells.wrong & agrees, moved / cells.scale, 1.0)
                model = scaled(base, cells.spread(grid, base.weight.shape))
                text = f"the scale of the {what} of each {length} along {'NK'[dim]} serves for all"
                found = parameters(length=length, axis="NK"[dim], which=what)
                yield Fit("scale_reused", model, text, found, 1)


def _whole_lines(agrees: Tensor, wrong: Tensor) -> bool:
    """Whether all cells of the rows, or of the columns, that are concerned hold the one scale."""
    if int(wrong.sum()) < 2:
        return False
    rows, columns = wrong.any(1), wrong.any(0)
    lines = [agrees[rows], agrees[:, columns]]
    return any(part.numel() > 1 and bool(part.all()) for part in lines)


@named("block_boundary", "group_size", cost=2)
def boundaries(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Blocks of another length than declared, along N or along K."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or weight.format.block is None:
        return
    right = effective_scale(weight)
    for dim in (0, 1):
        declared = weight.format.block[dim]
        for length in _lengths(evidence, base, dim, declared):
            used = _with_length(weight, right, dim, length)
            if not _agrees(evidence, base, used / right):
                continue
            yield Fit(
                "group_size" if dim == 1 else "block_boundary",
                replace(base, weight=base.weight * used / right),
                f"blocks along {'NK'[dim]} are read as {length} long, not {declared}",
                parameters(axis="NK"[dim], length=length, declared=declared),
                1,
            )


def _with_length(weight: QuantizedWeight, right: Tensor, dim: int, length: int) -> Tensor:
    """The effective scale with blocks of another length along one dimension, [N, K]."""
    assert weight.format.block is not None
    declared = weight.format.block[dim]
    cells = -(-weight.shape[dim] // declared)
    cell = (torch.arange(weight.shape[dim]) // length).clamp(max=cells - 1)
    return right.index_select(dim, cell * declared)


def _agrees(evidence: LinearEvidence, base: LinearModel, factor: Tensor) -> bool:
    """Whether most of what was read changes as the factor says; a sample decides."""
    n = base.weight.shape[0]
    some = torch.linspace(0, n - 1, min(n, 64)).long()
    found = evidence.readout[some] / base.weight[some][:, evidence.columns]
    near = (found / factor[some][:, evidence.columns] - 1).abs() <= tolerance(evidence)
    known = torch.isfinite(found) & (found != 0)
    return bool(known.any()) and float(near[known].double().mean()) > 0.9


def _lengths(evidence: LinearEvidence, base: LinearModel, dim: int, declared: int) -> list[int]:
    """Lengths to try: common ones, what the shape suggests, and where the ratio first changes."""
    weight = evidence.weight
    assert isinstance(weight, QuantizedWeight)
    size = weight.shape[dim]
    cells = weight.format.scale_shape(weight.shape)[dim]
    if cells < 2:
        return []
    tried = {declared // 2, declared * 2, declared * 4, declared - declared // 8}
    tried |= {16, 32, 64, 128, 256, max(1, size // cells), -(-size // cells)}
    if len(evidence.columns):
        order = evidence.columns.argsort()
        found = ratios(evidence, base)[:, order]
        lines = torch.nanmedian(found, 1 - dim).values
        places = torch.arange(len(lines)) if dim == 0 else evidence.columns[order]
        wrong = wrong_lines(lines, tolerance(evidence))
        if bool(wrong.any()):
            tried.add(int(places[wrong.nonzero()[0, 0]]))
    return sorted(length for length in tried if 0 < length <= size and length != declared)


HYPOTHESES = (laws, reused, boundaries, factors, shifted_cells)
