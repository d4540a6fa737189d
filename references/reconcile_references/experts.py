"""Mixtures of experts: two batched linears in place of the class that holds all experts' weights.

transformers keeps the experts of a layer in two parameters and loops over those that a token is
routed to. Here the same arithmetic runs through two modules that a kernel can take the place of:
``experts.w13``, [..., E, H] to [..., E, 2 I] (gate, then up), and ``experts.w2``, [..., E, I] to
[..., E, H]. Every expert sees every token, so that each is compared on every prompt; what a token
is not routed to does not enter its sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from reconcile.exceptions import CheckpointError, FormatError
from reconcile.grouped import GroupedWeight
from reconcile.weight import QuantizedWeight
from reconcile_references.checkpoint import names

CLASSES = ("Qwen3MoeExperts", "MixtralExperts", "Qwen2MoeExperts")
"""transformers' classes with ``gate_up_proj`` [E, 2 I, H], ``down_proj`` [E, H, I], ``act_fn``."""
ROUTERS = ("Qwen3MoeTopKRouter", "MixtralTopKRouter", "Qwen2MoeTopKRouter")
"""Their routers, which return logits, scores and the chosen experts."""
PARTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
"""What a batched linear is made of, in the order of its rows, as checkpoints name it."""


class ExpertLinear(nn.Module):
    """Stands where a kernel's or the reference's module comes: [..., E, K] to [..., E, N]."""

    def __init__(self, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.experts, self.n, self.k = experts, n, k

    def forward(self, x: Tensor) -> Tensor:
        """It has no weight of its own."""
        raise NotImplementedError(f"experts have no weight here; x {list(x.shape)}")


class Experts(nn.Module):
    """The experts of one layer through `ExpertLinear`; forward as transformers' classes."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        held = like.get_parameter("gate_up_proj")
        experts, rows, hidden = (int(size) for size in held.shape)
        self.w13 = ExpertLinear(experts, rows, hidden)
        self.w2 = ExpertLinear(experts, hidden, rows // 2)
        self.act_fn = like.act_fn
        self.experts = experts

    def forward(self, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Sum over each token's experts, in their order, in the dtype of ``hidden`` [T, H].

        Args:
            hidden: [T, H].
            chosen: experts of each token, integers [T, top_k].
            scores: their shares, [T, top_k].
        """
        experts = self.experts
        gate, up = self.w13(hidden[:, None, :].expand(-1, experts, -1)).chunk(2, -1)
        every = self.w2(self.act_fn(gate) * up)  # type: ignore[operator]
        share = torch.zeros(len(hidden), experts, dtype=scores.dtype, device=scores.device)
        share = share.scatter(1, chosen, scores)
        routed = torch.zeros_like(share, dtype=torch.bool).scatter(1, chosen, True)
        total = torch.zeros_like(hidden)
        for expert in range(experts):
            part = (every[:, expert] * share[:, expert, None]).to(hidden.dtype)
            total = torch.where(routed[:, expert, None], total + part, total)
        return total


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of the known classes that hold all experts of a layer, by path."""
    return {name: m for name, m in model.named_modules() if type(m).__name__ in CLASSES}


def split_experts(model: nn.Module, which: Collection[str] | None = None) -> None:
    """Put `Experts` in the place of the known classes at ``which`` paths, or of all, in place."""
    for name, module in expert_modules(model).items():
        if which is None or name in which:
            model.set_submodule(name, Experts(module))


def expert_linears(name: str, module: nn.Module) -> list[str]:
    """Paths of the linears, as checkpoints name them, that a module at path ``name`` holds."""
    count = int(module.get_parameter("gate_up_proj").shape[0])
    parts = [part for group in PARTS.values() for part in group]
    return [f"{name}.{expert}.{part}" for expert in range(count) for part in parts]


def fused(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of dense experts joined to what the known classes hold.

    Experts that `Experts` stands for are no more of a known class and stay as they are stored.

    Raises:
        CheckpointError: an expert's tensor is missing, or has another shape than the others.
    """
    found = dict(tensors)
    for name, module in expert_modules(skeleton).items():
        if f"{name}.gate_up_proj" in found:
            continue
        linears = [f"{linear}.weight" for linear in expert_linears(name, module)]
        if missing := [linear for linear in linears if linear not in found]:
            raise CheckpointError(names("missing tensors", missing))
        own = {linear.removeprefix(f"{name}."): found.pop(linear) for linear in linears}
        experts = range(len(linears) // 3)
        try:
            gate_up = [_rows(own, expert, PARTS["w13"]) for expert in experts]
            found[f"{name}.gate_up_proj"] = torch.stack(gate_up)
            down = [_rows(own, expert, PARTS["w2"]) for expert in experts]
            found[f"{name}.down_proj"] = torch.stack(down)
        except RuntimeError as error:
            raise CheckpointError(f"{name}: experts do not stack: {error}") from error
    return found


def _rows(own: Mapping[str, Tensor], expert: int, parts: tuple[str, ...]) -> Tensor:
    """The rows of one expert's linears, [N, K]."""
    return torch.cat([own[f"{expert}.{part}.weight"] for part in parts])


@dataclass(frozen=True, slots=True)
class Place:
    """A batched linear in a model: which expert linears, by their paths, are its groups."""

    module: ExpertLinear
    groups: tuple[tuple[str, ...], ...]
    """For each expert the paths of the linears whose rows it joins."""

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Every expert linear's path and (N, K)."""
        rows = self.module.n // len(self.groups[0])
        return {name: (rows, self.module.k) for group in self.groups for name in group}


def places(skeleton: nn.Module) -> dict[str, Place]:
    """Every batched linear of experts by its path."""
    found = {}
    for name, module in skeleton.named_modules():
        if not isinstance(module, ExpertLinear):
            continue
        parent, _, leaf = name.rpartition(".")
        groups = tuple(
            tuple(f"{parent}.{expert}.{part}" for part in PARTS[leaf])
            for expert in range(module.experts)
        )
        found[name] = Place(module, groups)
    return found


def joined(name: str, place: Place, weights: Mapping[str, QuantizedWeight]) -> GroupedWeight:
    """The experts' weights as one batched weight."""
    groups = tuple(_stacked([weights[part] for part in group]) for group in place.groups)
    return GroupedWeight(groups=groups, name=name)


def _stacked(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """One weight of the rows of several, their codes and scales as they are stored.

    Raises:
        FormatError: scales that do not stack: per tensor, or a block that spans two parts.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    block, n = first.format.block, sum(part.shape[0] for part in parts)
    if first.format.granularity == "tensor" or (block and first.shape[0] % block[0]):
        raise FormatError(
            f"{first.name}: {first.shape[0]} rows under one scale per "
            f"{first.format.granularity} {list(block or ())} do not stack with those of "
            f"{parts[1].name}"
        )
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales.view(torch.uint8) for part in parts]).view(first.scales.dtype)
        if first.format.scale_encoding == "e8m0"
        else torch.cat([part.scales for part in parts]),
        shape=(n, first.shape[1]),
        name=first.name.rpartition(".")[0],
    )


def original(place: Place, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The experts' dense weights before quantisation, [E, N, K]; None where one is missing."""
    parts = [[f"{part}.weight" for part in group] for group in place.groups]
    if any(name not in tensors for group in parts for name in group):
        return None
    return torch.stack([torch.cat([tensors[name] for name in group]) for group in parts])


def routers(skeleton: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that choose experts."""
    return tuple(n for n, m in skeleton.named_modules() if type(m).__name__ in ROUTERS)
