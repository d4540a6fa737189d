"""What goes wrong with groups of 32 under one byte: their order, their axis, what they are made of.

These ask for the bytes that the kernel multiplies by, which a contract that declares
``weight_requantised`` makes of a weight in another format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import named, parameters
from reconcile.diagnosis.model import Fit, LinearModel, Map
from reconcile.grouped import PlainWeight
from reconcile.linears import is_mx, weight_chain
from reconcile.numbers import mx
from reconcile.weight import QuantizedWeight

ONE = 127
"""The byte that stands for 1."""


def quantised(weight: PlainWeight, base: LinearModel) -> mx.Mx | None:
    """Codes and bytes that the kernel should multiply by; None where it should have none."""
    if isinstance(weight, QuantizedWeight) and is_mx(weight):
        return mx.Mx(codes=weight.unpacked(), scales=weight.scales.view(torch.uint8))
    if base.contract.weight_requantised is None:
        return None
    chain = weight_chain(weight, base.contract)
    before = chain.get("resolve", chain["decode"])
    return mx.quantise(before, mx.named(base.contract.weight_requantised))


def _under(found: mx.Mx, scales: Tensor) -> Tensor:
    """The codes under other bytes."""
    return replace(found, scales=scales.to(torch.uint8)).dequantize()


@named("pair_order", "last_block_scale_dropped", "scale_exponent_bias", cost=1)
def bytes_misplaced(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The bytes as the layout in pairs, or their bias, can be got wrong."""
    found = quantised(evidence.weight, base)
    if found is None or base.weight is not evidence.right.weight:
        return
    groups = found.scales.shape[1]
    padded = torch.nn.functional.pad(found.scales, (0, groups % 2))
    swapped = padded.reshape(len(padded), -1, 2).flip(-1).flatten(1)[:, :groups]
    yield Fit(
        "pair_order",
        replace(base, weight=_under(found, swapped)),
        "the two bytes of each pair of groups are swapped",
    )
    for byte, what in ((ONE, "1"), (0, "2^-127")):
        dropped = found.scales.clone()
        dropped[:, -1] = byte
        yield Fit(
            "last_block_scale_dropped",
            replace(base, weight=_under(found, dropped)),
            f"the last group along K of {groups} has no byte and is read under {what}",
            parameters(axis="K"),
        )
    for shift in (-1, 1):
        moved = (found.scales.int() + shift).clamp(0, 254)
        moved = torch.where(found.scales == mx.NAN_BYTE, mx.NAN_BYTE, moved)
        yield Fit(
            "scale_exponent_bias",
            replace(base, weight=_under(found, moved)),
            f"the exponent of every group is off by {shift:+d}",
            parameters(shift=[shift]),
        )


@named("weight_rounding", "scale_axis", cost=2)
def made_otherwise(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The quantiser given other values, or other groups, than the contract says."""
    if base.contract.weight_requantised is None or base.weight is not evidence.right.weight:
        return
    weight = evidence.weight
    if isinstance(weight, QuantizedWeight) and is_mx(weight):
        return
    rule = mx.named(base.contract.weight_requantised)
    chain = weight_chain(weight, base.contract)
    before = chain.get("resolve", chain["decode"])
    if "resolve" in chain:
        exact = mx.quantise(chain["decode"], rule).dequantize()
        text = (
            f"the weight is quantised from the float32 product, not after its rounding to "
            f"{base.contract.weight_rounding}"
        )
        yield Fit("weight_rounding", replace(base, weight=exact), text)
    across = mx.quantise(before.T.contiguous(), rule).dequantize().T.contiguous()
    yield Fit(
        "scale_axis",
        replace(base, weight=across),
        "groups of 32 lie along N, not along K",
        parameters(axis="N"),
    )
    for name, other in mx.RULES.items():
        if other is rule or name in ("vllm", "compressed_tensors"):
            continue
        values = mx.quantise(before, other).dequantize()
        if torch.equal(values, base.weight):
            continue
        text = f"the weight is quantised by the rule {name}, the contract declares {rule.name}"
        yield Fit("weight_rounding", replace(base, weight=values), text, parameters(rule=name))


@named("activation_scale", cost=2)
def one_activation_byte(_: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """One byte for all groups of all rows, or of each row."""
    if not base.contract.activation.startswith("mxfp8"):
        return
    rule = mx.named(base.contract.activation)
    for whole, what in ((True, "of all rows"), (False, "of each row")):
        yield Fit(
            "activation_scale",
            replace(base, quantise=_shared(rule, whole)),
            f"one byte serves all groups {what} of the activations",
            parameters(rule="tensor" if whole else "row"),
        )


def _shared(rule: mx.MxRule, whole: bool) -> Map:
    def quantise(x: Tensor) -> Tensor:
        scales = mx.quantise(x, rule).scales
        largest = scales.amax() if whole else scales.amax(-1, keepdim=True)
        unit = mx.e8m0(largest)
        codes = (x.double() / unit).clamp(-mx.LARGEST, mx.LARGEST).float()
        return codes.to(torch.float8_e4m3fn).double() * unit

    return quantise


@named("nan_codes", cost=1)
def nan_as_infinity(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The byte 255 read as 2^128, infinity in float32; here a number beyond any output's dtype.

    Of an impulse in another group nothing is known: there it is 0 times an infinity.
    """
    found = quantised(evidence.weight, base)
    if found is None or not bool((found.scales == mx.NAN_BYTE).any()):
        return
    scales = mx.e8m0(found.scales).nan_to_num(nan=2.0**500)
    values = found.codes.view(torch.float8_e4m3fn).double()
    spread = scales.repeat_interleave(mx.GROUP, 1)[:, : values.shape[1]]
    yield Fit(
        "nan_codes",
        replace(base, weight=values * spread, rows_only=True),
        "the scale byte 255 is read as 2^128, an infinity, and not as NaN",
    )


HYPOTHESES = (bytes_misplaced, made_otherwise, one_activation_byte, nan_as_infinity)
