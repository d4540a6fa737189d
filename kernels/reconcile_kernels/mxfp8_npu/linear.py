"""``mxfp8_npu`` as a `Kernel`: block FP8 becomes MXFP8 at load, activations at run time."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.fallback import fell_back
from reconcile.grouped import GroupedWeight
from reconcile.kernel import Engine, LinearSpec, Stage, Support
from reconcile.mx import GROUP
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import operators
from reconcile_kernels.mxfp8_npu.experts import PreparedExperts, expert, prepare_experts
from reconcile_kernels.mxfp8_npu.fallback import ASCEND_950, decide
from reconcile_kernels.mxfp8_npu.layout import Buffers, as_float8, pack
from reconcile_kernels.mxfp8_npu.load import BLOCK_FORMATS, MX_FORMAT, load, resolved, stages

NPU = Engine("npu", implementation="vendor")
"""torch_npu's operators on an Ascend 950."""
NPU_EMULATED = Engine("npu-emulated", execution="emulated", fidelity="semantic")
"""The documented arithmetic of the same operators on the CPU; the order of the sum is ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMx:
    """A weight as the operators read it. The source's scales are not kept."""

    codes: Tensor
    """uint8 [K, N], E4M3FN."""
    scales: Tensor
    """uint8 [ceil(G / 2), N, 2]."""
    engine: Engine

    @property
    def k(self) -> int:
        """Input features."""
        return self.codes.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDense:
    """A layer that runs unquantised: another arithmetic than the contract's."""

    weight: Tensor
    """bfloat16 [N, K]."""
    reason: str
    engine: Engine

    @property
    def k(self) -> int:
        """Input features."""
        return self.weight.shape[1]


def _dense(x: Tensor, prepared: PreparedDense, bias: Tensor | None) -> Tensor:
    """The unquantised product in the dtype of x, which is said to be that."""
    fell_back(prepared.reason)
    own = None if bias is None else bias.to(x.dtype)
    return functional.linear(x, prepared.weight.to(x.dtype), own)


