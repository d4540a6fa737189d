"""The case dsv4-wo_a: prefill and decode apart, the route visible, faults of one phase found."""

from dataclasses import replace
from pathlib import Path

import pytest

from reconcile.case import load_case
from reconcile.registry import embedded_case
from reconcile.report import Level, Reason, Verdict
from reconcile.session import Session, override

KERNELS = Path(__file__).with_name("dsv4_kernels.py")
OP = "self_attn.o_a_proj:out"


@pytest.fixture(scope="module")
def session():
    """One prompt of each length would cost minutes under load; two show everything but M = 128."""
    return Session(load_case(embedded_case("dsv4-wo_a")))


@pytest.fixture(scope="module")
def report(session):
    return session.run()


def judged(session, name, phases=("prefill", "decode"), required=True, **options):
    """The case with one candidate, by a kernel of this folder, which is required or not."""
    case = session.case
    candidate = replace(case.candidate[0], name=name, phases=phases)
    spec = f"{KERNELS}:{name}"
    gate = replace(case.gate, require=(spec,) if required else ())
    alone = replace(case, candidate=(candidate,), gate=gate, task=None)
    own = Session(override(alone, kernel=spec))
    own._checkpoint, own._references = session._checkpoint, session._references
    return own.run(**options)


def phase(row):
    return row.pass_.partition("-")[0]


def test_the_case_passes(report):
    assert report.exit_code == 0, report.explain()
    assert report.coverage.compared == report.coverage.expected == 6


def test_prefill_and_decode_are_passes_of_their_own(report):
    ops = [r for r in report.rows if r.level is Level.OP and r.kernel == "aiter_bf16.batched_gemm"]
    assert {phase(row) for row in ops} == {"prefill", "decode"}
    assert {row.shape[0] for row in ops} == {8}  # groups
    assert {row.shape[1] for row in ops if phase(row) == "decode"} == {1}
    whole = {row.shape[1] for row in ops if phase(row) == "prefill" and row.check == "chained"}
    assert whole == {8, 37, 128}


def test_the_route_is_judged_in_decode_only(report):
    rows = [row for row in report.rows if row.kernel == "aiter_bf16.wo_a"]
    assert {phase(row) for row in rows if row.level is Level.OP} == {"decode"}
    # what plain torch computed is not said to be the kernel's
    assert not [row for row in rows if phase(row) == "prefill"]
    assert [row for row in report.rows if not row.kernel and phase(row) == "prefill"]


def test_the_report_proves_that_the_kernel_ran(report):
    notes = [note for source in report.provenance for note in source.notes]
    assert "calls of aiter_bf16.batched_gemm in the model: prefill 9, decode 18" in notes
    assert any("aiter_bf16.wo_a in the model: prefill 0, decode 18; plain" in n for n in notes)
    chained = [r for r in report.rows if r.level is Level.OP and r.check == "chained"]
    assert chained
    assert {row.stats["calls"] for row in chained} == {1}


def test_upstreams_criterion_is_beside_ours(report):
    ops = [row for row in report.rows if row.level is Level.OP]
    assert all(row.limits.kind == "bound" for row in ops)
    assert all("max rel err <= 5e-4" in row.stats for row in ops)
    missed = [row for row in ops if not row.stats["max rel err <= 5e-4 met"]]
    assert all(row.stats["differing"] > 0 and "inside the bound" in row.text for row in missed)


def test_accuracy_comes_with_intervals(report):
    tasks = [row for row in report.rows if row.check == "task"]
    assert len(tasks) == 2
    for row in tasks:
        low, high = row.stats["interval_candidate"]
        assert low < row.stats["accuracy_candidate"] <= high
        assert row.stats["n"] == 512
        assert row.stats["calls"] > 0
        assert "no difference is claimed" in row.text


