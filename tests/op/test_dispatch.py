"""The table of kernels: what it chooses, why, and how a fallback shows."""

from dataclasses import replace

import pytest
import torch

import reconcile
from reconcile import Contract
from reconcile.checking.probes import random_weight
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec, Support
from reconcile.weight import QuantizedWeight
from reconcile_kernels.amx_fp8 import W8A16
from reconcile_kernels.dispatch import FP8, Dispatch
from reconcile_kernels.torch_w8a8 import TORCH_W8A8
from reconcile_references import fp8

AVX512 = Engine("avx512_bf16")
PYTHON = Engine("python")
SPEC = LinearSpec(n=64, k=64, format="fp8_e4m3_tensor", bias=False, activation_dtype=torch.bfloat16)
pytestmark = pytest.mark.skipif(not W8A16.is_supported(AVX512), reason="no AVX512-BF16")


def weight_of(shape, form=fp8.FP8_E4M3_TENSOR):
    like = QuantizedWeight(
        codes=torch.zeros(shape, dtype=torch.uint8),
        scales=torch.ones(form.scale_shape(shape)),
        format=form,
        shape=shape,
    )
    return random_weight(like, shape, torch.Generator().manual_seed(0))


def test_it_is_a_kernel_that_promises_what_its_first_does():
    assert isinstance(FP8, Kernel)
    assert FP8.contract == W8A16.contract
    assert FP8.engines == (*W8A16.engines, PYTHON)
    assert FP8.formats == W8A16.formats
    assert "reads" in FP8.can_implement(replace(SPEC, format="ternary_hf")).reason
    assert FP8.is_supported(AVX512)
    assert not FP8.is_supported(Engine("cuda"))


CHOICES = [
    ({}, "amx_fp8.w8a16", AVX512, ()),
    ({"n": 48}, "torch_w8a8", PYTHON, ("amx_fp8.w8a16",)),
    ({"k": 80}, "torch_w8a8", PYTHON, ("amx_fp8.w8a16",)),
    ({"format": "fp8_e4m3_block"}, "amx_fp8.w8a16", AVX512, ()),
    ({"format": "fp8_e4m3_block", "n": 48}, None, None, ("amx_fp8.w8a16", "torch_w8a8")),
]


@pytest.mark.parametrize(("changes", "name", "engine", "rejected"), CHOICES)
def test_the_first_that_takes_the_layer(changes, name, engine, rejected):
    choice = FP8.choose(replace(SPEC, **changes), AVX512)
    assert (choice.kernel and choice.kernel.name, choice.engine) == (name, engine)
    assert tuple(before for before, _ in choice.rejected) == rejected
    assert all(reason for _, reason in choice.rejected)
    assert FP8.can_implement(replace(SPEC, **changes)).ok is (name is not None)


def test_a_candidate_that_does_not_run_here_is_passed_over_with_its_reason(monkeypatch):
    monkeypatch.setattr(
        type(W8A16), "is_supported", lambda self, engine: Support(False, "no such processor")
    )
    choice = FP8.choose(SPEC)
    assert choice.kernel is TORCH_W8A8
    assert "amx: no such processor; avx512_bf16: no such processor" in choice.text


def test_the_chosen_kernel_computes_and_the_report_says_which():
    probes = ("impulse", "integer", "bound", "batch")
    report = reconcile.check_linear(FP8, weight_of((64, 96)), engine="avx512_bf16", probes=probes)
    report.raise_for_verdict()
    assert "fp8_dispatch: amx_fp8.w8a16 on avx512_bf16 (1 layers)" in report.notices


def test_other_semantics_are_a_fallback_and_no_pass():
    """N = 48 is refused by the W8A16 kernel; W8A8 in its place is shown as that."""
    report = reconcile.check_linear(FP8, weight_of((48, 96)), engine="avx512_bf16")
    assert report.exit_code == 2
    judged = [row for row in report.rows if row.reason == "fell_back"]
    assert judged
    for row in judged:
        assert "torch_w8a8" in row.text
        assert "must be a positive multiple of 32" in row.text
        assert "activation per_token_fp8 instead of none" in row.text
    assert any("other semantics: activation per_token_fp8" in text for text in report.notices)
    assert {row.verdict for row in report.rows if row.shape[1] == 48} == {"INCONCLUSIVE"}


def test_asked_for_by_name_the_fallback_is_judged_by_its_own_contract():
    reconcile.check_linear(TORCH_W8A8, weight_of((48, 96))).raise_for_verdict()
    channel = weight_of((64, 96), fp8.FP8_E4M3_CHANNEL)
    reconcile.check_linear(TORCH_W8A8, channel, bias=torch.randn(64)).raise_for_verdict()


def test_a_kernel_of_the_same_semantics_is_no_fallback():
    table = Dispatch("table", (W8A16, replace(TORCH_W8A8, contract=Contract())))
    prepared = table.prepare(weight_of((48, 96)), AVX512)
    assert prepared.kernel.name == "torch_w8a8"
    assert prepared.fallback == ""


def test_nothing_that_takes_the_layer_is_an_error_with_every_reason():
    with pytest.raises(KernelError, match=r"amx_fp8.w8a16 rejected: .*; torch_w8a8 rejected: "):
        FP8.prepare(weight_of((48, 96), fp8.FP8_E4M3_BLOCK), AVX512)


def test_in_a_model_every_choice_is_counted():
    report = reconcile.run(
        "tiny-fp8-tensor", kernel="fp8_dispatch", only="model.layers.3.*", levels=["op"]
    )
    report.raise_for_verdict()
    assert any(
        "fp8_dispatch: amx_fp8.w8a16" in text and "(7 layers)" in text for text in report.notices
    )
