"""Every mutant is found and its clean twin passes; every clean variant passes.

What is missed on purpose is listed in ``ratchet.json``, with its reason.
"""

import json
from pathlib import Path

import pytest

from reconcile.selftest.suite import QUICK_SEEDS, load_suite

FOLDER = Path(__file__).parent
SUITE = load_suite(FOLDER).select("quick", "*")
KNOWN = json.loads((FOLDER / "ratchet.json").read_text())["missed"]


@pytest.mark.parametrize("mutant", SUITE.mutants, ids=lambda mutant: mutant.id)
def test_mutant(mutant):
    seen = mutant.trial.run(faulty=True)
    twin = mutant.trial.run(faulty=False)

    assert twin.exit_code == 0, f"the clean twin: {twin}"
    assert mutant.detected(seen) != (mutant.id in KNOWN), f"{mutant.patch}: {seen}"
    assert mutant.id in KNOWN or mutant.located(seen), f"expected {mutant.op} first: {seen}"


@pytest.mark.parametrize("variant", SUITE.variants, ids=lambda variant: variant.id)
def test_clean(variant):
    for seed in range(QUICK_SEEDS):
        report = variant.run(seed)
        assert report.exit_code == 0, f"seed {seed}: {report.explain()}"
