"""MXFP8 rules against the implementations that they name, by golden vectors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reconcile.numbers import mx

VECTORS = Path(__file__).resolve().parents[2] / "fixtures/reconcile_fixtures/vectors"
MX = load_file(VECTORS / "03_mxfp8.safetensors")
REQUANT = load_file(VECTORS / "05_requant.safetensors")
E8M0 = load_file(VECTORS / "02_e8m0.safetensors")
NAMES = {
    "floor": "floor",
    "rceil": "rceil",
    "ceil": "ceil",
    "even": "even",
    "ascend_0": "ascend_alg0",
    "ascend_1": "ascend_alg1",
    "vllm": "vllm_torch",
    "compressed_tensors": "ct",
}
INPUTS = ("rows", "rows32", "rand", "rand32")


def given(name):
    """An input of the vectors, bfloat16 or float32 [R, K]."""
    if f"{name}.x_bf16" in MX:
        return MX[f"{name}.x_bf16"].view(torch.int16).view(torch.bfloat16)
    return MX[f"{name}.x_f32bits"].view(torch.float32)


def per_element(groups, k):
    return groups.repeat_interleave(32, -1)[..., :k]


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("rule", NAMES)
def test_bytes_and_codes_are_those_of_the_named_implementation(rule, source):
    x, name = given(source), f"{source}.{NAMES[rule]}"
    found, scales, codes = mx.quantise(x, mx.RULES[rule]), MX[f"{name}.scale"], MX[f"{name}.codes"]
    defined = MX.get(f"{name}.defined", torch.ones_like(scales)).bool()
    assert torch.equal(found.scales[defined], scales[defined])
    count = per_element(defined & (scales != 255), x.shape[-1])
    assert torch.equal(found.codes[count], codes[count])
    assert int(count.sum()) > 1000
    if f"{name}.deq" in MX:
        values = found.dequantize().float()
        assert torch.equal(values.nan_to_num(7), MX[f"{name}.deq"].nan_to_num(7))


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize(
    ("rule", "name"), [("microxcaling", "microx_nearest"), ("microxcaling_even", "microx_even")]
)
def test_microxcaling(rule, name, source):
    """Its exponent is a float, NaN above 127; values that overflow float32 there have no code."""
    x, exponent = given(source), MX[f"{source}.microx.shared_exp"]
    found = mx.quantise(x, mx.RULES[rule])
    finite = exponent.isfinite()
    assert torch.equal(found.scales[finite].float() - 127, exponent[finite])
    count = per_element(finite, x.shape[-1]) & MX[f"{source}.{name}.deq"].isfinite()
    assert torch.equal(found.codes[count], MX[f"{source}.{name}.codes"][count])


def test_the_vendors_golden_script_agrees_except_under_byte_0():
    """It does not blank groups below 2^-118 as the kernel does: there it is plain ``floor``."""
    for source in INPUTS:
        for algorithm in (0, 1):
            pairs = MX[f"{source}.ascend_golden_alg{algorithm}.scale_pairs"].flatten(-2)
            codes = MX[f"{source}.ascend_golden_alg{algorithm}.codes"]
            rule = mx.RULES[("floor", "ascend_1")[algorithm]]
            found = mx.quantise(given(source), rule)
            groups = found.scales.shape[-1]
            assert torch.equal(found.scales, pairs[..., :groups])
            assert not bool(pairs[..., groups:].any())
            assert torch.equal(found.codes, codes)


RULES_BY_AMAX = {
    # amax: floor and ascend_0, rceil and ascend_1, ceil, even, vllm, microxcaling, compressed
    1.0: (119, 119, 119, 119, 119, 119, 119),
    1.5: (119, 119, 120, 119, 119, 119, 119),
    1.75: (119, 119, 120, 119, 119, 119, 120),
    1.8125: (119, 120, 120, 119, 120, 119, 120),
    1.9375: (119, 120, 120, 120, 120, 119, 120),
    1.9921875: (119, 120, 120, 120, 120, 119, 120),
    2.0**-120: (0, 0, 0, 0, 0, 0, 0),
    3e38: (246, 247, 247, 246, 247, 246, None),
    float("inf"): (255, 255, 255, 255, 254, None, None),
}


@pytest.mark.parametrize("amax", RULES_BY_AMAX)
def test_maxima_that_tell_the_rules_apart(amax):
    block = torch.zeros(1, 32)
    block[0, 5] = amax
    names = ("floor", "rceil", "ceil", "even", "vllm", "microxcaling", "compressed_tensors")
    for name, byte in zip(names, RULES_BY_AMAX[amax], strict=True):
        if byte is not None:
            assert mx.quantise(block, mx.RULES[name]).scales.item() == byte, name
    for algorithm, name in (("ascend_0", "floor"), ("ascend_1", "rceil")):
        scales = [mx.quantise(block, mx.RULES[rule]).scales.item() for rule in (algorithm, name)]
        assert scales[0] == scales[1]


def test_what_byte_0_does_to_the_elements():
    block = torch.full((1, 32), 2.0**-120)
    codes = {rule: mx.quantise(block, mx.RULES[rule]).codes[0, 0].item() for rule in NAMES}
    assert codes["ascend_0"] == 0
    assert codes["floor"] == codes["rceil"] == codes["ascend_1"] == 0x70  # 128 = 2^-120 / 2^-127


@pytest.mark.parametrize(("rule", "value"), [("microxcaling", 0.5625), ("floor", 0.5)])
def test_ties_go_to_even_or_away(rule, value):
    block = torch.zeros(1, 32)
    block[0, :2] = torch.tensor([1.0, 0.53125])
    assert mx.quantise(block, mx.RULES[rule]).dequantize()[0, 1] == value


def test_dequantising_every_code_under_eleven_bytes():
    found = mx.Mx(codes=MX["deqtab.codes"], scales=MX["deqtab.scale"]).dequantize()
    expected = MX["deqtab.f32bits"].view(torch.float32)
    assert torch.equal(found.float().nan_to_num(7), expected.nan_to_num(7))


def test_scale_bytes_are_powers_of_two():
    expected = E8M0["table.f32bits"].view(torch.float32).double()
    found = mx.e8m0(torch.arange(256).to(torch.uint8))
    assert torch.equal(found[:255], expected[:255])
    assert found[255].isnan()


@pytest.mark.parametrize("case", ["f32", "e8m0", "extreme"])
@pytest.mark.parametrize("algorithm", [0, 1])
def test_requantising_resolved_weights(case, algorithm):
    """Codes, bytes, saturating groups and changed elements of block FP8 -> bfloat16 -> MXFP8."""
    dense = REQUANT[f"{case}.resolved_bf16"].view(torch.int16).view(torch.bfloat16)
    name = f"{case}.alg{algorithm}"
    rule = mx.RULES[f"ascend_{algorithm}"]
    found = mx.quantise(dense, rule)
    scales = REQUANT[f"{name}.scale"]
    assert torch.equal(found.scales, scales)
    count = per_element(scales != 255, dense.shape[-1])
    assert torch.equal(found.codes[count], REQUANT[f"{name}.codes"][count])
    saturating = mx.saturating(dense, found.scales, rule)
    assert torch.equal(saturating, REQUANT[f"{name}.sat_groups"].bool())
    assert int(saturating.sum()) == int(REQUANT[f"{name}.sat_count"])
    changed = int((found.dequantize() != dense.double()).sum())
    assert changed == int(REQUANT[f"{name}.changed_count"])


def test_power_of_two_source_scales_are_lossless_under_rceil_alone():
    dense = REQUANT["e8m0.resolved_bf16"].view(torch.int16).view(torch.bfloat16)
    lossless = mx.quantise(dense, mx.RULES["ascend_1"])
    assert torch.equal(lossless.dequantize(), dense.double())
    floor = mx.RULES["ascend_0"]
    assert bool(mx.saturating(dense, mx.quantise(dense, floor).scales, floor).any())


@pytest.mark.parametrize("k", [1, 31, 32, 33, 70])
def test_a_short_last_group_is_a_group_of_its_own(k):
    x = torch.randn(3, 2, k, generator=torch.Generator().manual_seed(k))
    whole = k // 32 * 32
    for rule in mx.RULES.values():
        found, tail = mx.quantise(x, rule), mx.quantise(x[..., whole:], rule) if k % 32 else None
        assert found.codes.shape == x.shape
        assert found.scales.shape == (3, 2, -(-k // 32))
        if tail is not None:
            assert torch.equal(found.codes[..., whole:], tail.codes)


def test_names_of_contracts():
    assert mx.named("mxfp8").name == "floor"
    assert mx.named("mxfp8_ascend_1").name == "ascend_1"
