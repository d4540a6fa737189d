"""What RoPE would do with another base, width, position or scale.

The tables of cosines and sines [B, T, d] that an attention is given are replaced. They hold each
of d/2 frequencies twice, the second half like the first (halves are rotated).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.diagnosis.fits import Family
from reconcile.diagnosis.hooks import Hooks, Variation, both, heads, on_output, undo

NAMES = ("rope_theta", "rope_frequencies", "partial_rotary", "position_offset")
BASES = (1e4, 5e5, 1e6, 1e5, 5e6, 1e7, 1e3, 1e2, 1.5e5, 8e6, 2.5e5)
"""Bases that models have."""
FRACTIONS = (0.5, 0.25, 0.75, 0.125)
"""Parts of a head that partial RoPE rotates."""


def rope_variations(name: str, block: nn.Module, frequencies: Tensor | None) -> Iterator[Variation]:
    """Positions and widths of RoPE that are not the right ones.

    Args:
        name: the attention's, inside the layer.
        block: the attention.
        frequencies: of the model's RoPE, [d/2]; None: it has none that is known.
    """
    size = getattr(block, "head_dim", None)
    if frequencies is None or not isinstance(size, int) or 2 * len(frequencies) != size:
        return
    still = Variation(
        "position_offset",
        name,
        "every position counts as 0: RoPE does nothing",
        _tables(name, lambda p: torch.zeros_like(p)[..., None] * frequencies),
    )
    yield still
    for count in (1, -1, 2, -2):
        ahead = f"{abs(count)} {'after' if count > 0 else 'before'} the right one"
        text = f"queries and keys are rotated to the position {ahead}"
        shift = _tables(name, _shifted(frequencies, count))
        yield Variation("position_offset", name, text, shift)
        text = f"queries alone are rotated to the position {ahead}"
        yield Variation("position_offset", name, text, _turned(name, size, frequencies, count))
    base = base_of(frequencies)
    for fraction in FRACTIONS:
        width = 2 * round(fraction * size / 2)
        own = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        for kind, kept, order in (
            ("with frequencies of their own width", own, _paired(size, width)),
            ("with those of the whole width", frequencies[: width // 2], _paired(size, width)),
            ("in pairs of the whole width", frequencies[: width // 2], torch.arange(size)),
        ):
            text = f"only {fraction:g} of each head is rotated, {width} of {size}, {kind}"
            hooks = both(_ordered(name, size, order), _tables(name, _angles(_padded(kept, size))))
            yield Variation("partial_rotary", name, text, hooks)


def rope_families(name: str, block: nn.Module, frequencies: Tensor | None) -> Iterator[Family]:
    """The base, and a factor of all frequencies, solved for."""
    size = getattr(block, "head_dim", None)
    if frequencies is None or not isinstance(size, int) or 2 * len(frequencies) != size:
        return
    right = base_of(frequencies)
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    yield Family(
        "rope_theta",
        name,
        lambda base: f"RoPE's base is {base:.4g}, where {right:.4g} is right",
        lambda base: _tables(name, _angles(base**-exponents)),
        tuple(10 ** (n / 2) for n in range(3, 17)),
        BASES,
    )
    yield Family(
        "rope_frequencies",
        name,
        lambda factor: f"RoPE's frequencies, or its positions, are {factor:.4g} times the right",
        lambda factor: _tables(name, _angles(factor * frequencies)),
        tuple(2.0 ** (n / 2) for n in range(-10, 8)),
        tuple(2.0**n for n in range(-5, 4)),
    )


def frequencies_of(model: nn.Module) -> Tensor | None:
    """Of the model's RoPE, float64 [d/2]; None where it has none, or several."""
    known = (getattr(module, "inv_freq", None) for module in model.modules())
    found = [tensor for tensor in known if isinstance(tensor, Tensor) and tensor.dim() == 1]
    return found[0].double() if len(found) == 1 else None


def base_of(frequencies: Tensor) -> float:
    """The base of frequencies c * base^(-2i / d), by the first two; c is that of linear scaling.

    >>> round(base_of(0.25 * 100.0 ** -torch.tensor([0.0, 0.5], dtype=torch.float64)), 9)
    100.0
    """
    if len(frequencies) < 2:
        return 1e4
    return float(frequencies[1] / frequencies[0]) ** -len(frequencies)


def _angles(frequencies: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda positions: positions[..., None] * frequencies


def _shifted(frequencies: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    return lambda positions: (positions + count)[..., None] * frequencies


def _padded(kept: Tensor, size: int) -> Tensor:
    return torch.cat([kept.double(), torch.zeros(size // 2 - len(kept), dtype=torch.float64)])


def _tables(name: str, angles: Callable[[Tensor], Tensor]) -> Hooks:
    """Tables of the angles [..., d/2] at positions [...], as large as the right ones."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        given = kwargs.get("position_embeddings")
        if given is None:
            return args, kwargs
        cos, sin = given
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(cos.shape[-2])
        angle = angles(positions.double())
        large = float((cos.double().square() + sin.double().square()).mean().sqrt())
        both_halves = torch.cat([angle, angle], -1)
        tables = (large * both_halves.cos(), large * both_halves.sin())
        made = tuple(table.to(cos.dtype).expand_as(cos) for table in tables)
        return args, kwargs | {"position_embeddings": made}

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        undo(stack, layer.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))

    return hooks


def _last(block: nn.Module, letter: str) -> nn.Module:
    """What gives queries or keys to RoPE."""
    norm = f"{letter}_norm"
    return block.get_submodule(norm if hasattr(block, norm) else f"{letter}_proj")


def _turned(name: str, size: int, frequencies: Tensor, count: int) -> Hooks:
    """Queries rotated further before RoPE: rotations add."""
    angle = torch.cat([frequencies, frequencies]) * count
    cos, sin = angle.cos(), angle.sin()

    def change(y: Tensor) -> Tensor:
        x = heads(y, size)
        first, second = x.chunk(2, -1)
        turned = x * cos.to(x) + torch.cat([-second, first], -1) * sin.to(x)
        return turned.reshape(y.shape)

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        on_output(_last(layer.get_submodule(name), "q"), stack, change)

    return hooks


def _paired(size: int, width: int) -> Tensor:
    """Order in which i and i + width/2, a pair of partial RoPE, are half a head apart."""
    half = width // 2
    rest = torch.arange(width, size)
    cut = (size - width) // 2
    first, second = torch.arange(half), torch.arange(half, width)
    return torch.cat([first, rest[:cut], second, rest[cut:]])


def _ordered(name: str, size: int, order: Tensor) -> Hooks:
    """Queries and keys with the columns of each head in another order: scores do not see it."""

    def change(y: Tensor) -> Tensor:
        return heads(y, size)[..., order].reshape(y.shape)

    def hooks(layer: nn.Module, stack: ExitStack) -> None:
        for letter in "qk":
            on_output(_last(layer.get_submodule(name), letter), stack, change)

    return hooks
