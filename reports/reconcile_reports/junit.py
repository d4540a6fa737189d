"""``junit.xml``: one test case per row, for CI systems.

A row that is inconclusive is an error, never a skip, unless the gate was told to allow it.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator

from reconcile.report import Level, Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.summary import Indexed
from reconcile_reports.wording import one_line, shape, visible

FILENAME: str | None = "junit.xml"
"""Name of the file in a run directory."""

_RUN = "run"
"""The suite that holds what concerns the whole run."""


def render(report: Report) -> str:
    """The report as JUnit XML."""
    suites = [*_level_suites(report), _run_suite(report)]
    root = ET.Element("testsuites", {"name": f"reconcile.{one_line(report.case)}"})
    root.extend(suites)
    _count(root)
    root.set("time", f"{report.seconds:.3f}")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _level_suites(report: Report) -> Iterator[ET.Element]:
    repeated = _repeated_names(report)
    for level in summary.levels(report):
        suite = _suite(report, level.value)
        suite.extend(_case(report, item, repeated) for item in summary.at_level(report, level))
        _count(suite)
        yield suite


def _run_suite(report: Report) -> ET.Element:
    """The case ``verdict``: an error where the run as a whole is not covered."""
    suite = _suite(report, _RUN)
    properties = ET.SubElement(suite, "properties")
    for name, value in _run_properties(report).items():
        ET.SubElement(properties, "property", {"name": name, "value": one_line(value)})
    case = ET.SubElement(suite, "testcase", _names(report, _RUN, "verdict"))
    if findings := summary.run_findings(report):
        _outcome(case, "error", _finding_type(report), "; ".join(findings))
    ET.SubElement(case, "system-out").text = visible(
        f"{report.verdict.value}: {report.subject}: {summary.headline(report)}"
    )
    _count(suite)
    return suite


def _run_properties(report: Report) -> dict[str, str]:
    return {
        "verdict": report.verdict.value,
        "exit_code": str(report.exit_code),
        "m_tried": summary.m_tried(report),
        "coverage": summary.coverage_text(report),
        "command": report.command,
    }


def _finding_type(report: Report) -> str:
    if not report.rows:
        return "not_compared"
    return "coverage" if not report.covered else "not_run"


def _suite(report: Report, name: str) -> ET.Element:
    attributes = {"name": f"reconcile.{one_line(report.case)}.{name}"}
    if report.created:
        attributes["timestamp"] = one_line(report.created)
    return ET.Element("testsuite", attributes)


def _names(report: Report, level: str, name: str) -> dict[str, str]:
    return {"classname": f"reconcile.{one_line(report.case)}.{level}", "name": name}


def _case(report: Report, item: Indexed, repeated: frozenset[tuple[Level, str]]) -> ET.Element:
    row, name = item.row, _row_name(item.row)
    if (row.level, name) in repeated:
        name = one_line(f"{name} [{row.kernel} {row.engine} row {item.index}]")
    case = ET.Element("testcase", _names(report, row.level.value, name))
    _properties(case, row)
    if row.verdict is Verdict.FAIL:
        _outcome(case, "failure", str(row.reason), summary.seen(row), _details(row))
    elif item.index in report.allowed_rows:
        _allowed(case, row)
    elif row.verdict is Verdict.INCONCLUSIVE:
        _outcome(case, "error", str(row.reason), summary.seen(row), _details(row))
    return case


def _row_name(row: Row) -> str:
    """Tap, check, shape, pass."""
    dimensions = shape(row.shape) if row.shape else ""
    return one_line(f"{row.tap} {row.check} {dimensions} {row.pass_}")


def _repeated_names(report: Report) -> frozenset[tuple[Level, str]]:
    counts = Counter((row.level, _row_name(row)) for row in report.rows)
    return frozenset(name for name, count in counts.items() if count > 1)


def _properties(case: ET.Element, row: Row) -> None:
    labels = {
        "kernel": row.kernel,
        "engine": row.engine,
        "implementation": row.implementation,
        "execution": row.execution,
        "fidelity": row.fidelity,
    }
    present = {name: one_line(value) for name, value in labels.items() if value}
    if present:
        properties = ET.SubElement(case, "properties")
        for name, value in present.items():
            ET.SubElement(properties, "property", {"name": name, "value": value})


def _outcome(case: ET.Element, tag: str, kind: str, message: str, details: str = "") -> None:
    ET.SubElement(case, tag, {"type": kind, "message": one_line(message)}).text = visible(details)


def _details(row: Row) -> str:
    lines = [row.text, summary.seen_and_limit(row), *summary.causes(row)]
    return "\n".join(line for line in lines if line)


def _allowed(case: ET.Element, row: Row) -> None:
    ET.SubElement(
        case, "system-out"
    ).text = f"inconclusive ({row.reason}), allowed by the gate: {summary.seen(row)}"


def _count(element: ET.Element) -> None:
    """Counts over the cases below ``element``."""
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    element.set("errors", str(sum(case.find("error") is not None for case in cases)))
    element.set("skipped", "0")
