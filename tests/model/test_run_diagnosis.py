"""What explains the failing rows of a run on the embedded model."""

from pathlib import Path

import pytest

import reconcile
from reconcile.explain import explain
from reconcile.report import Level, Verdict

KERNELS = Path(__file__).with_name("kernels.py")


@pytest.fixture(scope="module")
def run():
    session = reconcile.session()

    def call(kernel, levels=("op",), **options):
        return session.run(kernel=f"{KERNELS}:{kernel}", levels=levels, **options)

    return call


OPS = [
    ("ignores_scale_in_layer_3_down", "scale_missing"),
    ("high_bits_first", "bit_order"),
    ("last_column_unwritten", "unwritten"),
    ("drops_last_k", "k_tail_dropped"),
    ("scale_in_float16", "scale_low_precision"),
    ("all_scales_one_percent_up", "constant_ratio"),
    ("bfloat16_accumulator", "narrow_accumulator"),
    ("undeclared_without_scale", "scale_missing"),
    ("returns_an_old_row_for_one_row", "stale_output"),
]


@pytest.mark.parametrize(("kernel", "name"), OPS, ids=[row[0] for row in OPS])
def test_the_first_failing_op_is_explained(run, kernel, name):
    report = run(kernel, only="model.layers.[03].mlp.down_proj")
    first = report.rows[report.first_divergence.row]

    found = [(d.role, d.name, d.explains, d.text) for d in first.diagnosis]
    assert first.level is Level.OP
    assert first.diagnosis[0].name == name, found
    assert first.diagnosis[0].explains >= 0.9
    assert f"cause: {name} explains" in explain(report, first.tap)


def test_no_more_ops_than_the_budget_are_fitted(run):
    report = run("high_bits_first", only="model.layers.0.*")
    fitted = {row.tap for row in report.rows if row.diagnosis}
    assert len(fitted) == 3
    assert fitted <= {row.tap for row in report.failures()}


def test_a_run_that_passes_is_not_diagnosed(run, monkeypatch):
    monkeypatch.setattr("reconcile.diagnosis.run._ops", None)
    report = run("clean", only="model.layers.0.mlp.*")
    assert report.verdict is Verdict.PASS


def test_a_fault_of_the_diagnosis_is_a_note(run, monkeypatch):
    def broken(*_):
        raise ArithmeticError("mine")

    monkeypatch.setattr("reconcile.diagnosis.run._ops", broken)
    report = run("drops_last_k", only="model.layers.0.mlp.*")
    first = report.rows[report.first_divergence.row]
    assert report.exit_code == 1
    assert first.diagnosis[0].name == "not_diagnosed"
    assert "ArithmeticError: mine" in first.diagnosis[0].text
