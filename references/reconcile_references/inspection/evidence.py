"""What speaks for and against a layout: histogram, profiles of rows and columns, a dense twin.

Nothing here decides. Each piece of evidence is a number of its own; `verdict` weighs them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from reconcile.weight import Format, Packing
from reconcile_references.inspection.candidates import Packed, own_scales, shape_of
from reconcile_references.inspection.facts import byte_counts
from reconcile_references.inspection.samples import Sample, dense_part, sample, values_of
from reconcile_references.inspection.source import Stored

TENSORS = 20
"""Tensors of a group that are decoded for evidence, evenly spread over it."""


CHECK = 1 << 16
"""Codes of each single tensor that are compared with its twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """How a dense twin's values lie over the codes of one packing."""

    count: np.ndarray
    """Elements by code."""
    total: np.ndarray
    """Sum of the twin's values by code, each tensor scaled to unit variance."""
    elements: int
    tensors: int

    def agreement(self, table: Sequence[float]) -> float:
        """Correlation of the decoded values with the twin's, in [-1, 1]."""
        values = np.nan_to_num(np.asarray(table, np.float64)[: len(self.count)])
        if not self.elements:
            return 0.0
        mean = float((self.count * values).sum()) / self.elements
        spread = float((self.count * values**2).sum()) / self.elements - mean**2
        covariance = float((self.total * values).sum()) / self.elements
        return covariance / spread**0.5 if spread > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How the zeros of rows and columns follow what else is known of the same dimension."""

    total: float
    """Sum of z^2 over the pairs; about ``pairs`` where nothing is related."""
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was measured for one packing over a group of tensors."""

    packing: Packing
    counts: np.ndarray
    """Occurrences of each code, of all bytes or (base 3) of the sample."""
    illegal_share: float
    """Share of bytes that no encoder of this packing writes."""
    digest: bytes
    """Hash over the decoded samples: two packings with one digest read these tensors alike."""
    profile: Mapping[int, Profile]
    """By the code that is taken for zero."""
    twin: Twin | None


def gather(
    items: Sequence[Packed],
    packing: Packing,
    dense: Mapping[str, Stored],
    twin: Mapping[str, Sequence[Stored]],
    totals: np.ndarray,
) -> Evidence | None:
    """Measure one packing; None where the shape of some tensor does not fit it.

    Args:
        items: tensors that are stored alike.
        packing: how their codes would lie.
        dense: one-dimensional dense tensors (weights of norms) by stem.
        twin: dense tensors by stem of the packed one, several where it is split by rows.
        totals: bytes of the whole group by value.
    """
    shapes = {item.stem: shape_of(item, packing) for item in items}
    if any(shape is None for shape in shapes.values()):
        return None
    chosen = spread(items, TENSORS)
    samples = {i.stem: sample(i, packing, shape) for i in chosen if (shape := shapes[i.stem])}
    counts, illegal = code_counts(packing, totals, samples)
    zeros = [int(code) for code in np.flatnonzero(counts)] if (counts > 0).sum() <= 3 else []
    return Evidence(
        packing=packing,
        counts=counts,
        illegal_share=illegal,
        digest=_digest(samples),
        profile={zero: profile(samples, dense, zero) for zero in zeros},
        twin=_twin(samples, twin, len(counts)) if twin else None,
    )


def _digest(samples: Mapping[str, Sample]) -> bytes:
    found = hashlib.sha256()
    for part in samples.values():
        found.update(part.codes.numpy().tobytes())
    return found.digest()


def spread(items: Sequence[Packed], count: int) -> list[Packed]:
    """At most ``count`` of the items, evenly spread."""
    places = np.unique(np.linspace(0, len(items) - 1, min(len(items), count)).astype(int))
    return [items[i] for i in places]


def group_bytes(items: Sequence[Packed]) -> np.ndarray:
    """Occurrences of every byte over all tensors."""
    return np.asarray(sum(byte_counts(item.codes) for item in items))


