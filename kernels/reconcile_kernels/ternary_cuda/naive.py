"""``ternary_cuda.naive`` as a `Kernel`: what it promises, where it runs, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError, nearest
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.native import NativeLibrary, cuda_device
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cuda import ops
from reconcile_kernels.ternary_weight import widened

FORMAT = "ternary_k_interleaved"
"""The one format that the kernel reads."""

CUDA = Engine("cuda")
"""Compiled by nvcc, on an NVIDIA GPU."""
CUDA_ON_CPU = Engine("cuda-on-cpu", execution="emulated")
"""The same source compiled by the C++ compiler; the grid is a loop on the CPU."""

_LIBRARIES = {CUDA: ops.CUDA, CUDA_ON_CPU: ops.CPU}
_LARGEST_N = 32 * 65535
"""CUDA allows 65535 blocks along y, each of 32 columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTernary:
    """A ternary weight [N, K] where its engine reads it."""

    codes: Tensor
    """uint8 [N, K/4], contiguous, as the checkpoint stores them: nothing is unpacked ahead."""
    scales: Tensor
    """float32 [N], widened exactly."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    engine: Engine
    """The engine it was prepared for."""


@dataclass(frozen=True, slots=True)
class TernaryNaive:
    """y[m, n] = scale[n] * sum_k x[m, k] * w[n, k] (+ bias[n]), one CUDA thread per element of y.

    w is read in the format ``ternary_k_interleaved``; y has the dtype of x. The rounding steps are
    in the folder's README.
    """

    name: str = "ternary_cuda.naive"
    contract: Contract = field(
        default=Contract(
            scale_applied="after_sum",
            accumulator="float32",
            k_block=None,
            output="bfloat16",
            epilogue=("scale", "bias", "round"),
            deterministic=True,
            batch_invariant=True,
        )
    )
    """``output`` is the dtype of the usual activations; y always has the dtype of x."""
    engines: tuple[Engine, ...] = (CUDA, CUDA_ON_CPU)
    formats: tuple[str, ...] = (FORMAT,)

    @property
    def cuda_library(self) -> NativeLibrary:
        """The source for nvcc; its launch has 128 threads a block."""
        return ops.CUDA

    def is_supported(self, engine: Engine) -> Support:
        """Whether its compiler is here and, for ``cuda``, a GPU; every missing part is named."""
        library = _LIBRARIES.get(engine)
        if library is None:
            return Support(False, f"{self.name}: {self._unknown(engine)}")
        answers = [library.available()]
        if engine == CUDA:
            answers.append(cuda_device())
        missing = [answer.reason for answer in answers if not answer]
        return Support(not missing, "; ".join(missing or [answer.reason for answer in answers]))

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether format, K, N and dtype are the kernel's; every reason against it is given."""
        dtype = str(spec.activation_dtype).removeprefix("torch.")
        against = []
        if spec.format != FORMAT:
            against.append(f"reads {FORMAT}, not {spec.format}")
        if spec.k <= 0 or spec.k % 4:
            against.append(f"K must be a positive multiple of 4 (codes per byte), not {spec.k}")
        if not 0 < spec.n <= _LARGEST_N:
            against.append(f"N must be 1 to {_LARGEST_N} (blocks along y), not {spec.n}")
        if spec.activation_dtype not in ops.DTYPES:
            against.append(f"x must be {', '.join(ops.DTYPES.values())}, not {dtype}")
        if against:
            return Support(False, f"{self.name} {'; '.join(against)}")
        return Support(True, f"{FORMAT}, N={spec.n}, K={spec.k}, {dtype}")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> PreparedTernary:
        """Copy nothing but what must move: codes as stored, scales widened to float32.

        The bias is an argument of `apply`, whether or not ``weight`` carries one.

        Raises:
            KernelError: a weight of another format, a layer outside `can_implement`, or an
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
        device = "cuda" if engine == CUDA else "cpu"
        return PreparedTernary(
            codes=weight.codes.to(device).contiguous(),
            scales=widened(weight.scales, n, f"{where}: scales").to(device),
            n=n,
            k=k,
            engine=engine,
        )

    def apply(self, x: Tensor, prepared: PreparedTernary, bias: Tensor | None = None) -> Tensor:
        """Return y [..., N] for x [..., K], a new tensor in the dtype of x.

        An x that is not contiguous is copied first; x itself is never written. Without rows the
        result is empty and nothing is launched.

        Args:
            x: bfloat16, float32 or float16, on the device that the weight was prepared for.
            prepared: what `prepare` returned.
            bias: [N] in float32, bfloat16 or float16, or None.

        Raises:
            NotImplementedError: another dtype of x.
            KernelError: a wrong K, N or device, with what was expected and what came.
        """
        if x.dtype not in ops.DTYPES:
            raise NotImplementedError(
                f"{self.name}: x must be {', '.join(ops.DTYPES.values())}, got {x.dtype}"
            )
        if x.dim() == 0 or x.shape[-1] != prepared.k:
            raise KernelError(
                f"{self.name}: expected x [..., K] with K={prepared.k}, got "
                f"{list(x.shape)}{f' with K={x.shape[-1]}' if x.dim() else ''}"
            )
        if x.device != prepared.codes.device:
            raise KernelError(
                f"{self.name}: the weight was prepared for {prepared.engine.name} on "
                f"{prepared.codes.device}, x is on {x.device}"
            )
        if bias is not None:
            bias = widened(bias, prepared.n, f"{self.name}: bias").to(x.device)
        shape = (*x.shape[:-1], prepared.n)
        if x.numel() == 0:
            return x.new_empty(shape)
        y: Tensor = ops.ternary_naive(
            x.reshape(-1, prepared.k), prepared.codes, prepared.scales, bias
        )
        return y.reshape(shape)

    def build(self, engine: Engine) -> Path:
        """Compile ahead of time; path of the shared library. ``cuda`` needs nvcc, but no GPU.

        Raises:
            BuildError: no compiler, or a source that does not compile.
            KernelError: an engine that the kernel does not have.
        """
        library: NativeLibrary | None = _LIBRARIES.get(engine)
        if library is None:
            raise KernelError(f"{self.name}: {self._unknown(engine)}")
        return library.build()

    def _unknown(self, engine: Engine) -> str:
        return f'no engine "{engine.name}"; {nearest(engine.name, [e.name for e in self.engines])}'


NAIVE = TernaryNaive()
"""The kernel that the entry point ``ternary_cuda.naive`` names."""
