"""Model-level numbers against formulas in numpy's long double."""

import math

import numpy as np
import pytest
import torch

from reconcile.numbers.model_metrics import model_stats

INF, NAN = math.inf, math.nan


def logits(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def log_softmax(x):
    x = np.asarray(x, dtype=np.longdouble)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def rank(*order, size=12):
    """Logits whose order is ``order``, the rest below."""
    row = [-100.0 - i for i in range(size)]
    for place, token in enumerate(order):
        row[token] = 10.0 - place
    return row


def test_kl_and_likelihood():
    generator = torch.Generator().manual_seed(0)
    r = 4 * torch.randn(1, 6, 50, generator=generator, dtype=torch.float64)
    c = (r + 0.1 * torch.randn(1, 6, 50, generator=generator)).to(torch.bfloat16)
    tokens = [3, 1, 4, 1, 5, 9]
    found = model_stats(c, r, tokens)
    log_c, log_r = log_softmax(c[0].double().numpy()), log_softmax(r[0].numpy())
    kl = (np.exp(log_r) * (log_r - log_c)).sum(-1)
    assert found["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-10)
    assert found["kl_max"] == pytest.approx(float(kl.max()), rel=1e-10)
    for name, log in (("nll_candidate", log_c), ("nll_reference", log_r)):
        expected = -np.mean([log[t, tokens[t + 1]] for t in range(5)])
        assert found[name] == pytest.approx(float(expected), rel=1e-12)


def test_identical_logits():
    r = torch.randn(2, 3, 40, dtype=torch.float64)
    found = model_stats(r, r, list(range(6)))
    assert found["top10_set_gap"] == found["top10_order_gap"] == found["kl_max"] == 0.0
    assert found["top10_sets_equal"] == found["argmax_agreement"] == 1.0
    assert found["nll_candidate"] == found["nll_reference"]


def test_kl_is_of_the_reference():
    r, c = logits([0.0, math.log(3.0)]), logits([0.0, 0.0])
    assert model_stats(c, r, [0])["kl_max"] == pytest.approx(
        0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    )


TEN = tuple(range(10))
GAPS = {
    "equal": (rank(*TEN), rank(*TEN), 0.0, 0.0),
    "last replaced": (rank(*TEN[:9], 10), rank(*TEN, 10), 1.0, 0.0),
    "two swapped": (rank(1, 0, *TEN[2:]), rank(*TEN), 0.0, 1.0),
    "ends swapped": (rank(9, *TEN[1:9], 0), rank(*TEN), 0.0, 9.0),
    "top is lost": (rank(*TEN[1:], 10, 0), rank(*TEN, 10), 10.0, 0.0),
    "fewer than ten": (rank(1, 0, 2, size=3), rank(0, 1, 2, size=3), 0.0, 1.0),
}


@pytest.mark.parametrize("case", GAPS)
def test_top10_gaps(case):
    c, r, set_gap, order_gap = GAPS[case]
    found = model_stats(logits(c, r), logits(r, r), [0, 1])
    assert (found["top10_set_gap"], found["top10_order_gap"]) == (set_gap, order_gap)
    assert found["top10_sets_equal"] == (1.0 if set_gap == 0 else 0.5)


def test_ties_of_the_reference_are_no_gap():
    r = rank(*TEN, 10)
    r[9] = r[10] = 5.5  # the tenth place is shared
    r[0] = r[1] = 11.0
    c = list(r)
    c[10], c[9] = 5.6, 5.4
    c[1] = 12.0
    found = model_stats(logits(c), logits(r), [0])
    assert found["top10_set_gap"] == found["top10_order_gap"] == 0.0
    constant = logits([1.0] * 30)
    assert model_stats(logits(list(range(30))), constant, [0])["top10_order_gap"] == 0.0


@pytest.mark.parametrize("side", ["candidate", "reference"])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_nan_logits_never_agree(side, place):
    good, bad = logits(rank(*TEN), rank(*TEN)), logits(rank(*TEN), rank(*TEN))
    bad[0, 1, place] = NAN
    found = model_stats(*((bad, good) if side == "candidate" else (good, bad)), [0, 1])
    for name in ("top10_set_gap", "top10_order_gap", "kl_mean", "kl_max"):
        assert math.isnan(found[name]), name


def test_excluded_tokens_count_nothing_and_lost_ones_everything():
    r = logits([0.0, 1.0, -INF])
    assert model_stats(r, r, [0])["kl_max"] == 0.0
    assert model_stats(r, r, [0])["top10_order_gap"] == 0.0
    assert model_stats(r, logits([0.0, 1.0, 0.5]), [0])["kl_max"] == INF


def test_single_token_has_no_likelihood():
    found = model_stats(logits([0.0, 1.0]), logits([0.0, 1.0]), [1])
    assert math.isnan(found["nll_reference"])
    assert math.isnan(found["nll_candidate"])
    assert found["kl_mean"] == 0.0


def test_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        model_stats(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3), [0, 1])
    with pytest.raises(ValueError, match="expected logits for 3 tokens"):
        model_stats(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), [0, 1, 2])
