"""A layout that a case declares by itself, where config.json declares none that is known.

``reconcile inspect --write-toml`` writes it. It names a registered format or spells one out, and
says which stored key each linear and each dense parameter has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict

from reconcile.exceptions import ConfigError, nearest
from reconcile.tile import strided
from reconcile.weight import Format, Packing

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingConfig:
    """``[model.layout.packing]``: see `reconcile.weight.Packing` and `reconcile.tile.strided`."""

    __pydantic_config__ = _STRICT
    bits: int = 2
    dim: Literal[0, 1] = 1
    arrangement: Literal["interleaved", "planar", "strided"]
    low_first: bool = True
    stride: int | None = None
    """Bytes of a group; only with ``strided``."""
    flat: bool = False
    """Whether groups run across rows; only with ``strided``."""

    def packing(self) -> Packing:
        """The packing; ConfigError for fields that do not belong together."""
        if (self.stride is not None) != (self.arrangement == "strided"):
            raise ConfigError("model.layout.packing: stride belongs to arrangement strided")
        try:
            if self.arrangement == "strided":
                tile = strided(self.stride or 1, low_first=self.low_first, flat=self.flat)
                return Packing(bits=2, dim=1, arrangement="tiled", tile=tile)
            return Packing(
                bits=self.bits,
                dim=self.dim,
                arrangement=self.arrangement,
                low_first=self.low_first,
            )
        except ValueError as error:
            raise ConfigError(f"model.layout.packing: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSource:
    """Where a linear's weight is stored."""

    __pydantic_config__ = _STRICT
    codes: str
    """Stored key of the codes."""
    scale: str | None = None
    """Stored key of the scale; None: the scale is 1."""
    rows: tuple[int, int] | None = None
    """Rows of the logical weight in ``codes`` that are this linear's; None: all."""
    part: int | None = None
    """Which of several scales is this linear's; None: those of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """``[model.layout]``."""

    __pydantic_config__ = _STRICT
    format: str
    """A registered format; what is given below changes it, under the name ``declared``."""
    packing: PackingConfig | None = None
    table: tuple[float, ...] | None = None
    """Value of each code."""
    invalid: tuple[int, ...] | None = None
    granularity: Literal["tensor", "channel", "block"] | None = None
    block: tuple[int, int] | None = None
    scale_convention: Literal["multiply", "divide"] | None = None
    config: Path | None = None
    """Directory of config.json, where it is not the checkpoint's."""
    linears: dict[str, LinearSource] = field(default_factory=dict)
    """By module path. All others stay dense."""
    dense: dict[str, str] = field(default_factory=dict)
    """Stored key by parameter, where it is not the parameter's name; ``"T:key"`` is transposed."""
    unused: tuple[str, ...] = ()
    """Stored keys that the model does not have, by explicit word."""

    def number_format(self, known: dict[str, Format]) -> Format:
        """The format that it names or spells out.

        Raises:
            ConfigError: an unknown name, or fields that make no format.
        """
        if self.format not in known:
            raise ConfigError(f"model.layout.format {self.format!r}: {nearest(self.format, known)}")
        form = known[self.format]
        changes: dict[str, object] = {}
        if self.packing is not None:
            changes["packing"] = self.packing.packing()
        if self.table is not None:
            changes["table"] = self.table
        if self.invalid is not None:
            changes["invalid"] = frozenset(self.invalid)
        if self.granularity is not None:
            changes |= {"granularity": self.granularity, "block": self.block}
        elif self.block is not None:
            changes["block"] = self.block
        if self.scale_convention is not None:
            changes["scale_convention"] = self.scale_convention
        if not changes:
            return form
        if set(changes) != {"block"}:
            changes |= {"name": "declared", "misreadings": (), "reference": "declared by the case"}
        dtypes = dict.fromkeys((*form.scale_dtypes, torch.float32, torch.bfloat16, torch.float16))
        if form.scale_encoding == "value":
            changes["scale_dtypes"] = tuple(dtypes)
        try:
            return replace(form, **changes)  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"model.layout: {error}") from None
