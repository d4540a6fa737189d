"""Where a kernel is faster than the dense path: measured times by M, kept, and asked.

The dense path is `torch.nn.functional.linear` on the decoded weight. Nothing is assumed about
which of the two wins at small M: for every M that was measured the faster one is known, and an M
between two measured ones goes by the one below it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reconcile.exceptions import ConfigError
from reconcile.tracing.trace import write_atomically

DENSE = "dense"
"""Name of the dense path."""
NOISE = 0.03
"""Share of the time by which two runs of one path differ on a busy machine."""
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a measurement is for; a route may only use one of the same."""

    n: int
    k: int
    dtype: str
    """Dtype of x, by torch's name."""
    device: str
    """The processor or GPU, as it names itself."""
    threads: int
    """CPU threads; 0 on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of rows: medians over rounds in which every path took its turn."""

    m: int
    kernel_ms: float
    """The whole call from Python, in milliseconds."""
    dense_ms: float
    ratio: float
    """Median over the rounds of dense / kernel: above 1 the kernel is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """A forward pass of a whole model with the kernel, and with dense linears."""

    model: str
    tokens: int
    """Rows of the pass: a prompt, or 1."""
    kernel_ms: float
    dense_ms: float
    ratio: float
    """Median over the rounds of dense / kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A kernel beside the dense path, in one setting."""

    kernel: str
    engine: str
    setting: Setting
    points: tuple[Point, ...]
    """In order of M."""
    packed_bytes: int
    """What the prepared weight takes."""
    dense_bytes: int
    """What the decoded weight takes in the dtype of x."""
    format: str = ""
    """The weight's number format."""
    end_to_end: tuple[EndToEnd, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)
    """Machine, versions, commit and command line."""

    def path(self, m: int) -> str:
        """The path for ``m`` rows: that of the measured M at or below it."""
        return [path for start, path in self.spans() if start <= m][-1]

    def spans(self) -> tuple[tuple[int, str], ...]:
        """Pairs (least M, path) where the path changes, the first at M = 1.

        A path that is faster by less than `NOISE` is no reason to leave the one before.
        """
        found: list[tuple[int, str]] = []
        for point in self.points:
            kept = found[-1][1] if found else DENSE
            margin = NOISE if found else 0.0
            needed = 1 + (margin if kept == DENSE else -margin)
            path = self.kernel if point.ratio > needed else DENSE
            if not found or path != kept:
                found.append((point.m if found else 1, path))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossovers:
    """Measurements, at most one of a kernel in a setting."""

    measurements: tuple[Measurement, ...]

    def find(self, kernel: str, setting: Setting) -> Measurement | None:
        """The measurement for exactly this kernel and setting; None: not measured."""
        for measurement in self.measurements:
            if (measurement.kernel, measurement.setting) == (kernel, setting):
                return measurement
        return None

    def merged(self, others: Iterable[Measurement]) -> tuple[Measurement, ...]:
        """These measurements, with the others in place of those for the same."""
        table = {(m.kernel, m.setting): m for m in (*self.measurements, *others)}
        return tuple(table.values())

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        body = {"schema": SCHEMA, **asdict(self)}
        write_atomically(path, json.dumps(body, indent=2, default=str) + "\n")


def load_crossovers(path: Path) -> Crossovers:
    """Read what `Crossovers.save` wrote.

    Raises:
        ConfigError: no such file, other content, or another schema.
    """
    try:
        body = json.loads(path.read_text())
        if body["schema"] != SCHEMA:
            raise ConfigError(f"{path}: expected schema {SCHEMA}, got {body['schema']}")
        measurements = tuple(_measurement(entry) for entry in body["measurements"])
        return Crossovers(measurements=measurements)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a table of `reconcile bench`: {type(error).__name__}: {error}"
        ) from error


def _measurement(entry: dict[str, Any]) -> Measurement:
    points = tuple(Point(**point) for point in entry["points"])
    if not points or [p.m for p in points] != sorted({p.m for p in points}):
        raise ValueError("points: expected at least one, in order of M")
    whole = tuple(EndToEnd(**item) for item in entry["end_to_end"])
    read = {"setting": Setting(**entry["setting"]), "points": points, "end_to_end": whole}
    return Measurement(**entry | read)


def table_text(measurement: Measurement) -> str:
    """The measurement as a table for people."""
    s = measurement.setting
    saved = measurement.dense_bytes / measurement.packed_bytes
    lines = [
        f"{measurement.kernel} on {measurement.engine}, N={s.n}, K={s.k}, {s.dtype}, "
        f"{measurement.format}: {s.device}{f', {s.threads} thread(s)' if s.threads else ''}",
        f"weight: {measurement.packed_bytes} bytes packed, {measurement.dense_bytes} dense "
        f"({saved:.1f}x)",
        f"{'M':>6} {'kernel ms':>11} {'dense ms':>11} {'dense/kernel':>13}  route",
    ]
    lines += [
        f"{p.m:6} {p.kernel_ms:11.4g} {p.dense_ms:11.4g} {p.ratio:12.2f}x  {measurement.path(p.m)}"
        for p in measurement.points
    ]
    lines += [
        f"end to end, {e.model}, {e.tokens} token(s): {e.kernel_ms:.4g} ms, dense {e.dense_ms:.4g} "
        f"ms, {e.ratio:.2f}x"
        for e in measurement.end_to_end
    ]
    return "\n".join([*lines, f"route: {spans_text(measurement.spans())}"])


def spans_text(spans: Sequence[tuple[int, str]]) -> str:
    """E.g. ``ternary_cpu.bf16 from M=1, dense from M=512``."""
    return ", ".join(f"{path} from M={m}" for m, path in spans)
