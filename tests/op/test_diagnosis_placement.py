"""Outputs that lie elsewhere, are old or missing, and scales, biases and terms of another place."""

import pytest
import torch
from linears_by_hand import (
    BLOCK,
    CHANNEL,
    MX,
    TENSOR,
    TERNARY,
    diagnosed,
    kernel,
    linear,
    parts,
    said,
    scales_of,
    ternary,
    weight_for,
    weight_of,
)

import reconcile
from reconcile import Contract

RIGHT = kernel(lambda v, s: v * s)
NAMED = ("impulse", "layout", "bound")


def on_rows(change):
    """A change of the right result, as rows [M, N]."""

    def fault(x, weight, bias=None):
        y = RIGHT(x, weight, bias)
        return change(y.view(-1, y.shape[-1])).reshape(y.shape)

    return fault


def last_whole_tile(y):
    whole = len(y) // 32 * 32
    if whole and whole < len(y):
        y[whole:] = y[whole - 1]
    return y


def lower_half_of_a_tile(y):
    if len(y) > 16:
        y[16:32] = y[: len(y[16:32])].clone()
    return y


def closed_up(gap):
    def change(y):
        m, n = y.shape
        wide = torch.zeros(m, n + gap, dtype=y.dtype)
        wide.view(-1)[: y.numel()] = y.reshape(-1)
        return wide[:, :n].contiguous()

    return change


def spread_out(gap):
    def change(y):
        m, n = y.shape
        wide = torch.zeros(m, n + gap, dtype=y.dtype)
        wide[:, :n] = y
        return wide.view(-1)[: y.numel()].view(m, n)

    return change


def last_three_missing(x, weight, bias=None):
    y = torch.empty(*x.shape[:-1], parts(weight)[0].shape[0], dtype=x.dtype)
    y.view(-1)[:-3] = RIGHT(x, weight, bias).view(-1)[:-3]
    return y


def corner_missing(x, weight, bias=None):
    right = RIGHT(x, weight, bias)
    y = torch.empty_like(right)
    flat, good = y.view(-1, y.shape[-1]), right.view(-1, y.shape[-1])
    last = max(0, len(flat) - 2)
    flat[:last], flat[last:, :-5] = good[:last], good[last:, :-5]
    return y


def nothing(x, weight, bias=None):
    return torch.empty(*x.shape[:-1], parts(weight)[0].shape[0], dtype=x.dtype)


class OldRow:
    """One row alone gets what the call before gave its last row."""

    __name__ = "old_row"

    def __init__(self):
        self.kept = {}

    def __call__(self, x, weight, bias=None):
        y = RIGHT(x, weight, bias)
        rows = y.view(-1, y.shape[-1])
        kept = self.kept.get(parts(weight)[0].shape)
        if len(rows) == 1 and kept is not None:
            return kept.view_as(y).clone()
        self.kept[parts(weight)[0].shape] = rows[-1].clone()
        return y


def shared(length, which=0):
    """The scale of one row of each ``length`` serves for all of them."""

    def change(v, s):
        i = torch.arange(len(s))
        return v * s[(i - i % length + which).clamp(max=len(s) - 1)]

    return kernel(change)


