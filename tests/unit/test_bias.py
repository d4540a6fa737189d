"""The bias test: silent on correct kernels, loud on errors that lean one way."""

import pytest
import torch

from reconcile.contract import Contract
from reconcile.judging.judge import judge_bound
from reconcile.numbers.bias import bias_statistic, is_biased
from reconcile.report import Reason

LOOSE = Contract(split_k=2, partials="bfloat16")


def _problem(seed, m=64, n=256, k=256):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    w = torch.randn(n, k, generator=generator, dtype=torch.float64)
    return x, w, x @ w.T, x.abs() @ w.abs().T


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("way", ["float32 sum", "bfloat16 sum", "ternary"])
def test_correct_kernels_do_not_lean(seed, way):
    x, w, y, _ = _problem(seed)
    if way == "ternary":
        w = w.round().clamp(-1, 1)
        y = x @ w.T * 0.3
        c = ((x.float() @ w.float().T) * torch.tensor(0.3)).bfloat16()
        y = (x.float().double() @ w.T) * float(torch.tensor(0.3))
    elif way == "float32 sum":
        c = (x.float() @ w.float().T).bfloat16()
        y = x.float().double() @ w.float().double().T
    else:
        c = torch.zeros_like(y).bfloat16()
        for start in range(0, 256, 32):
            block = x[:, start : start + 32] @ w[:, start : start + 32].T
            c = (c.double() + block).to(torch.float32).bfloat16()
    assert not is_biased(bias_statistic(c, y), y.shape[1], LOOSE)


@pytest.mark.parametrize("fault", ["one percent up", "one percent down", "truncated"])
def test_errors_that_lean_are_found_inside_a_loose_bound(fault):
    _, _, y, size = _problem(1)
    if fault == "truncated":
        c = (y.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    else:
        c = (y * (1.01 if fault.endswith("up") else 0.99)).bfloat16()

    finding = judge_bound(c, y, size, 256, LOOSE, "float64")

    assert finding.utilisation <= 1
    assert finding.reason is Reason.BIAS


def test_zero_over_zero_is_zero_and_declared_truncation_is_no_bias():
    y = torch.randn(4, 64, dtype=torch.float64).bfloat16().double()
    assert bias_statistic(y.bfloat16(), y) == 0.0
    assert not is_biased(100.0, 256, Contract(accumulator_rounding="rtz"))
    assert not is_biased(100.0, 256, Contract(output_rounding="rtz"))
    assert not is_biased(100.0, 8, LOOSE)
    assert is_biased(100.0, 256, LOOSE)
    assert is_biased(float("nan"), 256, LOOSE)