def code_counts(
    packing: Packing, totals: np.ndarray, samples: Mapping[str, Sample]
) -> tuple[np.ndarray, float]:
    """Occurrences of each code and the share of bytes that cannot occur."""
    if packing.codes == 256:
        return totals, 0.0
    if packing.tile is not None and packing.tile.base == 3:
        legal = np.zeros(256, bool)
        legal[(256 * np.arange(243) + 242) // 243] = True
        illegal = float(totals[~legal].sum() / max(1, totals.sum()))
        found = torch.cat([part.codes.reshape(-1) for part in samples.values()])
        return np.bincount(found.numpy(), minlength=3)[:3], illegal
    counts = np.zeros(packing.codes, np.int64)
    for slot in range(packing.per_byte):
        codes = np.arange(256) >> (packing.bits * slot) & (packing.codes - 1)
        counts += np.bincount(codes, weights=totals, minlength=packing.codes).astype(np.int64)
    return counts, 0.0


def asymmetry(form: Format, counts: np.ndarray) -> float:
    """|n(+1) - n(-1)| / (n(+1) + n(-1)): weights have about as many of either sign.

    0 for a symmetric histogram, 1 where one sign is missing.
    """
    plus = sum(int(n) for n, value in zip(counts, form.table, strict=True) if value == 1 and n)
    minus = sum(int(n) for n, value in zip(counts, form.table, strict=True) if value == -1 and n)
    return abs(plus - minus) / (plus + minus) if plus + minus else 1.0


# --------------------------------------------------------------------------- profiles


def profile(samples: Mapping[str, Sample], dense: Mapping[str, Stored], zero: int) -> Profile:
    """Compare shares of non-zeros by row and by column with what has the same dimension.

    A column of q_proj belongs to one hidden dimension, and so does an entry of the norm before it;
    a row of up_proj and a column of down_proj belong to one neuron. In a trained model the shares
    of such partners are related, and a wrong order of the codes undoes it.
    """
    rows: list[tuple[str, Tensor]] = []
    columns: list[tuple[str, Tensor]] = []
    for stem, part in samples.items():
        used = (part.codes != zero).to(torch.float32)
        if part.rows is None:
            rows.append((stem, used.mean(1, dtype=torch.float64)))
        if part.columns is None:
            columns.append((stem, used.mean(0, dtype=torch.float64)))
    norms = [(stem, values_of(stored).abs()) for stem, stored in dense.items()]
    pairs = [*_partners(columns, norms), *_partners(rows, norms), *_partners(rows, columns)]
    scores = [_z(a, b) ** 2 for a, b in pairs]
    return Profile(total=float(sum(scores)), pairs=len(scores))


def _partners(
    left: Sequence[tuple[str, Tensor]], right: Sequence[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Vectors of one length of the same layer, or of any where names tell no layer."""
    found = []
    for stem, vector in left:
        same = [(other, w) for other, w in right if other != stem and len(w) == len(vector) >= 16]
        near = [(other, w) for other, w in same if _layer(other) == _layer(stem) is not None]
        known = [w for _, w in near] if near else [w for o, w in same if _layer(o) is None]
        found += [(vector, w) for w in known]
    return found


def _layer(stem: str) -> str | None:
    found = re.search(r"(?:layers|blk|h|blocks)\.(\d+)\.", stem)
    return found.group(1) if found else None


def _z(a: Tensor, b: Tensor) -> float:
    """Fisher's z of the correlation in standard deviations; 0 for a constant."""
    a, b = a - a.mean(), b - b.mean()
    size = float((a.square().sum() * b.square().sum()).sqrt())
    if size == 0 or not np.isfinite(size):
        return 0.0
    r = min(0.999999, max(-0.999999, float((a * b).sum()) / size))
    return float(np.arctanh(r) * max(0, len(a) - 3) ** 0.5)


# --------------------------------------------------------------------------- twin


def _twin(
    samples: Mapping[str, Sample], twin: Mapping[str, Sequence[Stored]], codes: int
) -> Twin | None:
    count, total = np.zeros(codes), np.zeros(codes)
    used = 0
    for stem, part in samples.items():
        if stem not in twin:
            continue
        values = twin_part(twin[stem], part)
        if values is None:
            continue
        values = values - values.mean()
        deviation = float(values.square().mean().sqrt())
        if deviation == 0:
            continue
        flat = part.codes.reshape(-1).numpy()
        count += np.bincount(flat, minlength=codes)[:codes]
        weights = (values / deviation).reshape(-1).numpy()
        total += np.bincount(flat, weights=weights, minlength=codes)[:codes]
        used += 1
    return Twin(count=count, total=total, elements=int(count.sum()), tensors=used) if used else None


def own_agreement(item: Packed, form: Format, parts: Sequence[Stored]) -> float:
    """Correlation of one tensor alone with its twin, from a small sample."""
    shape = shape_of(item, replace(form.packing, pad=False))
    if shape is None:
        return 0.0
    part = sample(item, replace(form.packing, pad=False), shape, CHECK)
    found = _twin({item.stem: part}, {item.stem: parts}, len(form.table))
    return found.agreement(form.table) if found else 0.0


def twin_part(parts: Sequence[Stored], part: Sample) -> Tensor | None:
    """The twin's values of a sample; of parts that lie one below the other all rows are needed."""
    if len(parts) == 1:
        found = dense_part(parts[0], part)
    else:
        whole = Sample(codes=part.codes, rows=None, columns=part.columns)
        found = torch.cat([dense_part(stored, whole) for stored in parts])
        found = found if part.rows is None else found[torch.from_numpy(part.rows)]
    return found if found.shape == part.codes.shape else None


def scale_ratio(
    item: Packed, form: Format, part: Sample, parts: Sequence[Stored]
) -> tuple[float, float] | None:
    """Mean magnitude of the twin over that of the weight, if the scale multiplies or divides."""
    if item.scale is None:
        return None
    values = twin_part(parts, part)
    scales = form.scale_values(own_scales(item))
    if values is None or not bool(scales.isfinite().all()) or not bool((scales > 0).all()):
        return None
    codes = form.decode(part.codes).abs()
    used = (codes > 0) & codes.isfinite()
    mean = float(values[used].abs().mean() / codes[used].mean()) if bool(used.any()) else 0.0
    return mean / float(scales.mean()), mean / float((1 / scales).mean())