def every_odd_block(v, s):
    k = torch.arange(v.shape[1])
    return v * s[:, k // 64 * 64]


def bias_before_scale(x, weight, bias=None):
    v, s = parts(weight)
    return linear(x, v * s, None if bias is None else bias.double() * s[:, 0])


def old_buffer(x, weight, bias=None):
    """The second 64 of K meet the activations of the first 64."""
    v, s = parts(weight)
    given = x.clone()
    if v.shape[1] >= 128:
        given[..., 64:128] = x[..., :64]
    return linear(given, v * s, bias)


def row_before(x, weight, bias=None):
    return RIGHT(x, weight, bias).roll(1, -1)


def halves_of_bytes(x, weight, bias=None):
    return linear(x, ternary(weight, shifts=(4, 6, 0, 2)) * scales_of(weight), bias)


def power_above(v, s):
    return v * 2.0 ** s.log2().ceil()


def third_block_shifted(v, s):
    shift = torch.zeros_like(v)
    shift[:128, 128:] = 1.0
    return (v - shift) * s


def truncated_int8(x, weight, bias=None):
    v, s = parts(weight)
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp_min(1e-7)
    codes = (wide * (torch.full_like(largest, 127.0) / largest)).trunc().clamp(-128, 127)
    step = (largest / torch.full_like(largest, 127.0)).double()
    return linear(codes.double() * step, v * s).to(x.dtype)


FAULTS = [
    ("rows repeat the last whole tile", BLOCK, on_rows(last_whole_tile), "m_tail_dropped"),
    ("half of a tile twice", "dense", on_rows(lower_half_of_a_tile), "shifted_rows"),
    ("gaps written over", CHANNEL, on_rows(closed_up(8)), "strided_output"),
    ("gaps left", "dense", on_rows(spread_out(16)), "strided_output"),
    ("last elements", BLOCK, last_three_missing, "unwritten"),
    ("a corner", "dense", corner_missing, "unwritten"),
    ("nothing", TENSOR, nothing, "unwritten"),
    ("old row", BLOCK, OldRow(), "stale_output"),
    ("first scale of 32", CHANNEL, shared(32), "scale_reused"),
    ("last scale of 4", TERNARY, shared(4, 3), "scale_reused"),
    ("pairs of groups", MX, kernel(every_odd_block), "scale_reused"),
    ("old buffer", CHANNEL, old_buffer, "column_permutation"),
    ("one output on", MX, row_before, "shifted_rows"),
    ("halves of bytes", TERNARY, halves_of_bytes, "nibble_order"),
    ("rounded up", BLOCK, kernel(power_above), "scale_mantissa_dropped"),
    ("one block shifted", BLOCK, kernel(third_block_shifted), "zero_point"),
    ("truncated int8", TERNARY, truncated_int8, "activation_scale"),
]


@pytest.mark.parametrize(
    ("what", "kind", "fault", "name"), FAULTS, ids=[f"{f[0]}, {f[1]}" for f in FAULTS]
)
def test_a_fault_is_named(what, kind, fault, name):
    rows = diagnosed(fault, weight_for(kind), probes=NAMED, batch_sizes=(1, 5, 33))
    best = rows[0].diagnosis[0]

    assert best.name == name, said(rows[0])
    assert best.explains >= 0.9


def test_a_bias_under_the_scale_is_named():
    row = diagnosed(
        bias_before_scale, weight_of(TERNARY, bias=True), probes=("bound",), batch_sizes=(16,)
    )[0]
    assert row.diagnosis[0].name == "bias_scaled", said(row)
    assert row.diagnosis[0].parameters["by"] == "multiplied"


def test_the_rule_of_a_microscaled_activation_is_named():
    def rounded_up(x, weight, bias=None):
        wide = x.float().unflatten(-1, (-1, 32))
        top = wide.abs().amax(-1, keepdim=True).double().clamp_min(2.0**-119)
        step = torch.exp2(torch.ceil(torch.log2(top / 448)))
        codes = (wide / step.float()).clamp(-448, 448).to(torch.float8_e4m3fn).double()
        v, s = parts(weight)
        return linear((codes * step).flatten(-2), v * s, bias).to(x.dtype)

    contract = Contract(activation="mxfp8")
    row = diagnosed(rounded_up, weight_of(MX), contract=contract, probes=("bound",))[0]
    assert row.diagnosis[0].name == "activation_scale", said(row)


@pytest.mark.parametrize(("parts", "name"), [(1, "k_tail_dropped"), (2, "split_missing")])
def test_half_of_k_is_a_split_where_one_is_declared(parts, name):
    half = kernel(lambda v, s: torch.cat([(v * s)[:, :128], 0 * v[:, 128:]], 1))
    contract = Contract(split_k=parts)
    row = diagnosed(half, weight_for(CHANNEL), contract=contract, probes=("impulse",))[0]
    assert row.diagnosis[0].name == name, said(row)


def test_scattered_holes_are_not_called_unwritten_rows():
    """Elements that are NaN here and there have no shape that could be said."""

    def holes(x, weight, bias=None):
        y = RIGHT(x, weight, bias)
        at = torch.rand(y.shape, generator=torch.Generator().manual_seed(y.numel())) < 0.02
        return torch.where(at, torch.nan, y)

    row = diagnosed(holes, weight_for("dense"), probes=("bound",), batch_sizes=(33,))[0]
    assert row.diagnosis[0].name == "none_fits", said(row)


def test_rows_of_noise_are_not_called_misplaced():
    def noise(x, weight, bias=None):
        y = RIGHT(x, weight, bias)
        flat = y.view(-1, y.shape[-1])
        drawn = torch.randn(flat[1::2].shape, generator=torch.Generator().manual_seed(len(flat)))
        flat[1::2] = drawn.to(y) * flat.float().std()
        return y

    row = diagnosed(noise, weight_for("dense"), probes=("bound",), batch_sizes=(32,))[0]
    assert row.diagnosis[0].name == "none_fits", said(row)


def written_across(x, w, b=None):
    y = torch.einsum("gmk,gnk->gmn", x.double(), w.double()).to(x.dtype)
    return y.transpose(0, 1).contiguous().view_as(y)


def one_group_missing(x, w, b=None):
    right = torch.einsum("gmk,gnk->gmn", x.double(), w.double()).to(x.dtype)
    y = torch.empty_like(right)
    y[:2] = right[:2]
    return y


@pytest.mark.parametrize(
    ("fault", "tap", "name"),
    [
        (written_across, "linear:out", "strided_output"),
        (one_group_missing, "linear.2:out", "unwritten"),
    ],
)
def test_a_fault_between_groups_is_named(fault, tap, name):
    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    report = reconcile.check_batched_linear(fault, weight, probes=("bound",), repeats=1)
    first = next(iter(report.failures()))
    assert (first.tap, first.diagnosis[0].name) == (tap, name), said(first)
