"""Dequantise, then multiply with torch: the plain way, for every format; see README.md."""

from reconcile_kernels.torch_dequant.kernel import TORCH_DEQUANT, TorchDequant

__all__ = ["TORCH_DEQUANT", "TorchDequant"]
