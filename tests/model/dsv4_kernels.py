"""Batched kernels for the DeepSeek-V4 case: correct ones, and one fault each."""

import torch

import reconcile
from reconcile_kernels.aiter_bf16.batched import BATCHED_GEMM, TRITON_ON_CPU, BatchedGemm
from reconcile_kernels.aiter_bf16.wo_a import WoA

CONTRACT = BATCHED_GEMM.contract


def clean(x, w, bias=None):
    """x [G, M, K], w [G, N, K]."""
    return torch.einsum("gmk,gnk->gmn", x.float(), w.float()).bfloat16()


def group_before(x, w, bias=None):
    return clean(x, w.roll(1, 0))


def contiguous_input_assumed(x, w, bias=None):
    return clean(x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)), w)


def wrong_in_decode(x, w, bias=None):
    """One row is handled by other code, which leaves out the last k."""
    return clean(x[..., :-1], w[..., :-1]) if x.shape[1] == 1 else clean(x, w)


def group_5_scaled(x, w, bias=None):
    y = clean(x, w)
    y[5] *= 1.25
    return y


def last_outputs_of_group_3(x, w, bias=None):
    y = clean(x, w)
    y[3, :, -2:] = 0
    return y


def groups_6_and_7_swapped_in_decode(x, w, bias=None):
    return clean(x, w[[0, 1, 2, 3, 4, 5, 7, 6]] if x.shape[1] == 1 else w)


def contiguous_output_assumed(x, w, bias=None):
    """[G, M, N] written one after the other into memory that is [M, G, N]."""
    groups, m, n = y_shape = (len(w), x.shape[1], w.shape[1])
    return clean(x, w).reshape(m, groups, n).transpose(0, 1).reshape(y_shape)


def falls_back_in_decode(x, w, bias=None):
    if x.shape[1] == 1:
        reconcile.fell_back("M = 1 is left to torch")
    return clean(x, w)


for _function in (
    clean,
    group_before,
    contiguous_input_assumed,
    wrong_in_decode,
    group_5_scaled,
    last_outputs_of_group_3,
    groups_6_and_7_swapped_in_decode,
    contiguous_output_assumed,
    falls_back_in_decode,
):
    _function.contract = CONTRACT


class _BreaksAfterTwo(BatchedGemm):
    """A GEMM whose third launch fails."""

    def run(self, x, w, bias, engine):
        if self.launches == 2:
            raise RuntimeError("hipErrorLaunchFailure")
        return super().run(x, w, bias, engine)


class _OnCpu(WoA):
    engines = (TRITON_ON_CPU,)


route_that_breaks = _OnCpu(_BreaksAfterTwo())
route_that_holds = _OnCpu(BatchedGemm())


class CountsNothing(_OnCpu):
    """Says that it ran, and did not."""

    launches = 0

    def apply(self, x, prepared, bias=None):
        return clean(x, prepared.weight)


never_launched = CountsNothing()
