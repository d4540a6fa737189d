"""Verdicts, exit codes and the JSON round trip of a Report."""

import json
import math

import pytest

from reconcile.report import Coverage, Level, Limits, Reason, Report, Row, Scope, Verdict


def _row(verdict=Verdict.PASS, reason=None, **fields):
    return Row(
        level=Level.OP, tap="m:out", check="isolated", verdict=verdict, reason=reason, **fields
    )


PASS = _row()
FAIL = _row(Verdict.FAIL, Reason.OVER_LIMIT)
OPEN = _row(Verdict.INCONCLUSIVE, Reason.NOT_RUN)
FULL = Coverage(expected=1, compared=1)

TABLE = [
    # rows, other fields, verdict, exit code
    ([PASS], {}, Verdict.PASS, 0),
    ([PASS, FAIL, OPEN], {}, Verdict.FAIL, 1),
    ([PASS, OPEN], {}, Verdict.INCONCLUSIVE, 2),
    ([], {}, Verdict.INCONCLUSIVE, 2),
    (
        [PASS],
        {"coverage": Coverage(expected=2, compared=1, missing=("x",))},
        Verdict.INCONCLUSIVE,
        2,
    ),
    ([PASS], {"coverage": Coverage(expected=0, compared=0)}, Verdict.INCONCLUSIVE, 2),
    (
        [PASS],
        {"coverage": Coverage(expected=2, compared=1), "required_coverage": 0.5},
        Verdict.PASS,
        0,
    ),
    ([PASS], {"required_not_run": ("k",)}, Verdict.INCONCLUSIVE, 2),
    ([FAIL], {"required_not_run": ("k",)}, Verdict.FAIL, 1),
    ([PASS, OPEN], {"allowed_rows": frozenset({1})}, Verdict.PASS, 0),
    ([OPEN], {"allowed_rows": frozenset({0})}, Verdict.INCONCLUSIVE, 2),
    ([FAIL], {"allowed_rows": frozenset({0})}, Verdict.FAIL, 1),
]


@pytest.mark.parametrize(("rows", "fields", "verdict", "exit_code"), TABLE)
def test_verdict_and_exit_code(rows, fields, verdict, exit_code):
    report = Report(case="c", rows=tuple(rows), **({"coverage": FULL} | fields))
    assert (report.verdict, report.exit_code) == (verdict, exit_code)
    if verdict is Verdict.PASS:
        report.raise_for_verdict()
    else:
        with pytest.raises(AssertionError, match=verdict.value):
            report.raise_for_verdict()


SCOPES = [
    ({"modules": 42, "of": 42}, "PASS: c"),
    ({"modules": 1, "of": 42}, "PASS: c (only 1 of the model's 42 modules)"),
    ({"modules": 2, "of": 2, "levels": ("op",)}, "PASS: c (only level op)"),
    ({"modules": 2, "of": 2, "phases": ("decode",)}, "PASS: c (only in decode)"),
    (
        {"modules": 1, "of": 2, "levels": ("op", "module")},
        "PASS: c (only 1 of the model's 2 modules, only level op and module)",
    ),
]


@pytest.mark.parametrize(("scope", "title"), SCOPES)
def test_a_restricted_pass_is_never_read_as_a_whole_one(scope, title):
    report = Report(case="c", rows=(PASS,), coverage=FULL, scope=Scope(**scope))
    assert report.title == title
    assert report.explain().splitlines()[0] == title
    again = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert again == report


def test_m_tried_is_of_the_ops_that_were_called():
    rows = [
        _row(shape=(12, 4, 8), kernel="k", stats={"max_abs": 0.0}),
        _row(shape=(2, 1, 4, 8), kernel="k", stats={"max_abs": 0.0}),  # G, M, N, K
        _row(Verdict.FAIL, Reason.RAISED, shape=(37, 4, 8), kernel="k"),
        _row(shape=(1, 4, 8), kernel="other", stats={"max_abs": 0.0}),
        _row(Verdict.INCONCLUSIVE, Reason.NOT_RUN, shape=(99, 4, 8), kernel="k"),
        Row(level=Level.MODULE, tap="m:out", check="c", verdict=Verdict.PASS, shape=(64, 8, 8)),
    ]
    report = Report(case="c", rows=tuple(rows), coverage=FULL)
    assert report.m_tried == {"k": [1, 12, 37], "other": [1]}
    assert report.to_dict()["m_tried"] == report.m_tried


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reason_belongs_to_one_verdict(reason):
    assert _row(reason.verdict, reason).reason is reason
    for verdict in Verdict:
        if verdict is not reason.verdict:
            with pytest.raises(ValueError, match="m:out"):
                _row(verdict, reason)


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.INCONCLUSIVE])
def test_a_bad_verdict_needs_a_reason(verdict):
    with pytest.raises(ValueError, match="None"):
        _row(verdict)


@pytest.mark.parametrize("fields", [{"source": "", "bounds": {"x": 1.0}}, {"source": "s"}])
def test_limits_need_a_source_and_a_bound(fields):
    with pytest.raises(ValueError, match="limits need"):
        Limits(kind="fixed", **fields)


def test_first_divergence_is_the_first_fail():
    report = Report(case="c", rows=(PASS, OPEN, FAIL, FAIL), coverage=FULL)
    assert (report.first_divergence.tap, report.first_divergence.row) == ("m:out", 2)


def test_json_round_trip_keeps_non_finite_numbers():
    row = _row(
        stats={"a": math.inf, "b": -math.inf, "list": [1.0, [math.inf]], "n": 3, "t": "text"},
        utilisation=math.inf,
        limits=Limits(kind="bound", source="s", bounds={"a": math.inf}),
        pass_="ab",
        shape=(1, 2),
    )
    report = Report(case="c", rows=(row, FAIL), coverage=FULL, allowed_rows=frozenset({1}))
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert Report.from_dict(json.loads(text)) == report
    assert json.loads(text)["rows"][0]["pass"] == "ab"


def test_json_keeps_nan():
    row = Report(case="c", rows=(_row(stats={"a": math.nan}),), coverage=FULL)
    back = Report.from_dict(json.loads(json.dumps(row.to_dict(), allow_nan=False)))
    assert math.isnan(back.rows[0].stats["a"])


@pytest.mark.parametrize(
    "edit",
    [
        lambda body: body.update(schema=2),
        lambda body: body.update(verdict="PASS"),
        lambda body: body.update(exit_code=0),
        lambda body: body.update(surprise=1),
        lambda body: body.pop("coverage"),
        lambda body: body["rows"][0].update(verdict="FINE"),
    ],
)
def test_an_edited_report_is_refused(edit):
    body = Report(case="c", rows=(FAIL,), coverage=FULL).to_dict()
    edit(body)
    with pytest.raises((ValueError, TypeError)):
        Report.from_dict(body)


def test_frame_has_a_line_per_row():
    frame = Report(case="c", rows=(PASS, FAIL), coverage=FULL).frame()
    assert list(frame["verdict"]) == ["PASS", "FAIL"]
    assert {"level", "tap", "check", "pass", "reason"} <= set(frame.columns)
