"""Every mutant is found, at the right op, and its clean twin passes; every clean variant passes.

What is missed is listed in ``ratchet.json``, with the reason; what is listed and found must go.
"""

from pathlib import Path

import pytest

from reconcile.selftest.ratchet import read_ratchet
from reconcile.selftest.run import run_mutant, run_variant
from reconcile.selftest.suite import load_suite

FOLDER = Path(__file__).parent
SUITE = load_suite(FOLDER).select("quick", "*")
MISSED = read_ratchet(FOLDER).missed


@pytest.mark.parametrize("mutant", SUITE.mutants, ids=lambda mutant: mutant.id)
def test_mutant(mutant):
    result = run_mutant(mutant, gates=False)

    assert not result.twin, f"the clean twin: {result.twin}"
    assert result.detected != (mutant.id in MISSED), result
    named = not result.detected or not mutant.op or result.located
    assert named, f"expected {mutant.op} first: {result}"


@pytest.mark.parametrize("variant", SUITE.variants, ids=lambda variant: variant.id)
def test_clean(variant):
    assert run_variant(variant, 1, gates=False).alarms == ()
