"""aiter's published kernel in the interpreter: right without a bias, and with one what is written
in docs/findings/aiter-batched-gemm-bf16.md."""

import pytest
import torch

import reconcile
from reconcile_kernels.aiter_bf16 import BATCHED_GEMM, aiter_package
from reconcile_kernels.aiter_bf16.batched import AITER_INTERPRETER

SHAPES = [(1, 4, 128, 32), (8, 8, 128, 64), (37, 4, 192, 32), (128, 2, 128, 16)]
"""(T, G, D, R) of SGLang's test of the route."""


def operands(t, g, d, r):
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(t, g, d, generator=generator).bfloat16()
    w = torch.randn(g, r, d, generator=generator).bfloat16()
    return o.transpose(0, 1), w, torch.randn(g, r, generator=generator).bfloat16()


def exact(x, w):
    return torch.einsum("gtd,grd->gtr", x.double(), w.double())


@pytest.fixture(scope="module", autouse=True)
def _is_here():
    support = aiter_package.runs_interpreted()
    assert support, support.reason


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_a_bias_it_rounds_once(shape):
    x, w, _ = operands(*shape)
    y = BATCHED_GEMM.run(x, w, None, AITER_INTERPRETER)
    stats = reconcile.error_stats(y, exact(x, w))
    assert stats.max_ulp <= 1
    assert stats.differing <= y.numel() / 100


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_with_a_bias_it_rounds_before_adding(shape):
    """The bits of fl(fl(sum) + bias), which differ from fl(sum + bias) in a quarter of elements."""
    x, w, bias = operands(*shape)
    y = BATCHED_GEMM.run(x, w, bias, AITER_INTERPRETER)
    twice = exact(x, w).bfloat16() + bias[:, None]
    once = (exact(x, w) + bias.double()[:, None]).bfloat16()
    assert int((y != twice).sum()) <= y.numel() / 100
    assert int((y != once).sum()) > y.numel() / 6


def test_the_probes_pass_without_a_bias():
    _, w, _ = operands(1, 3, 96, 48)
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(AITER_INTERPRETER), w, groups=[1], repeats=1
    )
    assert report.exit_code == 0, report.explain()


def test_the_probes_name_the_bias():
    _, w, bias = operands(1, 3, 96, 48)
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(AITER_INTERPRETER),
        w,
        bias=bias,
        groups=[1],
        repeats=1,
        probes=["integer", "bound"],
        batch_sizes=[1, 37],
    )
    assert report.exit_code == 1
    assert {row.check for row in report.failures()} >= {"bound"}
