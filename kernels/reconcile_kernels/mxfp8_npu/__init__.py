"""MXFP8 on Ascend NPUs; see README.md for layouts, arithmetic and engines."""

from reconcile_kernels.mxfp8_npu.linear import MXFP8, MXFP8_ALG_1, Mxfp8Linear, PreparedMx

__all__ = ["MXFP8", "MXFP8_ALG_1", "Mxfp8Linear", "PreparedMx"]
