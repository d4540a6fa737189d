"""Faults in batched linears: between groups, and in one group alone."""

from __future__ import annotations

import functools

import torch
from reconcile_mutants.common import PLAIN

from reconcile.selftest import BatchedTrial, Mutant

GROUPS, N, K = 4, 96, 128


@functools.cache
def weight():
    return torch.randn(GROUPS, N, K, generator=torch.Generator().manual_seed(0)).bfloat16()


@functools.cache
def bias():
    return torch.randn(GROUPS, N, generator=torch.Generator().manual_seed(1))


def right(x, w, b=None):
    """Float32 sums, one rounding."""
    y = torch.einsum("gmk,gnk->gmn", x.float(), w.float())
    return (y if b is None else y + b[:, None].float()).to(x.dtype)


def last_group_reads_its_neighbour(x, w, b=None):
    y = right(x, w, b)
    y[-1] = right(x, w.roll(1, 0), b)[-1]
    return y


def groups_and_rows_exchanged(x, w, b=None):
    """Written as [M, G, N], read as [G, M, N]."""
    y = right(x, w, b)
    return y.transpose(0, 1).contiguous().view_as(y)


def last_k_of_one_group(x, w, b=None):
    w = w.clone()
    w[1, :, -1] = 0
    return right(x, w, b)


def half_of_k_up_to_32_rows(x, w, b=None):
    """An activation mask in packed units."""
    if x.shape[1] <= 32:
        x = torch.cat([x[..., : K // 2], torch.zeros_like(x[..., K // 2 :])], -1)
    return right(x, w, b)


def bias_of_group_0(x, w, b=None):
    return right(x, w, None if b is None else b[:1].expand_as(b))


def bias_missing(x, w, b=None):
    return right(x, w)


def writes_other_groups(x, w, b=None):
    y = right(x, w, b)
    x[0].zero_()
    x[-1].zero_()
    return y


def nan_spreads(x, w, b=None):
    y = right(x, w, b)
    return torch.full_like(y, torch.nan) if bool(x.isnan().any()) else y


def group_of_no_rows_unwritten(x, w, b=None):
    """One group of four keeps what was in memory."""
    y = torch.empty(*x.shape[:2], w.shape[1], dtype=x.dtype)
    for group in (0, 1, 3):
        y[group] = right(x, w, b)[group]
    return y


def bfloat16_sums(x, w, b=None):
    total = torch.zeros(*x.shape[:2], w.shape[1])
    for start in range(0, x.shape[-1], 16):
        block = slice(start, start + 16)
        part = torch.einsum("gmk,gnk->gmn", x[..., block].float(), w[..., block].float())
        total = (total + part).bfloat16().float()
    return (total if b is None else total + b[:, None].float()).to(x.dtype)


def weight_as_it_lies(x, w, b=None):
    """K and N exchanged where they are equal."""
    square = w.shape[1] == w.shape[2]
    return right(x, w.transpose(1, 2).contiguous() if square else w, b)


QUICK = frozenset({"last_k_of_group_1", "bias_missing", "nan_spreads", "group_unwritten"})
"""Mutants of the quick subset; each probes every group."""


def mutant(name, faulty, op, causes, source, text, *, reasons=(), with_bias=False, made=weight):
    options = {"bias": bias()} if with_bias else {}
    return Mutant(
        id=f"batched/{name}",
        area="kernels",
        source=source,
        patch=text,
        trial=BatchedTrial(
            faulty=faulty, clean=right, weight=made, contract=PLAIN, options=options
        ),
        op=op,
        causes=causes,
        reasons=reasons,
        quick=name in QUICK,
    )


@functools.cache
def square():
    return torch.randn(GROUPS, 96, 96, generator=torch.Generator().manual_seed(2)).bfloat16()


MUTANTS = (
    mutant(
        "last_group", last_group_reads_its_neighbour, "linear.3:out", ("group_shifted",),
        "tgale96/grouped_gemm#36: a group gets another group's operand",
        "the last group multiplies by the weight of the one before",
    ),
    mutant(
        "groups_and_rows", groups_and_rows_exchanged, "linear:out",  # seen between the groups
        ("strided_output", "row_permutation"),
        "vllm-project/vllm#40737: an output of other strides than the kernel assumes",
        "the output is written as [M, G, N]",
    ),
    mutant(
        "last_k_of_group_1", last_k_of_one_group, "linear.1:out", ("k_tail_dropped",),
        "ROCm/aiter#4181: valid elements at the end of K are masked",
        "the last k of group 1 is left out",
    ),
    mutant(
        "half_of_k", half_of_k_up_to_32_rows, "linear.0:out",
        ("k_tail_dropped", "k_range_ratio", "split_missing"),  # the same sums are missing
        "ROCm/aiter#4181: an activation mask in packed units, for small M only",
        "up to 32 rows only the first half of K counts",
    ),
    mutant(
        "bias_of_group_0", bias_of_group_0, "linear:out", ("group_bias",),
        "Wenyueh/MinivLLM#80: a bias that is not the group's",
        "every group adds the bias of group 0", with_bias=True,
    ),
    mutant(
        "bias_missing", bias_missing, "linear.0:out", ("bias_missing",),
        "sgl-project/sglang#35358: a bias that is dropped", "no bias", with_bias=True,
    ),
    mutant(
        "writes_other_groups", writes_other_groups, "linear.0:out", (),
        "GeeeekExplorer/nano-vllm#170: works in place on the caller's data",
        "the activations of the first and the last group are cleared",
        reasons=("raised", "input_mutated"),
    ),
    mutant(
        "nan_spreads", nan_spreads, "linear.0:out", (),
        "unslothai/unsloth#9848: NaN of one row reaches others",
        "one NaN makes every group NaN", reasons=("nonfinite", "raised"),
    ),
    mutant(
        "group_unwritten", group_of_no_rows_unwritten, "linear.2:out", ("unwritten",),
        "vllm-project/vllm-ascend#17003: an expert's rows are not written",
        "group 2 is not written", reasons=("unwritten", "nonfinite"),
    ),
    mutant(
        "bfloat16_sums", bfloat16_sums, "linear.0:out", ("narrow_accumulator",),
        "ROCm/aiter#4581: partial sums in bfloat16", "the running sum is kept in bfloat16",
    ),
    mutant(
        "transposed", weight_as_it_lies, "linear.0:out", ("transposed",),
        "PTO-ISA/SuperNPUBench#161: a transposition that square inputs hide",
        "a square weight is used transposed", made=square,
    ),
)  # fmt: skip
