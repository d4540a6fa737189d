"""`amx_fp8.w8a16` in the embedded FP8 models, on every engine."""

import pytest

import reconcile
from reconcile_kernels.amx_fp8 import W8A16

CASES = ("tiny-fp8-tensor", "tiny-fp8-channel", "tiny-fp8-block")
ENGINES = [engine for engine in W8A16.engines if W8A16.is_supported(engine)]
MISSING = [engine for engine in W8A16.engines if engine not in ENGINES]


def run(case, engine, **options):
    return reconcile.run(case, kernel=W8A16.name, engine=engine.name, **options)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("case", CASES)
def test_one_layer(case, engine):
    """Sampled: one layer of six; the whole models are slow tests."""
    report = run(case, engine, only="model.layers.2.*", levels=["op"])
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (7, 7)
    ran = {(row.kernel, row.engine, row.execution) for row in report.rows if row.level == "op"}
    assert ran == {(W8A16.name, engine.name, engine.execution)}
    emulated = [text for text in report.notices if text.startswith("emulated")]
    assert len(emulated) == (engine.execution == "emulated")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
@pytest.mark.parametrize("case", CASES)
def test_the_whole_model(case, engine):
    report = run(case, engine)
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (42, 42)


@pytest.mark.parametrize("engine", MISSING, ids=lambda engine: engine.name)
def test_an_engine_that_does_not_run_here_is_no_pass(engine):
    report = run("tiny-fp8-tensor", engine, only="model.layers.2.*", levels=["op"])
    assert report.exit_code == 2
    rows = [row for row in report.rows if row.level == "op"]
    assert rows
    assert {(row.verdict, row.reason) for row in rows} == {("INCONCLUSIVE", "not_run")}
    assert all(W8A16.is_supported(engine).reason in row.text for row in rows)
