"""The error over depth, by layer and by op, as SVG for an HTML page.

matplotlib draws; `_for_page` then turns what it wrote into markup that a page with a strict
Content-Security-Policy can hold: no style attributes, no namespaces, no metadata, and
``currentColor`` for everything that is not a mark, so that it follows a light or dark page.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib.style
from matplotlib.figure import Figure

from reconcile.report import Level, Report, Verdict
from reconcile_reports import depth, summary
from reconcile_reports.depth import Curve, OpError
from reconcile_reports.wording import cut, number, one_line, plural, real

_INK = "#010203"
"""Stands for the page's text colour."""
_COLOURS = {Verdict.PASS: "#3a86c8", Verdict.INCONCLUSIVE: "#c98a12", Verdict.FAIL: "#d64550"}
_MARKERS = {Verdict.PASS: "o", Verdict.INCONCLUSIVE: "s", Verdict.FAIL: "X"}
_SIZES = {Verdict.PASS: 4.0, Verdict.INCONCLUSIVE: 6.5, Verdict.FAIL: 7.5}
_SERIES = ("#3a86c8", "#8c6bb1", "#2f9e75", "#c2649a", "#7a7a7a")
"""Colours of candidates."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "reconcile",
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.minor.visible": False,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.22,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
    "grid.color": _INK,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing and what it shows, in words."""

    svg: str
    title: str
    description: str


@dataclass(frozen=True, slots=True)
class Point:
    """One mark: a tap, its value, and the verdict of the row that gave it."""

    tap: str
    value: float
    verdict: Verdict


def depth_picture(report: Report) -> Picture | None:
    """Errors by layer and by op; None where the report has neither.

    A report without the curves of its layers (another tool's traces, say) shows the nmse of its
    chained outputs instead.
    """
    curve, ops = depth.curve(report), depth.ops(report)
    chained = {} if curve else _chained(report)
    first = depth.first_layer(report)
    panels = []
    words: list[str] = []
    if curve:
        panels.append(lambda axes: _draw_curve(axes, curve, first))
        words += _describe_curve(curve)
    if chained:
        panels.append(lambda axes: _draw_chained(axes, chained))
        words += _describe_chained(chained)
    if len(ops) > 1:
        panels.append(lambda axes: _draw_ops(axes, ops))
        words += _describe_ops(ops)
    if not panels:
        return None
    words += _describe_edges(_values(curve, chained, ops))
    return Picture(_draw(panels), "Error over depth", " ".join(words))


def _values(
    curve: Curve | None, chained: dict[str, list[Point]], ops: list[OpError]
) -> list[float]:
    drawn = [point.value for points in chained.values() for point in points]
    layers = curve.layers if curve else ()
    drawn += [item.accumulated for item in layers if item.accumulated is not None]
    return drawn + [value for op in ops for value in (op.local, op.propagated, op.accumulated)]


def _chained(report: Report) -> dict[str, list[Point]]:
    """By candidate, the largest nmse of each chained layer output, in execution order.

    A layer is a numbered module. Blocks inside the layers are left out, unless nothing else was
    recorded: their outputs are of another size than the residual stream's.
    """
    points = _chained_modules(report)
    layers = {
        name: [point for point in line if _is_layer(point.tap)] for name, line in points.items()
    }
    return layers if any(layers.values()) else points


def _is_layer(tap: str) -> bool:
    """Whether the tap's module is numbered: ``model.layers.3:out``."""
    return tap.partition(":")[0].rpartition(".")[2].isdigit()


def _chained_modules(report: Report) -> dict[str, list[Point]]:
    series: dict[str, dict[str, Point]] = {}
    for row in report.rows:
        value = real(row.stats.get("nmse"))
        if row.level is Level.MODULE and row.check == "chained" and value is not None:
            points = series.setdefault(row.kernel, {})
            points[row.tap] = _larger(points.get(row.tap), Point(row.tap, value, row.verdict))
    return {name: list(points.values()) for name, points in series.items()}


