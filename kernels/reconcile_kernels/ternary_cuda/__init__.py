"""Ternary linear layers in CUDA C++; see README.md for layout, arithmetic and engines."""

from reconcile_kernels.ternary_cuda.naive import NAIVE, PreparedTernary, TernaryNaive
from reconcile_kernels.ternary_cuda.variants import (
    MASKS,
    MASKS_BLOCK,
    MMA,
    TILED,
    TILED_BLOCK,
    VECTORISED,
    VECTORISED_BLOCK,
    PreparedWords,
    TernaryVariant,
)

__all__ = [
    "MASKS",
    "MASKS_BLOCK",
    "MMA",
    "NAIVE",
    "TILED",
    "TILED_BLOCK",
    "VECTORISED",
    "VECTORISED_BLOCK",
    "PreparedTernary",
    "PreparedWords",
    "TernaryNaive",
    "TernaryVariant",
]
