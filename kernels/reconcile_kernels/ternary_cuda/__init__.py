"""Ternary linear layers in CUDA C++; see README.md for layout, arithmetic and engines."""

from reconcile_kernels.ternary_cuda.naive import NAIVE, PreparedTernary, TernaryNaive

__all__ = ["NAIVE", "PreparedTernary", "TernaryNaive"]