def _larger(before: Point | None, point: Point) -> Point:
    """The point with the larger value; NaN is larger than any number."""
    if before is None or math.isnan(point.value):
        return point
    return point if point.value > before.value else before


def _describe_chained(series: dict[str, list[Point]]) -> Iterator[str]:
    for name, points in series.items():
        last = points[-1]
        worst = max(points, key=_order)
        yield (
            f"nmse of {plural(len(points), 'chained output')}"
            f"{f' of {one_line(name)}' if name else ''}: "
            f"{number(points[0].value)} at {points[0].tap}, {number(last.value)} at {last.tap}, "
            f"largest {number(worst.value)} at {worst.tap}."
        )


def _describe_curve(curve: Curve) -> Iterator[str]:
    first, last = curve.layers[0], curve.layers[-1]
    worst = max(curve.layers, key=lambda item: _plain_size(item.local))
    yield (
        f"Free run{f' of {one_line(curve.kernel)}' if curve.kernel else ''}: the error of the "
        f"hidden state relative to its size is {number(first.accumulated)} after layer "
        f"{first.name} and {number(last.accumulated)} after layer {last.name}"
        + (f" (noise floor {number(last.floor)})" if last.floor is not None else "")
        + f"; alone on the reference's inputs, layer {worst.name} is worst with "
        f"{number(worst.local)}."
    )


def _plain_size(value: float | None) -> float:
    return -1.0 if value is None else math.inf if math.isnan(value) else value


def _describe_ops(ops: list[OpError]) -> Iterator[str]:
    worst = max(ops, key=lambda op: _plain_size(op.local))
    yield (
        f"Of {plural(len(ops), 'op')} in the free run, {one_line(worst.tap)} has the largest "
        f"error of its own: nmse {number(worst.local)}, {number(worst.propagated)} inherited and "
        f"{number(worst.accumulated)} in all."
    )


def _describe_edges(values: list[float]) -> Iterator[str]:
    if 0.0 in values:
        yield "Zero is drawn at the foot of the axis."
    if not all(map(math.isfinite, values)):
        yield "NaN and infinity are drawn at the head of the axis."


def _order(point: Point) -> float:
    return math.inf if math.isnan(point.value) else point.value


def _draw(panels: list[Callable[[Any], None]]) -> str:
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(9.0, 2.9 * len(panels)), layout="constrained")
        for axes, draw in zip(
            figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
        ):
            draw(axes)
        return _for_page(_svg(figure))


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return out.getvalue()


def _draw_chained(axes: Any, series: dict[str, list[Point]]) -> None:  # noqa: ANN401
    """One line per candidate; a failing output is marked by shape as well as by colour."""
    taps = list(dict.fromkeys(point.tap for points in series.values() for point in points))
    place = {tap: at for at, tap in enumerate(taps)}
    values = [point.value for points in series.values() for point in points]
    bottom, top = _range(values)
    for at, (name, points) in enumerate(series.items()):
        where = [place[point.tap] for point in points]
        heights = [_clamped(point.value, bottom, top) for point in points]
        colour = _SERIES[at % len(_SERIES)]
        axes.plot(
            where, heights, color=colour, label=_series_label(name, at, len(series)), marker="o"
        )
    _mark(axes, [(place[p.tap], p) for points in series.values() for p in points], bottom, top)
    _logarithmic(axes, bottom, top)
    axes.set_title("Error over depth: chained layer outputs", pad=24)
    axes.set_ylabel("nmse")
    _layer_ticks(axes, taps)
    _legend(axes)


_LINES = {
    "accumulated": ("accumulated", _SERIES[0], "-", "o"),
    "local": ("local", _SERIES[4], "--", "s"),
    "floor": ("noise floor", _SERIES[2], ":", ""),
    "allowed": ("accepted", _INK, "-.", ""),
}
"""Label, colour, dashes and marker of each curve: no two differ by colour alone."""


