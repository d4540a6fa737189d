"""The embedded FP8 cases, by name; the derived checkpoints lie in the user's cache."""

import dataclasses

import pytest

import reconcile
from reconcile import registry

CASES = ("tiny-fp8-tensor", "tiny-fp8-channel", "tiny-fp8-block")


@pytest.mark.parametrize("name", CASES)
def test_one_layer_passes(name):
    report = reconcile.run(name, only="model.layers.3.*", levels=["op"])
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (7, 7)
    weights = [row for row in report.rows if row.level == "weight"]
    assert all(row.stats["second_decoder_agrees"] for row in weights)
    assert all(row.stats["quantisation_sqnr_db"] > 30 for row in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_whole_case_passes(name):
    report = reconcile.run(name)
    report.raise_for_verdict()
    assert (report.coverage.expected, report.coverage.compared) == (42, 42)


def test_a_load_rule_is_named_beside_the_verdict():
    case = reconcile.load_case(registry.case_file("tiny-fp8-tensor"))
    ruled = dataclasses.replace(
        case, model=dataclasses.replace(case.model, load_rule="vllm_shard_maximum")
    )
    report = reconcile.run(ruled, only="model.layers.3.*", levels=["op"])
    report.raise_for_verdict()
    assert any("load rule vllm_shard_maximum" in notice for notice in report.notices)
    assert any("codes changed" in note for p in report.provenance for note in p.notes)
