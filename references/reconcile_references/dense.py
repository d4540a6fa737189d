"""Linears that a checkpoint stores unquantised: plain ones, and batched ones by their class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from reconcile.contract import DTYPES
from reconcile.exceptions import CheckpointError
from reconcile.grouped import GroupedWeight
from reconcile.linears import DenseWeight
from reconcile_references.checkpoint import names

GROUPED = {"DeepseekV4GroupedLinear": "n_groups"}
"""transformers' batched linears: class, and its attribute that holds G. Their weight is [G N, K],
group after group, and they map [..., G, K] to [..., G, N]."""


def dense_linears(skeleton: nn.Module, head: str | None) -> dict[str, nn.Linear]:
    """Every linear whose forward is known, but for the output head.

    A subclass of `nn.Linear` that is not listed may compute something else and stays as it is.
    """
    return {
        name: module
        for name, module in skeleton.named_modules()
        if isinstance(module, nn.Linear)
        and (type(module) is nn.Linear or type(module).__name__ in GROUPED)
        and name != head
    }


def dense_weights(
    linears: Mapping[str, nn.Linear], tensors: Mapping[str, Tensor], path: Path
) -> dict[str, DenseWeight | GroupedWeight]:
    """Their stored weights; CheckpointError where one is missing or of another dtype or shape."""
    wanted = {f"{name}.weight": module for name, module in linears.items()}
    if missing := [name for name in wanted if name not in tensors]:
        raise CheckpointError(f"{path}: {names('missing tensors', missing)}")
    wrong = [
        f"{name} {tensors[name].dtype} {list(tensors[name].shape)}"
        for name, module in wanted.items()
        if tensors[name].dtype not in DTYPES.values() or tensors[name].shape != module.weight.shape
    ]
    if wrong:
        raise CheckpointError(
            f"{path}: {names('no unquantised weights of the declared shape', wrong)}; config.json "
            "has no quantization_config, so weights are read as they are"
        )
    return {name: _weight(name, module, tensors) for name, module in linears.items()}


def _weight(
    name: str, module: nn.Linear, tensors: Mapping[str, Tensor]
) -> DenseWeight | GroupedWeight:
    tensor, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    attribute = GROUPED.get(type(module).__name__)
    if attribute is None:
        return DenseWeight(tensor=tensor, name=name, bias=bias)
    parts = tensor.chunk(int(getattr(module, attribute)))
    biases = [None] * len(parts) if bias is None else bias.chunk(len(parts))
    groups = [DenseWeight(tensor=t, bias=b) for t, b in zip(parts, biases, strict=True)]
    return GroupedWeight(groups=tuple(groups), name=name)


def decode_dense_again(weight: DenseWeight) -> Tensor | None:
    """A bfloat16 weight from its bits, float64; None for another dtype, which numpy reads too."""
    if weight.tensor.dtype != torch.bfloat16:
        return None
    bits = weight.tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return torch.from_numpy(values.astype(np.float64))
