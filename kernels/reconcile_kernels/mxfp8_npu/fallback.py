"""Which layers run in MXFP8, which dense, and which not at all: vllm-ascend's rules as a table.

Source: vllm-ascend, quantization/configs/fp8_config.py, methods/fp8_block.py and
methods/w8a8/fp8_block.py (PR 14852); for ``scale_alg`` methods/w8a8_mxfp8.py at 182b75e.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from reconcile.weight import Shape

ASCEND_950 = "Ascend950"
"""What the name of a device that has the MX operators begins with."""
_SCALE_ALG = {("minimax_m3", "A5"): 1}
"""Model and device generation to ``scale_alg``; 0 everywhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How a layer runs, and why."""

    kind: Literal["mxfp8", "dense"]
    """``dense``: the resolved weight in the model's dtype, and an unquantised product."""
    reason: str


def scale_alg(model: str, generation: str) -> int:
    """``scale_alg`` that vllm-ascend passes to `npu_dynamic_mx_quant`.

    >>> scale_alg("minimax_m3", "A5"), scale_alg("minimax_m3", "A3"), scale_alg("qwen3", "A5")
    (1, 0, 0)
    """
    return _SCALE_ALG.get((model, generation), 0)


def check_config(block: Shape | None, activation: str) -> None:
    """What a block-FP8 config must declare.

    Raises:
        NotImplementedError: no ``weight_block_size``, or activations that are not dynamic.
    """
    if block is None:
        raise NotImplementedError("FP8 without weight_block_size is not implemented on Ascend")
    if activation != "dynamic":
        raise NotImplementedError(
            f"activation_scheme {activation!r} is not implemented on Ascend; expected 'dynamic'"
        )


def check_modelopt(serialised: bool) -> None:
    """What a ModelOpt MXFP8 config must declare; ValueError where the weights are not stored so."""
    if not serialised:
        raise ValueError("ModelOpt MXFP8: the checkpoint must be serialised in MXFP8, it is not")


def decide(name: str, shape: Shape, device: str, ignored: Iterable[str] = ()) -> Decision:
    """How a linear layer [N, K] at path ``name`` runs on ``device``."""
    if any(name == entry or name.endswith(f".{entry}") for entry in ignored):
        return Decision(kind="dense", reason=f"{name} is among the ignored layers: dense")
    if name.rpartition(".")[2] == "kv_b_proj":
        return Decision(kind="dense", reason=f"{name}: kv_b_proj is kept dense")
    if not device.startswith(ASCEND_950):
        return Decision(kind="dense", reason=f"{device} has no MX operators: dense")
    if shape[1] % 32:
        return Decision(
            kind="dense", reason=f"K = {shape[1]} is no multiple of 32: dense in the model's dtype"
        )
    return Decision(kind="mxfp8", reason=f"{device}, K = {shape[1]}")


def decide_experts(hidden: int, intermediate: int, device: str) -> Decision:
    """How a layer of experts runs: w13 has K = hidden, w2 has K = intermediate."""
    if not device.startswith(ASCEND_950):
        return Decision(kind="dense", reason=f"{device} has no MX operators: dense")
    odd = [f"{name} has K = {k}" for name, k in (("w13", hidden), ("w2", intermediate)) if k % 32]
    if odd:
        text = f"{' and '.join(odd)}, no multiple of 32: all experts dense in the model's dtype"
        return Decision(kind="dense", reason=text)
    return Decision(kind="mxfp8", reason=f"{device}, K = {hidden} and {intermediate}")
