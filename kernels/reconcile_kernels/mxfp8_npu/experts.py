"""Mixtures of experts: w13 [E, 2 I, H] and w2 [E, H, I], one expert at a time.

Each expert is resolved and quantised alone, a few rows at a time, and its codes are written over
the FP8 codes that they come from, so that beside the weights less than one dense expert is in
memory. Source: vllm-ascend,
quantization/methods/fp8_block.py (PR 14852), `_process_moe_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.exceptions import KernelError
from reconcile.grouped import GroupedWeight
from reconcile.kernel import Engine
from reconcile.numbers.mx import GROUP
from reconcile.weight import QuantizedWeight, Shape
from reconcile_kernels.mxfp8_npu.layout import paired
from reconcile_kernels.mxfp8_npu.load import MX_FORMAT, requantise_into, source_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedExperts:
    """Experts as the grouped operator reads them: views, as vllm-ascend keeps them."""

    codes: Tensor
    """uint8 [E, K, N], a transposed view of [E, N, K]."""
    scales: Tensor
    """uint8 [E, G / 2, N, 2], a transposed view."""
    engine: Engine

    @property
    def k(self) -> int:
        """Input features."""
        return self.codes.shape[1]


def requantise_in_place(
    codes: Tensor, scales: Tensor, block: Shape, scale_alg: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Turn block FP8 experts into MXFP8; codes are overwritten, the new scale bytes returned.

    Args:
        codes: E4M3FN bytes, uint8 [E, N, K]; written in place.
        scales: of the blocks, [E, ceil(N / bn), ceil(K / bk)].
        block: (bn, bk).
        scale_alg: 0 or 1.
        dtype: the model's, to which a weight is rounded before it is quantised.

    Returns:
        uint8 [E, N, K / 32].

    Raises:
        ValueError: a scale grid that does not fit.
        KernelError: K in no whole groups, or an odd number of them, which the layout of experts
            does not have.
    """
    experts, n, k = codes.shape
    check_groups(k)
    if scales.shape[0] != experts:
        raise ValueError(f"{experts} experts have scales of as many, got {list(scales.shape)}")
    found = torch.empty((experts, n, k // GROUP), dtype=torch.uint8)
    for expert in range(experts):
        own = codes[expert]
        found[expert] = requantise_into(own, own, scales[expert], block, scale_alg, dtype)
    return found


def check_groups(k: int) -> None:
    """KernelError unless K is an even number of whole groups."""
    if k % (2 * GROUP):
        raise KernelError(
            f"experts with K = {k}: their scale bytes are reshaped to pairs without padding, so K "
            f"must be a multiple of {2 * GROUP}"
        )


def prepare_experts(
    weight: GroupedWeight, scale_alg: int, engine: Engine, place: str = "cpu"
) -> PreparedExperts:
    """Every expert of a batched weight, loaded to ``place``; the source's scales are not kept.

    Raises:
        KernelError: groups that are not quantised, or K that is no even number of groups.
        ValueError: a scale grid that does not fit.
    """
    groups = [group for group in weight.groups if isinstance(group, QuantizedWeight)]
    if len(groups) != len(weight.groups) or not groups:
        raise KernelError(f"{weight.name}: experts in a number format are expected")
    check_groups(weight.shape[1])
    codes = torch.stack([group.codes for group in groups])
    if groups[0].format.name == MX_FORMAT:
        bytes_ = torch.stack([group.scales.view(torch.uint8) for group in groups])
    else:
        assert groups[0].format.block is not None
        scales = torch.stack([source_scales(group) for group in groups])
        bytes_ = requantise_in_place(codes, scales, groups[0].format.block, scale_alg)
    codes, pairs = codes.to(place), paired(bytes_).to(place)
    return PreparedExperts(codes=codes.transpose(1, 2), scales=pairs.transpose(1, 2), engine=engine)


def expert(prepared: PreparedExperts, index: int) -> tuple[Tensor, Tensor]:
    """Codes [K, N] and scale bytes [G / 2, N, 2] of one expert."""
    return prepared.codes[index], prepared.scales[index]
