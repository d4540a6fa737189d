"""Small figures of one row, written as SVG by hand: dozens of them fit into a page in a moment.

Colours are classes of the style sheet, so that they follow a light, dark or printed page. Every
figure comes with a sentence that says the same in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from reconcile.evidence import HeatMap, Histogram, Profile
from reconcile_reports.wording import number

CELL = 9
"""Pixels of one bin of a heat map."""
STEPS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
"""Lower ends of the colour classes ``h1`` ... of a share of the bound; above 1: ``h6``, ``h7``."""
QUIET = 0.02
"""Share of the largest error below which a row or column of bins is said to have next to none."""
PLOT = (300, 110)
"""Pixels of a plot's area."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing, its title, and what it shows in words."""

    title: str
    svg: Markup
    words: str


# --------------------------------------------------------------------------- heat map


def heat_figure(heat: HeatMap) -> Figure:
    """Where in the matrix the error is; one path for each colour class."""
    rows, columns = len(heat.values), len(heat.values[0])
    width, height = columns * CELL, rows * CELL
    classes: dict[str, list[str]] = {}
    top = _largest(heat)
    everywhere = _everywhere(heat)
    for i, line in enumerate(heat.values):
        for j, value in enumerate(line):
            name = _heat_class(value, top if everywhere else None)
            classes.setdefault(name, []).append(f"M{j * CELL} {i * CELL}h{CELL}v{CELL}h-{CELL}z")
    cells = (f'<path class="{name}" d="{"".join(d)}"/>' for name, d in sorted(classes.items()))
    body = "".join((*cells, *_tiles(heat), *_heat_axes(heat, width, height)))
    title = f"Error map: largest {heat.unit} in each bin"
    return Figure(title, _svg(width, height, body, "heat"), _heat_words(heat, top))


def _largest(heat: HeatMap) -> float:
    finite = [value for line in heat.values for value in line if value < math.inf]
    return max(finite, default=0.0)


def _everywhere(heat: HeatMap) -> bool:
    """Whether shades of the largest error say more than shares of the bound do.

    So it is without a bound, and where the error is beyond it in every bin.
    """
    if not heat.unit.startswith("share"):
        return True
    return all(value > 1 for line in heat.values for value in line)


def _heat_class(value: float, top: float | None) -> str:
    """Class by share of the bound, or by share of the largest error ``top``."""
    if value == math.inf or math.isnan(value):
        return "h7"
    if top is not None:
        return f"h{sum(value / top > step for step in STEPS[:5]) if top else 0}"
    if value > 1:
        return "h7" if value > 10 else "h6"
    return f"h{min(sum(value > step for step in STEPS), 5)}"


def _tiles(heat: HeatMap) -> Iterator[str]:
    """Boundaries of the format's blocks over the bins."""
    rows, columns = len(heat.values) * CELL, len(heat.values[0]) * CELL
    for place in _boundaries(heat.tile_columns, heat.columns):
        x = place / heat.bin_columns * CELL
        yield f'<path class="tile" d="M{x:g} 0v{rows}"/>'
    for place in _boundaries(heat.tile_rows, heat.rows):
        y = place / heat.bin_rows * CELL
        yield f'<path class="tile" d="M0 {y:g}h{columns}"/>'


def _boundaries(step: int | None, length: int) -> Iterable[int]:
    """Boundaries inside an axis; none where there would be more than bins."""
    if step is None or length / step > 40:
        return ()
    return range(step, length, step)


def _heat_axes(heat: HeatMap, width: int, height: int) -> Iterator[str]:
    yield _label(0, height + 14, "0", "start")
    yield _label(width, height + 14, f"{heat.column_axis} = {heat.columns}", "end")
    yield _label(-4, 9, "0", "end")
    yield _label(-4, max(height, 20), f"{heat.row_axis} = {heat.rows}", "end")


