"""FP8 linear layers on AMX and AVX512-BF16; see README.md for layout, arithmetic and engines."""

from reconcile_kernels.amx_fp8.kernel import W8A16, AmxFp8, PreparedFp8

__all__ = ["W8A16", "AmxFp8", "PreparedFp8"]
