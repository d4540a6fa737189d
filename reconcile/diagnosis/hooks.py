"""Hooks on a reference model that make a mistake in it, so that the library's own code runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Hooks = Callable[[nn.Module, ExitStack], None]
"""Registers a mistake on a layer; what is entered on the stack is undone."""


@dataclass(frozen=True, slots=True)
class Variation:
    """One mistake in one layer."""

    name: str
    """Name of the diagnosis."""
    where: str
    """Path inside the layer, for the report."""
    text: str
    hooks: Hooks


@contextmanager
def varied(layer: nn.Module, variation: Variation) -> Iterator[None]:
    """The layer with the mistake while the block runs."""
    with ExitStack() as stack:
        variation.hooks(layer, stack)
        yield


def child(layer: nn.Module, *parts: str) -> tuple[str, nn.Module] | None:
    """The child of a layer that has all of these parts, with its name."""
    for name, module in layer.named_children():
        if all(hasattr(module, part) for part in parts):
            return name, module
    return None


def undo(stack: ExitStack, handle: torch.utils.hooks.RemovableHandle) -> None:
    """Remove a hook when the mistake ends."""
    stack.callback(handle.remove)


def on_output(module: nn.Module, stack: ExitStack, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module gives, or the first of several."""

    def hook(_: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    undo(stack, module.register_forward_hook(hook))


def heads(x: Tensor, size: int) -> Tensor:
    """[..., H * size] as [..., H, size]; what is one head already stays."""
    return x.reshape(*x.shape[:-1], -1, size) if x.shape[-1] != size else x


def on_argument(name: str, argument: str, change: Callable[[Any], Any]) -> Hooks:
    """Change what a block of the layer is given under a keyword."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            if kwargs.get(argument) is not None:
                kwargs = kwargs | {argument: change(kwargs[argument])}
            return args, kwargs

        block = layer.get_submodule(name)
        undo(stack, block.register_forward_pre_hook(hook, with_kwargs=True))

    return hooks


def replaced(name: str, attribute: str, value: float | nn.Module) -> Hooks:
    """Another value of an attribute of a block of the layer."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        block = layer.get_submodule(name)
        stack.callback(setattr, block, attribute, getattr(block, attribute))
        setattr(block, attribute, value)

    return hooks


def both(*parts: Hooks) -> Hooks:
    """Several changes at once."""

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        for part in parts:
            part(layer, stack)

    return hooks
