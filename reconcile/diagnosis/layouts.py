"""Weights whose values are right but in other places: transposed, permuted rows or columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.diagnosis.codes import scale_of
from reconcile.diagnosis.evidence import LinearEvidence, logical_codes
from reconcile.diagnosis.hypothesis import few, named, parameters
from reconcile.diagnosis.model import Fit, LinearModel
from reconcile.weight import QuantizedWeight

ALIKE_TERM = 2.0**-10
"""Share of the largest weight below which a column counts as gone."""
ALIKE = 0.995
"""Correlation from which two rows or columns count as the same one."""


@named("transposed", cost=1)
def transposed(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The weight read column by column: the transpose where it is square."""
    n, k = base.weight.shape
    turned = base.weight.reshape(k, n).T if n != k else base.weight.T
    what = "transposed" if n == k else "read as [K, N] in memory and transposed"
    yield Fit("transposed", replace(base, weight=turned), f"the weight is {what}")
    if isinstance(evidence.weight, QuantizedWeight) and n == k:
        values, scale = _values(evidence, base)
        model = replace(base, weight=values.T * scale)
        text = "the codes are transposed, the scales are not"
        yield Fit("transposed", model, text, parameters(what="codes"), 1)


def _values(evidence: LinearEvidence, base: LinearModel) -> tuple[Tensor, Tensor]:
    """The base's values before the scale, and the scale, [N, K] each."""
    if not isinstance(evidence.weight, QuantizedWeight):
        return base.weight, torch.ones_like(base.weight)
    codes = logical_codes(evidence.weight)
    assert codes is not None
    scale = scale_of(evidence, base, codes)
    return base.weight / scale, scale


PERMUTATIONS = (
    "row_permutation",
    "column_permutation",
    "head_order",
    "pair_order",
    "interleaved_planar",
    "bit_order",
    "nibble_order",
    "shifted_rows",
)


