"""What a block of experts would give with other shares, or with experts in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.diagnosis.fits import Family
from reconcile.diagnosis.hooks import Hooks, Variation, child, undo

NAMES = ("norm_topk_prob", "expert_shares", "expert_order", "routing_scale")
Shares = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits [T, E], chosen experts [T, k] and right shares [T, k] to other shares [T, k]."""


def _softmax_all(logits: Tensor, chosen: Tensor, _: Tensor) -> Tensor:
    return logits.softmax(-1).gather(-1, chosen)


def _softmax_chosen(logits: Tensor, chosen: Tensor, _: Tensor) -> Tensor:
    return logits.gather(-1, chosen).softmax(-1)


def _sigmoid(logits: Tensor, chosen: Tensor, _: Tensor) -> Tensor:
    return logits.sigmoid().gather(-1, chosen)


def _sigmoid_normalised(logits: Tensor, chosen: Tensor, right: Tensor) -> Tensor:
    shares = _sigmoid(logits, chosen, right)
    return shares / shares.sum(-1, keepdim=True)


SHARES: tuple[tuple[str, str, Shares], ...] = (
    ("norm_topk_prob", "the shares of a token's experts are not made to sum to 1", _softmax_all),
    ("norm_topk_prob", "the shares of a token's experts are made to sum to 1", _softmax_chosen),
    ("expert_shares", "shares are sigmoids of the logits", _sigmoid),
    ("expert_shares", "shares are sigmoids of the logits, made to sum to 1", _sigmoid_normalised),
    ("expert_shares", "the experts of a token have equal shares",
     lambda _, __, right: torch.full_like(right, 1 / right.shape[-1])),
    ("expert_shares", "experts are added without their shares",
     lambda _, __, right: torch.ones_like(right)),
    ("expert_shares", "a token's experts have each other's shares",
     lambda _, __, right: right.flip(-1)),
)  # fmt: skip
"""What shares may be instead; the right one among them explains nothing."""


def expert_variations(layer: nn.Module) -> Iterator[Variation]:
    """Other shares, and experts in another order."""
    found = child(layer, "gate", "experts")
    if found is None:
        return
    name, _ = found
    for diagnosis, text, shares in SHARES:
        yield Variation(diagnosis, name, text, _shares(name, shares))
    for step in (1, -1, 2, -2):
        side = "after" if step > 0 else "before"
        text = f"a token is computed by the expert {abs(step)} {side} the chosen one"
        yield Variation("expert_order", name, text, _experts(name, _next(step)))
    for text, order in (
        ("experts are numbered from the last", lambda chosen, count: count - 1 - chosen),
        ("experts 2n and 2n + 1 are swapped", lambda chosen, _: chosen ^ 1),
        ("experts are in two halves that are swapped", lambda chosen, n: (chosen + n // 2) % n),
    ):
        yield Variation("expert_order", name, text, _experts(name, order))


def expert_families(layer: nn.Module) -> Iterator[Family]:
    """A factor of what the experts give, solved for."""
    found = child(layer, "gate", "experts")
    if found is None:
        return
    name, _ = found
    yield Family(
        "routing_scale",
        name,
        lambda factor: f"shares of experts are {factor:.4g} times the right ones",
        lambda factor: _shares(name, lambda _, __, right: factor * right),
        tuple(2.0**n for n in range(-5, 6)),
        (0.5, 2.0, 2.5, 0.4, 4.0, 0.25, 16.0),
    )


def _next(step: int) -> Callable[[Tensor, int], Tensor]:
    return lambda chosen, count: (chosen + step) % count


def _shares(name: str, shares: Shares) -> Hooks:
    """Other shares in what the router gives: logits [T, E], shares [T, k], experts [T, k]."""

    def hook(_: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401
        parts = output if isinstance(output, tuple) else (output,)
        chosen = next((t for t in parts if not t.is_floating_point()), None)
        floats = [t for t in parts if t.is_floating_point()]
        if chosen is None or len(floats) != 2:
            return output
        place = next((i for i, t in enumerate(parts) if t is not chosen and _fits(t, chosen)), None)
        logits = next((t for t in floats if place is not None and t is not parts[place]), None)
        if place is None or logits is None:
            return output
        other = shares(logits.double(), chosen, parts[place].double()).to(parts[place])
        return (*parts[:place], other, *parts[place + 1 :])

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        router = layer.get_submodule(name).get_submodule("gate")
        undo(stack, router.register_forward_hook(hook))

    return hooks


def _fits(shares: Tensor, chosen: Tensor) -> bool:
    return shares.is_floating_point() and shares.shape == chosen.shape


def _experts(name: str, order: Callable[[Tensor, int], Tensor]) -> Hooks:
    """Other numbers of experts in what the experts are called with."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        block = layer.get_submodule(name)
        count = _count(block)

        def change(value: Any) -> Any:  # noqa: ANN401
            integers = isinstance(value, Tensor) and not value.is_floating_point()
            return order(value, count).clamp(0, count - 1) if integers else value

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            return tuple(map(change, args)), {key: change(v) for key, v in kwargs.items()}

        experts = block.get_submodule("experts")
        undo(stack, experts.register_forward_pre_hook(hook, with_kwargs=True))

    return hooks


def _count(block: nn.Module) -> int:
    gate = block.get_submodule("gate")
    weight = getattr(gate, "weight", None)
    return len(weight) if isinstance(weight, Tensor) else int(getattr(gate, "num_experts", 1))
