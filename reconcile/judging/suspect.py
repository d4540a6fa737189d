"""Is the reference fit to judge? What in a weight says that its decoding may be wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from reconcile.grouped import GroupedWeight, StoredWeight
from reconcile.linears import DenseWeight
from reconcile.weight import QuantizedWeight

FORMAT_MAXIMA = {448.0: "E4M3", 240.0: "E4M3FNUZ", 57344.0: "E5M2", 6.0: "E2M1", 127.0: "int8"}
"""Largest magnitude of number formats: a weight that reaches one exactly was not dequantised."""


def suspicions(weight: StoredWeight) -> list[str]:
    """What speaks against judging by this weight; empty where nothing does."""
    if isinstance(weight, GroupedWeight):
        each = enumerate(weight.groups)
        return [f"group {g}: {text}" for g, group in each for text in suspicions(group)]
    values = weight.dequantize(torch.float64)
    found = []
    odd = int((~values.isfinite()).sum())
    if odd:
        found.append(f"{odd} of {values.numel()} decoded weights are NaN or infinite")
    amax = float(values[values.isfinite()].abs().max()) if odd < values.numel() else 0.0
    if amax == 0:
        found.append("every decoded weight is zero")
    if amax in (maxima := _maxima(weight)):
        found.append(
            f"the largest decoded weight is {amax:g}, the maximum of {maxima[amax]}: a scale is "
            "missing"
        )
    if isinstance(weight, QuantizedWeight):
        found += _scales(weight)
    return found


def _scales(weight: QuantizedWeight) -> list[str]:
    scales = weight.format.scale_values(weight.scales)
    if scales.numel() > 1 and bool((scales == 1).all()):
        return [f"all {scales.numel()} scales are 1: they may never have been loaded"]
    return []


def _maxima(weight: QuantizedWeight | DenseWeight) -> dict[float, str]:
    """Largest magnitudes that would say that codes were not scaled.

    Of a stored weight only its own format's: under a power of two, 384 / 64 is 6 by right. None
    of a ternary one, whose values are 1 under any scale of 1.
    """
    if isinstance(weight, DenseWeight):
        return FORMAT_MAXIMA
    table = weight.format.table
    own = max(abs(value) for value in table if math.isfinite(value))
    return {own: weight.format.name} if len(table) > 4 else {}


def weight_facts(
    weight: StoredWeight, again: Tensor | None, original: Tensor | None
) -> dict[str, Any]:
    """What the report says about a decoded weight, apart from any kernel.

    Args:
        weight: the stored weight.
        again: the same by a second decoder, or None.
        original: the dense weight before quantisation, or None.

    Returns:
        ``suspicions``: texts, empty if the reference is fit to judge; ``stats``: the share of
        zeros, the range of scales, whether the second decoder agrees bit by bit, and the
        signal-to-noise ratio of quantisation in dB; ``block``: rows and columns that share a
        scale, empty where these are no blocks.
    """
    found = suspicions(weight)
    values = weight.dequantize(torch.float64)
    stats: dict[str, Any] = {"zero_share": float((values == 0).double().mean())}
    groups = weight.groups if isinstance(weight, GroupedWeight) else (weight,)
    stored = [group for group in groups if isinstance(group, QuantizedWeight)]
    if stored:
        scales = [group.format.scale_values(group.scales) for group in stored]
        stats |= {
            "scale_min": min(float(part.min()) for part in scales),
            "scale_max": max(float(part.max()) for part in scales),
        }
    if again is not None:
        stats["second_decoder_agrees"] = torch.equal(values, again)
        if not stats["second_decoder_agrees"]:
            places = int((values != again).sum())
            found.append(f"a second decoder differs in {places} of {values.numel()} weights")
    if original is not None:
        exact = original.to(torch.float64)
        noise, power = (values - exact).square().sum(), exact.square().sum()
        stats["quantisation_sqnr_db"] = float(10 * torch.log10(power / noise))
    block = stored[0].format.block if stored else None
    return {"suspicions": found, "stats": stats, "block": list(block or ())}
