"""The pytest plugin: what fails a test, what is an error, and what is never green."""

import xml.etree.ElementTree as ET

import pytest
import torch

from reconcile import ReconcileError
from reconcile.report import Coverage, Level, Limits, Reason, Report, Row, Verdict

LIMITS = Limits(kind="bound", source="a test", bounds={"share": 1.0})
CHECK = """
import torch
from reconcile import QuantizedWeight

WEIGHT = torch.randn(32, 64, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
OPTIONS = {"probes": ["bound"], "batch_sizes": [2]}

def right(x, weight, bias=None):
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)

def wrong(x, weight, bias=None):
    return 1.01 * right(x, weight)

def grouped(x, weights, bias=None):
    return torch.einsum("bmk,bnk->bmn", x.float(), weights.float()).to(x.dtype)

def missing(x, weight, bias=None):
    raise NotImplementedError("no such shape")
"""


def row(tap="a:out", reason=None, **fields):
    verdict = Verdict.PASS if reason is None else reason.verdict
    return Row(
        level=Level.OP, tap=tap, check="isolated", verdict=verdict, reason=reason,
        limits=LIMITS, kernel="k", **fields,
    )  # fmt: skip


def report(*rows, expected=1, compared=1, **fields):
    return Report(
        case="made", rows=rows, coverage=Coverage(expected=expected, compared=compared), **fields
    )


@pytest.fixture
def run_case(pytester, monkeypatch):
    """Runs pytest on a case of which the report is given."""

    def run(result, *arguments):
        def fake(case, **_):
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr("reconcile.pytest_plugin.run", fake)
        return pytester.runpytest_inprocess("--reconcile", "case.toml", *arguments)

    return run


# --------------------------------------------------------------------------- --reconcile


def test_every_row_is_an_item_and_the_gate_is_one_more(run_case):
    result = run_case(report(row("a:out"), row("b:out", shape=(4, 8, 16), pass_="p")), "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*op[[]a:out-isolated-k[]] PASSED*", "*gate PASSED*"])
    result.stdout.fnmatch_lines(["*op[[]b:out-isolated-4x8x16-p-k[]] PASSED*"])
    result.stdout.fnmatch_lines(["PASS: made; 2 PASS; coverage 1/1"])


@pytest.mark.parametrize(
    ("result", "outcomes"),
    [
        (report(row(reason=Reason.OVER_LIMIT), row("b:out")), {"failed": 1, "passed": 2}),
        (report(row(reason=Reason.NOT_RUN), row("b:out")), {"errors": 1, "passed": 2}),
        (report(row(), expected=2), {"errors": 1, "passed": 1}),
        (report(row(), required_not_run=("k",)), {"errors": 1, "passed": 1}),
        (report(), {"errors": 1}),
        (
            report(row(reason=Reason.VACUOUS), allowed=("a:out: x",), allowed_rows={0}),
            {"errors": 1, "passed": 1},
        ),
        (report(row(), expected=0, compared=0), {"errors": 1, "passed": 1}),
    ],
    ids=["FAIL", "INCONCLUSIVE", "coverage", "required", "no rows", "none passed", "none expected"],
)
def test_what_is_not_pass_is_not_green(run_case, result, outcomes):
    found = run_case(result)
    found.assert_outcomes(**outcomes)
    assert found.ret == pytest.ExitCode.TESTS_FAILED


def test_an_allowed_row_passes_and_is_counted(run_case):
    allowed = report(
        row(reason=Reason.NOT_RUN), row("b:out"), allowed=("a:out: no GPU",), allowed_rows={0}
    )
    found = run_case(allowed)
    found.assert_outcomes(passed=3)
    found.stdout.fnmatch_lines(["*1 inconclusive allowed*"])


def test_the_failure_text_is_the_row_and_no_traceback(run_case):
    found = run_case(report(row(reason=Reason.OVER_LIMIT, text="2 of 8 outputs are wrong")))
    found.stdout.fnmatch_lines(["*FAIL over_limit*a:out*2 of 8 outputs are wrong*"])
    assert "pytest_plugin.py" not in found.stdout.str()


def test_k_chooses_among_the_rows(run_case):
    found = run_case(report(row("a:out"), row("b:out", Reason.BIAS)), "-k", "a:out")
    found.assert_outcomes(passed=1, deselected=2)


