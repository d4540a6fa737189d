"""Our operators as the CPU implementation of torch_npu's own schemas.

`torch.ops.npu.npu_dynamic_mx_quant` and `npu_quant_matmul` then run on CPU tensors, through the
dispatcher, with the signatures that torch_npu declares, so that code written against an NPU runs
unchanged. torch_npu must be importable; ``make npu`` makes an environment in which it is.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from reconcile_kernels.mxfp8_npu import operators

_SCALAR_TYPES = {15: torch.bfloat16, 5: torch.float16, 6: torch.float32}
"""c10::ScalarType of a dtype, which is how the dispatcher passes a dtype as an int."""
_E4M3 = (24, 292)
"""float8_e4m3fn as c10::ScalarType and as torch_npu's own number."""


@functools.cache
def register() -> Any:  # noqa: ANN401 - torch.library.Library has no types
    """Register both operators for CPU tensors, once; the library must be kept."""
    importlib.import_module("torch_npu")
    library: Any = torch.library.Library("npu", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    library.impl("npu_dynamic_mx_quant", _dynamic_mx_quant)
    library.impl("npu_quant_matmul", _quant_matmul)
    return library


def _dynamic_mx_quant(
    input: Tensor,  # noqa: A002 - the schema's name
    *,
    dst_type: int = 296,
    scale_alg: int | None = 0,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    kind: object = torch.float8_e4m3fn if dst_type in _E4M3 else dst_type
    return operators.npu_dynamic_mx_quant(input, dst_type=kind, scale_alg=scale_alg or 0, **options)


def _quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    output_dtype: int | None = None,
    **options: Any,  # noqa: ANN401
) -> Tensor:
    dtype = None if output_dtype is None else _SCALAR_TYPES.get(output_dtype)
    if dtype is None and output_dtype is not None:
        raise NotImplementedError(f"output_dtype {output_dtype} is not emulated")
    return operators.npu_quant_matmul(x1, x2, scale, output_dtype=dtype, **options)
