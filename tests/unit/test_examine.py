"""The close look at a pair: against plain numpy loops, and its size."""

import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from reconcile.evidence import MOST_BINS, MOST_ELEMENTS, MOST_STEPS
from reconcile.judging.examine import Pair, digest, examine, examine_logits
from reconcile.judging.gallery import MOST_FAILING, Gallery
from reconcile.judging.judge import Finding
from reconcile.report import Level, Reason

SHAPES = [(1, 1), (1, 7), (3, 5), (32, 32), (33, 65), (100, 40), (2, 3, 4)]


def pair_of(shape, seed=0, **fields):
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(shape, generator=generator, dtype=torch.float64)
    error = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**-7
    candidate = (reference + error).to(torch.bfloat16)
    return Pair(candidate, reference, **fields)


def matrix(tensor):
    return tensor.double().numpy().reshape(-1, tensor.shape[-1])


@pytest.mark.parametrize("shape", SHAPES)
def test_heat_map_holds_the_largest_of_each_bin(shape):
    pair = pair_of(shape)
    error = np.abs(matrix(pair.candidate) - matrix(pair.reference))
    heat = examine(pair).heat
    assert (heat.rows, heat.columns) == error.shape
    assert len(heat.values) <= MOST_BINS
    assert max(map(len, heat.values)) <= MOST_BINS
    for i, line in enumerate(heat.values):
        for j, value in enumerate(line):
            part = error[i * heat.bin_rows :, j * heat.bin_columns :]
            part = part[: heat.bin_rows, : heat.bin_columns]
            assert value == pytest.approx(part.max(), rel=1e-3)
    assert len(heat.values) * heat.bin_rows >= heat.rows


def test_heat_map_of_a_bound_is_its_share_and_names_the_tiles():
    pair = pair_of((4, 256), bound=torch.full((4, 256), 0.5, dtype=torch.float64))
    heat = examine(pair, (128, 32)).heat
    plain = examine(pair_of((4, 256))).heat
    assert heat.unit == "share of the bound"
    assert plain.unit == "|c - r|"
    assert len(heat.values[0]) == len(plain.values[0])
    assert (heat.tile_rows, heat.tile_columns) == (None, 128)
    impulses = dataclasses.replace(pair_of((64, 256)), places=torch.arange(64))
    heat = examine(impulses, (128, 32)).heat
    assert (heat.row_axis, heat.tile_rows, heat.tile_columns) == ("k", 32, 128)
    shuffled = dataclasses.replace(impulses, places=torch.arange(64).flip(0))
    assert examine(shuffled, (128, 32)).heat.tile_rows is None


def least_share(c, y, bound):
    """The least t with fl(y - tE) <= c <= fl(y + tE), by bisection over the definition."""

    def accepts(t):
        low, high = (
            float(np.float64(y + s * t * bound).astype(ml_dtypes.bfloat16)) for s in (-1, 1)
        )
        return low <= c <= high

    below, above = 0.0, 1e4
    if accepts(0.0):
        return 0.0
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (below, middle) if accepts(middle) else (middle, above)
    return above


def test_a_share_of_the_bound_is_the_least_that_accepts_the_element():
    pair = pair_of((3, 4), bound=torch.full((3, 4), 2.0**-9, dtype=torch.float64))
    found = examine(pair).heat.values
    expected = [
        [least_share(float(c), float(y), 2.0**-9) for c, y in zip(*rows, strict=True)]
        for rows in zip(pair.candidate.tolist(), pair.reference.tolist(), strict=True)
    ]
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-3)
    assert np.array(expected).max() > 0


def test_a_zero_bound_is_exceeded_by_any_error_and_met_by_none():
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    pair = Pair(torch.tensor([[1.0, 0.0]]), zeros, zeros)
    assert examine(pair).heat.values == ((math.inf, 0.0),)


@pytest.mark.parametrize("shape", SHAPES)
def test_worst_elements_and_their_ulps(shape):
    pair = pair_of(shape)
    c, r = pair.candidate.double().numpy(), pair.reference.numpy()
    order = np.argsort(-np.abs(c - r), axis=None, kind="stable")[:MOST_ELEMENTS]
    codes = r.astype(ml_dtypes.bfloat16)  # float64 -> bfloat16 by an independent library
    found = examine(pair).worst
    assert [item.index for item in found] == [
        tuple(int(i) for i in np.unravel_index(flat, shape)) for flat in order
    ]
    for item in found:
        assert item.candidate == c[item.index]
        assert item.reference == r[item.index]
        assert item.error == c[item.index] - r[item.index]
        assert item.ulps == steps(c[item.index], float(codes[item.index]))


def steps(a, b):
    """Number of bfloat16 values from b to a, by walking."""
    count, target = 0, ml_dtypes.bfloat16(a)
    at = ml_dtypes.bfloat16(b)
    while at != target:
        at = np.nextafter(at, target)
        count += 1
    return count


def test_impulses_are_placed_by_their_k():
    reference = torch.zeros(3, 4, dtype=torch.float64)
    candidate = reference.float()
    candidate[1, 2] = 1.0
    (item,) = examine(Pair(candidate, reference, places=torch.tensor([9, 5, 7]))).worst
    assert item.index == (5, 2)


