"""Which layers run in MXFP8, which dense, and which not at all: vllm-ascend's rules as a table.

The kernel asks it before it prepares a layer. Layers that the checkpoint itself leaves out
(``modules_to_not_convert``, ``ignored_layers``) never come here: whoever reads the checkpoint keeps
them dense, and refuses a grid of scales that does not fit.

Source: vllm-ascend, quantization/configs/fp8_config.py, methods/fp8_block.py and
methods/w8a8/fp8_block.py (PR 14852); for ``scale_alg`` methods/w8a8_mxfp8.py at 182b75e.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reconcile.kernel import LinearSpec
from reconcile.numbers.mx import GROUP

ASCEND_950 = "Ascend950"
"""What the name of a device that has the MX operators begins with."""
KEPT_DENSE = "kv_b_proj"
"""The linear that is absorbed into attention."""
WITHOUT_BLOCKS = ("fp8_e4m3_tensor", "fp8_e4m3_channel")
"""FP8 formats whose config has no ``weight_block_size``."""
EXPERTS = ("w13", "w2")
"""Batched linears of a mixture of experts, [E, 2 I, H] and [E, H, I], by their module's name."""
_SCALE_ALG = {("minimax_m3", "A5"): 1}
"""Model and device generation to ``scale_alg``; 0 everywhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How a layer runs, and why."""

    kind: Literal["mxfp8", "dense", "not implemented"]
    """``dense``: the resolved weight in the model's dtype, and an unquantised product."""
    reason: str


def scale_alg(model: str, generation: str) -> int:
    """``scale_alg`` that vllm-ascend passes to `npu_dynamic_mx_quant`.

    >>> scale_alg("minimax_m3", "A5"), scale_alg("minimax_m3", "A3"), scale_alg("qwen3", "A5")
    (1, 0, 0)
    """
    return _SCALE_ALG.get((model, generation), 0)


def decide(spec: LinearSpec, device: str = ASCEND_950) -> Decision:
    """How a layer runs on ``device``, by the first row of the table that fits."""
    if spec.format in WITHOUT_BLOCKS:
        return _not_implemented("FP8 without weight_block_size is not implemented on Ascend")
    if spec.activation_scheme == "static":
        return _not_implemented(
            "activation_scheme 'static' is not implemented on Ascend; expected 'dynamic'"
        )
    if KEPT_DENSE in spec.module.split("."):
        return _dense(f"{KEPT_DENSE} is kept dense")
    if not device.startswith(ASCEND_950):
        return _dense(f"{device} has no MX operators: dense in the model's dtype")
    if part := expert_part(spec.module):
        return _decide_experts(part, spec.n, spec.k)
    if spec.k % GROUP:
        return _dense(f"K = {spec.k} is no multiple of {GROUP}: dense in the model's dtype")
    return Decision(kind="mxfp8", reason="MXFP8")


def expert_part(module: str) -> str:
    """``w13`` or ``w2`` where a module, or a group of it, is one of them; else empty.

    >>> expert_part("model.layers.0.mlp.experts.w13.3"), expert_part("model.layers.0.mlp.up_proj")
    ('w13', '')
    """
    return next((part for part in module.split(".") if part in EXPERTS), "")


def _decide_experts(part: str, n: int, k: int) -> Decision:
    """Both halves run alike: w13 has K = hidden, w2 has K = intermediate, 2 I and H rows."""
    hidden, intermediate = (k, n // 2) if part == "w13" else (n, k)
    sizes = {"w13": hidden, "w2": intermediate}
    if odd := [f"{name} has K = {size}" for name, size in sizes.items() if size % GROUP]:
        return _dense(
            f"{' and '.join(odd)}, no multiple of {GROUP}: all experts dense in the model's dtype"
        )
    if odd := [f"{name} has K = {size}" for name, size in sizes.items() if size % (2 * GROUP)]:
        return _not_implemented(
            f"{' and '.join(odd)}: experts need an even number of groups of {GROUP}, their scale "
            "bytes are reshaped to pairs without padding"
        )
    return Decision(kind="mxfp8", reason="MXFP8")


def _dense(reason: str) -> Decision:
    return Decision(kind="dense", reason=reason)


def _not_implemented(reason: str) -> Decision:
    return Decision(kind="not implemented", reason=reason)
