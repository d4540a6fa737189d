"""vLLM's own FP8 linear op for CPUs, as a kernel; see README.md."""

from reconcile_kernels.vllm_fp8.kernel import W8A16, PreparedVllm, VllmFp8

__all__ = ["W8A16", "PreparedVllm", "VllmFp8"]