FAULTS = {
    "group_before": {"prefill", "decode"},
    "contiguous_input_assumed": {"prefill"},  # with one row the layouts are the same
    "wrong_in_decode": {"prefill", "decode"},  # a prefill's middle row alone is M = 1 too
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_the_op(session, report, name):
    found = judged(session, name, levels=["op"])
    assert found.exit_code == 1
    assert found.first_divergence.tap.endswith(OP)
    assert {phase(row) for row in found.failures()} == FAULTS[name]


CAUSES = {
    "group_before": ("group_shifted", {"step": -1}),
    "wrong_in_decode": ("k_tail_dropped", {}),
    "group_5_scaled": ("constant_ratio", {"group": 5, "ratio": 1.25}),
    "last_outputs_of_group_3": ("n_tail_dropped", {"group": 3, "start": 30}),
    "groups_6_and_7_swapped_in_decode": ("group_shifted", {"group": 6, "source": 7}),
    "contiguous_output_assumed": ("strided_output", {}),
    "contiguous_input_assumed": ("strided_input", {}),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_and_the_group_are_named(session, report, name):
    found = judged(session, name, levels=["op"])
    first = found.rows[found.first_divergence.row].diagnosis
    cause, where = CAUSES[name]
    assert first, found.first_divergence
    assert first[0].name == cause, [(d.name, d.explains, d.text) for d in first]
    assert where.items() <= first[0].parameters.items()


def test_a_clean_kernel_passes_in_either_phase(session, report):
    for phases in (("prefill",), ("decode",)):
        found = judged(session, "clean", phases, levels=["op"])
        assert found.exit_code == 0, found.explain()
        assert {phase(row) for row in found.rows if row.level is Level.OP} == set(phases)


def test_a_fallback_is_inconclusive_and_its_reason_is_there(session, report):
    found = judged(session, "falls_back_in_decode", levels=["op"])
    assert found.exit_code == 2
    bad = [row for row in found.rows if row.verdict is not Verdict.PASS]
    assert {row.reason for row in bad} == {Reason.FELL_BACK}
    assert {row.text for row in bad} == {"M = 1 is left to torch"}
    assert found.required_not_run == (f"{KERNELS}:falls_back_in_decode",)


@pytest.mark.parametrize("required", [False, True])
def test_without_op_rows_a_fallback_is_no_pass_either(session, report, required):
    """Modules and logits are right, and it is said that they are not the kernel's."""
    found = judged(session, "falls_back_in_decode", required=required, levels=["module", "model"])
    assert found.exit_code == 2
    assert not found.covered
    assert found.coverage.compared == 0
    assert bool(found.required_not_run) == required
    assert any("prefill 9, decode 0; other code in its place 18 times" in n for n in found.notices)
    reasons = {row.reason for row in found.rows if row.level is Level.OP}
    assert reasons == {Reason.FELL_BACK}
    assert all(phase(row) == "decode" for row in found.rows if row.level is Level.OP)


def test_a_route_that_breaks_is_inconclusive(session, report):
    """Two launches, then einsum for the rest of the process: the numbers are right, and no PASS."""
    with pytest.warns(RuntimeWarning, match="hipErrorLaunchFailure") as warned:
        found = judged(session, "route_that_breaks", ("decode",), levels=["op"])
    assert len(warned) == 1
    assert found.exit_code == 2
    reasons = {row.reason for row in found.rows if row.level is Level.OP}
    assert Reason.FELL_BACK in reasons
    assert any("hipErrorLaunchFailure" in row.text for row in found.rows)
    assert found.required_not_run
    assert found.coverage.missing[0] == "model.layers.0.self_attn.o_a_proj"


def test_the_calls_are_beside_the_verdict(report):
    """The terminal and the summary show notices; the provenance is on the page only."""
    said = [text for text in report.notices if text.startswith("calls of ")]
    assert len(said) == 2
    assert "prefill 0, decode 18; plain torch" in said[1]


def test_a_kernel_that_never_launched_is_inconclusive(session, report):
    found = judged(session, "never_launched", ("decode",), levels=["op"])
    assert found.exit_code == 2
    texts = {row.text for row in found.rows if row.verdict is not Verdict.PASS}
    assert texts == {"the kernel's own count of launches did not rise: other code computed this"}


def test_an_engine_that_is_not_here_is_not_run(session, report):
    case = override(session.case, engine="aiter")
    own = Session(case)
    own._checkpoint, own._references = session._checkpoint, session._references
    found = own.run(levels=["op"])
    assert found.exit_code == 2
    assert {row.reason for row in found.rows} == {Reason.NOT_RUN}
    assert all("amd-aiter" in row.text for row in found.rows)
