"""``torch_w8a8``: FP8 weights and FP8 activations in plain torch, as vLLM's fallback computes.

vLLM's `PerTensorTorchFP8ScaledMMLinearKernel` and its channel-wise sibling take what its W8A16
kernels refuse: activations are quantised per token (`csrc/cpu/fp8_quant.cpp`), so the semantics is
another one. Here the codes are multiplied in float32, which holds every product exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.activation import QUANTISERS
from reconcile.contract import Contract
from reconcile.kernel import PYTHON, Engine, LinearSpec, Support
from reconcile.weight import QuantizedWeight

FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_channel")

CONTRACT = Contract(activation="per_token_fp8", scale_applied="after_sum")
"""x is rounded to E4M3 with one scale per row before the product."""


@dataclass(frozen=True, slots=True)
class TorchW8A8:
    """y = scale * (quantised x) codes^T (+ b), summed in float32."""

    name: str = "torch_w8a8"
    contract: Contract = CONTRACT
    engines: tuple[Engine, ...] = (PYTHON,)
    formats: tuple[str, ...] = FORMATS

    def is_supported(self, engine: Engine) -> Support:
        """Wherever torch runs."""
        return Support(engine == PYTHON, "plain torch")

    def can_implement(self, spec: LinearSpec) -> Support:
        """Any shape, in its formats."""
        ok = spec.format in FORMATS
        return Support(ok, spec.format if ok else f"reads {', '.join(FORMATS)}, not {spec.format}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Values of the codes, float32 [N, K], and scales, float32 [1] or [N]."""
        return weight.format.decode(weight.unpacked(), torch.float32), weight.scales.float()

    def apply(
        self, x: Tensor, prepared: tuple[Tensor, Tensor], bias: Tensor | None = None
    ) -> Tensor:
        """Y [..., N] in the dtype of x [..., K]."""
        values, scales = prepared
        y = QUANTISERS["per_token_fp8"](x).float() @ values.T * scales
        return (y if bias is None else y + bias.float()).to(x.dtype)


TORCH_W8A8 = TorchW8A8()
"""The kernel that the entry point ``torch_w8a8`` names."""
