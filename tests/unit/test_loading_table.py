"""The table of loading steps, in every rendering."""

import math

import pytest

from reconcile.report import Coverage, Level, Reason, Report, Row, Verdict
from reconcile_reports import html, loading, markdown, terminal


def stage(name, module="a", reason=None, **stats):
    return Row(
        level=Level.STAGE,
        tap=f"{module}:param.weight",
        check=name,
        verdict=reason.verdict if reason else Verdict.PASS,
        reason=reason,
        text="wrong" if reason else "",
        stats=stats,
    )


ROWS = (
    stage("resolve", sqnr_db=55.5, changed_share=0.5, max_rel=0.003),
    stage("requantise.0", sqnr_db=30.5, changed_share=0.9, max_rel=0.06, saturating_share=0.14),
    stage("requantise.1", sqnr_db=31.5, changed_share=0.8, max_rel=0.32, saturating_share=0.28),
    stage("repack", sqnr_db=math.inf, changed_share=0.0, max_rel=0.0),
    stage("repack", "b", Reason.OVER_LIMIT, sqnr_db=math.inf, changed_share=0.0, max_rel=0.0),
    stage("repack", "c", Reason.FELL_BACK),
)
REPORT = Report(case="c", rows=ROWS, coverage=Coverage(expected=1, compared=1))


def test_steps_keep_the_worst_of_each_number():
    cells = [step.cells for step in loading.steps(REPORT)]
    assert cells == [
        ("resolve", "1", "0", "0", "55.5 dB", "50 %", "0.003", "-"),
        ("requantise", "2", "0", "0", "30.5 dB", "90 %", "0.32", "28 %"),
        ("repack", "3", "1", "1", "none", "0 %", "0", "-"),
    ]
    assert loading.lines(REPORT)[2].split("; ")[1:3] == ["1 not right", "1 fell back (wrong)"]


@pytest.mark.parametrize("render", [html.render, markdown.render, terminal.render])
def test_every_rendering_has_them(render):
    text = render(REPORT)
    assert all(words in text for words in ("resolve", "requantise", "repack", "30.5 dB", "28 %"))
    plain = Report(case="c", rows=(), coverage=Coverage(expected=1, compared=0))
    assert "requantise" not in render(plain)
