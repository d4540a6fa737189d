"""What attention would give with other norms of the heads, another mask or another scale."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.diagnosis.fits import Family
from reconcile.diagnosis.hooks import Hooks, Variation, on_argument, replaced, undo

NAMES = ("qk_norm_missing", "qk_norm_swapped", "qk_norm_order")
ROTATE = "apply_rotary_pos_emb"
"""The function by which a library's attention rotates queries and keys, [B, H, T, d]."""


def score_variations(name: str, block: nn.Module) -> Iterator[Variation]:
    """Norms of queries and keys, and diagonals of the mask."""
    if hasattr(block, "q_norm") and hasattr(block, "k_norm"):
        yield from _norms(name, block)
    for diagonal in (1, 2, -2):
        seen = f"{abs(diagonal)} position{'s' if abs(diagonal) > 1 else ''}"
        text = (
            f"the mask's diagonal is {diagonal:+d}: a position sees {seen} after itself"
            if diagonal > 0
            else f"the mask's diagonal is {diagonal:+d}: a position sees none of the last {seen}"
        )
        hooks = on_argument(name, "attention_mask", _diagonal(diagonal))
        yield Variation("mask", name, text, hooks)


def _norms(name: str, block: nn.Module) -> Iterator[Variation]:
    for letters, text in (("qk", "q_norm and k_norm are"), ("q", "q_norm is"), ("k", "k_norm is")):
        hooks = _norm_outputs(name, dict.fromkeys(letters, _as_given))
        yield Variation("qk_norm_missing", name, f"{text} not applied", hooks)
    for of, instead in (("q", "k"), ("k", "q")):
        hooks = _norm_outputs(name, {of: _given_to(block.get_submodule(f"{instead}_norm"))})
        text = f"{of}_norm has the weight of {instead}_norm"
        yield Variation("qk_norm_swapped", name, text, hooks)
    if callable(getattr(sys.modules[type(block).__module__], ROTATE, None)):
        text = "q_norm and k_norm are applied after RoPE, where before it is right"
        yield Variation("qk_norm_order", name, text, _after_rotation(name))


def _as_given(x: Tensor, _: Tensor) -> Tensor:
    return x


def _given_to(norm: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, _: norm.forward(x)


def _norm_outputs(name: str, changes: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> Hooks:
    """Other outputs of the norms, from what each was given and gave."""

    def hook_of(change: Callable[[Tensor, Tensor], Tensor]) -> Any:  # noqa: ANN401
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return change(args[0], output)

        return hook

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        for letter, change in changes.items():
            norm = layer.get_submodule(name).get_submodule(f"{letter}_norm")
            undo(stack, norm.register_forward_hook(hook_of(change)))

    return hooks


def _after_rotation(name: str) -> Hooks:
    """The norms give what they get, and what RoPE gives is normed."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        block = layer.get_submodule(name)
        norms = [block.get_submodule(f"{letter}_norm") for letter in "qk"]
        library = sys.modules[type(block).__module__]
        rotate = getattr(library, ROTATE)

        def normed(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
            turned = rotate(*args, **kwargs)
            return tuple(norm.forward(x) for norm, x in zip(norms, turned, strict=True))

        _norm_outputs(name, {"q": _as_given, "k": _as_given})(layer, stack)
        stack.callback(setattr, library, ROTATE, rotate)
        setattr(library, ROTATE, normed)

    return hooks


def _diagonal(count: int) -> Callable[[Tensor], Tensor]:
    """Query i sees keys up to i + ``count``; a query that would see none sees the first."""

    def change(mask: Tensor) -> Tensor:
        rows, columns = mask.shape[-2:]
        last = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows + count)
        last[:, 0] = True
        hidden = torch.full_like(mask, torch.finfo(mask.dtype).min)
        return hidden.masked_fill(last.to(mask.device), 0)

    return change


def score_families(name: str, block: nn.Module) -> Iterator[Family]:
    """The factor of the scores, solved for."""
    right = getattr(block, "scaling", None)
    if not isinstance(right, float) or right <= 0:
        return
    known = _scales(block, right)

    def text(value: float) -> str:
        means = f", which is {known[value]}" if value in known else ""
        return f"scores are multiplied by {value:.4g}{means}, where {right:.4g} is right"

    yield Family(
        "attention_scale",
        name,
        text,
        lambda value: replaced(name, "scaling", value),
        tuple(right * 2.0**n for n in range(-6, 7)),
        tuple(known),
    )


def _scales(block: nn.Module, right: float) -> dict[float, str]:
    """Scales that have a meaning, those that are likelier first."""
    found = {1.0: "no scale", right * right: "the scale applied twice"}
    size = getattr(block, "head_dim", None)
    width = getattr(getattr(block, "q_proj", None), "in_features", None)
    config = getattr(block, "config", None)
    numbers = {
        "the head size": size,
        "the hidden size": getattr(config, "hidden_size", width),
        "the number of heads": getattr(config, "num_attention_heads", None),
        "twice the head size": size and 2 * size,
        "half the head size": size and size / 2,
    }
    for what, number in numbers.items():
        if number:
            found.setdefault(float(number) ** -0.5, f"1 / sqrt({what}, {number:g})")
            found.setdefault(1.0 / number, f"1 / {what} ({number:g})")
    found.pop(right, None)
    return found
