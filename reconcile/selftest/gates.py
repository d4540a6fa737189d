"""Gates that published projects use, each as its source writes it, judged on the same outputs.

They are what a kernel's test would otherwise be. Every one gets the same candidate and the same
reference, computed in float64 on exactly decoded weights, and plain torch's own output at the
candidate's dtype; so they are stronger here than where the reference is another low-precision run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.rounding import round_to


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a gate sees of one call."""

    candidate: Tensor
    """[M, N] in its own dtype."""
    reference: Tensor
    """[M, N], float64."""
    baseline: Tensor
    """[M, N]: plain torch in the candidate's dtype on the same decoded weights."""

    @property
    def rounded(self) -> Tensor:
        """The reference in the candidate's dtype, as tests of one dtype have it."""
        return round_to(self.reference, self.candidate.dtype)


@dataclass(frozen=True, slots=True)
class Gate:
    """One published acceptance rule."""

    name: str
    source: str
    accepts: Callable[[Outputs], bool]


def cosine(outputs: Outputs) -> bool:
    """Cosine similarity of the flattened outputs >= 0.99; tensors that are all-close pass."""
    c, r = outputs.candidate.flatten().float(), outputs.rounded.flatten().float()
    if torch.allclose(c, r, atol=1e-4, rtol=1e-4, equal_nan=True):
        return True
    return bool(torch.nn.functional.cosine_similarity(c, r, dim=0, eps=1e-6) >= 0.99)


def pearson(outputs: Outputs) -> bool:
    """Pearson's correlation >= 0.99; equal tensors pass, one constant side does not."""
    c, r = outputs.candidate.flatten().double(), outputs.reference.flatten()
    if torch.equal(c, outputs.rounded.flatten().double()):
        return True
    return c.numel() > 1 and bool(torch.corrcoef(torch.stack([c, r]))[0, 1] >= 0.99)


def mean_relative(outputs: Outputs) -> bool:
    """Mean |c - r| / mean |r| < 0.001, in float32."""
    c, r = outputs.candidate.float(), outputs.rounded.float()
    return bool((c - r).abs().mean() / r.abs().mean() < 0.001)


def calc_diff(outputs: Outputs) -> bool:
    """1 - 2 <c, r> / (|c|^2 + |r|^2) < 0.001, in float64."""
    c, r = outputs.candidate.double(), outputs.rounded.double()
    return bool(1 - 2 * (c * r).sum() / (c * c + r * r).sum() < 0.001)


def normalised_error(outputs: Outputs) -> bool:
    """Sum (c - r)^2 / sum c^2 <= 5e-4, NaN and infinity on both sides alike."""
    c, r = outputs.candidate.double(), outputs.rounded.double()
    if not torch.equal(c.isnan(), r.isnan()) or not torch.equal(c.isinf(), r.isinf()):
        return False
    c, r = c[r.isfinite()], r[r.isfinite()]
    return not bool((c - r).square().sum() / c.square().sum() > 5e-4)


def assert_close(outputs: Outputs) -> bool:
    """``torch.testing.assert_close`` with the defaults of the dtype."""
    try:
        torch.testing.assert_close(outputs.candidate, outputs.rounded)
    except AssertionError:
        return False
    return True


def bad_elements(outputs: Outputs) -> bool:
    """At most 5 % of the elements are outside atol = rtol = 1e-2."""
    close = torch.isclose(outputs.candidate, outputs.rounded, rtol=1e-2, atol=1e-2)
    return bool((~close).double().mean() <= 0.05)


def twice_baseline(outputs: Outputs) -> bool:
    """Max |c - r| <= 2 max |plain torch - r| + 1e-5."""
    error = (outputs.candidate.double() - outputs.reference).abs().max()
    plain = (outputs.baseline.double() - outputs.reference).abs().max()
    return bool(error <= 2 * plain + 1e-5)


def three_way(outputs: Outputs) -> bool:
    """rmse(c, r) <= 3 rmse(plain torch, r) + 1e-5 (float32: 2), or all-close to plain torch."""
    c, plain = outputs.candidate, outputs.baseline
    if torch.allclose(plain, c, atol=1e-4, rtol=1e-4):
        return True
    narrow = c.dtype in (torch.bfloat16, torch.float16) or c.numel() < 1000
    error, usual = (
        (side.double() - outputs.reference).square().mean().sqrt() for side in (c, plain)
    )
    return bool(error <= (3 if narrow else 2) * usual + 1e-5)


GATES = (
    Gate("cosine 0.99", "pytorch/pytorch torch/_dynamo/utils.py, same(cos_similarity)", cosine),
    Gate("PCC 0.99", "tenstorrent/tt-metal tests/ttnn/utils_for_testing.py, comp_pcc", pearson),
    Gate(
        "rel_diff 1e-3", "vllm-project/vllm tests/kernels, w8a8 block matmul tests", mean_relative
    ),
    Gate("calc_diff 1e-3", "deepseek-ai/DeepGEMM deep_gemm/testing, calc_diff", calc_diff),
    Gate("NMSE 5e-4", "ggml-org/llama.cpp tests/test-backend-ops.cpp, MUL_MAT", normalised_error),
    Gate("assert_close", "pytorch/pytorch torch/testing, default tolerances", assert_close),
    Gate("5 % bad elements", "ROCm/aiter aiter/test_common.py, checkAllclose", bad_elements),
    Gate("2x baseline", "Dao-AILab/flash-attention tests/test_flash_attn.py", twice_baseline),
    Gate("three-way ratio", "pytorch/pytorch torch/_dynamo/utils.py, same(fp64_ref)", three_way),
)
"""Accepting is what their authors' code accepts; NaN is rejected wherever they reject it."""
