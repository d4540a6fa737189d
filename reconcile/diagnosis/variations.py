"""Variations of a reference layer: what it would compute with one common mistake.

Each is a set of hooks on the reference model, so that the library's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from reconcile.diagnosis.fits import Family
from reconcile.diagnosis.hooks import (
    Hooks,
    Variation,
    child,
    heads,
    on_argument,
    on_output,
    replaced,
    undo,
)


def variations(layer: nn.Module) -> Iterator[Variation]:
    """Every variation that the layer's modules allow."""
    attention = child(layer, "q_proj", "k_proj", "v_proj", "o_proj")
    if attention is not None:
        yield from _attention(*attention)
    moe = child(layer, "gate", "experts")
    if moe is not None:
        yield from _residuals(moe[0], "the MLP")
    mlp = child(layer, "gate_proj", "up_proj", "down_proj")
    if mlp is not None:
        name, _ = mlp
        yield Variation(
            "gate_up_order", name, "gate and up are swapped", _swapped(name, "gate_proj", "up_proj")
        )
        yield from _activations(*mlp)
        yield from _residuals(name, "the MLP")
    for name, module in ((attention or ("", None)), (mlp or ("", None))):
        for last in ("o_proj", "down_proj"):
            if module is not None and hasattr(module, last):
                for half in (0, 1):
                    text = f"only half {half} of the sum over K of {last} is there"
                    yield Variation("partial_sum", f"{name}.{last}", text, _half(name, last, half))


def _attention(name: str, block: nn.Module) -> Iterator[Variation]:
    for one, other in (("k_proj", "v_proj"), ("q_proj", "k_proj"), ("q_proj", "v_proj")):
        text = f"{one[0]} and {other[0]} are swapped"
        yield Variation("qkv_order", name, text, _swapped(name, one, other))
    size = getattr(block, "head_dim", None)
    if isinstance(size, int):
        for pairs, text in (
            (True, "RoPE rotates neighbours where halves are meant"),
            (False, "RoPE rotates halves where neighbours are meant"),
        ):
            yield Variation("rope_pairing", name, text, _pairs(name, size, pairs))
        groups = getattr(block, "num_key_value_groups", 1)
        if groups > 1:
            text = "key/value heads are tiled over the query heads, not repeated"
            yield Variation("gqa_tiling", name, text, _tiled(name, size, groups))
    yield Variation("mask", name, "no position is masked", _mask(name, "none"))
    yield Variation("mask", name, "a position does not see itself", _mask(name, "strict"))
    scale = getattr(block, "scaling", None)
    if isinstance(scale, float):
        for wrong, text in ((1.0, "is missing"), (scale * scale, "is applied twice")):
            what = f"the scale of the attention scores {text}"
            yield Variation("attention_scale", name, what, replaced(name, "scaling", wrong))
    yield from _residuals(name, "the attention")


ACTIVATIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("SiLU", functional.silu),
    ("GELU", functional.gelu),
    ("GELU by tanh", partial(functional.gelu, approximate="tanh")),
    ("GELU as x sigmoid(1.702 x)", lambda x: x * torch.sigmoid(1.702 * x)),
    ("ReLU", functional.relu),
    ("squared ReLU", lambda x: functional.relu(x).square()),
    ("sigmoid", torch.sigmoid),
    ("no function", lambda x: x),
)
"""What may stand in for the activation of an MLP; the right one among them explains nothing."""


def _activations(name: str, block: nn.Module) -> Iterator[Variation]:
    attribute = next((a for a in ("act_fn", "activation_fn") if callable(getattr(block, a, 0))), "")
    for what, function in ACTIVATIONS if attribute else ():
        text = f"the activation of the MLP is {what}"
        hooks = replaced(name, attribute, _Applied(function))
        yield Variation("activation_function", name, text, hooks)


