"""pytest plugin: the fixture ``reconcile_check`` and the option ``--reconcile CONFIG``.

    def test_my_kernel(reconcile_check):
        reconcile_check(my_kernel, weight)          # level op: all probes, bounds and bias

    pytest --reconcile reconcile.toml -k down_proj  # one item for each row of the case

A FAIL is a failed test. An INCONCLUSIVE is an error, not a skip, unless it is allowed with a
reason: ``[gate] allow_inconclusive`` of the case, ``allow_inconclusive=`` of the fixture; what
was allowed is counted in the summary. A case gives one more item, ``gate``, which is in error
where coverage or a required kernel is missing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import pytest
from filelock import FileLock
from torch import Tensor

from reconcile.checking.batched import check_batched_linear
from reconcile.checking.linear import check_linear
from reconcile.exceptions import ReconcileError
from reconcile.explain import explain_row
from reconcile.kernel import Kernel
from reconcile.report import Report, Row, Verdict
from reconcile.session import run
from reconcile.tracing.trace import write_atomically
from reconcile.weight import QuantizedWeight

SUMMARY = "reconcile"
"""Name of the property that carries a line of the terminal summary (in JUnit too)."""

Check = Callable[..., Report]


class Inconclusive(Exception):
    """Raised where a comparison could not be made; never a pass."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--reconcile CONFIG``, which may be repeated."""
    parser.getgroup("reconcile").addoption(
        "--reconcile",
        action="append",
        default=[],
        metavar="CONFIG",
        help="reconcile a case (TOML file or name of an embedded one): one item for each row",
    )


# --------------------------------------------------------------------------- the fixture


@pytest.fixture
def reconcile_check(record_property: Callable[[str, object], None]) -> Check:
    """`reconcile.check_linear` that fails the test unless the verdict is PASS.

    ``reconcile_check(kernel, weight, *, allow_inconclusive="", **options)`` takes the options of
    `reconcile.check_linear`, or of `reconcile.check_batched_linear` where ``weight`` is a list
    or a tensor [B, N, K], and returns the `Report`. With a reason in ``allow_inconclusive`` an
    INCONCLUSIVE report is returned too, and counted in the summary.
    """

    def check(
        kernel: Kernel | Callable[..., Tensor],
        weight: QuantizedWeight | Tensor | list[Any] | tuple[Any, ...],
        *,
        allow_inconclusive: str = "",
        **options: Any,  # noqa: ANN401
    ) -> Report:
        __tracebackhide__ = True
        batched = isinstance(weight, list | tuple) or getattr(weight, "ndim", 2) == 3
        judge: Callable[..., Report] = check_batched_linear if batched else check_linear
        report = judge(kernel, weight, **options)
        allowed = report.verdict is Verdict.INCONCLUSIVE and allow_inconclusive.strip()
        note = f", allowed: {allow_inconclusive.strip()}" if allowed else ""
        record_property(SUMMARY, f"{_line(report)}{note}")
        if report.verdict is Verdict.INCONCLUSIVE and not allowed:
            raise Inconclusive(report.explain())
        if not allowed:
            report.raise_for_verdict()
        return report

    return check


