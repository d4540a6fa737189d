"""What judges the harness is judged: rates, gates, suites, the ratchet, the command."""

import json
import math
import sys

import pytest
import torch

from reconcile.cli import main
from reconcile.exceptions import ConfigError
from reconcile.report import Coverage, Diagnosis, Level, Reason, Report, Row, Verdict
from reconcile.selftest import CanaryTrial, Cause, Mutant, Seen, suite
from reconcile.selftest.gates import GATES, Outputs
from reconcile.selftest.ratchet import Ratchet, accepted, read_ratchet, violations, write_ratchet
from reconcile.selftest.rates import Rate
from reconcile.selftest.run import Clean, Outcome, run_mutant
from reconcile.selftest.table import gate_rates, rates, to_dict, to_text

# ------------------------------------------------------------------ rates


@pytest.mark.parametrize("total", [1, 5, 84, 1480])
def test_interval_where_it_has_a_closed_form(total):
    """None of n: 1 - (alpha / 2)^(1 / n); all of n by symmetry."""
    end = 1 - 0.025 ** (1 / total)
    assert Rate(0, total).interval == pytest.approx((0.0, end), abs=1e-9)
    assert Rate(total, total).interval == pytest.approx((1 - end, 1.0), abs=1e-9)


@pytest.mark.parametrize(("hits", "total"), [(3, 10), (66, 72), (990, 1000)])
def test_interval_has_the_stated_tails(hits, total):
    """Outside of the interval the count is one of the rarest 2.5 %, by the binomial itself."""
    low, high = Rate(hits, total).interval

    def at_least(count, p):
        return math.fsum(
            math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(count, total + 1)
        )

    assert at_least(hits, low) == pytest.approx(0.025, abs=1e-6)
    assert 1 - at_least(hits + 1, high) == pytest.approx(0.025, abs=1e-6)


def test_a_rate_of_nothing_says_so():
    assert str(Rate(0, 0)) == "none"
    assert math.isnan(Rate(0, 0).value)
    assert str(Rate(9, 10)) == "9 of 10 (90.0 %, 55.5-99.7)"


# ------------------------------------------------------------------ gates

REFERENCE = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ALL = {gate.name for gate in GATES}
LOCAL = {"assert_close", "2x baseline"}
SCALE_BLIND = {"cosine 0.99", "PCC 0.99"}


def one_nan(c):
    c[3, 5] = torch.nan
    return c


def largest_by_five_percent(c):
    c.view(-1)[c.abs().argmax()] *= 1.05
    return c


CANDIDATES = [
    # what, change of the right output, who refuses it
    ("right", lambda c: c, set()),
    ("zeros", torch.zeros_like, ALL),
    ("doubled", lambda c: c * 2, ALL - SCALE_BLIND),
    ("negated", lambda c: -c, ALL),
    ("shuffled rows", lambda c: c.roll(1, 0), ALL),
    ("one NaN", one_nan, ALL - {"5 % bad elements"}),
    ("largest element by 5 %", largest_by_five_percent, LOCAL),
    ("1 % up", lambda c: (c.double() * 1.01).to(c.dtype), {
        "rel_diff 1e-3", "2x baseline", "three-way ratio"
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "refused"), [c[1:] for c in CANDIDATES], ids=[c[0] for c in CANDIDATES]
)
def test_gates_refuse_what_their_sources_refuse(change, refused):
    right = REFERENCE.bfloat16()
    outputs = Outputs(change(right.clone()), REFERENCE, right)
    found = {gate.name for gate in GATES if not gate.accepts(outputs)}
    assert found == refused


# ------------------------------------------------------------------ what is seen of a report


def row(tap, reason, diagnosis=()):
    return Row(
        level=Level.OP,
        tap=tap,
        check="bound",
        verdict=Verdict.PASS if reason is None else reason.verdict,
        reason=reason,
        diagnosis=tuple(Diagnosis(name=name, explains=share) for name, share in diagnosis),
    )


def report(*rows):
    return Report(case="c", rows=rows, coverage=Coverage(expected=1, compared=1))


def test_a_fail_goes_before_what_is_inconclusive():
    seen = Seen.of(report(row("a:out", Reason.VACUOUS), row("b:out", Reason.OVER_LIMIT)))
    assert (seen.exit_code, seen.tap, seen.reason) == (1, "b:out", "over_limit")


def test_the_diagnosis_is_of_the_op_that_is_named_first():
    seen = Seen.of(
        report(
            row("a:out", Reason.OVER_LIMIT),
            row("b:out", Reason.OVER_LIMIT, [("scale_missing", 1.0)]),
            row("a:out", Reason.OVER_LIMIT, [("sign", 0.9)]),
        )
    )
    assert [d.name for d in seen.diagnosis] == ["sign"]


def mutant(name="area/one", **fields):
    trial = CanaryTrial(canary=lambda: report(row("a:out", None)), right=(1, ""), patch=_none)
    return Mutant(id=name, area="gate", source="s", patch="p", trial=trial, **fields)


def _none():
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (Seen(exit_code=1, reason="over_limit"), True),
        (Seen(exit_code=1, reason="raised"), False),
        (Seen(exit_code=0), False),
        (Seen(exit_code=2, reason="over_limit"), False),
        (Seen(exit_code=4, reason="over_limit"), False),
    ],
)
def test_detection_needs_exit_code_and_reason(seen, found):
    assert mutant(reasons=("over_limit",)).detected(seen) == found


