"""Faults of a kernel inside the real model: the verdict, the reason and the first tap."""

from dataclasses import replace
from pathlib import Path

import pytest

import reconcile
from reconcile import registry
from reconcile.report import Level, Reason, Verdict

KERNELS = Path(__file__).with_name("kernels.py")
FIRST = "model.layers.0.self_attn.q_proj:out"
DOWN_3 = "model.layers.3.mlp.down_proj:out"
K_1 = "model.layers.1.self_attn.k_proj:out"


@pytest.fixture(scope="module")
def session():
    """The embedded case; its checkpoint and reference are loaded once for all kernels."""
    case = reconcile.load_case(registry.embedded_case())
    return reconcile.session(replace(case, gate=replace(case.gate, require=())))


@pytest.fixture
def run(session):
    return lambda kernel, *levels, **options: session.run(
        kernel=f"{KERNELS}:{kernel}", levels=levels or None, **options
    )


FAULTS = [
    # kernel, exit code, first reason, first tap
    ("ignores_scale_in_layer_3_down", 1, Reason.OVER_LIMIT, DOWN_3),
    ("high_bits_first", 1, Reason.OVER_LIMIT, FIRST),
    ("last_column_unwritten", 1, Reason.UNWRITTEN, FIRST),
    ("nan_for_one_token", 1, Reason.NONFINITE, FIRST),
    ("changes_its_input", 1, Reason.INPUT_MUTATED, FIRST),
    ("declines_one_row", 2, Reason.NOT_RUN, FIRST),
    ("raises_on_one_row", 1, Reason.RAISED, FIRST),
    ("other_bits_every_fifth_call", 1, Reason.UNSTABLE, K_1),
    ("ends_the_program", 1, Reason.RAISED, FIRST),
    ("returns_an_old_row_for_one_row", 1, Reason.OVER_LIMIT, FIRST),
    ("changes_its_scales", 1, Reason.INPUT_MUTATED, FIRST),
    ("rewrites_the_weight_in_prepare", 1, Reason.INPUT_MUTATED, FIRST),
    ("changes_its_input_in_the_model_only", 1, Reason.INPUT_MUTATED, FIRST),
    ("not_built_here", 2, Reason.NOT_RUN, FIRST),
    ("shares_a_workspace", 1, Reason.UNSTABLE, FIRST),
    ("returns_float32", 1, Reason.DTYPE, FIRST),
    ("returns_wrong_shape", 1, Reason.SHAPE, FIRST),
    ("returns_none", 1, Reason.DTYPE, FIRST),
    ("raises_always", 1, Reason.RAISED, FIRST),
    ("declines_always", 2, Reason.NOT_RUN, FIRST),
    ("drops_last_k", 1, Reason.OVER_LIMIT, FIRST),
    ("scale_in_float16", 1, Reason.OVER_LIMIT, FIRST),
    ("all_scales_one_percent_up", 1, Reason.OVER_LIMIT, FIRST),
    ("bfloat16_accumulator", 1, Reason.OVER_LIMIT, FIRST),
    ("undeclared_without_scale", 1, Reason.OVER_LIMIT, FIRST),
]


@pytest.mark.parametrize(
    ("kernel", "exit_code", "reason", "tap"), FAULTS, ids=[row[0] for row in FAULTS]
)
def test_a_fault_is_named_first(run, kernel, exit_code, reason, tap):
    report = run(kernel)

    first = next(row for row in report.rows if row.verdict is not Verdict.PASS)
    assert report.exit_code == exit_code
    assert (first.tap, first.reason) == (tap, reason)
    if exit_code == 1:
        assert report.first_divergence.tap == tap
    else:
        assert report.first_divergence is None


def test_only_the_faulty_op_fails_and_what_follows_is_blocked(run):
    report = run("ignores_scale_in_layer_3_down")

    assert {row.tap for row in report.failures()} == {DOWN_3}
    layer = [
        row for row in report.rows if row.tap == "model.layers.3:out" and row.check == "isolated"
    ]
    assert {row.reason for row in layer} == {Reason.BLOCKED}
    assert all(DOWN_3.removesuffix(":out") in row.text for row in layer)
    before = [row for row in report.rows if row.tap == "model.layers.2:out"]
    assert before
    assert {row.verdict for row in before} == {Verdict.PASS}


@pytest.mark.parametrize("seed", range(20))
def test_another_order_of_summation_passes(run, seed):
    report = run(f"order_{seed}")

    assert report.exit_code == 0, report.explain()


def test_without_a_contract_plain_torch_passes_against_the_baseline(run):
    report = run("undeclared")

    assert report.exit_code == 0, report.explain()
    ops = [row for row in report.rows if row.level is Level.OP]
    assert {row.limits.kind for row in ops} == {"baseline"}


@pytest.mark.parametrize("level", ["op", "module", "model"])
def test_fail_fast_ends_after_the_first_bad_level(run, level):
    report = run("high_bits_first", level, fail_fast=True)

    assert report.exit_code == 1
    assert {row.level.value for row in report.rows} == {"weight", level}


def test_a_fault_shows_at_every_level_alone(run):
    for level in ("op", "module", "model"):
        assert run("all_scales_one_percent_up", level).exit_code == 1


@pytest.mark.parametrize("before", ["changes_its_scales", "rewrites_the_weight_in_prepare"])
def test_a_kernel_that_changes_its_weight_does_not_spoil_the_next(run, before):
    run(before, "op")
    assert run("clean", "op").exit_code == 0


def test_a_required_kernel_object_with_another_name_passes():
    session = reconcile.session()
    report = session.run(kernel=f"{KERNELS}:protocol", only="*.0.mlp.*", levels=["op"])
    assert report.exit_code == 0, report.explain()
    assert report.required_not_run == ()


def test_a_restricted_run_says_so(run):
    report = run("clean", "op", only="*.0.mlp.*")
    assert report.notices[:2] == ("restricted to modules *.0.mlp.*", "restricted to level op")
