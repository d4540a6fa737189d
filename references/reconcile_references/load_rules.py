"""What a serving engine does to stored weights while it loads them, as named rules.

A rule is never applied unless a case names it: with it the reference judges what the engine's
kernel gets, without it what the checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.exceptions import CheckpointError, nearest
from reconcile.weight import QuantizedWeight

Weights = dict[str, QuantizedWeight]
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that vLLM loads as one module (``packed_modules_mapping`` of llama, qwen3, mistral3)."""
_PER_TENSOR = "fp8_e4m3_tensor"


def apply_rule(rule: str, weights: Weights) -> tuple[Weights, tuple[str, ...]]:
    """The weights after a rule, and what it changed, in words.

    Raises:
        CheckpointError: an unknown rule, or one that these weights are not subject to.
    """
    if rule not in RULES:
        raise CheckpointError(f"unknown load rule {rule!r}: {nearest(rule, RULES)}")
    changed = RULES[rule](weights)
    codes = sum(int((changed[n].codes != w.codes).sum()) for n, w in weights.items())
    total = sum(weight.codes.numel() for weight in weights.values())
    return changed, (f"load rule {rule}: {codes} of {total} codes changed",)


def vllm_shard_maximum(weights: Weights) -> Weights:
    """Per-tensor FP8 requantised to the largest scale of the linears that vLLM fuses.

    A shard is decoded as ``w.to(float16) * scale`` in float16, and encoded again by
    multiplication with the reciprocal of the largest scale in float32, to nearest even,
    saturating. It happens to a linear that is alone, too. Source: vLLM 0.33.0
    `w8a8_utils.requantize_with_max_scale`, `csrc/cpu/fp8_quant.cpp`.

    Raises:
        CheckpointError: a weight that is not per tensor; vLLM leaves those alone.
    """
    other = sorted(name for name, w in weights.items() if w.format.name != _PER_TENSOR)
    if other:
        raise CheckpointError(
            f"load rule vllm_shard_maximum is for {_PER_TENSOR}; {other[0]} is "
            f"{weights[other[0]].format.name}"
        )
    changed: Weights = {}
    for group in _groups(weights):
        largest = torch.stack([weights[name].scales.to(torch.float32) for name in group]).amax(0)
        for name in group:
            codes = _requantised(weights[name], largest)
            changed[name] = replace(weights[name], codes=codes, scales=largest)
    return {name: changed[name] for name in weights}


def _groups(weights: Mapping[str, QuantizedWeight]) -> list[list[str]]:
    """Names of the linears that are loaded together; most are alone."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        parent, _, leaf = name.rpartition(".")
        fused = next((members for members in FUSED if leaf in members), (leaf,))
        groups.setdefault(f"{parent}.{fused[0]}", []).append(name)
    return list(groups.values())


def _requantised(weight: QuantizedWeight, scale: Tensor) -> Tensor:
    """Codes of the weight under another scale, uint8 [N, K]."""
    values = weight.codes.view(torch.float8_e4m3fn).to(torch.float16)
    decoded = values * weight.scales.to(torch.float32).reshape(())  # float16: a scalar promotes not
    scaled = decoded.to(torch.float32) * (1 / scale.reshape(()))
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


RULES: dict[str, Callable[[Weights], Weights]] = {"vllm_shard_maximum": vllm_shard_maximum}
"""Every rule that ``[model] load_rule`` may name."""
