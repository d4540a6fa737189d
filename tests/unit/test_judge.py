"""Judgements of one pair where there is nothing to hold it to."""

import math

import pytest
import torch

from reconcile.judging.judge import judge_baseline, judge_numbers, worst_of
from reconcile.judging.sides import largest
from reconcile.numbers.limits import baseline_limits
from reconcile.report import Reason

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
NAMES = ("max_abs", "nmse", "worst_row_nmse")


@pytest.mark.parametrize("odd", [math.inf, math.nan])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [0.0, 1e-6, 10.0])
def test_where_plain_torch_overflows_nothing_is_said(odd, name, error):
    """Neither that a right kernel fails (NaN) nor that any error passes (infinity)."""
    baseline = dict.fromkeys(NAMES, 1e-3) | {name: odd}
    finding = judge_baseline(X + error, X, baseline, "float16", "here")
    assert finding.reason is Reason.VACUOUS
    assert name in finding.text


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_divergence_without_a_limit_is_not_within_it(odd):
    limits = baseline_limits({"kl_mean": 1e-3, "kl_max": odd}, ("kl_mean", "kl_max"), "x", "y")
    finding = judge_numbers({"kl_mean": 0.0, "kl_max": 5.0}, limits)
    assert finding.reason is Reason.VACUOUS


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0)])
def test_nan_of_one_prompt_is_not_lost_in_the_pool(values):
    pooled = largest([{"max_abs": value} for value in values])
    assert pooled is not None
    assert math.isnan(pooled["max_abs"])


def test_the_worst_of_several_outputs():
    baseline = dict.fromkeys(NAMES, 1e-3)
    right = judge_baseline(X + 1e-4, X, baseline, "float32", "here")
    wrong = judge_baseline(X + 1, X, baseline, "float32", "here")
    lost = judge_baseline(torch.full_like(X, torch.nan), X, baseline, "float32", "here")
    assert worst_of([right, wrong, right]) == 1
    assert worst_of([right, lost]) == 1
