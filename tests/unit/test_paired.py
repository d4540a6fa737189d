"""Paired runs: when one may be called faster."""

import itertools
import math
import random

import pytest

from reconcile.numbers.paired import FEWEST, Paired, median_interval, paired


def of(ratios):
    return Paired(ours=tuple(ratios), theirs=(1.0,) * len(ratios))


@pytest.mark.parametrize("n", [1, 2, FEWEST - 1])
def test_too_few_pairs_claim_nothing(n):
    found = of([0.5] * n)
    assert found.interval is None
    assert found.claim == "no difference claimed"
    assert "too few" in found.text()


def test_an_interval_below_one_is_faster():
    found = of([0.8, 0.9, 0.85, 0.82, 0.88, 0.86, 0.84])
    assert found.claim == "faster"
    assert found.text().startswith("faster: ratio 0.850 [0.800, 0.900] over 7 pairs")
    assert of([1 / r for r in found.ratios]).claim == "slower"


def test_one_slow_round_in_seven_is_not_enough():
    assert of([0.8, 0.9, 0.85, 0.82, 0.88, 0.86, 1.4]).claim == "no difference claimed"


@pytest.mark.parametrize("n", range(1, 40))
def test_the_interval_is_the_narrowest_that_covers(n):
    """P(median outside) = 2 P(Bin(n, 1/2) <= rank), summed exactly."""
    found = median_interval(range(n))

    def outside(rank):
        return 2 * sum(math.comb(n, i) for i in range(rank + 1)) / 2**n

    ranks = [rank for rank in range(n // 2) if outside(rank) <= 0.05]
    assert found == (None if not ranks else (ranks[-1], n - 1 - ranks[-1]))


def test_it_covers_as_often_as_it_says():
    draw = random.Random(0)
    hits = sum(
        low <= 0 <= high
        for low, high in (median_interval([draw.gauss() for _ in range(15)]) for _ in range(2000))
    )
    assert 0.95 <= hits / 2000 <= 0.985


def test_both_run_in_turns_and_warm_up_does_not_count():
    order, clock = [], itertools.count(1)

    def runs(name):
        def run():
            order.append(name)
            return float(next(clock))

        return run

    found = paired(runs("a"), runs("b"), rounds=2, warmup=1)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert (found.ours, found.theirs) == ((3.0, 6.0), (4.0, 5.0))