def _heat_words(heat: HeatMap, top: float) -> str:
    bins = [value for line in heat.values for value in line]
    said = [
        f"{heat.rows} x {heat.columns} in bins of {heat.bin_rows} x {heat.bin_columns}",
        f"largest {number(top)}",
    ]
    if heat.unit.startswith("share"):
        over = sum(not value <= 1 for value in bins)
        said.append(f"{over} of {len(bins)} bins hold an element over its bound")
    said.append(
        "darker is larger" if _everywhere(heat) else "blue is within the bound, orange beyond it"
    )
    rows = [sum(not v <= 1 for v in line) for line in heat.values]
    columns = [sum(not v <= 1 for v in line) for line in zip(*heat.values, strict=True)]
    if heat.unit.startswith("share") and 0 < sum(map(bool, columns)) < len(columns):
        said.append(f"in {_places(columns, heat.bin_columns, heat.columns, heat.column_axis)}")
    if heat.unit.startswith("share") and 0 < sum(map(bool, rows)) < len(rows):
        said.append(f"in {_places(rows, heat.bin_rows, heat.rows, heat.row_axis)}")
    said += _quiet(heat, top)
    if heat.row_axis == "k":
        said.append("row k is the impulse at k, and is also the k-th row of the call")
    tiles = {"n": heat.tile_columns, heat.row_axis: heat.tile_rows}
    drawn = [f"{step} along {axis}" for axis, step in tiles.items() if step]
    if drawn:
        said.append(f"lines: the format's blocks, every {' and '.join(drawn)}")
    return "; ".join(said) + "."


def _quiet(heat: HeatMap, top: float) -> list[str]:
    """Where a whole row or column of bins has next to no error, while others have."""
    said = []
    axes = (
        (heat.row_axis, heat.bin_rows, heat.rows, heat.values),
        (heat.column_axis, heat.bin_columns, heat.columns, tuple(zip(*heat.values, strict=True))),
    )
    for axis, step, size, lines in axes:
        quiet = [max(line) <= QUIET * top for line in lines]
        if 0 < sum(quiet) < len(quiet):
            said.append(f"at most {QUIET:.0%} of the largest in {_places(quiet, step, size, axis)}")
    return said


def _places(counts: Sequence[int], step: int, size: int, axis: str) -> str:
    """Ranges of an axis whose bins are hit, at most three.

    >>> _places([0, 1, 1, 0, 1], 4, 20, "n")
    'n 4-11, 16-19'
    """
    hit = [at for at, count in enumerate(counts) if count]
    runs = [[hit[0], hit[0]]]
    for before, at in pairwise(hit):
        if at == before + 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    shown = [f"{a * step}-{min((b + 1) * step, size) - 1}" for a, b in runs[:3]]
    return f"{axis} {', '.join(shown)}" + (" and more" if len(runs) > 3 else "")


# --------------------------------------------------------------------------- histogram


def histogram_figure(histogram: Histogram) -> Figure:
    """Errors by size as bars, and those of one correct rounding as a line."""
    seen, expected = dict(histogram.seen), dict(histogram.expected)
    exponents = range(min((*seen, *expected), default=0), max((*seen, *expected), default=0) + 1)
    total = histogram.seen_zero + sum(seen.values())
    most = max((*seen.values(), *expected.values()), default=1)
    width, height = PLOT
    step = width / max(len(exponents), 1)
    bars = "".join(
        f"M{at * step:.1f} {height}v{-height * seen.get(e, 0) / most:.1f}"
        f"h{max(step - 1, 0.5):.1f}V{height}z"
        for at, e in enumerate(exponents)
        if seen.get(e)
    )
    line = "".join(
        f"{'L' if at else 'M'}{(at + 0.5) * step:.1f} "
        f"{height * (1 - expected.get(e, 0) / most):.1f}"
        for at, e in enumerate(exponents)
    )
    first, last = exponents[0] - 1, exponents[-1]
    body = "".join(
        (
            f'<path class="bar1" d="{bars}"/>' if bars else "",
            f'<path class="line2" d="{line}"/>' if expected else "",
            _frame(width, height),
            _label(0, height + 14, _power(first), "start"),
            _label(width, height + 14, f"{_power(last)}  |error|", "end"),
            _label(-4, 9, str(most), "end"),
        )
    )
    words = (
        f"{histogram.seen_zero} of {total} elements have no error (of a correct rounding: "
        f"{histogram.expected_zero}); the middle error is {_middle(seen)}, of a correct rounding "
        f"{_middle(expected)}."
    )
    title = "Errors by size (bars) and of one correct rounding (line)"
    return Figure(title, _svg(width, height, body, "plot"), words)