@dataclass(frozen=True, slots=True)
class Mxfp8Linear:
    """y = MX(x) MX(W)^T (+ b): both operands in MXFP8, sums in float32, one rounding at the end."""

    scale_alg: int = 0
    """How the shared exponent is found, for weights and activations alike."""
    engines: tuple[Engine, ...] = (NPU, NPU_EMULATED)
    formats: tuple[str, ...] = (*BLOCK_FORMATS, MX_FORMAT)
    contract: Contract = field(init=False)

    def __post_init__(self) -> None:
        """The contract names the quantiser that ``scale_alg`` is."""
        rules = {0: "mxfp8_ascend_0", 1: "mxfp8_ascend_1"}
        contract = Contract(
            activation=rules[self.scale_alg],  # type: ignore[arg-type]
            weight_rounding="bfloat16",
            weight_requantised=rules[self.scale_alg],  # type: ignore[arg-type]
            scale_applied="after_block",
            k_block=GROUP,
            accumulator="float32",
            output="bfloat16",
        )
        object.__setattr__(self, "contract", contract)

    @property
    def name(self) -> str:
        """``mxfp8_npu``, or with the algorithm where it is not the usual one."""
        return f"mxfp8_npu.scale_alg_{self.scale_alg}" if self.scale_alg else "mxfp8_npu"

    def is_supported(self, engine: Engine) -> Support:
        """The emulation runs wherever torch does; ``npu`` needs torch_npu and an Ascend 950."""
        if engine == NPU_EMULATED:
            return Support(True, "the documented operators on the CPU; no NPU is used")
        return npu_device() if engine == NPU else Support(False, f"no engine {engine.name!r}")

    def can_implement(self, spec: LinearSpec) -> Support:
        """MXFP8 needs whole groups of 32 along K; what has not runs dense, and says so."""
        if spec.format not in self.formats:
            return Support(False, f"{self.name} reads {', '.join(self.formats)}, not {spec.format}")
        if spec.activation_dtype not in (torch.bfloat16, torch.float32):
            return Support(False, f"{self.name}: x must be bfloat16 or float32")
        if spec.groups is not None and spec.k % (2 * GROUP):
            text = f"experts need K in an even number of groups of 32, not K = {spec.k}"
            return Support(False, f"{self.name}: {text}")
        found = decide("", (spec.n, spec.k), ASCEND_950)
        if found.kind == "dense":
            return Support(True, f"{self.name}: {found.reason}")
        return Support(True, f"{spec.format}, N={spec.n}, K={spec.k}, scale_alg {self.scale_alg}")

    def prepare(
        self, weight: QuantizedWeight | GroupedWeight, engine: Engine
    ) -> PreparedMx | PreparedExperts | PreparedDense:
        """Resolve, quantise, repack; the packed tensors alone are kept. See `decide` for dense.

        Raises:
            KernelError: another format, or an engine that does not run here.
            ValueError: a scale grid that does not fit its blocks.
        """
        support = self.is_supported(engine)
        if not support:
            raise KernelError(f"{self.name}: {support.reason}")
        if isinstance(weight, GroupedWeight):
            return prepare_experts(weight, self.scale_alg, engine)
        decision = decide(weight.name, weight.shape, ASCEND_950)
        if decision.kind == "dense":
            return PreparedDense(weight=resolved(weight), reason=decision.reason, engine=engine)
        buffers = Buffers()
        buffers.load(*pack(*load(weight, self.scale_alg)))
        assert buffers.codes is not None
        assert buffers.scales is not None
        device = "npu" if engine == NPU else "cpu"
        return PreparedMx(
            codes=buffers.codes.to(device), scales=buffers.scales.to(device), engine=engine
        )

    def stages(self, weight: QuantizedWeight, engine: Engine) -> Iterator[Stage]:  # noqa: ARG002
        """What `prepare` does to the weight, step by step."""
        if decide(weight.name, weight.shape, ASCEND_950).kind == "dense":
            return iter([Stage(name="resolve", values=resolved(weight), facts={"runs": "dense"})])
        return stages(weight, self.scale_alg)

    def apply(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        prepared: PreparedMx | PreparedExperts | PreparedDense,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Y [..., N] in the dtype of x [..., K]; of experts [E, M, N] for x [E, M, K].

        Args:
            x: bfloat16 or float32, quantised here per row; or codes float8_e4m3fn [M, K] with scale
                bytes [M, ceil(G / 2), 2] that are quantised already: then y is bfloat16.
            prepared: what `prepare` returned.
            bias: [N]; widened to float32.

        Raises:
            KernelError: another K.
        """
        given = x[0] if isinstance(x, tuple) else x
        if given.dim() == 0 or given.shape[-1] != prepared.k:
            raise KernelError(
                f"{self.name}: expected x [..., {prepared.k}], got {list(given.shape)}"
            )
        if isinstance(prepared, PreparedDense):
            return _dense(given, prepared, bias)
        if isinstance(prepared, PreparedExperts):
            return self._experts(given, prepared, bias)
        ops = _operators(prepared.engine)
        leading = given.shape[:-1]
        if isinstance(x, tuple):
            codes, scales, dtype = *x, torch.bfloat16
        else:
            rows, dtype = x.reshape(-1, prepared.k), x.dtype
            codes, scales = ops.npu_dynamic_mx_quant(
                rows, dst_type=torch.float8_e4m3fn, scale_alg=self.scale_alg
            )
        y: Tensor = ops.npu_quant_matmul(
            codes,
            as_float8(prepared.codes),
            prepared.scales,
            scale_dtype=torch.float8_e8m0fnu,
            pertoken_scale=scales,
            pertoken_scale_dtype=torch.float8_e8m0fnu,
            bias=None if bias is None else bias.to(torch.float32),
            output_dtype=dtype,
            group_sizes=operators.GROUP_SIZES,
        )
        return y.reshape(*leading, y.shape[-1])

    def _experts(self, x: Tensor, prepared: PreparedExperts, bias: Tensor | None) -> Tensor:
        """Every expert on its own rows; an expert without rows gives none."""
        made = []
        for index, rows in enumerate(x):
            codes, scales = expert(prepared, index)
            one = PreparedMx(codes=codes, scales=scales, engine=prepared.engine)
            made.append(self.apply(rows, one, None if bias is None else bias[index]))
        return torch.stack(made)


def npu_device() -> Support:
    """Whether torch_npu is installed and sees an Ascend 950."""
    if importlib.util.find_spec("torch_npu") is None:
        return Support(False, "torch_npu is not installed")
    try:
        torch_npu = importlib.import_module("torch_npu")
        name = torch_npu.npu.get_device_name() if torch_npu.npu.is_available() else ""
    except Exception as error:  # noqa: BLE001 - it raises what its libraries raise
        return Support(False, f"torch_npu does not import: {type(error).__name__}: {error}")
    if not name.startswith(ASCEND_950):
        return Support(False, f"needs {ASCEND_950}, torch_npu sees {name or 'no NPU'}")
    return Support(True, name)


def _operators(engine: Engine) -> Any:  # noqa: ANN401 - a module, ours or torch_npu
    return importlib.import_module("torch_npu") if engine == NPU else operators


MXFP8 = Mxfp8Linear()
"""The kernel that the entry point ``mxfp8_npu`` names."""
MXFP8_ALG_1 = Mxfp8Linear(scale_alg=1)
"""The same with ``scale_alg`` 1, which MiniMax-M3 takes."""
