"""Accepted errors: what is taken, what is refused, and what becomes a FAIL."""

import json
import math

import pytest

from reconcile.exceptions import ConfigError
from reconcile.gate import accepted
from reconcile.report import Coverage, Level, Provenance, Reason, Report, Row, Verdict

STATS = {"max_abs": 0.5, "nmse": 1.2345e-6, "worst_row_nmse": 2e-6, "bias": 0.1, "n": 8}


def row(tap="a:out", stats=STATS, reason=None, **fields):
    verdict = Verdict.PASS if reason is None else reason.verdict
    fields = {"check": "isolated", "shape": (4, 8, 16), "pass_": "p", "kernel": "k"} | fields
    return Row(level=Level.OP, tap=tap, verdict=verdict, reason=reason, stats=stats, **fields)


def report(*rows, sha="abc", **fields):
    source = Provenance(
        side="reference", model="m", checkpoint_sha256=sha, dtype="float64", machine="x86"
    )
    fields = {"case": "c", "coverage": Coverage(expected=1, compared=1)} | fields
    return Report(rows=rows, provenance=(source,), created="2026-01-01T00:00:00+00:00", **fields)


def run(path, stats, margin=1.25):
    """The row of a later run with other statistics."""
    found = accepted.ratchet(report(row(stats=STATS | stats)), accepted.load(path), margin)
    return found.rows[0]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "c.accepted.json"
    accepted.save(accepted.accept(report(row()), "first run"), path)
    return path


def test_the_file_is_small_sorted_and_rounded_up(path):
    found = report(row("b:out"), row("a:out", {"nmse": 9.991e-7, "differing": 3}), row("a:out", {}))
    path.unlink()
    accepted.save(accepted.accept(found, " why "), path)
    lines = path.read_text().splitlines()
    assert lines[-4:] == [
        '  "op a:out isolated 4x8x16 p k": {"nmse": 1e-06},',
        '  "op b:out isolated 4x8x16 p k": '
        '{"max_abs": 0.5, "nmse": 1.24e-06, "worst_row_nmse": 2e-06}',
        " }",
        "}",
    ]
    assert json.loads(path.read_text())["why"] == "why"


@pytest.mark.parametrize(
    ("stats", "passes"),
    [
        ({}, True),
        ({"nmse": 1.24e-6 * 1.25}, True),
        ({"nmse": 1.24e-6 * 1.26}, False),
        ({"max_abs": 0.63}, False),
        ({"max_abs": math.nan}, False),
        ({"max_abs": math.inf}, False),
        ({"max_abs": "nan"}, False),
        ({"bias": 100.0}, True),
        ({"max_abs": 0.0, "nmse": 0.0, "worst_row_nmse": 0.0}, True),
    ],
    ids=str,
)
def test_a_run_may_not_be_worse_than_accepted_times_margin(path, stats, passes):
    found = run(path, stats)
    assert found.verdict is (Verdict.PASS if passes else Verdict.FAIL)
    if not passes:
        assert found.reason is Reason.RATCHET
        assert "accepted" in found.text


def test_the_failing_row_shows_the_accepted_error_and_its_reason(path):
    found = run(path, {"nmse": 3e-6})
    assert found.limits.kind == "ratchet"
    assert "first run (2026-01-01" in found.limits.source
    assert found.utilisation == pytest.approx(3e-6 / (1.24e-6 * 1.25))
    assert found.text == "nmse 3e-06 is more than 1.25 x the accepted 1.24e-06"


def test_an_error_accepted_as_zero_stays_zero(path):
    path.unlink()
    zero = {"max_abs": 0.0}
    accepted.save(accepted.accept(report(row(stats=zero)), "exact"), path)
    assert accepted.ratchet(report(row(stats=zero)), accepted.load(path), 2).verdict == "PASS"
    worse = accepted.ratchet(report(row(stats={"max_abs": 1e-30})), accepted.load(path), 2)
    assert worse.verdict is Verdict.FAIL


