"""``amx_fp8.w8a16`` as a `Kernel`: what it promises, where it runs, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError, nearest
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.weight import Format, QuantizedWeight, Shape
from reconcile_kernels.amx_fp8 import emulator, features, ops
from reconcile_kernels.amx_fp8.packing import COLUMNS, Layout, pack, refused, unpack

FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_channel", "fp8_e4m3_block", "fp8_e4m3_block_e8m0")
"""The formats that the kernel reads: one scale per tensor, per output row, or per block."""

AMX = Engine("amx")
"""TDPBF16PS on tiles."""
AVX512_BF16 = Engine("avx512_bf16")
"""VDPBF16PS."""
AMX_EMULATED = Engine("amx-emulated", execution="emulated")
"""The binary of `AMX`; its tile instructions are executed by software."""

_SUPPORT = {
    AMX: features.amx,
    AVX512_BF16: features.avx512_bf16,
    AMX_EMULATED: emulator.supported,
}
_DTYPES = (torch.bfloat16, torch.float32)
_VECTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of biases: those that float32 holds exactly."""

CONTRACT = Contract(
    scale_applied="after_block",
    accumulator="float32",
    k_block=ops.K_BLOCK,
    epilogue=("scale", "bias", "round"),
    output="bfloat16",
    flush_subnormals=True,
    deterministic=True,
    batch_invariant=True,
)
"""W8A16: activations are not quantised, and no weight is rounded after it was decoded.

The arithmetic is the same for every number of rows, so ``by_batch`` is empty and a row gives the
same bits in prefill and decode. ``output`` is that of the usual activations; y has the dtype of x.
"""