def _draw_curve(axes: Any, curve: Curve, first: str | None) -> None:  # noqa: ANN401
    """Errors by layer, relative to the size of the hidden state."""
    names = [item.name for item in curve.layers]
    lines = {name: [getattr(item, name) for item in curve.layers] for name in _LINES}
    known = [value for line in lines.values() for value in line if value is not None]
    bottom, top = _range(known)
    for name, (label, colour, dashes, marker) in _LINES.items():
        placed = [(at, value) for at, value in enumerate(lines[name]) if value is not None]
        _line(
            axes, placed, (bottom, top), label=label, color=colour, linestyle=dashes, marker=marker
        )
    _divergence(axes, names.index(first) if first in names else None)
    _logarithmic(axes, bottom, top)
    axes.set_title("Error of each layer's output, relative to its size", pad=24)
    axes.set_ylabel("rms error / rms")
    step = max(1, math.ceil(len(names) / 16))
    axes.set_xticks(
        range(0, len(names), step), [cut(_ascii(one_line(n)), 6) for n in names[::step]]
    )
    axes.set_xlabel("layer")
    axes.set_xlim(-0.6, len(names) - 0.4)
    _legend(axes)


def _line(
    axes: Any,  # noqa: ANN401
    placed: list[tuple[int, float]],
    edges: tuple[float, float],
    **style: str,
) -> None:
    if placed:
        axes.plot(
            [at for at, _ in placed], [_clamped(value, *edges) for _, value in placed], **style
        )


def _divergence(axes: Any, at: int | None) -> None:  # noqa: ANN401
    """A line where the first failing row is."""
    if at is not None:
        axes.axvline(at, color=_COLOURS[Verdict.FAIL], linewidth=1.2, label="first divergence")


def _draw_ops(axes: Any, ops: list[OpError]) -> None:  # noqa: ANN401
    """The budget of every op in the free run; a failing op is marked by shape and colour."""
    bottom, top = _range([v for op in ops for v in (op.local, op.propagated, op.accumulated)])
    for name, colour, dashes in (
        ("accumulated", _SERIES[0], "-"),
        ("propagated", _SERIES[1], ":"),
        ("local", _SERIES[4], "--"),
    ):
        placed = [(at, getattr(op, name)) for at, op in enumerate(ops)]
        _line(axes, placed, (bottom, top), label=name, color=colour, linestyle=dashes, marker="")
    marks = [(at, Point(op.tap, op.local, op.verdict)) for at, op in enumerate(ops)]
    _mark(axes, marks, bottom, top, verdicts=(Verdict.FAIL,))
    _logarithmic(axes, bottom, top)
    axes.set_title("Each op in the free run: accumulated = propagated + local", pad=24)
    axes.set_ylabel("nmse")
    _layer_ticks(axes, [op.tap for op in ops])
    _legend(axes)


def _mark(
    axes: Any,  # noqa: ANN401
    placed: list[tuple[int, Point]],
    bottom: float,
    top: float,
    verdicts: Iterable[Verdict] = (Verdict.INCONCLUSIVE, Verdict.FAIL),
) -> None:
    """Points of each verdict in that verdict's colour and shape."""
    for verdict in verdicts:
        chosen = [(at, point) for at, point in placed if point.verdict is verdict]
        if chosen:
            axes.plot(
                [at for at, _ in chosen],
                [_clamped(point.value, bottom, top) for _, point in chosen],
                color=_COLOURS[verdict],
                label=verdict.value,
                linestyle="none",
                marker=_MARKERS[verdict],
                markersize=_SIZES[verdict],
                markeredgewidth=0,
                zorder=3,
                clip_on=False,
            )


def _range(values: list[float]) -> tuple[float, float]:
    """Whole decades that hold every positive finite value."""
    finite = [value for value in values if 0 < value < math.inf]
    if not finite:
        return 1e-1, 1e1
    low = max(math.floor(math.log10(min(finite))), -300)
    high = min(math.ceil(math.log10(max(finite))), 300)
    return 10.0 ** (low - 1), 10.0 ** max(high, low + 1)


