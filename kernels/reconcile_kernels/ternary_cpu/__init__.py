"""Ternary linear layers for AVX-512; see README.md for layout, arithmetic and engines."""

from reconcile_kernels.ternary_cpu.kernel import BF16, INT8, PackedTernary, TernaryCpu

__all__ = ["BF16", "INT8", "PackedTernary", "TernaryCpu"]
