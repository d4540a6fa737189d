"""``aiter_bf16.batched_gemm`` as a `Kernel`: what it promises, where it runs, how it is called."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError, nearest
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.numbers.criteria import Criterion
from reconcile_kernels.aiter_bf16 import aiter_package, interpreter, source
from reconcile_kernels.aiter_bf16.config import config_for, contract

FORMAT = "bfloat16"
"""The one format that it reads: unquantised bfloat16 weights."""

AITER = Engine("aiter", implementation="vendor", fidelity="semantic")
"""The real package on a gfx95."""
TRITON = Engine("triton", fidelity="semantic")
"""Our kernel, compiled by Triton for the GPU that is here."""
TRITON_INTERPRETER = Engine("triton-interpreter", execution="emulated", fidelity="semantic")
"""Our kernel in Triton's interpreter, repaired for bfloat16."""
AITER_INTERPRETER = Engine(
    "aiter-interpreter", implementation="vendor", execution="emulated", fidelity="semantic"
)
"""aiter's published kernel in Triton's interpreter, repaired for bfloat16."""
TRITON_ON_CPU = Engine("triton-on-cpu", execution="emulated", fidelity="semantic")
"""Our kernel's source executed by torch; needs no Triton."""

UPSTREAM = Criterion(
    name="max rel err <= 5e-4",
    limit=5e-4,
    epsilon=1e-6,
    source="SGLang's test of this route: max(|out - ref| / (|ref| + 1e-6)) against the bf16 einsum",
    meaning=(
        "on bfloat16 one ulp is 0.39 % to 0.78 % of the value, so it accepts bit-identical "
        "elements only"
    ),
)
"""The criterion that the route was merged with, shown beside the bound."""

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [B, M, K], w [B, N, K], bias [B, N] or None to y [B, M, N]."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A weight [B, N, K] for one engine. Nothing is repacked."""

    weight: Tensor
    engine: Engine


class BatchedGemm:
    """Y[b] = X[b] W[b]^T (+ bias[b]) over bfloat16, float32 sums, one rounding."""

    name = "aiter_bf16.batched_gemm"
    contract: Contract = contract()
    engines = (AITER, TRITON, TRITON_INTERPRETER, AITER_INTERPRETER, TRITON_ON_CPU)
    formats = (FORMAT,)
    criteria = (UPSTREAM,)

    def __init__(self) -> None:
        """Nothing is imported yet."""
        self.launches = 0
        """How many times an engine has been started since the process began."""
        self._lock = Lock()
        self._functions: dict[Engine, Function] = {}

    def is_supported(self, engine: Engine) -> Support:
        """Whether the engine runs here, and why (not)."""
        answers: dict[Engine, Callable[[], Support]] = {
            AITER: aiter_package.runs_natively,
            TRITON: _triton_compiles,
            TRITON_INTERPRETER: interpreter.is_supported,
            AITER_INTERPRETER: aiter_package.runs_interpreted,
            TRITON_ON_CPU: lambda: Support(True, "the kernel's source executed by torch"),
        }
        if engine not in answers:
            known = [known.name for known in self.engines]
            return Support(False, f'no engine "{engine.name}"; {nearest(engine.name, known)}')
        return answers[engine]()

    def can_implement(self, spec: LinearSpec) -> Support:
        """Batched linears over bfloat16."""
        against = []
        if spec.groups is None:
            against.append("is a batched kernel, and this linear is not")
        if spec.format != FORMAT or spec.activation_dtype != torch.bfloat16:
            against.append(
                f"reads and multiplies {FORMAT}, not {spec.format} by "
                f"{str(spec.activation_dtype).removeprefix('torch.')}"
            )
        if against:
            return Support(False, f"{self.name} {'; '.join(against)}")
        return Support(True, f"B={spec.groups}, N={spec.n}, K={spec.k}, {FORMAT}")

    def prepare(self, weight: Tensor, engine: Engine) -> Prepared:
        """The weight [B, N, K] as it is, on the engine's device.

        Raises:
            KernelError: not a bfloat16 tensor of three dimensions, or an engine that does not run
                here (with the reason).
        """
        if weight.dim() != 3 or weight.dtype != torch.bfloat16:
            raise KernelError(
                f"{self.name}: expected a bfloat16 weight [B, N, K], got {weight.dtype} "
                f"{list(weight.shape)}"
            )
        self._function(engine)
        device = "cuda" if engine in (AITER, TRITON) else "cpu"
        return Prepared(weight.to(device), engine)

    def apply(self, x: Tensor, prepared: Prepared, bias: Tensor | None = None) -> Tensor:
        """Y [B, M, N] for x [B, M, K] of any strides; its memory is [M, B, N], as models want it.

        Raises:
            NotImplementedError: another dtype of x.
            KernelError: shapes that do not fit, with what was expected and what came.
        """
        return self.run(x, prepared.weight, bias, prepared.engine)

    def run(self, x: Tensor, w: Tensor, bias: Tensor | None, engine: Engine) -> Tensor:
        """The same over plain tensors."""
        if x.dtype != torch.bfloat16:
            raise NotImplementedError(f"{self.name}: x must be bfloat16, got {x.dtype}")
        _check(self.name, x, w, bias)
        function = self._function(engine)
        with self._lock:
            self.launches += 1
        return function(x, w, bias)

    def as_function(self, engine: Engine) -> Function:
        """F(x, weight, bias=None) on one engine, for `check_batched_linear`."""
        kernel = self

        def batched_gemm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
            return kernel.run(x, w, bias, engine)

        batched_gemm.contract = self.contract  # type: ignore[attr-defined]
        batched_gemm.__name__ = f"{self.name} on {engine.name}"
        return batched_gemm

    def _function(self, engine: Engine) -> Function:
        """What the engine calls, imported once."""
        with self._lock:
            if engine not in self._functions:
                if not (support := self.is_supported(engine)):
                    raise KernelError(f"{self.name} on {engine.name}: {support.reason}")
                self._functions[engine] = _LOADERS[engine]()
            return self._functions[engine]