# --------------------------------------------------------------------------- the items of a case


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Append the items of every case, before ``-k`` and others choose among them."""
    for name in config.getoption("--reconcile"):
        items.extend(_items(session, name, _report_of(name, config)))


def _items(session: pytest.Session, name: str, report: Report) -> Iterator[pytest.Item]:
    case = _Case.from_parent(session, name=Path(name).name, nodeid=name)
    seen: Counter[str] = Counter()
    for index, row in enumerate(report.rows):
        label = _label(row)
        seen[label] += 1
        if seen[label] > 1:
            label = f"{label[:-1]}-{seen[label]}]"
        allowed = index in report.allowed_rows
        yield _RowItem.from_parent(case, name=label, row=row, allowed=allowed)
    yield _GateItem.from_parent(case, name="gate", report=report)


def _label(row: Row) -> str:
    shape = "x".join(map(str, row.shape))
    parts = [row.tap, row.check, shape, row.pass_, row.kernel]
    return f"{row.level.value}[{'-'.join(part for part in parts if part)}]"


class _Case(pytest.Collector):
    """Parent of the items of one case."""

    def collect(self) -> list[pytest.Item]:
        """Nothing more than what `_items` made."""
        return []


class _RowItem(pytest.Item):
    """One row of the report."""

    def __init__(self, *, row: Row, allowed: bool, **rest: Any) -> None:  # noqa: ANN401
        super().__init__(**rest)
        self.row, self.allowed = row, allowed

    def setup(self) -> None:
        """An INCONCLUSIVE row is an error of the test, not its failure."""
        if self.row.verdict is Verdict.INCONCLUSIVE and not self.allowed:
            raise Inconclusive(explain_row(self.row))

    def runtest(self) -> None:
        """The verdict, which is known by now."""
        if self.row.verdict is Verdict.FAIL:
            raise AssertionError(explain_row(self.row))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:  # noqa: ANN401, ARG002
        """The text alone: a traceback of this file helps nobody."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Place and name for the list of failures."""
        return self.path, None, self.nodeid


class _GateItem(pytest.Item):
    """What no single row says: coverage, required kernels, whether there are rows."""

    def __init__(self, *, report: Report, **rest: Any) -> None:  # noqa: ANN401
        super().__init__(**rest)
        self.report = report
        self.user_properties.append((SUMMARY, _line(report)))

    def setup(self) -> None:
        """Nothing passed, too little was compared, or a required kernel did not run."""
        report = self.report
        passed = any(row.verdict is Verdict.PASS for row in report.rows)
        nothing = report.verdict is Verdict.INCONCLUSIVE and not passed
        if report.required_not_run or not report.covered or nothing:
            raise Inconclusive(report.explain(limit=0))

    def runtest(self) -> None:
        """The rows have items of their own."""

    repr_failure = _RowItem.repr_failure
    reportinfo = _RowItem.reportinfo


# --------------------------------------------------------------------------- running a case


def _report_of(name: str, config: pytest.Config) -> Report:
    """The report of a case: run once, also where several xdist workers collect."""
    try:
        shared = _shared_folder(config)
        if shared is None:
            return run(name, command=f"pytest --reconcile {name}")
        shared.mkdir(mode=0o700, exist_ok=True)
        file = shared / f"{sha256(name.encode()).hexdigest()[:16]}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                report = run(name, command=f"pytest --reconcile {name}")
                write_atomically(file, json.dumps(report.to_dict()))
            return Report.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ReconcileError as error:
        _usage_error(name, error)


def _usage_error(name: str, error: Exception) -> NoReturn:
    raise pytest.UsageError(f"--reconcile {name}: {error}") from None


def _shared_folder(config: pytest.Config) -> Path | None:
    """A folder that all xdist workers of this run have in common; None in a run without."""
    worker = getattr(config, "workerinput", None)
    run_id = worker["testrunuid"] if worker else config.getoption("testrunuid", None)
    return Path(tempfile.gettempdir()) / f"reconcile-pytest-{run_id}" if run_id else None


def pytest_unconfigure(config: pytest.Config) -> None:
    """The controller takes the shared folder away."""
    folder = _shared_folder(config)
    if folder is not None and not hasattr(config, "workerinput"):
        shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------- the summary


def _line(report: Report) -> str:
    counts = ", ".join(f"{n} {verdict}" for verdict, n in report.counts().items() if n)
    coverage = report.coverage
    said = [report.title, counts or "no rows"]
    said.append(f"coverage {coverage.compared}/{coverage.expected}")
    if report.allowed:
        said.append(f"{len(report.allowed)} inconclusive allowed")
    if report.required_not_run:
        said.append(f"required but not run: {', '.join(report.required_not_run)}")
    return "; ".join([*said, *report.notices])


def pytest_terminal_summary(terminalreporter: Any) -> None:  # noqa: ANN401 - private type
    """One line for each report, whatever the verdict; nothing is silent."""
    lines = [
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, value in report.user_properties
        if name == SUMMARY
    ]
    if lines:
        terminalreporter.section("reconcile")
        for line in lines:
            terminalreporter.write_line(line)
