"""The parameters that a model has, by its config, without memory for any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from reconcile.exceptions import CheckpointError
from reconcile_references.experts import split_experts
from reconcile_references.models import meta_model, model_config, structure_of, tied_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Names and logical shapes of a model."""

    name: str
    parameters: Mapping[str, tuple[int, ...]]
    """Every tensor of the state dict by name."""
    linears: Mapping[str, tuple[int, int]]
    """(N, K) of every linear by module path."""
    tied: Mapping[str, str]
    """Parameters that need not be stored, with what they are tied to."""
    head: str | None
    layers: int


def read_architecture(
    folder: Path, *, split: bool = False
) -> tuple[Architecture | None, dict[str, Any], str]:
    """The architecture of ``folder/config.json``, the config as it is, and why there is none.

    ``split``: whether the checkpoint stores every expert by itself.

    A config that is missing or that transformers does not know is a finding, not an error; one
    that is no JSON object is.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None, {}, f"no config.json in {folder.name}: logical shapes are inferred"
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    try:
        return _architecture(folder, split), body, ""
    except CheckpointError as error:
        return None, body, f"the architecture is not known: {error}"


def _architecture(folder: Path, split: bool) -> Architecture:
    model = meta_model(model_config(folder), folder)
    if split:
        split_experts(model)
    parts = structure_of(model)
    return Architecture(
        name=type(model).__name__,
        parameters={name: tuple(t.shape) for name, t in model.state_dict().items()},
        linears={
            name: (module.out_features, module.in_features)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        },
        tied=tied_weights(model),
        head=parts.head,
        layers=len(parts.layers),
    )
