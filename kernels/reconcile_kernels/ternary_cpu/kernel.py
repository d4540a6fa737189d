"""``ternary_cpu.bf16`` and ``ternary_cpu.int8`` as `Kernel` values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError, nearest
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cpu import ops
from reconcile_kernels.ternary_cpu.processor import lacking
from reconcile_kernels.ternary_weight import row_scaled_formats, row_scales, ternary_values, widened

AVX512_BF16 = Engine("avx512_bf16")
"""VDPBF16PS: bfloat16 products, float32 sums."""
AVX512_VNNI = Engine("avx512_vnni")
"""VPDPBUSD: int8 products, int32 sums."""

_LARGEST_K = 1 << 22
"""Sums of K products of 2 * 128 stay below 2^31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTernary:
    """A ternary weight [N, K] in the order of ``panels.h``."""

    words: Tensor
    """int32, the codes."""
    scales: Tensor
    """float32 [N rounded up to 128], one per row; padding is 1."""
    divide: bool
    """Whether the scale divides."""
    n: int
    """Output features."""
    k: int
    """Input features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TernaryCpu:
    """y[m, n] = scale[n] * sum_k x[m, k] * w[n, k] (+ bias[n]), w in {-1, 0, +1}, on AVX-512.

    Reads every registered ternary format with one scale, or one per row; y has the dtype of x.
    The rounding steps are in the folder's README.
    """

    name: str
    kind: str
    """``bfloat16`` or ``int8``: what the products are of."""
    op: str
    """Name of the custom op that computes the same."""
    instructions: tuple[str, ...]
    """What the processor must have, named as in /proc/cpuinfo."""
    contract: Contract
    engines: tuple[Engine, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the registered formats that it reads."""
        return row_scaled_formats()

    def is_supported(self, engine: Engine) -> Support:
        """Whether the instructions and a C++ compiler are here; every missing part is named."""
        if engine not in self.engines:
            return Support(False, f"{self.name}: {self._unknown(engine)}")
        compiler = ops.LIBRARY.available()
        missing = lacking(self.instructions)
        reasons = [] if compiler else [compiler.reason]
        if missing:
            reasons.append(f"the processor has no {', '.join(missing)}")
        return Support(not reasons, "; ".join(reasons) or compiler.reason)

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether format, K and dtype are the kernel's; every reason against it is given."""
        dtype = str(spec.activation_dtype).removeprefix("torch.")
        known = ops.DTYPES[self.kind]
        against = []
        if spec.format not in self.formats:
            against.append(f"reads {', '.join(self.formats)}, not {spec.format}")
        if not 0 < spec.k <= _LARGEST_K:
            against.append(f"K must be 1 to {_LARGEST_K}, not {spec.k}")
        if spec.n <= 0:
            against.append(f"N must be positive, not {spec.n}")
        if spec.activation_dtype not in known:
            against.append(f"x must be {', '.join(known.values())}, not {dtype}")
        if against:
            return Support(False, f"{self.name} {'; '.join(against)}")
        return Support(True, f"{spec.format}, N={spec.n}, K={spec.k}, {dtype}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> PackedTernary:
        """Pack the codes anew and widen the scales to float32, exactly.

        Raises:
            KernelError: a weight that is not ternary, a layer outside `can_implement`, or an
                engine that does not run here (with the reason).
        """
        n, k = weight.shape
        where = weight.name or "weight"
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
        if weight.format.granularity == "block":
            raise KernelError(f"{where}: {self.name} has no scales per block")
        return PackedTernary(
            words=ops.pack(ternary_values(weight, where), self.kind),
            scales=row_scales(weight, -(-n // ops.ROWS) * ops.ROWS),
            divide=weight.format.scale_convention == "divide",
            n=n,
            k=k,
        )

    def apply(self, x: Tensor, prepared: PackedTernary, bias: Tensor | None = None) -> Tensor:
        """Return y [..., N] for x [..., K], a new tensor in the dtype of x.

        An x that is not contiguous is copied first; x itself is never written.

        Raises:
            NotImplementedError: a dtype of x that the kernel has no code for.
            KernelError: a wrong K, N or device, with what was expected and what came.
        """
        if x.dtype not in ops.DTYPES[self.kind]:
            raise NotImplementedError(
                f"{self.name}: x must be {', '.join(ops.DTYPES[self.kind].values())}, got {x.dtype}"
            )
        if x.dim() == 0 or x.shape[-1] != prepared.k:
            raise KernelError(
                f"{self.name}: expected x [..., K] with K={prepared.k}, got {list(x.shape)}"
            )
        if x.device.type != "cpu":
            raise KernelError(f"{self.name}: the weight is on cpu, x is on {x.device}")
        if bias is not None:
            bias = widened(bias, prepared.n, f"{self.name}: bias")
        operands = (x.reshape(-1, prepared.k), prepared.words, prepared.scales, bias)
        if torch.compiler.is_compiling():  # only the op is in the graph
            op = getattr(torch.ops.reconcile_kernels, self.op)
            y: Tensor = op(*operands, prepared.n, prepared.divide)
        else:
            y = ops.multiply(self.kind, *operands, prepared.n, prepared.divide)
        return y.view(*x.shape[:-1], prepared.n)

    def build(self, engine: Engine) -> Path:
        """Compile ahead of time; path of the shared library.

        Raises:
            BuildError: no compiler, or a source that does not compile.
            KernelError: an engine that the kernel does not have.
        """
        if engine not in self.engines:
            raise KernelError(f"{self.name}: {self._unknown(engine)}")
        return ops.LIBRARY.build()

    def _unknown(self, engine: Engine) -> str:
        return f'no engine "{engine.name}"; {nearest(engine.name, [e.name for e in self.engines])}'


_BASE = ("avx512f", "avx512bw", "avx512vl", "avx512dq")

BF16 = TernaryCpu(
    name="ternary_cpu.bf16",
    kind="bfloat16",
    op="ternary_avx512_bf16",
    instructions=(*_BASE, "avx512_bf16"),
    contract=Contract(
        scale_applied="after_sum",
        accumulator="float32",
        output="bfloat16",
        flush_subnormals=True,
        batch_invariant=True,
    ),
    engines=(AVX512_BF16,),
)
"""bfloat16 activations as they are; every product is exact."""

INT8 = TernaryCpu(
    name="ternary_cpu.int8",
    kind="int8",
    op="ternary_avx512_vnni",
    instructions=(*_BASE, "avx512_vnni"),
    contract=Contract(
        activation="per_token_int8",
        scale_applied="after_sum",
        accumulator="float32",
        output="bfloat16",
        batch_invariant=True,
    ),
    engines=(AVX512_VNNI,),
)
"""Activations quantised per row to int8; the sum is an exact integer."""