def _clamped(value: float, bottom: float, top: float) -> float:
    """``value`` inside the axis: zero at its foot, NaN and infinity at its head."""
    return top if math.isnan(value) else min(max(value, bottom), top)


def _logarithmic(axes: Any, bottom: float, top: float) -> None:  # noqa: ANN401
    axes.set_yscale("log")
    axes.set_ylim(bottom, top * 1.3)
    axes.minorticks_off()
    step = max(1, math.ceil(math.log10(top / bottom) / 6))
    first, last = round(math.log10(bottom)), round(math.log10(top))
    decades = list(range(first, last + 1, step))
    axes.set_yticks([10.0**decade for decade in decades], [_decade(decade) for decade in decades])
    axes.grid(axis="y")


def _decade(exponent: int) -> str:
    return f"{10.0**exponent:g}"


def _layer_ticks(axes: Any, taps: list[str]) -> None:  # noqa: ANN401
    """Ticks where a layer begins, at most about sixteen."""
    marks = summary.layer_marks(taps)
    marks = marks[:: max(1, math.ceil(len(marks) / 16))]
    axes.set_xticks([at for at, _ in marks], [cut(number, 6) for _, number in marks])
    axes.set_xlabel("layer" if marks else "execution order")
    axes.set_xlim(-0.6, len(taps) - 0.4)


def _legend(axes: Any) -> None:  # noqa: ANN401
    handles, names = axes.get_legend_handles_labels()
    if handles and any(names):
        legend = axes.legend(
            loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=min(len(names), 5), borderpad=0
        )
        legend.set_in_layout(False)  # it stands above the axes: a wide one must not narrow them


def _series_label(name: str, at: int, count: int) -> str:
    """Names of the first candidates, then one entry for the rest, then none."""
    last = len(_SERIES) - 1
    if at == last and count > len(_SERIES):
        return f"and {count - last} more"
    return _label(name) if at <= last else ""


def _label(name: str) -> str:
    """A candidate's name for the legend; matplotlib takes ``_`` at the start for "no entry"."""
    return cut(_ascii(one_line(name)), 30).lstrip("_").replace("$", r"\$")


def _ascii(text: str) -> str:
    """``text`` in characters that every font has."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _for_page(svg: str) -> str:
    """What matplotlib wrote, as markup inside an HTML page."""
    root = ET.fromstring(svg)
    drawing = {"viewBox": root.attrib["viewBox"], "aria-hidden": "true", "focusable": "false"}
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in {"style", "metadata"}:
                parent.remove(child)
    for element in root.iter():
        _plain(element)
    root.attrib.clear()
    root.attrib.update(drawing)
    return ET.tostring(root, encoding="unicode").replace(_INK, "currentColor")


def _plain(element: ET.Element) -> None:
    """Tag and attributes without namespaces; each style declaration becomes an attribute."""
    element.tag = _local(element.tag)
    attributes = {_local(name): value for name, value in element.attrib.items()}
    attributes |= dict(_declarations(attributes.pop("style", "")))
    unused = {"font-family", "id"} if element.tag == "g" else {"font-family"}
    element.attrib.clear()
    element.attrib.update({k: v for k, v in attributes.items() if k not in unused})


def _local(name: object) -> str:
    return re.sub(r"^\{.*\}", "", str(name))


def _declarations(style: str) -> Iterator[tuple[str, str]]:
    """The declarations of a style attribute; ``font`` gives its size, the family is the page's.

    >>> list(_declarations("font: 10px 'DejaVu Sans', sans-serif; text-anchor: middle"))
    [('font-size', '10'), ('text-anchor', 'middle')]
    """
    for declaration in filter(None, (part.strip() for part in style.split(";"))):
        name, value = (part.strip() for part in declaration.split(":", 1))
        size = re.match(r"(?:\S+ )*?([\d.]+)px", value) if name == "font" else None
        if size:
            yield "font-size", size.group(1)
        elif name != "font":
            yield name, value
