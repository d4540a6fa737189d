"""Merging runs of several machines: what is kept, what is left out, what is refused."""

from dataclasses import replace

import pytest

from reconcile.exceptions import ConfigError
from reconcile.gate.merge import merge
from reconcile.report import Coverage, Level, Provenance, Reason, Report, Row, Verdict

FULL = Coverage(expected=2, compared=2)


def row(kernel="amx", reason=None, tap="a:out", engine="amx", **fields):
    verdict = Verdict.PASS if reason is None else reason.verdict
    stats = {} if reason is Reason.NOT_RUN else {"n": 4}
    engine = "" if reason is Reason.NOT_RUN else engine
    return Row(
        level=Level.OP, tap=tap, check="isolated", verdict=verdict, reason=reason,
        kernel=kernel, engine=engine, stats=stats, **fields,
    )  # fmt: skip


def report(*rows, coverage=FULL, sha="abc", machine="one", **fields):
    source = Provenance(
        side="reference", model="m", checkpoint_sha256=sha, dtype="float64", machine=machine
    )
    return Report(
        **{"case": "c", "rows": rows, "coverage": coverage, "provenance": (source,)} | fields
    )


NOT_RUN = report(row(reason=Reason.NOT_RUN), row("cuda"), required=("amx", "cuda"))
RAN = report(row(), row("cuda", Reason.NOT_RUN), required=("amx", "cuda"), machine="two")


def test_what_did_not_run_here_is_answered_by_the_machine_where_it_ran():
    assert merge([NOT_RUN]).verdict is Verdict.INCONCLUSIVE
    found = merge([NOT_RUN, RAN])
    assert found.verdict is Verdict.PASS
    assert found.exit_code == 0
    assert [(r.kernel, r.verdict) for r in found.rows] == [("cuda", "PASS"), ("amx", "PASS")]
    assert "2 rows did not run on one machine and were compared on another" in found.notices
    assert {source.machine for source in found.provenance} == {"one", "two"}


@pytest.mark.parametrize(
    ("reports", "require", "verdict", "missing"),
    [
        ([NOT_RUN], (), "INCONCLUSIVE", ("amx",)),
        ([RAN, RAN], (), "INCONCLUSIVE", ("cuda",)),
        ([NOT_RUN, RAN], ("npu",), "INCONCLUSIVE", ("npu",)),
        ([NOT_RUN, RAN], ("amx@amx",), "PASS", ()),
        ([NOT_RUN, RAN], ("amx@amx-emulated",), "INCONCLUSIVE", ("amx@amx-emulated",)),
        ([report(row("cuda")), report(row("cuda"))], ("amx",), "INCONCLUSIVE", ("amx",)),
        ([RAN, report(row(reason=Reason.BIAS), row("cuda"))], (), "FAIL", ()),
    ],
)
def test_a_required_kernel_that_ran_nowhere_is_no_pass(reports, require, verdict, missing):
    found = merge(reports, require)
    assert (found.verdict, found.required_not_run) == (verdict, missing)


def test_a_failure_is_never_left_out():
    bad = report(row(reason=Reason.OVER_LIMIT))
    assert merge([bad, report(row())]).verdict is Verdict.FAIL
    fell_back = report(row(reason=Reason.FELL_BACK))
    assert merge([fell_back, report(row())]).verdict is Verdict.INCONCLUSIVE


def test_equal_rows_are_there_once_and_allowances_follow_their_rows():
    one = report(row("x"), row("y", Reason.VACUOUS), allowed=("y",), allowed_rows={1})
    two = report(row("z"), *one.rows, allowed=("y",), allowed_rows={2})
    found = merge([one, two])
    assert [r.kernel for r in found.rows] == ["x", "y", "z"]
    assert (found.allowed_rows, found.allowed, found.verdict) == ({1}, ("y",), "PASS")


@pytest.mark.parametrize(
    ("missing", "compared"),
    [((("a",), ("a", "b")), 1), ((("a",), ("b",)), 2), (((), ("a", "b")), 2)],
)
def test_a_module_is_covered_if_one_machine_compared_it(missing, compared):
    parts = [
        report(row(), coverage=Coverage(expected=2, compared=2 - len(names), missing=names))
        for names in missing
    ]
    assert merge(parts).coverage.compared == compared


@pytest.mark.parametrize(
    ("reports", "what"),
    [
        ([], "no run was given"),
        ([report(row()), report(row(), case="d")], "case"),
        ([report(row()), report(row(), sha="def")], "checkpoint"),
        ([report(row()), report(row(), coverage=Coverage(expected=3, compared=3))], "expected"),
        ([report(row(), notices=("restricted to modules a",))], "restricted"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(reports, what):
    with pytest.raises(ConfigError, match=what):
        merge(reports)


def test_runs_of_other_prompts_are_refused_and_another_case_file_is_said():
    def hashed(what, value):
        found = report(row())
        (side,) = found.provenance
        return replace(found, provenance=(replace(side, hashes={what: value}),))

    with pytest.raises(ConfigError, match="prompts"):
        merge([hashed("inputs (token ids)", "1"), hashed("inputs (token ids)", "2")])
    merged = merge([hashed("case file", "1"), hashed("case file", "2")])
    assert any("different versions of the case file: 1, 2" in text for text in merged.notices)


def test_a_merge_of_nothing_compared_is_no_pass():
    assert merge([report(), report()]).verdict is Verdict.INCONCLUSIVE