def test_histograms_count_every_finite_element_once():
    pair = pair_of((20, 30))
    c, r = matrix(pair.candidate), matrix(pair.reference)
    rounded = r.astype(ml_dtypes.bfloat16).astype(np.float64)
    found = examine(pair).histogram
    for pairs, zeros, error in (
        (found.seen, found.seen_zero, np.abs(c - r)),
        (found.expected, found.expected_zero, np.abs(rounded - r)),
    ):
        assert zeros == int((error == 0).sum())
        for exponent, count in pairs:
            inside = (error >= 2.0 ** (exponent - 1)) & (error < 2.0**exponent)
            assert count == int(inside.sum()) > 0
        assert zeros + sum(count for _, count in pairs) == error.size


@pytest.mark.parametrize("shape", [(3, 5), (130, 70)])
def test_profiles_are_root_mean_squares(shape):
    pair = pair_of(shape)
    squares = (matrix(pair.candidate) - matrix(pair.reference)) ** 2
    found = examine(pair)
    for profile, along in ((found.row_profile, 1), (found.column_profile, 0)):
        means = squares.mean(along)
        assert len(profile.values) == math.ceil(len(means) / profile.step) <= MOST_STEPS
        for at, value in enumerate(profile.values):
            part = means[at * profile.step : (at + 1) * profile.step]
            assert value == pytest.approx(math.sqrt(part.mean()), rel=1e-3)


def test_nan_is_worst_and_alike_overflow_is_no_error():
    huge = 2.0**300
    reference = torch.tensor([[1.0, huge, 3.0, math.nan]], dtype=torch.float64)
    candidate = torch.tensor([[1.0, math.inf, math.nan, math.nan]])
    (item,) = examine(Pair(candidate, reference)).worst
    assert item.index == (0, 2)
    assert item.ulps is None
    assert math.isnan(item.error)
    assert examine(Pair(candidate, reference)).heat.values == ((0.0, 0.0, math.inf, 0.0),)


def test_the_largest_evidence_is_small():
    pair = pair_of((4096, 512), bound=torch.full((4096, 512), 1e-3, dtype=torch.float64))
    assert len(json.dumps(dataclasses.asdict(examine(pair, (128, 128))))) < 16_000


def test_digest_tells_bits_dtype_and_shape():
    x = torch.tensor([[1.0, -0.0]])
    same = [x.clone(), x.repeat(2, 1)[:1]]
    other = [-x, x.abs(), x.reshape(2, 1), x.double(), x.to(torch.bfloat16)]
    assert {digest(item) for item in same} == {digest(x)}
    assert len({digest(item) for item in [x, *other]}) == 6


def test_logits_are_ranked_where_they_differ_most():
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(1, 5, 30, generator=generator, dtype=torch.float64)
    candidate = reference.clone()
    candidate[0, 3] = candidate[0, 3].flip(0)
    found = examine_logits(candidate, reference, 10)
    r = reference[0, 3].numpy()
    order = np.argsort(-r)
    assert (found.ranking.position, found.ranking.positions) == (3, 5)
    assert [item.token for item in found.ranking.ranks] == order[:10].tolist()
    assert [item.candidate_token for item in found.ranking.ranks] == (29 - order[:10]).tolist()
    assert found.ranking.ranks[0].margin == r[order[0]] - r[order[1]]
    assert found.ranking.ranks[9].margin is None
    p, q = np.exp(r) / np.exp(r).sum(), np.exp(r[::-1]) / np.exp(r).sum()
    assert found.kl_by_token[3] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-3)
    assert found.kl_by_token[:3] == (0.0, 0.0, 0.0)


def finding(used, reason=None):
    return Finding({}, utilisation=used, reason=reason, pair=pair_of((2, 2)))


def test_gallery_looks_at_failures_once_per_place_and_at_records():
    gallery = Gallery()
    looked = [
        gallery.look(level, tap, "c", finding(used, reason)).evidence is not None
        for level, tap, used, reason in (
            (Level.OP, "a", 0.1, None),
            (Level.OP, "b", 0.05, None),
            (Level.OP, "b", 0.2, None),
            (Level.MODULE, "b", 0.01, None),
            (Level.OP, "a", 9.0, Reason.OVER_LIMIT),
            (Level.OP, "a", 99.0, Reason.OVER_LIMIT),
            (Level.OP, "a", 99.0, Reason.BLOCKED),
            (Level.OP, "c", 0.3, None),
            (Level.OP, "c", None, None),
        )
    ]
    assert looked == [True, False, True, True, True, False, False, True, False]


def test_a_large_passing_row_is_not_looked_at():
    large = torch.zeros(1, (1 << 20) + 1)
    pair = Pair(large, large.double())
    passing = Finding({}, utilisation=0.5, pair=pair)
    failing = Finding({}, utilisation=2.0, reason=Reason.OVER_LIMIT, pair=pair)
    looked = [Gallery().look(Level.OP, "a", "c", item).evidence for item in (passing, failing)]
    assert looked[0] is None
    assert looked[1] is not None


def test_gallery_is_bounded():
    gallery = Gallery()
    found = [
        gallery.look(Level.OP, str(n), "c", finding(2.0, Reason.OVER_LIMIT)) for n in range(60)
    ]
    assert sum(item.evidence is not None for item in found) == MOST_FAILING
