"""Stored keys to the model's parameters: known dialects, then shapes.

A key is a module and a role. Dialects are data: regular expressions over the module, from the names
of Meta's and Mistral's own checkpoints, llama.cpp's and BitNet's GPU kernels to transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reconcile_references.inspection.architecture import Architecture

ROLES: dict[str, str] = {
    "weight": "weight",
    "weight_packed": "weight",
    "qweight": "weight",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "qscale_weight": "scale",
    "weight:scale": "scale",
    "scales": "scale",
    "scale": "scale",
    "bias": "bias",
    "input_scale": "input_scale",
    "activation_scale": "input_scale",
    "qscale_act": "input_scale",
    "k_scale": "cache_scale",
    "v_scale": "cache_scale",
}
"""Last components of a key and what they hold."""
_LAYER = r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\."
_BLOCK = r"^blk\.(\d+)\."
_AT = r"model.layers.\1."
_DIALECTS: tuple[tuple[str, str], ...] = (
    (r"^model\.language_model\.(.*)", r"model.\1"),
    (r"^language_model\.model\.(.*)", r"model.\1"),
    (r"^(?:token_embd|tok_embeddings)$", "model.embed_tokens"),
    (r"^(?:output_norm|norm)$", "model.norm"),
    (r"^output$", "lm_head"),
    (_LAYER + r"(?:attention|attn)\.w([qkvo])$", _AT + r"self_attn.\2_proj"),
    (_LAYER + r"(?:feed_forward|ffn)\.w1$", _AT + "mlp.gate_proj"),
    (_LAYER + r"(?:feed_forward|ffn)\.w2$", _AT + "mlp.down_proj"),
    (_LAYER + r"(?:feed_forward|ffn)\.w3$", _AT + "mlp.up_proj"),
    (_LAYER + r"(?:attention|attn)\.([qk])_norm$", _AT + r"self_attn.\2_norm"),
    (_LAYER + r"(?:attention|attn)_norm$", _AT + "input_layernorm"),
    (_LAYER + r"ffn_norm$", _AT + "post_attention_layernorm"),
    (_LAYER + r"(?:attention|attn)\.attn_sub_norm$", _AT + "self_attn.attn_sub_norm"),
    (_LAYER + r"(?:feed_forward|ffn)\.ffn_sub_norm$", _AT + "mlp.ffn_sub_norm"),
    (_BLOCK + r"attn_([qkv])$", _AT + r"self_attn.\2_proj"),
    (_BLOCK + r"attn_output$", _AT + "self_attn.o_proj"),
    (_BLOCK + r"attn_([qk])_norm$", _AT + r"self_attn.\2_norm"),
    (_BLOCK + r"attn_sub_norm$", _AT + "self_attn.attn_sub_norm"),
    (_BLOCK + r"ffn_(gate|up|down)$", _AT + r"mlp.\2_proj"),
    (_BLOCK + r"ffn_sub_norm$", _AT + "mlp.ffn_sub_norm"),
    (_BLOCK + r"attn_norm$", _AT + "input_layernorm"),
    (_BLOCK + r"ffn_norm$", _AT + "post_attention_layernorm"),
)
_FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_LAYER + r"(?:attention|attn|self_attn)\.(?:wqkv|qkv_proj)$", ("q_proj", "k_proj", "v_proj")),
    (_LAYER + r"(?:feed_forward|ffn|mlp)\.(?:w13|gate_up_proj)$", ("gate_proj", "up_proj")),
)
"""Tensors that hold several linears, one below the other."""


@dataclass(frozen=True, slots=True)
class Key:
    """A stored key taken apart."""

    stem: str
    """Module path in the checkpoint's own names."""
    role: str
    """``weight``, ``scale``, ``bias``, ``input_scale``, ``cache_scale`` or ``other``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stored weight goes in the model."""

    parameters: tuple[str, ...]
    """One parameter; several where the tensor is split by rows, in order."""
    how: str
    """``same name``, ``dialect``, ``split``, ``shape`` or ``ambiguous``."""
    choices: int = 1
    """How many parameters fit equally well."""


def split_key(name: str) -> Key:
    """Module and role of a key.

    >>> split_key("model.layers.0.mlp.up_proj.weight_scale_inv")
    Key(stem='model.layers.0.mlp.up_proj', role='scale')
    >>> split_key("lm_head")
    Key(stem='lm_head', role='other')
    """
    stem, _, last = name.rpartition(".")
    return Key(stem, ROLES[last]) if last in ROLES and stem else Key(name, "other")


def translate(stem: str) -> str:
    """A module path in transformers' names, where a dialect is known.

    >>> translate("blk.3.ffn_gate")
    'model.layers.3.mlp.gate_proj'
    """
    for pattern, replacement in _DIALECTS:
        if re.match(pattern, stem):
            return re.sub(pattern, replacement, stem)
    return stem


def fused(stem: str) -> tuple[str, ...]:
    """The linears that a tensor of this name holds one below the other; () for others.

    >>> fused("layers.1.feed_forward.w13")
    ('model.layers.1.mlp.gate_proj', 'model.layers.1.mlp.up_proj')
    """
    for pattern, parts in _FUSED:
        if found := re.match(pattern, stem):
            group = "self_attn" if parts[0] == "q_proj" else "mlp"
            return tuple(f"model.layers.{found.group(1)}.{group}.{part}" for part in parts)
    return ()


def place(stem: str, role: str, model: Architecture | None) -> Place | None:
    """The parameter of a stored weight or bias by its name; None where no name fits."""
    if role not in ("weight", "bias", "other"):
        return None
    suffix = f".{role}" if role != "other" else ""
    target = f"{translate(stem)}{suffix}"
    if model is None:
        how = "same name" if target == f"{stem}{suffix}" else "dialect"
        return Place(parameters=(target,), how=how)
    if f"{stem}{suffix}" in model.parameters:
        return Place(parameters=(f"{stem}{suffix}",), how="same name")
    if target in model.parameters:
        return Place(parameters=(target,), how="dialect")
    parts = tuple(f"{part}{suffix}" for part in fused(stem))
    if parts and all(part in model.parameters for part in parts):
        return Place(parameters=parts, how="split")
    return None


def by_shape(
    shapes: Mapping[str, Iterable[tuple[int, ...]]],
    free: Mapping[str, tuple[int, ...]],
) -> dict[str, Place]:
    """Parameters for keys that no name places, by the logical shapes that each may have.

    ``shapes``: possible logical shapes by key. ``free``: the parameters that are still without a
    tensor. A key that fits several is ambiguous and placed nowhere in particular.
    """
    places = {}
    for key, possible in shapes.items():
        wanted = set(possible)
        fitting = [name for name, shape in free.items() if shape in wanted]
        if len(fitting) == 1:
            places[key] = Place(parameters=(fitting[0],), how="shape")
        elif fitting:
            places[key] = Place(parameters=tuple(fitting), how="ambiguous", choices=len(fitting))
    return places
