"""How the error grows with depth: the numbers behind the curve, from a report's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reconcile.report import Level, Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.wording import layer, real


@dataclass(frozen=True, slots=True)
class LayerError:
    """Errors of one layer's output as root mean squares over that of the reference."""

    name: str
    accumulated: float | None
    """In the free run."""
    local: float | None
    """Alone on the reference's inputs."""
    inherited: float | None
    """The accumulated error before it times its gain for a random error."""
    floor: float | None
    """Plain torch at the candidate's dtype, in free runs."""
    allowed: float | None
    """The largest accepted one."""
    gain: float | None
    """How much the layer amplifies a random error; not relative."""
    amplification: float | None
    """accumulated / accumulated before it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One candidate's errors by layer, in the pass where the last is largest."""

    kernel: str
    pass_: str
    layers: tuple[LayerError, ...]


@dataclass(frozen=True, slots=True)
class OpError:
    """The budget of one op in the free run, as nmse; of the pass with the largest local error."""

    tap: str
    local: float
    """The op against the reference's op on the same input."""
    propagated: float
    """The reference's op on the candidate's input against that on its own."""
    accumulated: float
    """What was captured on both sides."""
    verdict: Verdict


def curve(report: Report) -> Curve | None:
    """The curve of the rows ``growth``; None where there are none."""
    rows = [row for row in report.rows if row.check == "growth" and _numbers(row, "rmse_by_layer")]
    if not rows:
        return None
    row = max(rows, key=lambda row: _size(_numbers(row, "rmse_by_layer")[-1]))
    return Curve(row.kernel, row.pass_, _layers(report, row))


def _layers(report: Report, row: Row) -> tuple[LayerError, ...]:
    seen = _numbers(row, "rmse_by_layer")
    nothing: list[float | None] = [None] * len(seen)
    size = _numbers(row, "reference_rms_by_layer") or [1.0 for _ in seen]
    tables = {
        name: _numbers(row, f"{name}_by_layer") or nothing
        for name in ("local_rmse", "inherited_rmse", "floor_rmse", "allowed_rmse", "gain")
    }
    names = _names(report, len(seen))
    return tuple(
        LayerError(
            name=names[at],
            accumulated=_ratio(value, size[at]),
            local=_ratio(tables["local_rmse"][at], size[at]),
            inherited=_ratio(tables["inherited_rmse"][at], size[at]),
            floor=_ratio(tables["floor_rmse"][at], size[at]),
            allowed=_ratio(tables["allowed_rmse"][at], size[at]),
            gain=tables["gain"][at],
            amplification=_ratio(value, seen[at - 1]) if at else None,
        )
        for at, value in enumerate(seen)
    )


def _names(report: Report, count: int) -> list[str]:
    """Numbers of the layers, from the chained outputs of numbered modules."""
    taps = dict.fromkeys(
        row.tap
        for row in report.rows
        if row.check == "chained" and row.level is Level.MODULE and _is_layer(row.tap)
    )
    names = [layer(tap) or tap for tap in taps]
    return names if len(names) == count else [str(at) for at in range(count)]


def _is_layer(tap: str) -> bool:
    return tap.partition(":")[0].rpartition(".")[2].isdigit()


def ops(report: Report) -> list[OpError]:
    """The budget of every op that has one, in execution order."""
    found: dict[str, OpError] = {}
    for row in report.rows:
        local = real(row.stats.get("nmse"))
        parts = [real(row.stats.get(f"{part}_nmse")) for part in ("propagated", "accumulated")]
        if row.level is not Level.OP or local is None or parts[0] is None or parts[1] is None:
            continue
        known = found.get(row.tap)
        if known is None or _size(local) > _size(known.local):
            found[row.tap] = OpError(row.tap, local, parts[0], parts[1], row.verdict)
    return list(found.values())


def first_layer(report: Report) -> str | None:
    """Number of the layer of the first divergence."""
    row = summary.first_divergence(report)
    return None if row is None else layer(row.tap)


def _numbers(row: Row, name: str) -> list[float | None]:
    """A list of numbers among the statistics; empty where there is none."""
    values = row.stats.get(name)
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return [real(value) for value in values]


def _ratio(value: float | None, size: float | None) -> float | None:
    if value is None or size is None:
        return None
    return value / size if size > 0 else (0.0 if value == 0 else math.inf)


def _size(value: float | None) -> float:
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value
