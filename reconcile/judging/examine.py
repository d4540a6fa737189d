"""A close look at one pair of tensors: what `reconcile.evidence` keeps of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from reconcile.evidence import (
    MOST_BINS,
    MOST_ELEMENTS,
    MOST_STEPS,
    Element,
    Evidence,
    HeatMap,
    Histogram,
    Profile,
    Ranked,
    Ranking,
)
from reconcile.numbers.limits import shares
from reconcile.rounding import bit_view, code_order, round_to

DIGITS = 4
"""Significant digits of a bin's value; elements keep all of theirs."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The tensors of one judgement."""

    candidate: Tensor
    reference: Tensor
    """Of the same shape, wider than the candidate."""
    bound: Tensor | None = None
    """E of each element, where it was derived."""
    rounding: str = "rne"
    """How the output is rounded; it decides what share of E an element needs."""
    places: Tensor | None = None
    """What the rows are, where they are not rows of activations: the k of each impulse."""


Block = tuple[int, int] | None
"""Rows (N) and columns (K) of the weight that share a scale."""


def digest(tensor: Tensor) -> str:
    """Hash of dtype, shape and bits, 16 hex digits: equal for equal outputs of two runs."""
    found = blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=8)
    bits = bit_view(tensor.detach().cpu().contiguous()).reshape(-1)
    found.update(bits.view(torch.uint8).numpy().data)
    return found.hexdigest()


def examine(pair: Pair, block: Block = None) -> Evidence:
    """Worst elements, heat map, histogram and profiles of one pair.

    Args:
        pair: tensors of equal shape with at least one element, on any device.
        block: the weight's blocks; their boundaries go into the heat map.
    """
    columns = pair.candidate.shape[-1] if pair.candidate.dim() else 1
    c = pair.candidate.detach().cpu().reshape(-1, columns)
    r = pair.reference.detach().cpu().reshape(-1, columns)
    rounded = round_to(r, c.dtype)
    size = _size(c, r, rounded)
    share = None
    if pair.bound is not None:
        bound = pair.bound.detach().cpu().reshape(-1, columns).double()
        share = shares(c, r.double(), bound, pair.rounding).nan_to_num(
            nan=math.inf, posinf=math.inf
        )
    return Evidence(
        worst=_worst(c, r, rounded, size, pair),
        heat=_heat(size, share, pair.places, block),
        histogram=_histogram(size, (rounded.double() - r.double()).abs()),
        row_profile=_profile(size, 1, "m" if pair.places is None else "k"),
        column_profile=_profile(size, 0, "n"),
    )


def _size(c: Tensor, r: Tensor, rounded: Tensor) -> Tensor:
    """|c - r| in float64: 0 where both overflow or are NaN alike, inf where only one does."""
    alike = (c == rounded) & ~c.isfinite() | (c.isnan() & rounded.isnan())
    size = torch.where(alike, 0.0, (c.double() - r.double()).abs())
    return torch.where(size.isnan(), math.inf, size)


def _worst(c: Tensor, r: Tensor, rounded: Tensor, size: Tensor, pair: Pair) -> tuple[Element, ...]:
    found = size.flatten().topk(min(MOST_ELEMENTS, size.numel()))
    elements = []
    for flat in found.indices[found.values > 0].tolist():
        row, column = divmod(flat, c.shape[1])
        elements.append(
            Element(
                index=_index(flat, row, column, pair),
                candidate=float(c[row, column]),
                reference=float(r[row, column]),
                error=float(c[row, column].double() - r[row, column].double()),
                ulps=_ulps(c[row, column], rounded[row, column]),
            )
        )
    return tuple(elements)


def _index(flat: int, row: int, column: int, pair: Pair) -> tuple[int, ...]:
    """Place in the tensor as it was judged; for an impulse (k, n)."""
    if pair.places is not None:
        return int(pair.places[row]), column
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), pair.candidate.shape))


def _ulps(c: Tensor, rounded: Tensor) -> int | None:
    if not bool(c.isfinite()) or not bool(rounded.isfinite()):
        return None
    return abs(int(code_order(c)) - int(code_order(rounded)))