class _Applied(nn.Module):
    """A function as a module: a module's place takes nothing else."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """``function(x)``."""
        return self._function(x)


def _swapped(name: str, one: str, other: str) -> Hooks:
    """Each gives the other's output, cut or repeated to its own width where they differ."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        block = layer.get_submodule(name)
        first, second = block.get_submodule(one), block.get_submodule(other)
        plain = {one: first.forward, other: second.forward}

        def hook_of(source: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
            def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                got = source(args[0])
                return got if got.shape == output.shape else output

            return hook

        undo(stack, first.register_forward_hook(hook_of(plain[other])))
        undo(stack, second.register_forward_hook(hook_of(plain[one])))

    return hooks


def _pairs(name: str, size: int, pairs: bool) -> Hooks:
    """Rotating pairs is rotating halves of permuted heads, and scores do not see the order."""
    order = torch.arange(size).view(-1, 2).T.flatten()
    order = order if pairs else order.argsort()

    def change(y: Tensor) -> Tensor:
        return heads(y, size)[..., order].reshape(y.shape)

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        block = layer.get_submodule(name)
        for letter in "qk":  # after the norm, where there is one: its weight stays in place
            last = f"{letter}_norm" if hasattr(block, f"{letter}_norm") else f"{letter}_proj"
            on_output(block.get_submodule(last), stack, change)

    return hooks


def _tiled(name: str, size: int, groups: int) -> Hooks:
    """Query head h meets key head h mod n: the query heads permuted there and back."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        block = layer.get_submodule(name)

        def order_of(x: Tensor) -> Tensor:
            heads = x.shape[-1] // size
            return torch.arange(heads).view(groups, heads // groups).T.flatten()

        def there(y: Tensor) -> Tensor:
            return heads(y, size)[..., order_of(y), :].reshape(y.shape)

        def back(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            return (heads(x, size)[..., order_of(x).argsort(), :].reshape(x.shape),)

        on_output(block.get_submodule("q_proj"), stack, there)
        undo(stack, block.get_submodule("o_proj").register_forward_pre_hook(back))

    return hooks


def _mask(name: str, kind: str) -> Hooks:
    def change(mask: Tensor) -> Tensor:
        if kind == "none":
            return torch.zeros_like(mask)
        hidden = torch.finfo(mask.dtype).min
        strict = mask.masked_fill(torch.eye(*mask.shape[-2:], dtype=torch.bool), hidden)
        strict[..., 0, 0] = 0  # the first position has nothing else to see
        return strict

    return on_argument(name, "attention_mask", change)


def first_wrong(candidate: Tensor, right: Tensor, jump: float | None = None) -> int | None:
    """The position from which on the error of [..., T, C] is another; None: it is so from 0 on.

    Splits the logarithms of the errors where two levels describe them best.
    """
    least = LEAST_JUMP if jump is None else jump
    c, r = (side.reshape(-1, *side.shape[-2:])[0] for side in (candidate, right))
    power = (c - r).square().sum(-1) / r.square().sum(-1).clamp_min(1e-300)
    levels = power.clamp_min(1e-12).log()
    best, place = 0.0, None
    for t in range(1, len(levels)):
        before, after = levels[:t], levels[t:]
        step = float(after.mean() - before.mean())
        gain = step * step * t * (len(levels) - t) / len(levels)
        if step > least and gain > best:
            best, place = gain, t
    return place


LEAST_JUMP = 3.0
"""Logarithm of the factor by which the squared error must grow at a window's edge."""


def windows(layer: nn.Module, first: int | None) -> Iterator[Variation]:
    """Attention to as many keys as positions are right."""
    attention = child(layer, "q_proj", "k_proj", "v_proj", "o_proj")
    if attention is None or first is None:
        return
    name, _ = attention

    for count in range(max(1, first - 2), first + 1):  # the first lost key may hardly show
        text = f"a position sees {count} keys and no earlier ones"
        yield Variation("mask", name, text, on_argument(name, "attention_mask", _window(count)))


def _window(count: int) -> Callable[[Tensor], Tensor]:
    def change(mask: Tensor) -> Tensor:
        far = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(-count)
        return mask.masked_fill(far, torch.finfo(mask.dtype).min)

    return change


def _residuals(name: str, what: str) -> Iterator[Variation]:
    for diagnosis, sign, text in (
        ("residual_missing", -1.0, f"the residual around {what} is missing"),
        ("residual_doubled", 1.0, f"the residual around {what} is added twice"),
    ):
        yield Variation(diagnosis, name, text, _residual(name, _times(sign)))
    text = f"the residual around {what} is the norm's output, not what the norm got"
    yield Variation("residual_source", name, text, _residual(name, lambda x, normed: normed - x))


def _times(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, _: factor * x


def families(layer: nn.Module) -> Iterator[Family]:
    """Mistakes of the layer's residuals that have one number."""
    attention = child(layer, "q_proj", "k_proj", "v_proj", "o_proj")
    mlp = child(layer, "gate_proj", "up_proj", "down_proj") or child(layer, "gate", "experts")
    for found, what in ((attention, "the attention"), (mlp, "the MLP")):
        if found is not None:
            yield _residual_factor(found[0], what)


def _residual_factor(name: str, what: str) -> Family:
    return Family(
        "residual_scaled",
        name,
        lambda factor: f"the residual around {what} is {factor:.4g} times itself",
        lambda factor: _residual(name, lambda x, _: (factor - 1) * x),
        (-1.0, 0.0, 0.5, 1.5, 2.0, 3.0, 4.0, 8.0),
        (-1.0, 0.5, 0.0, 2.0, 3.0, 4.0),
        logarithmic=False,
    )


def _residual(name: str, change: Callable[[Tensor, Tensor], Tensor]) -> Hooks:
    """Adds ``change(stream, normed)`` to the block's output: before the norm, and after it."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        seen: list[tuple[Tensor, Tensor]] = []

        def after(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> None:
            seen.append((args[0] if args else kwargs["hidden_states"], output))

        norm = _norm_before(layer, name)
        undo(stack, norm.register_forward_hook(after, with_kwargs=True))
        on_output(layer.get_submodule(name), stack, lambda y: y + change(*seen[-1]))

    return hooks


def _norm_before(layer: nn.Module, name: str) -> nn.Module:
    """The norm that reads the stream which the block adds to."""
    wanted = "input_layernorm" if hasattr(layer.get_submodule(name), "q_proj") else None
    if wanted is not None:
        return layer.get_submodule(wanted)
    for candidate in ("pre_feedforward_layernorm", "post_attention_layernorm"):
        if hasattr(layer, candidate):
            return layer.get_submodule(candidate)
    raise LookupError(f"no norm in front of {name}")


def _half(name: str, last: str, half: int) -> Hooks:
    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0].clone()
            middle = x.shape[-1] // 2
            x[..., middle:] *= 1 - half
            x[..., :middle] *= half
            return (x,)

        block = layer.get_submodule(name).get_submodule(last)
        undo(stack, block.register_forward_pre_hook(hook))

    return hooks


NAMES = (
    "qkv_order",
    "gate_up_order",
    "rope_pairing",
    "gqa_tiling",
    "mask",
    "attention_scale",
    "activation_function",
    "residual_missing",
    "residual_doubled",
    "residual_source",
    "residual_scaled",
    "partial_sum",
)
