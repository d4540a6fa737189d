"""The embedded FP8 cases, by name; the derived checkpoints lie in the user's cache."""

import dataclasses

import pytest
import torch

import reconcile
from reconcile import registry

CASES = ("tiny-fp8-tensor", "tiny-fp8-channel", "tiny-fp8-block")


@pytest.mark.parametrize("kernel", ["amx_fp8.w8a16", "torch_dequant"])
@pytest.mark.parametrize("name", CASES)
def test_one_layer_passes(name, kernel):
    report = reconcile.run(name, kernel=kernel, only="model.layers.3.*", levels=["op"])
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


def rounds_weights_beyond_four_rows(x, weight, bias=None):
    """Like vLLM's op: another arithmetic for many rows."""
    w = weight.dequantize(torch.float32)
    if x.numel() // x.shape[-1] > 4:
        w = w.bfloat16().float()
    return (x.float() @ w.T).to(x.dtype)


rounds_weights_beyond_four_rows.contract = reconcile.Contract(
    weight_rounding="bfloat16", by_batch=((4, reconcile.Contract()),)
)


def test_a_row_alone_is_judged_by_the_arithmetic_of_one_row():
    """Its reference does not round weights where the contract says that few rows do not."""
    case = reconcile.load_case(registry.case_file("tiny-fp8-tensor"))
    case = case.with_candidate(kernel=f"{__file__}:rounds_weights_beyond_four_rows")
    case = dataclasses.replace(case, gate=dataclasses.replace(case.gate, require=()))
    report = reconcile.run(case, only="model.layers.3.*", levels=["op"])
    report.raise_for_verdict()
    assert {row.shape[0] for row in report.rows if row.check == "isolated"} == {1, 64}
