"""aiter's bfloat16 batched GEMM and DeepSeek-V4's route to it; README.md has the arithmetic."""

from reconcile_kernels.aiter_bf16.batched import BATCHED_GEMM, BatchedGemm
from reconcile_kernels.aiter_bf16.route import Facts, Route, eligible
from reconcile_kernels.aiter_bf16.wo_a import WO_A, WoA

__all__ = ["BATCHED_GEMM", "WO_A", "BatchedGemm", "Facts", "Route", "WoA", "eligible"]
