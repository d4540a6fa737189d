"""`vllm_fp8.w8a16`: how it calls vLLM's op (a stand-in here), and the op itself where vLLM is.

The second part runs in the environment that `make vllm` makes:

    .venvs/vllm/bin/python -m pytest tests/op/test_vllm_fp8.py
"""

from dataclasses import replace

import pytest
import torch

import reconcile
from reconcile.checking.probes import random_weight
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec
from reconcile.weight import QuantizedWeight
from reconcile_kernels.amx_fp8.packing import pack
from reconcile_kernels.vllm_fp8 import W8A16, kernel
from reconcile_references import fp8

(VLLM,) = W8A16.engines
HERE = W8A16.is_supported(VLLM)
needs_vllm = pytest.mark.skipif(not HERE, reason=HERE.reason)


def weight_of(form, shape, codes=None):
    scales = torch.ones(form.scale_shape(shape))
    like = QuantizedWeight(
        codes=torch.zeros(shape, dtype=torch.uint8), scales=scales, format=form, shape=shape
    )
    made = random_weight(like, shape, torch.Generator().manual_seed(0))
    return made if codes is None else replace(made, codes=codes)


class StandIn:
    """The op's arguments, kept; and its result for M <= 4, in plain torch."""

    def convert_weight_packed(self, codes):
        assert codes.dtype == torch.float8_e4m3fn
        self.codes = codes
        return pack(codes, tuple(codes.shape), "nk").view(torch.float8_e4m3fn)

    def fp8_scaled_mm_cpu(self, x, packed, scales, block, bias, dtype, is_vnni):
        self.block, self.bias, self.scales = block, bias, scales
        assert (x.dim(), is_vnni, dtype) == (2, True, x.dtype)
        assert scales.dtype == torch.float32
        n, k = packed.shape
        spread = scales.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
        y = x.float() @ (self.codes.float() * spread).T
        return (y if bias is None else y + bias).to(dtype)


@pytest.fixture
def op(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(kernel, "_ops", lambda: stand_in)
    monkeypatch.setattr(kernel, "_installed", lambda: kernel.Support(True, "a stand-in"))
    return stand_in


def test_kernel_object():
    assert isinstance(W8A16, Kernel)
    assert Engine("vllm", "vendor", "hardware", "bit_exact") == VLLM
    many, few = W8A16.contract.at(5), W8A16.contract.at(4)
    assert (many.weight_rounding, many.scale_applied) == ("bfloat16", "before")
    assert (few.weight_rounding, few.scale_applied, few.k_block) == (None, "after_block", 128)


@pytest.mark.parametrize(
    ("changes", "ok"),
    [({}, True), ({"k": 80}, True), ({"n": 48}, False), ({"format": "fp8_e4m3_channel"}, False)],
)
def test_its_gate_is_vllms(changes, ok):
    """N % 32 as upstream's per-tensor class; K is not looked at there either."""
    spec = LinearSpec(
        n=64, k=64, format="fp8_e4m3_tensor", bias=False, activation_dtype=torch.bfloat16
    )
    assert W8A16.can_implement(replace(spec, **changes)).ok is ok


@pytest.mark.parametrize("form", [fp8.FP8_E4M3_TENSOR, fp8.FP8_E4M3_BLOCK])
def test_the_op_gets_what_vllm_gives_it(op, form):
    weight = weight_of(form, (160, 288))
    prepared = W8A16.prepare(weight, VLLM)
    x = torch.randn(2, 1, 3, 288, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.ones(160)
    y = W8A16.apply(x, prepared, bias)
    assert y.shape == (2, 1, 3, 160)
    assert op.bias is bias
    assert op.block == ([160, 128] if form.block is None else [128, 128])
    assert tuple(op.scales.shape) == ((1, 3) if form.block is None else (2, 3))
    right = x.double() @ weight.dequantize().T + 1
    torch.testing.assert_close(y.double(), right, rtol=2**-7, atol=0.02)


def test_without_vllm_the_reason_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(kernel.importlib.util, "find_spec", lambda name: None)
    kernel._installed.cache_clear()
    try:
        support = W8A16.is_supported(VLLM)
        assert not support
        assert "`make vllm`" in support.reason
        with pytest.raises(KernelError, match="make vllm"):
            W8A16.prepare(weight_of(fp8.FP8_E4M3_TENSOR, (32, 32)), VLLM)
    finally:
        kernel._installed.cache_clear()
    assert 'no engine "amx"' in W8A16.is_supported(Engine("amx")).reason


def without_exponent_zero(x, weight, bias=None):
    """What the op makes of the codes: no branch for exponent field 0, none for NaN."""
    codes = torch.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7) / 8
    table = (1 + mantissa) * 2.0 ** (exponent - 7) * torch.where(codes < 128, 1, -1)
    return (x.float() @ (table[weight.codes.long()] * weight.scales).T).to(x.dtype)


def test_such_codes_are_named():
    """Zero and the subnormals as one cause, and each NaN code that became a number."""
    weight = weight_of(fp8.FP8_E4M3_TENSOR, (128, 256))
    probes = ("impulse", "code_table")
    report = reconcile.check_linear(without_exponent_zero, weight, probes=probes)
    assert report.exit_code == 1
    first = next(row for row in report.rows if row.verdict == "FAIL")
    assert (first.diagnosis[0].name, first.diagnosis[0].explains) == ("subnormals", 1.0)
    lost = next(row for row in report.rows if row.reason == "nonfinite")
    assert "0x7F (not finite) is decoded as a number" in lost.text
    assert "0xFF (not finite) is decoded as a number" in lost.text


# The op itself --------------------------------------------------------------------------------


def normal_codes(shape):
    codes = torch.tensor([c for c in range(256) if 8 <= c & 0x7F < 0x7F], dtype=torch.uint8)
    return codes[torch.randint(len(codes), shape, generator=torch.Generator().manual_seed(2))]


@needs_vllm
@pytest.mark.parametrize("form", [fp8.FP8_E4M3_TENSOR, fp8.FP8_E4M3_BLOCK])
def test_its_contract_holds_on_codes_that_it_decodes(form):
    weight = weight_of(form, (256, 256), normal_codes((256, 256)))
    sizes = (1, 2, 3, 4, 5, 6, 16, 33, 64)
    report = reconcile.check_linear(W8A16, weight, probes=["bound"], batch_sizes=sizes)
    report.raise_for_verdict()
    assert len(report.rows) == len(sizes)


@needs_vllm
def test_every_probe_finds_the_codes_that_it_does_not_decode():
    """docs/findings/vllm-fp8-cpu.md: exponent field 0 is read as a normal number, NaN as 480."""
    report = reconcile.check_linear(W8A16, weight_of(fp8.FP8_E4M3_TENSOR, (256, 256)))
    assert report.exit_code == 1
    failed = {row.check for row in report.rows if row.verdict == "FAIL"}
    assert {"impulse", "code_table", "integer"} <= failed
    assert {row.engine for row in report.rows} == {"vllm"}
    assert {row.implementation for row in report.rows} == {"vendor"}
