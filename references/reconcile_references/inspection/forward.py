"""The strongest witness without a twin: does the model predict text under a layout?

The architecture is filled with the dense tensors and the packed ones as a candidate reads them. The
loss of a trained model on a text is far below what the frequencies of its tokens give only where
packing, table and scale are all right. Activations are not quantised for this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from reconcile.exceptions import CheckpointError, FormatError, ReconcileError
from reconcile.weight import Format, Packing
from reconcile_references.inspection.candidates import Packed, own_scales, shape_of
from reconcile_references.inspection.source import Stored
from reconcile_references.models import empty_model, model_config

LIMIT = 50_000_000
"""Packed weights of a model that is still run; larger ones are judged without."""
TOKENS = 64
"""Tokens of a prompt that are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProbe:
    """A model whose packed weights can be exchanged."""

    model: Any
    items: Sequence[Packed]
    prompts: Sequence[Tensor]
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def guessing(self) -> float:
        """Loss of who knows how often each token occurs but no order; nats per token.

        A model whose linears are noise can come near to it, by its embedding and its head alone.
        """
        counts = torch.bincount(torch.cat([tokens[1:] for tokens in self.prompts]))
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log()).sum())

    def loss(self, form: Format, prompts: int) -> float:
        """Mean loss over the first ``prompts`` prompts, nats per token; inf if it cannot run."""
        for item in self.items:
            try:
                parts = dequantised(item, form, self.codes(item, form.packing))
            except FormatError:
                return math.inf
            for name, values in parts.items():
                self.model.get_parameter(name).data.copy_(values)
        with torch.inference_mode():
            losses = [self._loss(tokens) for tokens in self.prompts[:prompts]]
        mean = sum(losses) / len(losses)
        return mean if math.isfinite(mean) else math.inf

    def codes(self, item: Packed, packing: Packing) -> Tensor:
        """Codes of a tensor, int64 [N, K]; those of the last packing are kept."""
        if self.kept.get("packing") != packing:
            self.kept.clear()
            self.kept["packing"] = packing
        if item.stem not in self.kept:
            self.kept[item.stem] = unpacked(item, packing)
        found: Tensor = self.kept[item.stem]
        return found

    def _loss(self, tokens: Tensor) -> float:
        logits = self.model(tokens[None]).logits[0, :-1].to(torch.float32)
        return float(torch.nn.functional.cross_entropy(logits, tokens[1:]))


def unpacked(item: Packed, packing: Packing) -> Tensor:
    """All codes of a tensor, int64 [N, K]."""
    packing = packing if packing.tile else replace(packing, pad=True)
    shape = shape_of(item, packing)
    if shape is None:
        raise FormatError(f"{item.stem}: its bytes are no whole blocks of this packing")
    stored = torch.from_numpy(item.codes.rows(slice(None)))
    return packing.unpack(stored.reshape(packing.stored_shape(shape)), shape).long()


def dequantised(item: Packed, form: Format, codes: Tensor) -> dict[str, Tensor]:
    """The linears that a packed tensor holds, float32, by parameter.

    A tensor that is split by rows has one scale for each part, in order, or one for each row.
    """
    assert item.place is not None
    values = form.decode(codes, torch.float32)
    scales = (
        own_scales(item)
        if form.granularity == "tensor" or item.scale is None
        else (item.scale.tensor())
    )
    parts = item.shards or ((values.shape[0], values.shape[1]),)
    found, start = {}, 0
    for index, (name, part) in enumerate(zip(item.place.parameters, parts, strict=True)):
        rows = slice(start, start + part[0])
        own = form.scale_values(_own(scales, form, index, rows, len(parts)))
        spread = form.spread(own, part).to(torch.float32)
        multiplies = form.scale_convention == "multiply"
        found[name] = values[rows] * spread if multiplies else values[rows] / spread
        start += part[0]
    return found


def _own(scales: Tensor, form: Format, index: int, rows: slice, parts: int) -> Tensor:
    """The scales of one part of a split tensor, in the format's own shape."""
    if form.granularity == "channel":
        return scales.reshape(-1)[rows]
    if form.granularity == "block":
        return scales if parts == 1 else scales[rows]
    flat = scales.reshape(-1)
    return flat[index : index + 1] if flat.numel() > 1 else flat


def make_probe(
    folder: Path,
    items: Sequence[Packed],
    dense: Mapping[str, Stored],
    prompts: Path | None,
) -> tuple[ModelProbe | None, str]:
    """The model of a checkpoint, ready for candidates; or None and why there is none.

    ``dense``: the stored tensor of every parameter that is not packed.
    """
    try:
        config = model_config(folder)
        tokens = read_prompts(folder, prompts)
    except ReconcileError as error:
        return None, f"the model was not run: {error}"
    if not tokens:
        return None, (
            "the model was not run: there is no text; give --prompts FILE, a JSON list of texts or "
            "of token ids"
        )
    size = sum(math.prod(item.shape) for item in items if item.shape)
    if size > LIMIT:
        return None, f"the model was not run: {size} packed weights, more than {LIMIT}"
    model = empty_model(config, torch.float32)
    held = dict(model.named_parameters())
    packed = {name for item in items if item.place for name in item.place.parameters}
    lost = sorted(set(held) - packed - set(dense) - set(model.all_tied_weights_keys))
    if lost or not packed <= set(held):
        return None, f"the model was not run: {len(lost)} parameters have no tensor: {lost[:3]}"
    with torch.no_grad():
        for name, stored in dense.items():
            if name in held:
                held[name].copy_(stored.tensor().to(torch.float32).reshape(held[name].shape))
    model.tie_weights()
    size = int(config.vocab_size)
    ids = [torch.tensor(list(t)[:TOKENS]) for t in tokens if len(t) > 1 and max(t) < size]
    if not ids:
        return None, "the model was not run: no prompt of two tokens of its vocabulary"
    return ModelProbe(model=model.eval(), items=items, prompts=ids), ""


def read_prompts(folder: Path, file: Path | None) -> list[list[int]]:
    """Token ids of the prompts; texts need the checkpoint's tokenizer. [] where there are none."""
    if file is None:
        return []
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from error
    entries = body.get("prompts") if isinstance(body, dict) else body
    if not isinstance(entries, list):
        raise CheckpointError(f"{file}: expected a list of texts or of token-id lists")
    plain = [e.get("tokens", e.get("text")) if isinstance(e, dict) else e for e in entries]
    return [_tokens(entry, folder, file) for entry in plain]


def _tokens(entry: object, folder: Path, file: Path) -> list[int]:
    if isinstance(entry, list) and all(type(token) is int and token >= 0 for token in entry):
        return entry
    if not isinstance(entry, str):
        raise CheckpointError(f"{file}: expected a text or a list of token ids, got {entry!r:.80}")
    if not any(folder.glob("tokenizer*")):
        raise CheckpointError(f"{folder}: has no tokenizer; give the prompts as token ids")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    return list(tokenizer(entry)["input_ids"])
