"""Batched linears, Y[g] = X[g] W[g]^T: their weight, their layout, and their place in a model.

In a model a batched linear is a module from [..., G, K] to [..., G, N]. A kernel sees it with the
group in front: x [G, M, K], weight [G, N, K], y [G, M, N], where M counts the rows of one group.
x is a strided view, as it is where the model transposes; a kernel that needs it contiguous copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reconcile.contract import Contract
from reconcile.exceptions import FormatError
from reconcile.linears import BaselineLinear, DenseWeight, ReferenceLinear
from reconcile.weight import QuantizedWeight

PlainWeight = QuantizedWeight | DenseWeight
"""The weight of one linear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """G weights [N, K] of the same kind and shape."""

    groups: tuple[PlainWeight, ...]
    """The weight of each group, with its own bias [N] or none."""
    name: str = ""
    """Module path, informational."""

    def __post_init__(self) -> None:
        """Groups that differ in shape, format or bias are no batch."""
        kinds = {(group.shape, format_name(group), group.bias is None) for group in self.groups}
        if len(kinds) != 1:
            raise FormatError(
                f"{self.name or 'weight'}: expected groups of one shape and format, all with a "
                f"bias or none, got {sorted(map(str, kinds))}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K) of one group."""
        return self.groups[0].shape

    @property
    def bias(self) -> Tensor | None:
        """[G, N] or None."""
        parts = [group.bias for group in self.groups if group.bias is not None]
        return torch.stack(parts) if parts else None

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values [G, N, K]."""
        return torch.stack([group.dequantize(dtype) for group in self.groups])


StoredWeight = QuantizedWeight | DenseWeight | GroupedWeight
"""What a checkpoint holds for a module that a kernel may compute."""


def format_name(weight: StoredWeight) -> str:
    """Name of the number format; of a dense weight its dtype, e.g. ``bfloat16``."""
    if isinstance(weight, GroupedWeight):
        return format_name(weight.groups[0])
    if isinstance(weight, DenseWeight):
        return str(weight.tensor.dtype).removeprefix("torch.")
    return weight.format.name


def group_count(weight: StoredWeight) -> int | None:
    """G of a batched linear; None for a plain one."""
    return len(weight.groups) if isinstance(weight, GroupedWeight) else None


def numel(weight: StoredWeight) -> int:
    """Number of weights."""
    n, k = weight.shape
    return n * k * (group_count(weight) or 1)


def to_kernel(x: Tensor, groups: int | None) -> Tensor:
    """What the kernel gets of a module's input: [..., G, K] as the view [G, M, K]."""
    return x if groups is None else x.reshape(-1, groups, x.shape[-1]).transpose(0, 1)


def to_module(y: Tensor, lead: Sequence[int], groups: int | None) -> Tensor:
    """What the module returns of a kernel's output: [G, M, N] as [*lead, G, N]."""
    return y if groups is None else y.transpose(0, 1).reshape(*lead, groups, y.shape[-1])


def flat_rows(tensor: Tensor, groups: int | None) -> Tensor:
    """A module's output as [M, N], of a batched linear as [M, G N]: one row for each row of x."""
    return tensor.reshape(-1, tensor.shape[-1] * (groups or 1))


def take_rows(x: Tensor, groups: int | None, start: int, count: int) -> Tensor:
    """Some of the rows of a kernel's input, [count, K] or [G, count, K]."""
    if groups is None:
        return x.reshape(-1, x.shape[-1])[start : start + count]
    return x[:, start : start + count]


def row_count(x: Tensor, groups: int | None) -> int:
    """M of a module's input."""
    return x.numel() // max(1, x.shape[-1] * (groups or 1))


# --------------------------------------------------------------------------- in a model


class GroupedReference(nn.Module):
    """The exact batched linear: a `ReferenceLinear` for each group, [..., G, K] to [..., G, N]."""

    def __init__(self, weight: GroupedWeight, contract: Contract, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._groups = [ReferenceLinear(group, contract, dtype) for group in weight.groups]

    def forward(self, x: Tensor) -> Tensor:
        """The exact layer, up to the rounding of ``dtype``."""
        return torch.stack([one(x[..., g, :]) for g, one in enumerate(self._groups)], -2)

    def magnitude(self, x: Tensor) -> Tensor:
        """S = sum_k |x_k| |w_k| (+ |b|), [..., G, N]."""
        parts = [one.magnitude(x[..., g, :]) for g, one in enumerate(self._groups)]
        return torch.stack(parts, -2)


class GroupedBaseline(nn.Module):
    """Plain torch at the candidate's dtype, [..., G, K] to [..., G, N]."""

    def __init__(
        self, weight: GroupedWeight, dtype: torch.dtype, contract: Contract | None = None
    ) -> None:
        super().__init__()
        self._groups = nn.ModuleList(BaselineLinear(g, dtype, contract) for g in weight.groups)

    def forward(self, x: Tensor) -> Tensor:
        """Group by group."""
        return torch.stack([one(x[..., g, :]) for g, one in enumerate(self._groups)], -2)


Reference = ReferenceLinear | GroupedReference
"""Either has ``dtype``, ``forward`` and ``magnitude``."""


def reference_linear(weight: StoredWeight, contract: Contract, dtype: torch.dtype) -> Reference:
    """The trusted module that takes the place of a stored weight's."""
    if isinstance(weight, GroupedWeight):
        return GroupedReference(weight, contract, dtype)
    return ReferenceLinear(weight, contract, dtype)


def baseline_linear(
    weight: StoredWeight, dtype: torch.dtype, contract: Contract | None = None
) -> nn.Module:
    """Plain torch in the place of a stored weight's module."""
    if isinstance(weight, GroupedWeight):
        return GroupedBaseline(weight, dtype, contract)
    return BaselineLinear(weight, dtype, contract)