def _middle(counts: dict[int, int]) -> str:
    """The bin of the median of the errors that are not zero."""
    if not counts:
        return "none"
    left = sum(counts.values()) / 2
    for exponent in sorted(counts):
        left -= counts[exponent]
        if left <= 0:
            return f"about {_power(exponent)}"
    return "none"


def _power(exponent: int) -> str:
    return f"2^{exponent}"


# --------------------------------------------------------------------------- profiles


def profile_figure(profile: Profile) -> Figure:
    """The root mean square error along one axis."""
    return _steps(
        f"Root mean square error along {profile.axis}",
        profile.values,
        f"{profile.axis} = {profile.size}",
        profile.axis,
        profile.step,
    )


def kl_figure(values: Sequence[float], positions: int) -> Figure:
    """KL divergence by position of the prompt."""
    step = -(-positions // max(len(values), 1))
    return _steps("KL divergence by token, in nats", values, f"token {positions}", "token", step)


def _steps(title: str, values: Sequence[float], end: str, axis: str, step: int) -> Figure:
    width, height = PLOT
    finite = [value for value in values if math.isfinite(value)]
    most = max(finite, default=0.0)
    each = width / max(len(values), 1)
    heights = [height * _portion(value, most) for value in values]
    bars = "".join(
        f"M{at * each:.1f} {height}v{-tall:.1f}h{max(each - 0.5, 0.5):.1f}V{height}z"
        for at, tall in enumerate(heights)
        if tall > 0
    )
    body = "".join(
        (
            f'<path class="bar1" d="{bars}"/>' if bars else "",
            _frame(width, height),
            _label(0, height + 14, "0", "start"),
            _label(width, height + 14, end, "end"),
            _label(-4, 9, number(most), "end"),
        )
    )
    return Figure(title, _svg(width, height, body, "plot"), _steps_words(values, axis, step))


def _portion(value: float, most: float) -> float:
    if not math.isfinite(value):
        return 1.0
    return value / most if most > 0 else 0.0


def _steps_words(values: Sequence[float], axis: str, step: int) -> str:
    """Where the largest is, and how far the profile is from flat."""
    if not values or not any(values):
        return "No error."
    sized = [math.inf if math.isnan(value) else value for value in values]
    worst = max(range(len(sized)), key=sized.__getitem__)
    middle = sorted(sized)[len(sized) // 2]
    quiet = [value <= QUIET * sized[worst] for value in sized]
    place = f"{axis} {worst * step}" + (f"-{(worst + 1) * step - 1}" if step > 1 else "")
    said = f"Largest {number(values[worst])} at {place}; the middle one is {number(middle)}"
    if any(quiet):
        size = len(values) * step
        said += f"; at most {QUIET:.0%} of the largest in {_places(quiet, step, size, axis)}"
    return f"{said}."


# --------------------------------------------------------------------------- shared


def _frame(width: int, height: int) -> str:
    return f'<path class="axis" d="M0 0V{height}H{width}"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    """A label; ``text`` is made of numbers and axis names only."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{Markup.escape(text)}</text>'


def _svg(width: int, height: int, body: str, kind: str) -> Markup:
    left = 58
    box = f"{-left} -4 {width + left + 6} {height + 24}"
    size = f'width="{width + left + 6}" height="{height + 24}"'
    return Markup(
        f'<svg class="{kind}" viewBox="{box}" {size} aria-hidden="true" focusable="false">'
        f"{body}</svg>"
    )
