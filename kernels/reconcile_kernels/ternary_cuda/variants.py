"""The CUDA variants as `Kernel` values: what each promises, and which shapes it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError, nearest
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.native import NativeLibrary, cuda_device
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cuda import ops, variant_ops
from reconcile_kernels.ternary_cuda.naive import CUDA, CUDA_ON_CPU
from reconcile_kernels.ternary_weight import (
    block_scaled_formats,
    fits,
    row_scaled_formats,
    row_scales,
    span_of,
    ternary_values,
    widened,
)


def interleaved_words(values: Tensor) -> Tensor:
    """Ternary values, int8 [N, K] with K a multiple of 16, to words of 16 codes, int32 [N * K/16].

    Codes 0, 1, 2 are 0, +1, -1; k = 16j + i lies in bits 2i and 2i + 1 of word j.
    """
    codes = torch.where(values < 0, 2, values).to(torch.int64)
    return _words(codes.reshape(-1, 16), 2)


def mask_words(values: Tensor) -> Tensor:
    """Ternary values, int8 [N, K], to bit planes, int32 [N * ceil(K/32) * 2], plus before minus.

    k = 32j + i lies in bit i of words 2j (+1) and 2j + 1 (-1) of its row; padding is zero.
    """
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % 32))
    planes = torch.stack([padded.reshape(-1, 32) == sign for sign in (1, -1)], dim=1)
    return _words(planes.reshape(-1, 32).to(torch.int64), 1)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [words, 32 / bits], the first in the lowest bits, to int32."""
    unsigned = (codes << torch.arange(0, 32, bits)).sum(1)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWords:
    """A ternary weight [N, K] as its variant reads it, where its engine reads it."""

    words: Tensor
    """int32, packed by the variant's own rule."""
    scales: Tensor
    """float32 [N], or [N, ceil(K / span)]."""
    span: int
    """Values of K that share a scale; 0: all."""
    divide: bool
    """Whether the scale divides."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    engine: Engine
    """The engine it was prepared for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TernaryVariant:
    """y[m, n] = scale * sum_k x[m, k] * w[n, k] (+ bias[n]) by one of the CUDA sources.

    Reads every registered ternary format of its granularity; y has the dtype of x. The rounding
    steps are in the folder's README.
    """

    name: str
    variant: str
    """Name of the source, and of the custom op's variant."""
    step: int
    """K must be a multiple of it: what one aligned load takes."""
    blocks: int
    """Blocks of K that share a scale must be a multiple of it; 0: no scales per block."""
    pack: Callable[[Tensor], Tensor]
    """Ternary values, int8 [N, K], to the words that the source reads."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of x."""
    contract: Contract
    engines: tuple[Engine, ...] = (CUDA, CUDA_ON_CPU)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the registered formats that it reads."""
        return block_scaled_formats(self.blocks) if self.blocks else row_scaled_formats()

    @property
    def cuda_library(self) -> NativeLibrary:
        """The source for nvcc; all launches have 128 threads a block."""
        return variant_ops.CUDA[self.variant]

    def is_supported(self, engine: Engine) -> Support:
        """Whether its compiler is here and, for ``cuda``, a GPU; every missing part is named."""
        if engine not in self.engines:
            return Support(False, f"{self.name}: {self._unknown(engine)}")
        answers = [self._libraries(engine)[self.variant].available()]
        if engine.name == CUDA.name:
            answers.append(cuda_device())
        missing = [answer.reason for answer in answers if not answer]
        return Support(not missing, "; ".join(missing or [answer.reason for answer in answers]))

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether format, K, N and dtype are the kernel's; every reason against it is given."""
        dtypes = [ops.DTYPES[dtype] for dtype in self.dtypes]
        dtype = str(spec.activation_dtype).removeprefix("torch.")
        against = []
        if spec.format not in self.formats:
            against.append(f"reads {', '.join(self.formats) or 'no format'}, not {spec.format}")
        if spec.k <= 0 or spec.k % self.step:
            against.append(
                f"K must be a positive multiple of {self.step} (aligned vector loads), not {spec.k}"
            )
        if spec.n <= 0:
            against.append(f"N must be positive, not {spec.n}")
        if dtype not in dtypes:
            against.append(f"x must be {', '.join(dtypes)}, not {dtype}")
        if against:
            return Support(False, f"{self.name} {'; '.join(against)}")
        return Support(True, f"{spec.format}, N={spec.n}, K={spec.k}, {dtype}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> PreparedWords:
        """Pack the codes anew and widen the scales to float32, exactly.

        Raises:
            KernelError: a weight that is not ternary, a layer outside `can_implement`, or an
                engine that does not run here (with the reason).
        """
        (n, k), where = weight.shape, weight.name or "weight"
        spec = LinearSpec(
            n=n,
            k=k,
            format=weight.format.name,
            bias=weight.bias is not None,
            activation_dtype=self.contract.output_dtype,
        )
        for support in (self.can_implement(spec), self.is_supported(engine)):
            if not support:
                raise KernelError(f"{where}: {support.reason}")
        span = span_of(weight.format)
        if not fits(weight.format, self.blocks or k):
            raise KernelError(
                f"{where}: {self.name} has scales per row and a multiple of {self.blocks} values "
                f"of K, got blocks of {list(weight.format.block or ())}"
            )
        device = "cuda" if engine.name == CUDA.name else "cpu"
        scales = row_scales(weight, n) if not span else weight.scales.to(torch.float32)
        return PreparedWords(
            words=self.pack(ternary_values(weight, where)).to(device),
            scales=scales.contiguous().to(device),
            span=span,
            divide=weight.format.scale_convention == "divide",
            n=n,
            k=k,
            engine=engine,
        )

    def apply(self, x: Tensor, prepared: PreparedWords, bias: Tensor | None = None) -> Tensor:
        """Return y [..., N] for x [..., K], a new tensor in the dtype of x.

        An x with gaps, or that does not begin on 16 bytes, is copied first; x is never written.

        Raises:
            NotImplementedError: a dtype of x that the kernel has no code for.
            KernelError: a wrong K, N or device, or a fault that the emulated grid found.
        """
        if x.dtype not in self.dtypes:
            names = ", ".join(ops.DTYPES[dtype] for dtype in self.dtypes)
            raise NotImplementedError(f"{self.name}: x must be {names}, got {x.dtype}")
        if x.dim() == 0 or x.shape[-1] != prepared.k:
            raise KernelError(
                f"{self.name}: expected x [..., K] with K={prepared.k}, got {list(x.shape)}"
            )
        if x.device != prepared.words.device:
            raise KernelError(
                f"{self.name}: the weight was prepared for {prepared.engine.name} on "
                f"{prepared.words.device}, x is on {x.device}"
            )
        if bias is not None:
            bias = widened(bias, prepared.n, f"{self.name}: bias").to(x.device)
        y: Tensor = variant_ops.ternary_cuda(
            x.reshape(-1, prepared.k),
            prepared.words,
            prepared.scales,
            bias,
            self.variant,
            prepared.n,
            prepared.span,
            prepared.divide,
        )
        return y.reshape(*x.shape[:-1], prepared.n)

    def build(self, engine: Engine) -> Path:
        """Compile ahead of time; path of the shared library. ``cuda`` needs nvcc, but no GPU.

        Raises:
            BuildError: no compiler, or a source that does not compile.
            KernelError: an engine that the kernel does not have.
        """
        if engine not in self.engines:
            raise KernelError(f"{self.name}: {self._unknown(engine)}")
        return self._libraries(engine)[self.variant].build()

    def _libraries(self, engine: Engine) -> dict[str, NativeLibrary]:
        return variant_ops.CUDA if engine.name == CUDA.name else variant_ops.CPU

    def _unknown(self, engine: Engine) -> str:
        return f'no engine "{engine.name}"; {nearest(engine.name, [e.name for e in self.engines])}'


_ALL = tuple(ops.DTYPES)
_BY_ROW = Contract(scale_applied="after_sum", accumulator="float32", batch_invariant=True)
_BY_BLOCK = Contract(scale_applied="after_block", accumulator="float32", batch_invariant=True)

VECTORISED = TernaryVariant(
    name="ternary_cuda.vectorised",
    variant="vectorised",
    step=64,
    blocks=0,
    pack=interleaved_words,
    dtypes=_ALL,
    contract=_BY_ROW,
)
"""16-byte loads of w and x, eight lanes a row; for few rows of x."""
TILED = replace(VECTORISED, name="ternary_cuda.tiled", variant="tiled", step=16)
"""Tiles of x and w in shared memory, 16 elements of y a thread."""
MASKS = replace(VECTORISED, name="ternary_cuda.masks", variant="masks", step=8, pack=mask_words)
"""Bit planes of +1 and -1, no multiplication."""
MMA = replace(
    VECTORISED,
    name="ternary_cuda.mma",
    variant="mma",
    dtypes=(torch.bfloat16, torch.float16),
    contract=replace(_BY_ROW, accumulator_rounding="rtz"),
    engines=(Engine("cuda", fidelity="semantic"),),
)
"""Tensor cores, for many rows of x; a GPU only."""
VECTORISED_BLOCK = replace(
    VECTORISED, name="ternary_cuda.vectorised_block", blocks=64, contract=_BY_BLOCK
)
"""`VECTORISED` for scales per row and block of K."""
TILED_BLOCK = replace(TILED, name="ternary_cuda.tiled_block", blocks=64, contract=_BY_BLOCK)
"""`TILED` for scales per row and block of K."""
MASKS_BLOCK = replace(MASKS, name="ternary_cuda.masks_block", blocks=32, contract=_BY_BLOCK)
"""`MASKS` for scales per row and block of K."""
ALL = (VECTORISED, TILED, MASKS, MMA, VECTORISED_BLOCK, TILED_BLOCK, MASKS_BLOCK)
