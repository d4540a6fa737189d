"""``torch_dequant`` as a `Kernel`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.kernel import PYTHON, Engine, LinearSpec, Support
from reconcile.weight import QuantizedWeight

_NARROW = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class TorchDequant:
    """y = x float32(W)^T (+ b) in float32, rounded once to the dtype of x."""

    name: str = "torch_dequant"
    contract: Contract = field(
        default=Contract(
            weight_rounding="float32",
            scale_applied="before",
            accumulator="float32",
            output="bfloat16",
            deterministic=True,
        )
    )
    """``output`` is the dtype of the usual activations; y always has the dtype of x."""
    engines: tuple[Engine, ...] = (PYTHON,)
    formats: tuple[str, ...] | None = None

    def is_supported(self, engine: Engine) -> Support:
        """Wherever torch runs."""
        return Support(engine == PYTHON, f"torch {torch.__version__}")

    def can_implement(self, spec: LinearSpec) -> Support:
        """Any shape and format; x in a dtype that float32 holds."""
        if spec.activation_dtype not in _NARROW:
            return Support(False, f"{self.name} computes in float32, x is {spec.activation_dtype}")
        return Support(True, f"{spec.format}, N={spec.n}, K={spec.k}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> Tensor:  # noqa: ARG002
        """The decoded weight, float32 [N, K]."""
        return weight.dequantize(torch.float32)

    def apply(self, x: Tensor, prepared: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y [..., N] in the dtype of x [..., K]; KernelError for another K."""
        if x.dim() == 0 or x.shape[-1] != prepared.shape[1]:
            raise KernelError(
                f"{self.name}: expected x [..., {prepared.shape[1]}], got {list(x.shape)}"
            )
        wide = None if bias is None else bias.to(torch.float32)
        return functional.linear(x.to(torch.float32), prepared, wide).to(x.dtype)


TORCH_DEQUANT = TorchDequant()
"""The kernel that the entry point ``torch_dequant`` names."""
