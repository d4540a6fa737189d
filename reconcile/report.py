"""What a run says: rows with verdicts, coverage, and the exit code.

HTML, JSON, JUnit, Markdown and the terminal are renderings of one `Report`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from html import escape
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter

from reconcile.evidence import Evidence

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
"""Version of the ``report.json`` layout."""
_MNK = 3
"""Last dimensions of an op's shape: M, N, K."""


class Verdict(StrEnum):
    """Outcome of one comparison."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"


class Level(StrEnum):
    """Stages of the funnel."""

    WEIGHT = "weight"
    STAGE = "stage"
    OP = "op"
    MODULE = "module"
    MODEL = "model"


LEVELS = (Level.OP, Level.MODULE, Level.MODEL)
"""Levels of the funnel that a case can ask for, in order."""
PHASES = ("prefill", "decode")
"""Passes of a model that generates."""


class Reason(StrEnum):
    """Why a verdict is not PASS."""

    # FAIL
    OVER_LIMIT = "over_limit"
    BIAS = "bias"
    NONFINITE = "nonfinite"
    SHAPE = "shape"
    DTYPE = "dtype"
    UNWRITTEN = "unwritten"
    OVERRUN = "overrun"
    INPUT_MUTATED = "input_mutated"
    RAISED = "raised"
    UNSTABLE = "unstable"
    RATCHET = "ratchet"
    # INCONCLUSIVE
    NOT_RUN = "not_run"
    FELL_BACK = "fell_back"
    NOT_COMPARED = "not_compared"
    REFERENCE_SUSPECT = "reference_suspect"
    CAPTURE_INVALID = "capture_invalid"
    VACUOUS = "vacuous"
    BLOCKED = "blocked"

    @property
    def verdict(self) -> Verdict:
        """The verdict that this reason belongs to."""
        return Verdict.INCONCLUSIVE if self in _INCONCLUSIVE else Verdict.FAIL


_INCONCLUSIVE = frozenset(
    {
        Reason.NOT_RUN,
        Reason.FELL_BACK,
        Reason.NOT_COMPARED,
        Reason.REFERENCE_SUSPECT,
        Reason.CAPTURE_INVALID,
        Reason.VACUOUS,
        Reason.BLOCKED,
    }
)


class ExitCode:
    """Exit codes of the command line."""

    PASS = 0
    """Everything was compared and passed."""
    FAIL = 1
    """At least one FAIL."""
    INCONCLUSIVE = 2
    """No FAIL, but something is inconclusive, uncovered, not run, or nothing was compared."""
    BAD_INPUT = 3
    """Bad input or configuration."""
    INTERNAL = 4
    """A fault of the tool itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest accepted value of each gated statistic, and where the numbers come from."""

    kind: Literal["exact", "bound", "baseline", "floor", "fixed", "ratchet"]
    """How the bounds were found; a measured or derived kind is preferred to ``fixed``."""
    source: str
    """Derivation, calibration run, or the user's reason; never empty."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Statistic to largest accepted value; a value is accepted if value <= bound."""

    def __post_init__(self) -> None:
        """A limit without a source, or that gates nothing, is refused."""
        if not self.source or not self.bounds:
            raise ValueError("limits need a source and at least one bound")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One fitted explanation of a failing row."""

    name: str
    explains: float
    """Share of the error energy explained, in [0, 1]."""
    parameters: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    role: Literal["cause", "also", "runner_up"] = "cause"
    """``cause``: the best explanation, or ``none_fits``. ``also``: a second, independent fault;
    its share is of what the first one left. ``runner_up``: the next best instead of the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    level: Level
    tap: str
    """Module path and port, e.g. ``model.layers.3.mlp.down_proj:out``."""
    check: str
    """``isolated``, ``chained``, ``top10``, ``kl``, ``growth``, ..."""
    shape: tuple[int, ...] = ()
    """Op level: (M, N, K); else the shape of the compared tensor."""
    pass_: str = ""
    """Fingerprint of the pass's inputs (``pass`` in JSON)."""
    kernel: str = ""
    engine: str = ""
    implementation: str = ""
    execution: str = ""
    fidelity: str = ""
    verdict: Verdict
    reason: Reason | None = None
    text: str = ""
    """One sentence for the reader: what was seen, where."""
    stats: dict[str, Any] = field(default_factory=dict)
    limits: Limits | None = None
    utilisation: float | None = None
    """Largest share of its limit that the error takes; above 1 is a FAIL."""
    diagnosis: tuple[Diagnosis, ...] = ()
    digest: str = ""
    """Hash of the candidate's output, equal where two runs gave the same bits; empty where the
    row judges no single tensor."""
    evidence: Evidence | None = None
    """A close look at the tensors, for rows that matter; see `judging.examine.Gallery`."""

    def __post_init__(self) -> None:
        """A row that is not PASS has a reason that fits its verdict; a PASS has none."""
        if (self.reason is None) != (self.verdict is Verdict.PASS):
            raise ValueError(f"{self.tap}: verdict {self.verdict} with reason {self.reason}")
        if self.reason is not None and self.reason.verdict is not self.verdict:
            raise ValueError(f"{self.tap}: reason {self.reason} is not one of {self.verdict}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which of the modules that must be compared were compared."""

    expected: int
    compared: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much of the model a run was about, whoever restricted it: the caller or the case."""

    modules: int
    """Modules that the kernels of the run were to compute."""
    of: int
    """Modules of the model that have a weight to judge."""
    levels: tuple[str, ...] = LEVELS
    """Levels that were run."""
    phases: tuple[str, ...] = PHASES
    """Passes in which a kernel was used."""

    @property
    def of_modules(self) -> str:
        """How many modules of the model, where not all."""
        few = self.modules < self.of
        return f"only {self.modules} of the model's {self.of} modules" if few else ""

    @property
    def restriction(self) -> str:
        """What a reader must know beside the verdict; empty for a run of the whole.

        >>> Scope(modules=1, of=42, levels=("op",)).restriction
        "only 1 of the model's 42 modules, only level op"
        """
        parts = [self.of_modules] if self.of_modules else []
        if len(self.levels) < len(LEVELS):
            parts.append(f"only level {' and '.join(self.levels)}")
        if len(self.phases) == 1:
            parts.append(f"only in {self.phases[0]}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first failing tap in execution order."""

    tap: str
    row: int
    """Index into ``rows``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where one side of the comparison comes from."""

    side: str
    """``reference`` or the candidate's name."""
    model: str
    """Name or path of the checkpoint."""
    checkpoint_sha256: str
    """Hash over the checkpoint's files."""
    dtype: str
    """Dtype of activations and arithmetic."""
    machine: str
    """Processor and system."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of what computed it."""
    command: str = ""
    """Command line or API call."""
    created: str = ""
    """UTC time, ISO 8601."""
    notes: tuple[str, ...] = ()
    """What the reader must know, e.g. which engine ``auto`` chose."""
    commit: str = ""
    """Git commit of the working directory, ``+changes`` where it has some; empty outside git."""
    config: str = ""
    """Path of the case file."""
    seeds: dict[str, int] = field(default_factory=dict)
    """Everything random starts from these."""
    hashes: dict[str, str] = field(default_factory=dict)
    """sha256 by what was hashed: the case file, inputs, kernel sources, loaded binaries."""
    build: dict[str, str] = field(default_factory=dict)
    """By native library: the compiler's own words and the flags."""
    settings: dict[str, str] = field(default_factory=dict)
    """What decides whether a second run gives the same bits: threads, flushing, environment."""
    cpu: str = ""
    """Vector and matrix extensions of the processor that torch and kernels may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a run says."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    case: str
    rows: tuple[Row, ...]
    coverage: Coverage
    provenance: tuple[Provenance, ...] = ()
    command: str = ""
    created: str = ""
    """UTC time, ISO 8601."""
    seconds: float = 0.0
    """Wall time of the run."""
    notices: tuple[str, ...] = ()
    """Findings that concern the whole run: a required kernel that did not run, ..."""
    required_coverage: float = 1.0
    """Share of the expected modules that must have been compared."""
    required: tuple[str, ...] = ()
    """What the gate requires: ``kernel`` or ``kernel@engine``."""
    required_not_run: tuple[str, ...] = ()
    """Required kernels that did not run on everything they can implement."""
    allowed: tuple[str, ...] = ()
    """Uses of ``[gate] allow_inconclusive``: row and the reason given."""
    allowed_rows: frozenset[int] = frozenset()
    """Indices of the INCONCLUSIVE rows that the gate was told to allow."""
    scope: Scope | None = None
    """How much of the model the run was about; None where there is no model or it is not known."""

    @property
    def subject(self) -> str:
        """The case, and in brackets how much of its model was looked at if not all."""
        restriction = self.scope.restriction if self.scope else ""
        return f"{self.case} ({restriction})" if restriction else self.case

    @property
    def title(self) -> str:
        """Verdict and what it is about."""
        return f"{self.verdict.value}: {self.subject}"

    @property
    def m_tried(self) -> dict[str, list[int]]:
        """By kernel, the numbers of rows M with which its ops were called, ascending."""
        tried: dict[str, set[int]] = {}
        for row in self.rows:
            if row.level is Level.OP and len(row.shape) >= _MNK and _was_called(row):
                tried.setdefault(row.kernel, set()).add(row.shape[-_MNK])
        return {kernel: sorted(sizes) for kernel, sizes in tried.items()}

    @property
    def verdict(self) -> Verdict:
        """FAIL if any row fails; PASS only if everything was compared and passed."""
        if any(row.verdict is Verdict.FAIL for row in self.rows):
            return Verdict.FAIL
        if self.required_not_run or not self.covered or not self.rows:
            return Verdict.INCONCLUSIVE
        if all(
            row.verdict is Verdict.PASS or index in self.allowed_rows
            for index, row in enumerate(self.rows)
        ) and any(row.verdict is Verdict.PASS for row in self.rows):
            return Verdict.PASS
        return Verdict.INCONCLUSIVE

    @property
    def covered(self) -> bool:
        """Whether enough of the expected modules were compared, and there are any."""
        coverage = self.coverage
        return (
            coverage.expected > 0
            and coverage.compared >= self.required_coverage * coverage.expected
        )

    @property
    def exit_code(self) -> int:
        """0 PASS, 1 FAIL, 2 INCONCLUSIVE."""
        return {
            Verdict.PASS: ExitCode.PASS,
            Verdict.FAIL: ExitCode.FAIL,
            Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
        }[self.verdict]

    @property
    def first_divergence(self) -> Divergence | None:
        """The first FAIL: rows are in funnel order, and within a level in execution order."""
        for index, row in enumerate(self.rows):
            if row.verdict is Verdict.FAIL:
                return Divergence(tap=row.tap, row=index)
        return None

    def failures(self) -> Iterator[Row]:
        """Rows with verdict FAIL, in order."""
        return (row for row in self.rows if row.verdict is Verdict.FAIL)

    def counts(self) -> dict[str, int]:
        """Number of rows by verdict; every verdict is present."""
        counts = Counter(row.verdict for row in self.rows)
        return {verdict.value: counts[verdict] for verdict in Verdict}

    def frame(self) -> pd.DataFrame:
        """One line per row; statistics are columns ``stats.<name>``."""
        import pandas as pd

        records = [_row_record(row) for row in self.rows]
        return pd.json_normalize(records)

    def show(self) -> None:
        """The report where it is called: as a page in a notebook, else as text."""
        try:
            from IPython import get_ipython
            from IPython.display import display
        except ImportError:
            print(self.explain())  # noqa: T201
            return
        if get_ipython() is None:
            print(self.explain())  # noqa: T201
        else:
            display(self)

    def _repr_html_(self) -> str:
        """The page that ``reconcile run`` writes, in a frame of its own."""
        (renderer,) = entry_points(group="reconcile.reporters", name="html")
        page = escape(renderer.load()(self), quote=True)
        return (
            f'<iframe srcdoc="{page}" width="100%" height="640" sandbox="allow-scripts"></iframe>'
        )

    def raise_for_verdict(self) -> None:
        """AssertionError with the terminal text of the failing rows unless the verdict is PASS."""
        if self.verdict is Verdict.PASS:
            return
        __tracebackhide__ = True
        raise AssertionError(self.explain())

    def explain(self, limit: int = 20) -> str:
        """The verdict, and one line for each of the first ``limit`` rows that are not PASS."""
        lines = [self.title, *self.notices]
        bad = [row for row in self.rows if row.verdict is not Verdict.PASS]
        for row in bad[:limit]:
            lines += [describe(row), *(f"  because: {because(row)}" for _ in row.diagnosis[:1])]
        if len(bad) > limit:
            lines.append(f"... and {len(bad) - limit} more rows")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The content of ``report.json``."""
        body: dict[str, Any] = {
            "schema": SCHEMA,
            "verdict": self.verdict.value,
            "exit_code": self.exit_code,
            "first_divergence": (
                None
                if self.first_divergence is None
                else {"tap": self.first_divergence.tap, "row": self.first_divergence.row}
            ),
            "counts": self.counts(),
            "m_tried": self.m_tried,
        }
        fields: dict[str, Any] = _spell_floats(_REPORT.dump_python(self, exclude={"rows"}))
        rows = [_row_record(row) for row in self.rows]
        return body | fields | {"rows": rows, "allowed_rows": sorted(self.allowed_rows)}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Report:
        """The Report that `to_dict` wrote.

        Raises:
            ValueError: another schema, unknown or missing keys, or a stored verdict that the
                rows do not give.
        """
        if body.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {body.get('schema')!r}")
        derived = ("schema", "verdict", "exit_code", "first_divergence", "counts", "m_tried")
        fields = {key: value for key, value in body.items() if key not in derived}
        fields["rows"] = [_row_fields(row) for row in fields.get("rows", [])]
        report = _REPORT.validate_python(fields)
        if body.get("verdict") != report.verdict or body.get("exit_code") != report.exit_code:
            raise ValueError(
                f"the stored verdict {body.get('verdict')} / {body.get('exit_code')} is not what "
                f"the rows give ({report.verdict} / {report.exit_code})"
            )
        return report


def describe(row: Row) -> str:
    """One line: verdict, reason, where, and what was seen.

    >>> describe(Row(level=Level.OP, tap="a:out", check="isolated", verdict=Verdict.FAIL,
    ...              reason=Reason.NONFINITE, text="1 NaN"))
    'FAIL nonfinite  op a:out isolated: 1 NaN'
    """
    reason = f" {row.reason.value}" if row.reason else ""
    shape = f" {'x'.join(map(str, row.shape))}" if row.shape else ""
    where = f"{row.level.value} {row.tap} {row.check}{shape}"
    return f"{row.verdict.value}{reason}  {where}: {row.text or 'within its limits'}"


def because(row: Row) -> str:
    """The best diagnosis of a row in one line; empty where there is none."""
    if not row.diagnosis:
        return ""
    best = row.diagnosis[0]
    return f"{best.text or best.name} (explains {best.explains:.1%} of the error)"


def _was_called(row: Row) -> bool:
    return bool(row.stats) or row.verdict is Verdict.FAIL


_ROW = TypeAdapter(Row)
_REPORT = TypeAdapter(Report)


_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""JSON has no non-finite numbers: they are written as these strings and read back."""


def _row_record(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = _spell_floats(_ROW.dump_python(row))
    return {("pass" if key == "pass_" else key): value for key, value in record.items()}


def _row_fields(record: dict[str, Any]) -> dict[str, Any]:
    fields = {("pass_" if key == "pass" else key): value for key, value in record.items()}
    for name in ("stats", "utilisation", "evidence"):
        fields[name] = _restore_floats(fields.get(name))
    return fields


def _spell_floats(value: Any) -> Any:  # noqa: ANN401
    """``value`` with every non-finite float spelt out, containers as lists and dicts."""
    if isinstance(value, dict):
        return {key: _spell_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_floats(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.value if isinstance(value, StrEnum) else value


def _restore_floats(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _restore_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore_floats(item) for item in value]
    return _NONFINITE.get(value, value) if isinstance(value, str) else value