def _check(name: str, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    fits = x.dim() == w.dim() == 3 and x.shape[0] == w.shape[0] and x.shape[2] == w.shape[2]
    if not fits or w.dtype != x.dtype or w.device != x.device:
        raise KernelError(
            f"{name}: expected x [B, M, K] and w [B, N, K] of one dtype and device, got "
            f"{x.dtype} {list(x.shape)} on {x.device} and {w.dtype} {list(w.shape)} on {w.device}"
        )
    if bias is not None and tuple(bias.shape) != tuple(w.shape[:2]):
        raise KernelError(f"{name}: expected a bias {list(w.shape[:2])}, got {list(bias.shape)}")


def _ours(module: Any) -> Function:  # noqa: ANN401
    """Our kernel over an output whose memory is [M, B, N]."""

    def function(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        (batch, m, _), n = x.shape, w.shape[1]
        y = torch.empty((m, batch, n), dtype=x.dtype, device=x.device).transpose(0, 1)
        if y.numel():
            module.run(x, w, bias, y, config_for(m))
        return y

    return function


def _interpreted() -> Function:
    interpreter.repair()
    return _ours(source.in_triton())


def _aiter(load: Callable[[], aiter_package.BatchedGemm]) -> Function:
    upstream = load()

    def function(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        added = None if bias is None else bias[:, None].to(x.dtype).contiguous()
        return upstream(x.contiguous(), w, bias=added)

    return function


_LOADERS: dict[Engine, Callable[[], Function]] = {
    AITER: lambda: _aiter(aiter_package.native),
    TRITON: lambda: _ours(source.in_triton()),
    TRITON_INTERPRETER: _interpreted,
    AITER_INTERPRETER: lambda: _aiter(aiter_package.interpreted),
    TRITON_ON_CPU: lambda: _ours(source.in_torch()),
}


def _triton_compiles() -> Support:
    """Whether Triton and a GPU for it are here."""
    missing = []
    if importlib.util.find_spec("triton") is None:
        missing.append("triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        missing.append("TRITON_INTERPRET=1 asks for the interpreter")
    if not torch.cuda.is_available():
        missing.append("torch sees no GPU")
    return Support(not missing, "; ".join(missing) or torch.cuda.get_device_name(0))


BATCHED_GEMM = BatchedGemm()
"""The kernel that the entry point ``aiter_bf16.batched_gemm`` names."""
