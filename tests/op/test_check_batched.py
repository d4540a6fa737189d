"""Batched linears: clean ones pass, faults of one group or between groups fail."""

import pytest
import torch

import reconcile
from reconcile.report import Reason

CONTRACT = reconcile.Contract()


@pytest.fixture(scope="module")
def weight():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 96, 128, generator=generator).bfloat16()


def batched(x, w, bias=None):
    y = torch.einsum("gmk,gnk->gmn", x.float(), w.float())
    return (y if bias is None else y + bias[:, None].float()).bfloat16()


def last_group_reads_the_one_before(x, w, bias=None):
    y = batched(x, w, bias)
    y[-1] = batched(x, w.roll(1, 0), bias)[-1]
    return y


def group_dimension_in_the_wrong_place(x, w, bias=None):
    y = batched(x, w, bias)
    return y.transpose(0, 1).contiguous().view_as(y)


def drops_the_last_k_of_group_0(x, w, bias=None):
    w = w.clone()
    w[0, :, -1] = 0
    return batched(x, w, bias)


def bias_of_group_0_for_all(x, w, bias=None):
    return batched(x, w, None if bias is None else bias * 0 + bias[:1] * 0)


def changes_its_input(x, w, bias=None):
    y = batched(x, w, bias)
    x.mul_(2)
    return y


def wrong_rank(x, w, bias=None):
    return batched(x, w, bias)[0]


def test_a_clean_kernel_passes(weight):
    report = reconcile.check_batched_linear(batched, weight, contract=CONTRACT)
    assert report.exit_code == 0, report.explain()
    assert {row.tap for row in report.rows} == {
        "linear:out",
        *(f"linear.{g}:out" for g in (0, 2, 3, 5)),
    }
    assert "probed groups [0, 2, 3, 5] of 6" in report.notices


def test_a_clean_kernel_with_bias_passes(weight):
    bias = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    report = reconcile.check_batched_linear(
        batched, weight, bias=bias, contract=CONTRACT, groups=[1]
    )
    assert report.exit_code == 0, report.explain()
    dropped = reconcile.check_batched_linear(
        bias_of_group_0_for_all, weight, bias=bias, contract=CONTRACT, groups=[1]
    )
    assert dropped.exit_code == 1


@pytest.mark.parametrize(
    "kernel",
    [
        last_group_reads_the_one_before,
        group_dimension_in_the_wrong_place,
        drops_the_last_k_of_group_0,
        changes_its_input,
        wrong_rank,
    ],
)
def test_a_fault_fails(weight, kernel):
    assert reconcile.check_batched_linear(kernel, weight, contract=CONTRACT).exit_code == 1


def test_the_faulty_group_is_named(weight):
    report = reconcile.check_batched_linear(
        drops_the_last_k_of_group_0, weight, contract=CONTRACT, groups=range(6)
    )
    assert {row.tap for row in report.failures()} == {"linear.0:out"}
    assert "only at k = 127" in next(report.failures()).text


@pytest.mark.parametrize(
    "arguments", [{"groups": []}, {"groups": [6]}, {"bias": torch.ones(6)}, {"probes": "x"}]
)
def test_bad_arguments(weight, arguments):
    with pytest.raises(reconcile.ReconcileError):
        reconcile.check_batched_linear(batched, weight, **arguments)


def bias_of_group_0(x, w, bias=None):
    return batched(x, w, None if bias is None else bias[:1].expand_as(bias))


def changes_the_bias(x, w, bias=None):
    y = batched(x, w, bias)
    if bias is not None:
        bias.add_(1)
    return y


def changes_other_groups(x, w, bias=None):
    y = batched(x, w, bias)
    x[0].zero_()
    x[-1].zero_()
    return y


def spreads_nan(x, w, bias=None):
    y = batched(x, w, bias)
    return torch.full_like(y, torch.nan) if bool(x.isnan().any()) else y