@named(*PERMUTATIONS, cost=2, last_resort=True)
def permutations(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Rows or columns matched with those of the base, with their scales or without."""
    if not len(evidence.columns):
        return
    values, scale = _values(evidence, base)
    quotients = evidence.readout / scale[:, evidence.columns]
    rows = match(evidence.readout, base.weight[:, evidence.columns])
    yield from _moved(evidence, base, 0, rows, base.weight[rows], "with their scales")
    if isinstance(evidence.weight, QuantizedWeight):
        if evidence.weight.format.block is not None:
            rows = match(quotients, values[:, evidence.columns])
        text = "without their scales"
        yield from _moved(evidence, base, 0, rows, values[rows] * scale, text)
    columns = torch.arange(values.shape[1])
    seen, read = evidence.read
    columns[seen] = match((read / scale[:, seen]).T, values.T, seen)
    whole = _completed(columns, seen)
    yield from _moved(evidence, base, 1, whole, values[:, whole] * scale, "")


@named("column_permutation", cost=3, last_resort=True)
def misplaced_terms(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Columns of the weight that meet the activations of other columns, which keep their own.

    As a buffer that is read before it is filled gives: k multiplies what another k should.
    """
    seen, read = evidence.read
    first = {int(k): i for i, k in enumerate(seen.tolist())}
    places = torch.tensor(sorted(first))
    if len(places) < base.weight.shape[1]:
        return
    read = read[:, [first[int(k)] for k in places]]
    power = base.weight.square().sum(0)
    slack = 2.0 * evidence.right.weight.abs().amax() * ALIKE_TERM
    gone = (read.abs().amax(0) <= slack) & (base.weight.abs().amax(0) > 8 * slack)
    extra = read - base.weight
    host = ~gone & (extra.square().sum(0) > ALIKE_TERM * power)
    if not bool(gone.any()) or not bool(host.any()):
        return
    lost, hosts = gone.nonzero().flatten(), host.nonzero().flatten()
    likeness = _unit(base.weight[:, lost].T) @ _unit(extra[:, hosts].T).T  # [lost, hosts]
    best = likeness.max(1)
    found = best.values >= ALIKE
    if not bool(found.any()):
        return
    lost, target = lost[found], hosts[best.indices[found]]
    weight = base.weight.clone()
    weight[:, lost] = 0.0
    weight.index_add_(1, target, base.weight[:, lost])
    steps = target - lost
    same = bool((steps == steps[0]).all())
    where = f"k {int(steps[0]):+d}" if same else f"other k: {few(target)}"
    text = f"{len(lost)} columns of the weight multiply the activations of {where}: k = {few(lost)}"
    known = parameters(columns=lost, of=target)
    free = 2 if same else len(lost)
    yield Fit("column_permutation", replace(base, weight=weight), text, known, free)


def match(read: Tensor, known: Tensor, own: Tensor | None = None) -> Tensor:
    """For each row read, the known row that it equals; its own place where none does.

    Args:
        read: [R, L], any scale.
        known: [S, L].
        own: [R] the place of each row read among the known ones; default: the same number.
    """
    places = torch.arange(len(read)) if own is None else own
    a, b = _unit(read), _unit(known)
    likeness = a @ b.T
    best = likeness.max(1)
    stays = likeness[torch.arange(len(read)), places] >= best.values - 1e-4
    found = (best.values >= ALIKE) & ~stays
    return torch.where(found, best.indices, places)


def _unit(rows: Tensor) -> Tensor:
    wide = torch.nan_to_num(rows, 0.0, 0.0, 0.0).float()
    return wide / wide.square().sum(1, keepdim=True).sqrt().clamp_min(1e-30)


def _completed(found: Tensor, seen: Tensor) -> Tensor:
    """A permutation known at some places, continued by its rule where it has one."""
    if len(torch.unique(seen)) == len(found):
        return found
    places = torch.unique(seen)
    for _, _, rule in rules(len(found), 1):
        if bool((rule[places] == found[places]).all()):
            return rule
    return found


def _moved(
    evidence: LinearEvidence, base: LinearModel, dim: int, source: Tensor, weight: Tensor, how: str
) -> Iterator[Fit]:
    moved = source != torch.arange(len(source))
    if not bool(moved.any()):
        return
    name, text, free = describe_permutation(evidence, dim, source)
    what = "rows" if dim == 0 else "columns"
    yield Fit(
        name,
        replace(base, weight=weight),
        f"{text} ({int(moved.sum())} of {len(source)} {what} are elsewhere"
        f"{', ' + how if how else ''})",
        parameters(axis="NK"[dim], moved=int(moved.sum()), first=source[:8]),
        free,
    )


def rules(size: int, per_byte: int) -> Iterator[tuple[str, str, Tensor]]:
    """Name, words and index map of the permutations that people make."""
    i = torch.arange(size)
    if size % 2 == 0:
        yield "pair_order", "neighbours of a pair are swapped", i ^ 1
    if size % 4 == 0 and per_byte == 4:
        yield "nibble_order", "the two halves of each byte are swapped", i ^ 2
    for group in (2, 4, 8):
        if size % group == 0 and group > 2:
            turned = i - i % group + group - 1 - i % group
            name = "bit_order" if per_byte == group else "pair_order"
            yield name, f"each group of {group} is reversed", turned
    for ways in (2, 3, 4, 8, 16):
        if size % ways == 0 and size > ways:
            part = size // ways
            yield (
                "interleaved_planar",
                f"read as {ways} interleaved parts",
                i % ways * part + i // ways,
            )
            yield "interleaved_planar", f"read as {ways} planar parts", i % part * ways + i // part
    for head in (8, 16, 32, 64, 80, 96, 128, 256):
        if size % head == 0 and size > head:
            half = head // 2
            inside = i % head
            turned = i - inside + inside % 2 * half + inside // 2
            yield "pair_order", f"heads of {head}: halves read as interleaved pairs", turned
            turned = i - inside + inside % half * 2 + inside // half
            yield "pair_order", f"heads of {head}: interleaved pairs read as halves", turned


def describe_permutation(
    evidence: LinearEvidence, dim: int, source: Tensor
) -> tuple[str, str, int]:
    """Name, words and number of parameters of an index map."""
    size = len(source)
    weight = evidence.weight
    per_byte = 1
    if isinstance(weight, QuantizedWeight) and weight.format.packing.dim == dim:
        per_byte = weight.format.packing.per_byte
    for name, text, rule in rules(size, per_byte):
        if torch.equal(rule, source):
            if name == "pair_order" and per_byte == 2:
                return "nibble_order", "the two codes of each byte are swapped", 0
            return name, text, 1
    steps = source - torch.arange(size)
    moved = steps[steps != 0]
    step = int(moved.mode().values)
    if float(((steps - step) % size == 0).double().mean()) > 0.9:
        name = "shifted_rows" if dim == 0 else "column_permutation"
        return name, f"everything is shifted by {step} along {'NK'[dim]}", 1
    for head in (256, 128, 96, 80, 64, 32, 16, 8):
        if size % head == 0 and size >= 2 * head:
            starts = source.view(-1, head)
            whole = starts - starts[:, :1] == torch.arange(head)
            if bool(whole.all()) and bool((starts[:, 0] % head == 0).all()):
                order = (starts[:, 0] // head).tolist()
                return "head_order", f"blocks of {head} lie in the order {few(order)}", len(order)
    name = "row_permutation" if dim == 0 else "column_permutation"
    places = (steps != 0).nonzero().flatten()
    pairs = [f"{int(p)} has {int(source[p])}" for p in places[:2]]
    return name, f"permuted: {'; '.join(pairs)}, ...", len(moved)


HYPOTHESES = (transposed, permutations, misplaced_terms)
