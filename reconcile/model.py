"""The interface of a model source: what the engine asks of whoever reads checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from reconcile.grouped import StoredWeight
from reconcile.layout import LayoutConfig

MakeLinear = Callable[[str, StoredWeight], nn.Module]
"""Module path and stored weight to the module that takes its place: from [..., K] to [..., N], for
a `GroupedWeight` from [..., G, K] to [..., G, N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Module paths of a decoder's parts, in execution order."""

    layers: tuple[str, ...]
    """Decoder layers, e.g. ``model.layers.0``."""
    norm: str | None
    """Final norm."""
    head: str | None
    """Output embedding, ``lm_head``."""
    routers: tuple[str, ...] = ()
    """Modules that choose experts; they return logits, scores and the chosen ones."""


class Checkpoint(Protocol):
    """A checkpoint that was read and checked."""

    @property
    def path(self) -> Path:
        """Its directory."""

    @property
    def sha256(self) -> str:
        """Hash over its files."""

    @property
    def dtype(self) -> str:
        """Dtype of its dense tensors, by torch name."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def weights(self) -> Mapping[str, StoredWeight]:
        """Every linear that a kernel may compute, by module path, in the model's order."""

    @property
    def activation(self) -> str:
        """What the checkpoint asks of activations: ``none``, ``dynamic`` or ``static``."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the reader of a report must know of it, e.g. which load rule was applied."""

    @property
    def structure(self) -> Structure:
        """Where the layers, the final norm and the head are."""

    def build(self, dtype: torch.dtype, make_linear: MakeLinear) -> nn.Module:
        """The model in ``dtype`` with ``make_linear`` in place of every quantised linear."""

    def precise(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Context in which the library's own float32 islands keep ``dtype``."""

    def decode_again(self, module: str) -> Tensor | None:
        """A quantised weight by a second, independent decoder, float64; None: there is none."""

    def originals(self, path: Path) -> Mapping[str, Tensor]:
        """The dense weights that were quantised, by module path, from another checkpoint."""

    def tokens(self, prompt: str) -> list[int]:
        """Token ids of a text; CheckpointError where the checkpoint has no tokenizer."""


class ModelSource(Protocol):
    """Entry point of group ``reconcile.models``."""

    def load(
        self, path: Path, rule: str | None = None, layout: LayoutConfig | None = None
    ) -> Checkpoint:
        """Read a checkpoint; CheckpointError says what is missing, unused or wrong.

        ``rule`` names what a serving engine changes in the weights when it loads them. ``layout``
        stands in place of the quantisation that the checkpoint declares.
        """
