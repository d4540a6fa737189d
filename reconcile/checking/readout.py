"""What an impulse probe reads out: which codes, rows and block boundaries are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reconcile.weight import QuantizedWeight

FEW = 4
"""At most this many codes are named."""
SAME = 1e-2
"""Relative difference below which two effective scales count as one (outputs are rounded)."""


def name_codes(weight: QuantizedWeight, columns: Tensor, got: Tensor, wrong: Tensor) -> str:
    """The codes that explain the wrong elements, or an empty text.

    Codes explain them if few of the codes that are there are concerned and nothing else is.
    (Under a large scale a small error of a code may hide behind the output's rounding.)

    Args:
        weight: the weight that was read out.
        columns: [M], the k of each row.
        got: [M, N], the effective weight: outputs over the amplitude, float64.
        wrong: [M, N], where it is not what it should be.
    """
    codes = weight.unpacked()[:, columns].T.long()
    spoilt = wrong.all(0) & ~torch.isfinite(weight.format.decode(weight.unpacked())).all(1)
    wrong_elsewhere = wrong & ~spoilt
    named: list[str] = []
    for n in spoilt.nonzero().flatten()[:FEW].tolist():
        row = weight.unpacked()[n]
        odd = [int(c) for c in row if not _finite(weight, int(c))]
        named += [f"0x{code:02X} (not finite) is decoded as a number" for code in odd]
    present = torch.bincount(codes.flatten(), minlength=256)
    hit = torch.bincount(codes[wrong_elsewhere], minlength=256)
    guilty = hit.nonzero().flatten().tolist()
    if len(guilty) > min(FEW, max(1, int((present > 0).sum()) // 4)):
        guilty = []  # too many to be the cause; a NaN that became a number is one of its own
    for code in guilty:
        place = (wrong_elsewhere & (codes == code)).nonzero()[0]
        m, n = (int(i) for i in place)
        scale = _scale_at(weight, n, int(columns[m]))
        value = float(got[m, n]) / scale if scale else float("nan")
        named.append(f"0x{code:02X} means {weight.format.table[code]:.6g}, decoded as {value:.6g}")
    return f"code {'; code '.join(named)}" if named else ""


def name_boundaries(weight: QuantizedWeight, columns: Tensor, got: Tensor) -> str:
    """Where the effective scale changes along N, if not where the format's blocks do."""
    block = weight.format.block
    if block is None:
        return ""
    codes = weight.unpacked()[:, columns]
    values = weight.format.decode(codes)
    scale = torch.where(values.abs() > 0, got.T / values, torch.nan)
    in_first = columns < block[1]
    if not bool(in_first.any()) or weight.shape[0] <= block[0]:
        return ""
    rows = torch.nanmedian(scale[:, in_first], 1).values
    change = (rows[1:] / rows[:-1] - 1).abs() > SAME
    seen = [int(i) + 1 for i in change.nonzero().flatten()]
    declared = list(range(block[0], weight.shape[0], block[0]))
    if not seen or set(seen) <= set(declared):
        return ""
    return (
        f"the scale changes at n = {_few(seen)}, the format's blocks of {block[0]} rows at "
        f"n = {_few(declared)}"
    )


def name_places(columns: Tensor, wrong: Tensor) -> str:
    """Whole rows or columns of the weight that are wrong, where they are few."""
    texts = []
    for axis, letter, places in ((0, "n", torch.arange(wrong.shape[1])), (1, "k", columns)):
        lines = wrong.any(axis)
        if 0 < int(lines.sum()) <= FEW < lines.numel():
            texts.append(f"{letter} = {_few(places[lines].tolist())}")
    return f"only at {' and '.join(texts)}" if texts else ""


def _scale_at(weight: QuantizedWeight, n: int, k: int) -> float:
    form = weight.format
    spread = form.spread(form.scale_values(weight.scales), weight.shape)
    scale = float(spread.expand(weight.shape)[n, k])
    return 1 / scale if form.scale_convention == "divide" and scale else scale


def _finite(weight: QuantizedWeight, code: int) -> bool:
    value = weight.format.table[code]
    return value == value and abs(value) != float("inf")


def _few(places: Sequence[int], limit: int = 6) -> str:
    shown = ", ".join(map(str, places[:limit]))
    return shown + (", ..." if len(places) > limit else "")