def test_ranks_of_causes():
    wanted = mutant(causes=("sign", Cause("constant_ratio", {"ratio": lambda r: r == 2})))

    def rank(*diagnoses):
        return wanted.rank(Seen(exit_code=1, diagnosis=diagnoses))

    def named(name, **parameters):
        return Diagnosis(name=name, explains=1.0, parameters=parameters)

    assert rank(named("sign")) == 1
    assert rank(named("scale_missing"), named("sign")) == 2
    assert rank(named("constant_ratio", ratio=2)) == 1
    assert rank(named("constant_ratio", ratio=3)) is None
    assert rank(named("constant_ratio")) is None
    assert rank() is None


# ------------------------------------------------------------------ suites and the ratchet

FILE = """
from contextlib import nullcontext
import torch
import reconcile
from reconcile.selftest import Mutant, OpTrial, Variant

def right(x, w):
    return (x.float() @ w.float().T).to(x.dtype)

def wrong(x, w):
    return right(x, w) * {factor}

def make():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

MUTANTS = (Mutant(
    id="{name}/doubled", area="kernels", source="s", patch="twice", op="linear:out",
    trial=OpTrial(faulty=wrong, clean=right, weight=make),
),)
VARIANTS = (Variant(
    id="{name}/right", what="plain", seeds=3,
    run=lambda seed: reconcile.check_linear(right, make(), probes=("bound",), seed=seed),
),)
"""


@pytest.fixture
def folder(tmp_path):
    """A suite of its own; the package of the other suite is put back."""
    before = sys.modules.get(suite.PACKAGE)
    kept = None if before is None else before.__path__
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith(f"{suite.PACKAGE}.tiny")]:
        del sys.modules[name]
    if before is None:
        sys.modules.pop(suite.PACKAGE, None)
    else:
        before.__path__ = kept


def write(folder, name="tiny_a", factor=2):
    (folder / f"{name}.py").write_text(FILE.format(name=name, factor=factor))


def test_the_command_on_a_suite(folder, capsys):
    write(folder)
    code = main(["selftest", "--suite", str(folder), "--json", str(folder / "table.json")])
    out = capsys.readouterr().out
    assert code == 0
    assert "tiny_a/doubled" in out
    assert "detection                    1 of 1 (100.0 %, 2.5-100.0)" in out
    body = json.loads((folder / "table.json").read_text())
    assert body["rates"]["detection"] == {"hits": 1, "total": 1, "low": 0.025, "high": 1.0}
    assert body["gates"]["cosine 0.99"]["caught"]["hits"] == 0  # a factor of two
    assert body["gates"]["rel_diff 1e-3"]["caught"]["hits"] == 1
    assert body["gates"]["reconcile"]["caught"]["hits"] == 1