@dataclass(frozen=True, kw_only=True)
class PreparedFp8:
    """A weight [N, K] as the native code reads it."""

    packed: Tensor
    """uint8 [N, K], VNNI-2 in blocks of 32 columns."""
    scales: Tensor
    """float32 [ceil(N / group), ceil(K / 128)], or [N] with group 1."""
    group: int
    """Columns that share a row of ``scales``."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    engine: Engine
    """The engine it was prepared for."""

    def codes(self) -> Tensor:
        """The codes again, uint8 [N, K]."""
        return unpack(self.packed)

    def check(self, weight: QuantizedWeight) -> None:
        """KernelError unless this is ``weight``, code by code."""
        wrong = self.codes() != weight.unpacked()
        if bool(wrong.any()):
            n, k = wrong.nonzero()[0].tolist()
            raise KernelError(
                f"{weight.name or 'weight'}: {int(wrong.sum())} of {wrong.numel()} packed codes "
                f"are not the weight's, first at [n={n}, k={k}]"
            )


@dataclass(frozen=True, slots=True)
class AmxFp8:
    """y = x W^T (+ b) with E4M3FN weights and bfloat16 or float32 activations, on the CPU.

    The rounding steps are in the folder's README.
    """

    name: str = "amx_fp8.w8a16"
    contract: Contract = CONTRACT
    engines: tuple[Engine, ...] = field(default=(AMX, AVX512_BF16, AMX_EMULATED))
    formats: tuple[str, ...] = FORMATS

    def is_supported(self, engine: Engine) -> Support:
        """Whether processor, system and compiler are here; what is missing is named."""
        supported = _SUPPORT.get(engine)
        if supported is None:
            return Support(False, f"{self.name}: {self._unknown(engine)}")
        return supported()

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether format, N, K and dtype are the kernel's; every reason against it is given."""
        against = []
        if spec.format not in FORMATS:
            against.append(f"reads {', '.join(FORMATS)}, not {spec.format}")
        if reason := refused(spec.n, spec.k):
            against.append(reason)
        dtype = str(spec.activation_dtype).removeprefix("torch.")
        if spec.activation_dtype not in _DTYPES:
            against.append(f"x must be bfloat16 or float32, not {dtype}")
        if against:
            return Support(False, f"{self.name} {'; '.join(against)}")
        return Support(True, f"{spec.format}, N={spec.n}, K={spec.k}, {dtype}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> PreparedFp8:
        """Pack the codes, widen the scales. The bias is an argument of `apply`.

        Raises:
            KernelError: a weight outside `can_implement`, or an engine that does not run here.
            NotImplementedError: blocks other than (a multiple of 32) x 128.
        """
        return self.prepare_tensors(
            weight.unpacked(),
            weight.scales,
            form=weight.format,
            shape=weight.shape,
            layout="nk",
            engine=engine,
            name=weight.name,
        )

    def prepare_tensors(
        self,
        codes: Tensor,
        scales: Tensor,
        *,
        form: Format,
        shape: Shape,
        layout: Layout,
        engine: Engine,
        name: str = "",
    ) -> PreparedFp8:
        """`prepare` for plain tensors, whose orientation is declared.

        Args:
            codes: uint8 or float8_e4m3fn; [N, K], or [K, N] with ``layout`` ``kn``.
            scales: as ``form`` stores them; of one scale per tensor also 0-dimensional.
            form: the format, which says what the scales belong to.
            shape: logical (N, K).
            layout: ``nk`` or ``kn``; never guessed.
            engine: one of `engines`.
            name: module path, for messages.
        """
        n, k = shape
        where = name or "weight"
        spec = LinearSpec(
            n=n, k=k, format=form.name, bias=False, activation_dtype=self.contract.output_dtype
        )
        for support in (self.can_implement(spec), self.is_supported(engine)):
            if not support:
                raise KernelError(f"{where}: {support.reason}")
        expanded, group = _expanded(scales, form, shape, where)
        return PreparedFp8(
            packed=pack(codes, shape, layout),
            scales=expanded,
            group=group,
            n=n,
            k=k,
            engine=engine,
        )

    def apply(self, x: Tensor, prepared: PreparedFp8, bias: Tensor | None = None) -> Tensor:
        """Return y [..., N] for x [..., K], a new tensor in the dtype of x.

        An x that is not contiguous is copied first; x itself is never written.

        Args:
            x: bfloat16, or float32 on the engine ``avx512_bf16``; on the CPU.
            prepared: what `prepare` returned.
            bias: [N] in float32, bfloat16 or float16, or None.

        Raises:
            NotImplementedError: a dtype of x that the engine does not compute.
            KernelError: no prepared weight, or a wrong K, N or device.
        """
        if not isinstance(prepared, PreparedFp8):
            raise KernelError(
                f"{self.name}: expected what prepare returned, got {type(prepared).__name__}: call "
                "prepare(weight, engine) first, once for each weight"
            )
        if x.dtype not in ops.activations(prepared.engine.name):
            raise NotImplementedError(
                f"{self.name} on {prepared.engine.name}: x must be "
                f"{' or '.join(map(_short, ops.activations(prepared.engine.name)))}, got "
                f"{_short(x.dtype)}"
            )
        if x.dim() == 0 or x.shape[-1] != prepared.k or x.device.type != "cpu":
            raise KernelError(
                f"{self.name}: expected x [..., K] with K={prepared.k} on the CPU, got "
                f"{list(x.shape)} on {x.device}"
            )
        if bias is not None:
            bias = _widened(bias, prepared.n, f"{self.name}: bias")
        y = ops.amx_fp8(
            x.reshape(-1, prepared.k),
            prepared.packed,
            prepared.scales,
            bias,
            prepared.group,
            x.dtype,
            prepared.engine.name,
        )
        return y.reshape(*x.shape[:-1], prepared.n)

    def build(self, engine: Engine) -> Path:
        """Compile ahead of time; path of the shared library. ``amx`` needs no AMX for that.

        Raises:
            BuildError: no compiler, or a source that does not compile.
            KernelError: an engine that the kernel does not have.
        """
        if engine not in self.engines:
            raise KernelError(f"{self.name}: {self._unknown(engine)}")
        if engine == AMX_EMULATED:
            emulator.LIBRARY.build()
        return ops.library(engine.name).build()

    def _unknown(self, engine: Engine) -> str:
        return f'no engine "{engine.name}"; {nearest(engine.name, [e.name for e in self.engines])}'


def _expanded(scales: Tensor, form: Format, shape: Shape, where: str) -> tuple[Tensor, int]:
    """Scales in float32 as the native code reads them, and how many columns share a row."""
    n, k = shape
    blocks = -(-k // ops.K_BLOCK)
    if form.granularity == "tensor":
        scales = scales.reshape(-1)
    expected = form.scale_shape(shape)
    if tuple(scales.shape) != expected or scales.dtype not in form.scale_dtypes:
        raise KernelError(
            f"{where}: expected scales {list(expected)} in "
            f"{', '.join(map(_short, form.scale_dtypes))}, got {_short(scales.dtype)} "
            f"{list(scales.shape)}"
        )
    wide = form.scale_values(scales).to(torch.float32)  # exact: every stored dtype fits
    if form.granularity == "channel":
        return wide.contiguous(), 1
    if form.granularity == "tensor":
        return wide.expand(1, blocks).contiguous(), n
    assert form.block is not None
    rows, columns = form.block
    if rows % COLUMNS or columns != ops.K_BLOCK:
        raise NotImplementedError(
            f"{where}: blocks must be a multiple of {COLUMNS} rows by {ops.K_BLOCK} columns, not "
            f"{rows} x {columns}"
        )
    return wide.contiguous(), rows


def _widened(vector: Tensor, n: int, what: str) -> Tensor:
    """``vector`` [N] as contiguous float32, exactly; KernelError for what float32 cannot hold."""
    if vector.dtype not in _VECTOR_DTYPES or tuple(vector.shape) != (n,):
        raise KernelError(
            f"{what}: expected [{n}] in {', '.join(map(_short, _VECTOR_DTYPES))}, got "
            f"{_short(vector.dtype)} {list(vector.shape)}"
        )
    return vector.to(torch.float32).contiguous()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


W8A16 = AmxFp8()
"""The kernel that the entry point ``amx_fp8.w8a16`` names."""
