"""Faults of microscaling are named: every mutant of `tests/mutants/mxfp8.py` by its cause."""

import sys
from pathlib import Path

import pytest

from reconcile.selftest.suite import load_suite

FOLDER = Path(__file__).resolve().parents[1] / "mutants"
MUTANTS = [m for m in load_suite(FOLDER).mutants if m.id.startswith("mxfp8/")]
QUICK = ("pair_order", "odd_group_dropped", "groups_along_n")
"""Those whose fit takes a second; the others are slow."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, marks=() if m.id.endswith(QUICK) else pytest.mark.slow, id=m.id)
        for m in MUTANTS
    ],
)
def test_the_cause_is_named_first(mutant):
    assert mutant.rank(mutant.trial.run(faulty=True)) == 1
    assert "reconcile_mutants.mxfp8" in sys.modules
