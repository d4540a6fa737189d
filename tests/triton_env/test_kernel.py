"""Our kernel in Triton's interpreter: the case, the sizes, the mutants; compiled for real GPUs."""

from collections import Counter

import pytest
import torch
from reconcile_mutants.aiter_bf16 import (
    BATCH,
    FAULTS,
    OP,
    PROBES,
    SIZES,
    K,
    Kernel,
    N,
    bias_of,
    weight_of,
)

import reconcile
from reconcile.case import load_case
from reconcile.registry import embedded_case
from reconcile.report import Level, Verdict
from reconcile.session import Session, override
from reconcile_kernels.aiter_bf16 import BATCHED_GEMM, source
from reconcile_kernels.aiter_bf16.batched import TRITON_INTERPRETER, TRITON_ON_CPU

UPSTREAM_SHAPES = [(1, 4, 128, 32), (8, 8, 128, 64), (37, 4, 192, 32), (128, 2, 128, 16)]


def operands(t, g, d, r):
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(t, g, d, generator=generator).bfloat16()
    return o.transpose(0, 1), torch.randn(g, r, d, generator=generator).bfloat16()


@pytest.mark.parametrize("t", [1, 8, 37, 128])
def test_reduced_sizes(t):
    x, w = operands(t, 8, 128, 32)
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(TRITON_INTERPRETER),
        w,
        groups=[7],
        batch_sizes=[t],
        probes=["integer", "bound"],
        repeats=1,
    )
    assert report.exit_code == 0, report.explain()
    y = BATCHED_GEMM.run(x, w, None, TRITON_INTERPRETER)
    other = BATCHED_GEMM.run(x, w, None, TRITON_ON_CPU)
    stats = reconcile.error_stats(y, other.double())
    assert stats.max_ulp <= 1
    assert stats.differing <= y.numel() / 100


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", UPSTREAM_SHAPES, ids=str)
def test_upstream_shapes(shape, biased):
    x, w = operands(*shape)
    bias = bias_of(shape=(w.shape[0], w.shape[1])) if biased else None
    y = BATCHED_GEMM.run(x, w, bias, TRITON_INTERPRETER)
    exact = torch.einsum("gtd,grd->gtr", x.double(), w.double())
    exact = exact if bias is None else exact + bias.double()[:, None]
    stats = reconcile.error_stats(y, exact)
    assert stats.max_ulp <= 1
    assert stats.differing <= y.numel() / 100


def test_the_case_passes():
    case = override(load_case(embedded_case("dsv4-wo_a")), engine="triton-interpreter")
    report = Session(case).run(levels=["op"])
    assert report.exit_code == 0, report.explain()
    assert {row.engine for row in report.rows} == {"triton-interpreter"}
    assert {row.execution for row in report.rows} == {"emulated"}
    assert any("multiplies bit patterns" in n for n in _notes(report))
    assert "calls of aiter_bf16.batched_gemm in the model: prefill 9, decode 18" in report.notices
    ops = [r for r in report.rows if r.level is Level.OP and r.check == "chained"]
    everywhere = Counter(_rows(r) for r in ops if r.kernel == "aiter_bf16.batched_gemm")
    # three layers; two decode steps after each of the three prefills
    assert everywhere == {
        ("prefill", 8): 3,
        ("prefill", 37): 3,
        ("prefill", 128): 3,
        ("decode", 1): 18,
    }
    assert Counter(_rows(r) for r in ops if r.kernel == "aiter_bf16.wo_a") == {("decode", 1): 18}


def _rows(row):
    """Phase and M of an op; its shape is (G, M, N, K)."""
    return row.pass_.partition("-")[0], row.shape[1]


def _notes(report):
    return tuple(note for source in report.provenance for note in source.notes)


def test_the_clean_source_passes():
    assert judged(Kernel(load=source.in_triton), bias=True).verdict is Verdict.PASS


@pytest.mark.parametrize("name", FAULTS)
def test_a_mutant_is_found(name):
    causes, *_, changes, options = FAULTS[name]
    report = judged(Kernel(*changes, load=source.in_triton), **options)
    assert report.exit_code == 1
    assert report.first_divergence.tap == options.get("op", OP)
    diagnosis = report.rows[report.first_divergence.row].diagnosis
    assert diagnosis[0].name in causes


def judged(kernel, bias=False, k=K, **_):
    given = {"bias": bias_of()} if bias else {}
    return reconcile.check_batched_linear(
        kernel,
        weight_of(shape=(BATCH, N, k)),
        contract=kernel.contract,
        groups=[BATCH // 2],
        batch_sizes=SIZES,
        repeats=1,
        probes=PROBES,
        **given,
    )


def test_real_size():
    """G = 8, D = 4096, R = 1024: one group of eight is probed, all of them are called once."""
    _, w = operands(8, 8, 4096, 1024)
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(TRITON_INTERPRETER),
        w,
        groups=[5],
        batch_sizes=[8],
        probes=["bound"],
        repeats=1,
    )
    assert report.exit_code == 0, report.explain()
    assert {(row.check, row.shape) for row in report.rows} == {
        ("bound", (8, 1024, 4096)),
        ("layout", (8, 5, 1024, 4096)),
    }
