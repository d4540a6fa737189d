"""The tensors of a checkpoint under the model's names, as the layout of a case arranges them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reconcile.exceptions import CheckpointError, FormatError, nearest
from reconcile.layout import LayoutConfig, LinearSource
from reconcile.weight import Format, Shape
from reconcile_references.checkpoint import names
from reconcile_references.inspection.source import open_source

TRANSPOSED = "T:"
"""What begins the key of a dense tensor that is stored transposed."""


def arrange(
    path: Path, layout: LayoutConfig, form: Format, linears: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Read the tensors that a layout names.

    Args:
        path: checkpoint directory or file.
        layout: which stored key belongs where.
        form: the format of all its linears.
        linears: (N, K) of the model's linears by module path.

    Returns:
        Codes ``{module}.weight``, scales ``{module}.weight_scale`` in the format's own shape, and
        every other tensor under its parameter's name.

    Raises:
        CheckpointError, FormatError: a key or module that is not there, or bytes that do not fit.
    """
    stored = open_source(path).tensors
    if unknown := sorted(set(layout.linears) - set(linears)):
        hint = nearest(unknown[0], linears)
        raise CheckpointError(f"model.layout.linears: no linear {unknown[0]!r}: {hint}")
    wanted = _wanted(layout)
    if lost := wanted - set(stored):
        raise CheckpointError(f"{path}: {names('keys that model.layout names are missing', lost)}")
    made: dict[str, Tensor] = {}
    for module, source in layout.linears.items():
        shape = linears[module]
        whole = max((s.rows[1] for s in _siblings(layout, source) if s.rows), default=shape[0])
        try:
            codes = _codes(stored[source.codes].tensor(), form, (whole, shape[1]), source, shape)
            scale = stored[source.scale].tensor() if source.scale else torch.ones(1)
            made[f"{module}.weight"] = codes
            made[f"{module}.weight_scale"] = _scale(scale, form, source, shape)
        except FormatError as error:
            raise FormatError(f"{module}: {error}") from None
    for parameter, key in layout.dense.items():
        tensor = stored[key.removeprefix(TRANSPOSED)].tensor()
        made[parameter] = tensor.t().contiguous() if key.startswith(TRANSPOSED) else tensor
    left = set(stored) - wanted - set(layout.unused)
    return made | {key: stored[key].tensor() for key in left}


def _wanted(layout: LayoutConfig) -> set[str]:
    codes = {source.codes for source in layout.linears.values()}
    scales = {source.scale for source in layout.linears.values() if source.scale}
    return codes | scales | {key.removeprefix(TRANSPOSED) for key in layout.dense.values()}


def _siblings(layout: LayoutConfig, source: LinearSource) -> list[LinearSource]:
    return [other for other in layout.linears.values() if other.codes == source.codes]


def _codes(
    stored: Tensor, form: Format, whole: Shape, source: LinearSource, shape: Shape
) -> Tensor:
    """Codes in the format's own shape; of a tensor of several linears the rows that are asked."""
    if stored.element_size() != 1:
        raise FormatError(f"{source.codes}: expected bytes, got {stored.dtype}")
    expected = form.packing.stored_shape(whole)
    if stored.numel() != expected[0] * expected[1]:
        raise FormatError(
            f"{source.codes}: expected {list(expected)} bytes for a weight {list(whole)} in format "
            f"{form.name}, got {list(stored.shape)}"
        )
    if source.rows is None:
        return stored.reshape(expected)
    low, high = source.rows
    if not 0 <= low < high or high - low != shape[0]:
        raise FormatError(f"{source.codes}: rows {low} to {high} are not the {shape[0]} of it")
    codes = form.unpack(stored.view(torch.uint8).reshape(expected), whole)
    return form.pack(codes[low:high].contiguous())


def _scale(stored: Tensor, form: Format, source: LinearSource, shape: Shape) -> Tensor:
    expected = form.scale_shape(shape)
    if source.part is not None:
        stored = stored.reshape(-1)[source.part : source.part + 1]
    elif source.rows is not None and form.granularity != "tensor":
        rows = form.block[0] if form.block else 1
        low, high = source.rows
        stored = stored.reshape(-1, *expected[1:])[low // rows : -(-high // rows)]
    size = 1
    for side in expected:
        size *= side
    return stored.reshape(expected) if stored.numel() == size else stored
