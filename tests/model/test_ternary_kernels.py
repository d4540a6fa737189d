"""The ternary kernels inside the embedded model: every level passes."""

from dataclasses import replace

import pytest

import reconcile
from reconcile import registry
from reconcile.kernel import choose_engine
from reconcile.report import Level


@pytest.fixture(scope="module")
def session():
    case = reconcile.load_case(registry.embedded_case())
    return reconcile.session(replace(case, gate=replace(case.gate, require=())))


VARIANTS = ("vectorised", "tiled", "masks")
NAMES = [
    "ternary_cpu.bf16",
    "ternary_cpu.int8",
    *(pytest.param(f"ternary_cuda.{name}", marks=pytest.mark.slow) for name in VARIANTS),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_embedded_case_passes(session, name):
    kernel = registry.kernel(name)
    engine, reason = choose_engine(kernel, "auto")
    if engine is None:
        pytest.skip(reason)
    report = session.run(kernel=name)
    report.raise_for_verdict()
    assert {row.level for row in report.rows} == {Level.WEIGHT, Level.OP, Level.MODULE, Level.MODEL}
    assert {row.engine for row in report.rows if row.level is Level.OP} == {engine.name}