def test_other_verdicts_are_kept(path):
    for reason in (Reason.BIAS, Reason.NOT_RUN):
        bad = row(stats=STATS | {"nmse": 1.0}, reason=reason)
        assert accepted.ratchet(report(bad), accepted.load(path), 1.25).rows == (bad,)


def test_what_is_not_in_common_is_counted(path):
    better = row(stats=dict.fromkeys(accepted.STATISTICS, 0.0))
    found = accepted.ratchet(report(better, row("new:out")), accepted.load(path), 1.25)
    assert found.notices == (
        "ratchet: 1 rows are held to errors accepted earlier",
        "ratchet: 1 rows are better by more than the margin; accept the run to keep that",
        "ratchet: 1 rows with errors are not among the accepted ones",
    )
    path.unlink()
    accepted.save(accepted.accept(report(row(), row("old:out")), "two"), path)
    found = accepted.ratchet(report(row()), accepted.load(path), 1.25)
    assert found.notices[-1] == "ratchet: 1 accepted rows are not in this run"


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (report(row(reason=Reason.BIAS)), "FAIL is not accepted, first a:out"),
        (report(row(), row("b:out", reason=Reason.NOT_RUN)), "INCONCLUSIVE is not accepted"),
        (report(row(), required_not_run=("k",)), "INCONCLUSIVE is not accepted"),
        (report(), "INCONCLUSIVE is not accepted"),
        (report(row(reason=Reason.RATCHET), row(reason=Reason.BIAS)), "FAIL is not accepted"),
    ],
)
def test_what_is_not_pass_is_not_accepted(found, what):
    with pytest.raises(ConfigError, match=what):
        accepted.accept(found, "because")


def test_a_regression_is_accepted_with_a_reason():
    worse = report(row(stats=STATS | {"nmse": 1e-3}, reason=Reason.RATCHET), row("b:out"))
    assert len(accepted.accept(worse, "faster by half").rows) == 2
    with pytest.raises(ConfigError, match="reason"):
        accepted.accept(worse, "  ")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (report(row(), sha="def"), "checkpoint"),
        (report(row(pass_="q")), "prompts"),
        (report(row(), case="d"), "case"),
    ],
)
def test_another_subject_is_refused_in_both_directions(path, other, what):
    before = path.read_text()
    with pytest.raises(ConfigError, match=f"another {what}"):
        accepted.save(accepted.accept(other, "again"), path)
    assert path.read_text() == before
    with pytest.raises(ConfigError, match=f"another {what}"):
        accepted.ratchet(other, accepted.load(path), 1.25)


def test_nothing_in_common_is_no_pass(path):
    with pytest.raises(ConfigError, match="no row in common"):
        accepted.ratchet(report(row(engine="other")), accepted.load(path), 1.25)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "no such file"),
        ("{", "unreadable"),
        ("[]", "schema 1"),
        ('{"schema": 2}', "schema 1"),
        ('{"schema": 1, "case": "c"}', "Field required|missing"),
        ("NAN", "finite"),
        ("-1", "finite"),
    ],
)
def test_a_damaged_file_is_an_error(path, text, what):
    if text is None:
        path.unlink()
    elif text in ("NAN", "-1"):
        path.write_text(path.read_text().replace("1.24e-06", text.replace("NAN", "1e999")))
    else:
        path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        accepted.load(path)


def test_equal_rows_are_numbered():
    names = accepted.keys([row(), row(), row("b:out")])
    assert names == [
        "op a:out isolated 4x8x16 p k",
        "op a:out isolated 4x8x16 p k #2",
        "op b:out isolated 4x8x16 p k",
    ]


def test_rounding_up_never_goes_below():
    for value in (0.5, 1.2345e-6, 9.999e-7, 1e-300, 7.0, 123456.0, 2**-1074):
        shown = accepted._rounded_up(value)
        assert value <= shown <= value * 1.0101 or value < 1e-300
