"""Batched linears: layouts, the exact module against einsum, and what cannot be a batch."""

import pytest
import torch

import reconcile
from reconcile.contract import Contract
from reconcile.exceptions import FormatError
from reconcile.grouped import (
    GroupedBaseline,
    GroupedReference,
    GroupedWeight,
    flat_rows,
    format_name,
    group_count,
    numel,
    row_count,
    take_rows,
    to_kernel,
    to_module,
)
from reconcile.kernel import PYTHON, FunctionKernel
from reconcile.linears import DenseWeight
from reconcile.replay import KernelLinear, Prepared

G, N, K = 3, 4, 8


@pytest.fixture
def weight():
    tensor = torch.randn(G, N, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.randn(G, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    groups = [DenseWeight(tensor=t, bias=b) for t, b in zip(tensor, bias, strict=True)]
    return GroupedWeight(groups=tuple(groups), name="wo_a")


def exact(x, weight):
    y = torch.einsum("...gk,gnk->...gn", x.double(), weight.dequantize())
    return y + weight.bias.double()


@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
def test_layouts_are_inverse(lead):
    x = torch.randn(*lead, G, K)
    given = to_kernel(x, G)
    assert given.shape == (G, row_count(x, G), K)
    assert given.data_ptr() == x.data_ptr()  # a view, as in the model
    assert torch.equal(to_module(given, lead, G), x)
    assert torch.equal(take_rows(given, G, 0, 1)[:, 0], x.reshape(-1, G, K)[0])
    assert flat_rows(x, G).shape == (row_count(x, G), G * K)
    assert to_kernel(x, None) is x


@pytest.mark.parametrize("lead", [(1,), (2, 5)])
def test_reference_and_baseline_are_the_batched_product(weight, lead):
    x = torch.randn(*lead, G, K).bfloat16()
    reference = GroupedReference(weight, Contract(), torch.float64)
    assert torch.allclose(reference(x), exact(x, weight), rtol=1e-14, atol=1e-14)
    size = torch.einsum("...gk,gnk->...gn", x.double().abs(), weight.dequantize().abs())
    assert torch.allclose(reference.magnitude(x), size + weight.bias.double().abs(), rtol=1e-14)
    plain = GroupedBaseline(weight, torch.bfloat16)(x)
    assert plain.dtype == torch.bfloat16
    assert torch.allclose(plain.double(), exact(x, weight), rtol=1e-2, atol=1e-1)


def test_the_contract_counts_the_rows_of_one_group(weight):
    """M is rows per group: 3 groups of 2 rows are 2 rows, not 6."""
    narrow = Contract(weight_rounding="bfloat16")
    by_batch = Contract(by_batch=((2, narrow),))
    fine = [DenseWeight(tensor=torch.full((N, K), 1 + 2.0**-12)) for _ in range(G)]
    reference = GroupedReference(GroupedWeight(groups=tuple(fine)), by_batch, torch.float64)
    assert float(reference(torch.ones(2, G, K))[0, 0, 0]) == K
    assert float(reference(torch.ones(3, G, K))[0, 0, 0]) == K * (1 + 2.0**-12)


def test_facts(weight):
    assert (group_count(weight), format_name(weight), numel(weight)) == (G, "bfloat16", G * N * K)
    assert weight.shape == (N, K)
    assert weight.bias.shape == (G, N)


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (DenseWeight(tensor=torch.ones(2, 3)), DenseWeight(tensor=torch.ones(3, 2))),
        (DenseWeight(tensor=torch.ones(2, 3)), DenseWeight(tensor=torch.ones(2, 3).half())),
        (
            DenseWeight(tensor=torch.ones(2, 3)),
            DenseWeight(tensor=torch.ones(2, 3), bias=torch.ones(2)),
        ),
    ],
)
def test_what_is_no_batch_is_refused(groups):
    with pytest.raises(FormatError, match="one shape and format"):
        GroupedWeight(groups=groups)


def batched(x, w, bias=None):
    y = torch.einsum("gmk,gnk->gmn", x.float(), w.float())
    return (y if bias is None else y + bias[:, None].float()).bfloat16()


def test_a_kernel_in_a_model_sees_the_group_in_front(weight):
    prepared = Prepared.of(FunctionKernel("batched", batched), PYTHON, weight, torch.bfloat16)
    module = KernelLinear(prepared)
    x = torch.randn(2, 5, G, K).bfloat16()
    y = module(x)
    assert y.shape == (2, 5, G, N)
    assert torch.equal(y, exact(x, weight).bfloat16())
    assert (module.calls, module.mutation, module.fallback) == (1, "", "")


def test_a_fallback_is_remembered_over_later_calls_of_the_kernel(weight):
    """A task is one answer of many calls: one of them by other code is enough to say so."""

    def function(x, w, bias=None):
        if x.shape[1] > 1:
            reconcile.fell_back("only one row")
        return batched(x, w, bias)

    prepared = Prepared.of(FunctionKernel("batched", function), PYTHON, weight, torch.bfloat16)
    module = KernelLinear(prepared)
    for rows in (5, 1, 5, 1):
        module(torch.randn(rows, G, K).bfloat16())
    assert (module.calls, module.fallback) == (2, "only one row")
    module.forget()
    module(torch.randn(1, G, K).bfloat16())
    assert (module.calls, module.fallback) == (3, "")


def test_a_kernel_that_writes_into_its_weight_is_found(weight):
    def writes(x, w, bias=None):
        return batched(x, w, bias)

    def prepare(w):
        w.mul_(2)
        return w

    writes.prepare = prepare
    call = Prepared.attempt(FunctionKernel("writes", writes), PYTHON, weight, torch.bfloat16)
    assert call.reason is reconcile.Reason.INPUT_MUTATED


def test_outside_its_phase_plain_torch_computes(weight):
    prepared = Prepared.of(FunctionKernel("batched", batched), PYTHON, weight, torch.bfloat16)
    elsewhere = GroupedBaseline(weight, torch.bfloat16)
    module = KernelLinear(prepared, elsewhere)
    module.used = False
    x = torch.randn(2, G, K).bfloat16()
    assert torch.equal(module(x), elsewhere(x))
    assert module.calls == 0
