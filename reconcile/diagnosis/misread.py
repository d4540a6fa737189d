"""What the weight's own format says is commonly misread, and other orders of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from reconcile.contract import DTYPES
from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import named, parameters
from reconcile.diagnosis.model import Fit, LinearModel
from reconcile.exceptions import FormatError
from reconcile.linears import is_mx
from reconcile.numbers import mx
from reconcile.rounding import round_to
from reconcile.weight import QuantizedWeight

CAUSES = (
    "scale_missing",
    "scale_inverted",
    "scale_squared",
    "scale_mantissa_dropped",
    "scale_low_precision",
    "scale_reused",
    "scale_axis",
    "last_block_scale_dropped",
    "block_boundary",
    "bytes_as_numbers",
    "fn_fnuz",
    "exponent_bias",
    "sign",
    "subnormals",
    "nan_codes",
    "code_table",
    "ternary_table",
    "bit_order",
    "interleaved_planar",
)
"""Diagnoses that the misreadings of the formats here belong to; others keep their own name."""


def under_contract(values: Tensor, base: LinearModel) -> Tensor:
    """Decoded values after what the contract declares is done to them, as the reference does it."""
    contract = base.contract
    if contract.weight_rounding is not None:
        values = round_to(values.float().double(), DTYPES[contract.weight_rounding]).double()
    if contract.weight_requantised is not None:
        values = mx.quantise(values, mx.named(contract.weight_requantised)).dequantize()
    return values


@named(*CAUSES)
def misreadings(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Each misreading that the format lists, from the right reading only."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or base.weight is not evidence.right.weight:
        return
    for misreading in weight.format.misreadings:
        read = misreading.read(weight)
        values = (
            read
            if is_mx(weight) and base.contract.weight_requantised
            else under_contract(read, base)
        )
        if torch.equal(values, base.weight):
            continue
        found = parameters(misreading=misreading.name)
        name = misreading.cause or misreading.name
        yield Fit(name, replace(base, weight=values), misreading.text, found)


@named("bit_order", "nibble_order", "interleaved_planar", cost=1)
def packings(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Codes read from the same bytes in another order."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or base.weight is not evidence.right.weight:
        return
    packing = weight.format.packing
    if packing.bits == 8:
        return
    other: Literal["interleaved", "planar"]
    other = "planar" if packing.arrangement == "interleaved" else "interleaved"
    nibbles = packing.bits == 4
    flipped = replace(packing, low_first=not packing.low_first)
    changes = (
        ("nibble_order" if nibbles else "bit_order", "from the other end of each byte", flipped),
        ("interleaved_planar", f"as {other} ones", replace(packing, arrangement=other)),
        (
            "interleaved_planar",
            f"as {other} ones and from the other end of each byte",
            replace(flipped, arrangement=other),
        ),
    )
    for name, text, changed in changes:
        read = replace(weight, format=replace(weight.format, packing=changed))
        try:
            values = under_contract(read.dequantize(), base)
        except FormatError:
            continue  # these bytes cannot be read so
        yield Fit(name, replace(base, weight=values), f"codes are read {text}")


HYPOTHESES = (misreadings, packings)