def test_rows_of_one_name_are_all_there(run_case):
    run_case(report(row(), row(), row(reason=Reason.BIAS))).assert_outcomes(passed=3, failed=1)


def test_bad_configuration_is_a_usage_error(run_case):
    found = run_case(ReconcileError("case.toml: no such case file"))
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*--reconcile case.toml: case.toml: no such case file"])


def test_an_internal_error_is_not_green(run_case):
    assert run_case(ZeroDivisionError("in a row")).ret == pytest.ExitCode.INTERNAL_ERROR


def test_junit_has_one_case_for_each_row(run_case, pytester):
    run_case(report(row("a:out"), row("b:out", Reason.BIAS)), "--junitxml=found.xml")
    cases = ET.parse(pytester.path / "found.xml").getroot().findall(".//testcase")
    assert len(cases) == 3
    assert [case.find("failure") is not None for case in cases] == [False, True, False]


# --------------------------------------------------------------------------- reconcile_check


BODIES = {
    "right": ("reconcile_check(right, WEIGHT, **OPTIONS)", "passed"),
    "returns": ("assert reconcile_check(right, WEIGHT, **OPTIONS).rows", "passed"),
    "wrong": ("reconcile_check(wrong, WEIGHT, **OPTIONS)", "failed"),
    "batched": ("reconcile_check(grouped, torch.stack([WEIGHT, -WEIGHT]), repeats=1)", "passed"),
    "batched_list": ("reconcile_check(right, [WEIGHT, WEIGHT], repeats=1)", "failed"),
    "declined": ("reconcile_check(missing, WEIGHT, **OPTIONS)", "failed"),
    "no_reason": ("reconcile_check(missing, WEIGHT, allow_inconclusive=' ', **OPTIONS)", "failed"),
    "allowed": (
        "r = reconcile_check(missing, WEIGHT, allow_inconclusive='no GPU', **OPTIONS)\n"
        "    assert r.verdict.value == 'INCONCLUSIVE'",
        "passed",
    ),
    "fail_is_not_allowed": (
        "reconcile_check(wrong, WEIGHT, allow_inconclusive='later', **OPTIONS)",
        "failed",
    ),
}


def test_the_fixture(pytester):
    """Every body in one other process: in this one, torch would be imported twice."""
    tests = [
        f"def test_{name}(reconcile_check):\n    {body}\n" for name, (body, _) in BODIES.items()
    ]
    pytester.makepyfile("\n".join([CHECK, *tests]))
    found = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider")
    text = found.stdout.str()
    for name, (_, outcome) in BODIES.items():
        assert f"::test_{name} {outcome.upper()}" in text, name
    found.stdout.fnmatch_lines(["INCONCLUSIVE: check_linear missing*allowed: no GPU"])
    found.stdout.fnmatch_lines(["PASS: check_linear right*"])


# --------------------------------------------------------------------------- the real thing


def outcomes_of(pytester, tiny, *arguments):
    """(name, outcome) of every item of a real case, in order, from JUnit."""
    folder = tiny().write(pytester.path / "checkpoint")
    torch.manual_seed(0)
    (pytester.path / "case.toml").write_text(
        f"""
[case]
name = "real"
[model]
checkpoint = "{folder}"
max_tokens = 4
prompts = "prompts.json"
[[candidate]]
name = "naive"
kernel = "ternary_cuda.naive"
modules = ["model.layers.0.self_attn.*"]
[levels]
run = ["op"]
"""
    )
    (pytester.path / "prompts.json").write_text("[[3, 5, 7, 9]]")
    found = pytester.runpytest_subprocess(
        "--reconcile", "case.toml", "--junitxml=found.xml", "-p", "no:cacheprovider", *arguments
    )
    assert found.ret == 0, found.stdout.str()
    cases = ET.parse(pytester.path / "found.xml").getroot().findall(".//testcase")
    return sorted((case.get("name"), [child.tag for child in case]) for case in cases)


def test_two_workers_give_the_rows_of_one(pytester, tiny):
    one = outcomes_of(pytester, tiny)
    two = outcomes_of(pytester, tiny, "-n", "2")
    assert len(one) > 4
    assert one == two