def test_what_is_missed_fails_unless_it_is_accepted(folder, capsys):
    write(folder, factor=1)
    arguments = ["selftest", "--suite", str(folder)]
    assert main(arguments) == 1
    assert "missed: tiny_a/doubled: twice" in capsys.readouterr().out
    assert main([*arguments, "--subset", "full", "--accept", "it is no fault"]) == 0
    assert read_ratchet(folder).missed == {"tiny_a/doubled": "it is no fault"}
    assert main(arguments) == 0
    assert "tiny_a/doubled: not detected: it is no fault" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "nothing/*"],
        ["--suite", "/nowhere"],
        ["--accept", " "],
        ["--accept", "why"],
        ["--accept", "why", "--subset", "full", "--only", "tiny*"],
        ["--subset", "some"],
        ["--jobs", "0"],
    ],
)
def test_bad_arguments(arguments, folder, capsys):
    write(folder)
    given = arguments if "--suite" in arguments else ["--suite", str(folder), *arguments]
    try:
        code = main(["selftest", *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 3


def test_an_empty_suite_and_two_of_one_name_are_refused(folder):
    with pytest.raises(ConfigError, match="nothing would be tested"):
        suite.load_suite(folder)
    write(folder)
    (folder / "tiny_b.py").write_text((folder / "tiny_a.py").read_text())
    with pytest.raises(ConfigError, match="two items are called 'tiny_a/doubled'"):
        suite.load_suite(folder)


def test_outside_a_source_checkout_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("reconcile.__file__", str(tmp_path / "site-packages" / "r" / "x.py"))
    assert main(["selftest"]) == 3
    assert "part of a source checkout" in capsys.readouterr().err


def outcome(*results, alarms=()):
    return Outcome(tuple(results), (Clean(id="c/v", what="w", checks=40, alarms=tuple(alarms)),))


def test_a_trial_that_crashes_is_not_a_detection():
    def crash():
        raise ZeroDivisionError("in the harness")

    broken = mutant()
    broken = Mutant(
        id="area/crash", area="gate", source="s", patch="p", exit_code=1,
        trial=CanaryTrial(canary=crash, right=(4, ""), patch=_none),
    )  # fmt: skip
    result = run_mutant(broken)
    assert not result.detected
    assert "ZeroDivisionError" in result.text


def test_the_ratchet(tmp_path):
    found = run_mutant(mutant(exit_code=1))  # the canary passes, but 1 is its right answer
    assert found.detected
    assert found.twin  # and so its twin is not clean: the mutant proves nothing
    table = rates(outcome(found))
    known = Ratchet(rates={"detection": (2, 2)})
    texts = violations(outcome(found, alarms=["seed 3: FAIL"]), table, known, whole=True)
    assert [text.split(":")[0] for text in texts] == [
        "false alarm",
        "the clean twin of area/one is not clean",
        "detection fell",
    ]
    assert violations(outcome(), table, Ratchet(missed={"x": "y"}), whole=False) == []
    written = accepted(outcome(found), table, known, "first")
    write_ratchet(tmp_path, written)
    assert read_ratchet(tmp_path) == written
    (tmp_path / "ratchet.json").write_text('{"rates": 3}')
    with pytest.raises(ConfigError, match="not a ratchet"):
        read_ratchet(tmp_path)


def test_tables_of_one_result():
    found = run_mutant(mutant(exit_code=1, causes=("sign",)))
    body = outcome(found, alarms=["seed 0: FAIL"])
    text = to_text(body, Ratchet(), ["something"], 1.0)
    assert "false alarms                 1 of 40" in text
    assert "named nothing, expected sign: no reason known" in text
    assert text.endswith("the ratchet does NOT hold; 1 s")
    assert gate_rates(body)["reconcile"]["caught"].total == 0
    assert to_dict(body, [], 1.0, "quick")["rates"]["false alarms"]["hits"] == 1