def _heat(size: Tensor, share: Tensor | None, places: Tensor | None, block: Block) -> HeatMap:
    value = size if share is None else share
    rows, columns = value.shape
    bin_rows, bin_columns = -(-rows // MOST_BINS), -(-columns // MOST_BINS)
    impulses = places is not None and _in_a_row(places)
    return HeatMap(
        rows=rows,
        columns=columns,
        row_axis="m" if places is None else "k",
        column_axis="n",
        bin_rows=bin_rows,
        bin_columns=bin_columns,
        tile_rows=_tile(block[1], rows) if block and impulses else None,
        tile_columns=_tile(block[0], columns) if block else None,
        unit="|c - r|" if share is None else "share of the bound",
        values=tuple(map(_short, _largest(value, bin_rows, bin_columns).tolist())),
    )


def _in_a_row(places: Tensor) -> bool:
    return bool((places == torch.arange(len(places))).all())


def _tile(step: int, length: int) -> int | None:
    """A boundary every ``step`` places, where the axis has one."""
    return step if 1 < step < length else None


def _largest(value: Tensor, bin_rows: int, bin_columns: int) -> Tensor:
    """The largest of each bin of [R, C]."""
    below, right = -value.shape[0] % bin_rows, -value.shape[1] % bin_columns
    padded = torch.nn.functional.pad(value, (0, right, 0, below))
    rows, columns = padded.shape[0] // bin_rows, padded.shape[1] // bin_columns
    return padded.view(rows, bin_rows, columns, bin_columns).amax((1, 3))


def _histogram(size: Tensor, expected: Tensor) -> Histogram:
    seen, seen_zero = _by_exponent(size)
    right, right_zero = _by_exponent(expected)
    return Histogram(seen=seen, expected=right, seen_zero=seen_zero, expected_zero=right_zero)


def _by_exponent(size: Tensor) -> tuple[tuple[tuple[int, int], ...], int]:
    """Pairs (e, count) of the finite sizes in [2^(e-1), 2^e), and the number of zeros.

    The exponent is read from the bits of the float64: a logarithm or a sort would cost more than
    everything else in a look.
    """
    biased = size.view(torch.int64) >> 52  # sizes have no sign
    counts = torch.bincount(biased.flatten(), minlength=2048)
    zero = int((size == 0).sum())
    counts[2047] = 0  # infinite; there is no NaN among sizes
    counts[0] -= zero  # what is left there is subnormal in float64: below any dtype's rounding
    places = counts.nonzero().flatten().tolist()
    return tuple((place - 1022, int(counts[place])) for place in places), zero


def _profile(size: Tensor, along: int, axis: str) -> Profile:
    """Root mean square over the other axis and over the bins of this one."""
    squares = size.square().mean(along)
    length = len(squares)
    step = -(-length // MOST_STEPS)
    means = [float(part.mean().sqrt()) for part in torch.split(squares, step)]
    return Profile(axis=axis, size=length, step=step, values=_short(means))


def _short(values: list[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)


# --------------------------------------------------------------------------- model


def examine_logits(candidate: Tensor, reference: Tensor, top: int) -> Evidence:
    """The ``top`` largest logits where the sides differ most, and the KL of every position.

    Args:
        candidate: [..., T, V].
        reference: the same shape.
        top: number of ranks.
    """
    c = candidate.detach().to("cpu", torch.float64).flatten(0, -2)
    r = reference.detach().to("cpu", torch.float64).flatten(0, -2)
    log_c, log_r = torch.log_softmax(c, -1), torch.log_softmax(r, -1)
    share = log_r.exp()
    kl = torch.where(share == 0, 0.0, share * (log_r - log_c)).sum(-1).clamp_min(0.0)
    position = int(torch.where(kl.isnan(), math.inf, kl).argmax())
    step = -(-len(kl) // MOST_STEPS)
    binned = [float(part.max()) for part in torch.split(kl, step)]
    ranking = Ranking(
        position=position,
        positions=len(kl),
        ranks=_ranks(c[position], r[position], min(top, r.shape[-1])),
    )
    return Evidence(ranking=ranking, kl_by_token=_short(binned))


def _ranks(c: Tensor, r: Tensor, top: int) -> tuple[Ranked, ...]:
    ours, theirs = (
        side.sort(descending=True, stable=True).indices[:top].tolist() for side in (c, r)
    )
    logits = [float(r[token]) for token in theirs]
    return tuple(
        Ranked(
            rank=at + 1,
            token=token,
            logit=logits[at],
            margin=logits[at] - logits[at + 1] if at + 1 < top else None,
            candidate_token=ours[at],
            candidate_logit=float(c[token]),
        )
        for at, token in enumerate(theirs)
    )