@pytest.mark.parametrize(
    "kernel", [bias_of_group_0, changes_the_bias, changes_other_groups, spreads_nan]
)
def test_a_fault_between_groups_fails(weight, kernel):
    bias = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    report = reconcile.check_batched_linear(
        kernel, weight, bias=bias, contract=CONTRACT, groups=[1]
    )
    assert report.exit_code == 1


def does_not_write_group_2(x, w, bias=None):
    y = torch.empty(*x.shape[:2], w.shape[1], dtype=x.dtype)
    right = batched(x, w, bias)
    for group in (0, 1, 3, 4, 5):
        y[group] = right[group]
    return y


def test_a_group_that_is_not_written_is_named(weight):
    report = reconcile.check_batched_linear(does_not_write_group_2, weight, contract=CONTRACT)
    assert {row.tap for row in report.failures()} == {"linear.2:out"}
    assert next(report.failures()).reason is Reason.UNWRITTEN
    unprobed = reconcile.check_batched_linear(
        does_not_write_group_2, weight, contract=CONTRACT, groups=[0]
    )
    assert "groups [2]" in next(unprobed.failures()).text


def takes_x_as_contiguous(x, w, bias=None):
    """Right wherever x lies as [G, M, K], which is where the group's probes put it."""
    strides = (x.shape[1] * x.shape[2], x.shape[2], 1)
    return batched(x.as_strided(x.shape, strides), w, bias)


def test_a_strided_x_is_tried(weight):
    report = reconcile.check_batched_linear(
        takes_x_as_contiguous, weight, contract=CONTRACT, groups=[1], probes=["bound"]
    )
    (failure,) = report.failures()
    assert (failure.tap, failure.check, failure.shape) == ("linear:out", "layout", (6, 5, 96, 128))


def test_a_faulty_group_explains_the_call_on_all(weight):
    report = reconcile.check_batched_linear(
        drops_the_last_k_of_group_0, weight, contract=CONTRACT, groups=[0], probes=["impulse"]
    )
    assert report.rows[-1].reason is reconcile.Reason.BLOCKED
    assert "explained by linear.0:out" in report.rows[-1].text


def writes_y_as_contiguous(x, w, bias=None):
    """The right numbers, in the memory order of [G, M, N], in an output that has another."""
    memory = batched(x, w, bias).contiguous().view(x.shape[1], x.shape[0], w.shape[1])
    return memory.transpose(0, 1)


def weight_of_the_group_before(x, w, bias=None):
    return batched(x, w.roll(1, 0), bias)


@pytest.mark.parametrize(
    ("kernel", "name", "parameters"),
    [
        (takes_x_as_contiguous, "strided_input", {}),
        (writes_y_as_contiguous, "strided_output", {}),
        (weight_of_the_group_before, "group_shifted", {"shift": 1}),
        (bias_of_group_0, "group_bias", {"group": 0}),
    ],
)
def test_what_is_wrong_between_groups_is_named(weight, kernel, name, parameters):
    bias = torch.randn(6, 96, generator=torch.Generator().manual_seed(1))
    report = reconcile.check_batched_linear(
        kernel, weight, bias=bias, contract=CONTRACT, groups=[1], probes=["bound"]
    )
    (failure,) = report.failures()
    best = failure.diagnosis[0]
    assert (failure.tap, best.name, best.parameters) == ("linear:out", name, parameters)
    assert best.explains > 0.99
    others = [row for row in report.rows if row is not failure]
    assert {row.reason for row in others} <= {None, reconcile.Reason.BLOCKED}


def test_a_fault_inside_a_group_is_not_called_one_between_them(weight):
    report = reconcile.check_batched_linear(
        drops_the_last_k_of_group_0, weight, contract=CONTRACT, groups=[1], probes=["bound"]
    )
    assert report.exit_code == 1
    assert report.rows[-1].diagnosis == ()
