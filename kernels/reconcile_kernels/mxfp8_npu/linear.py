"""``mxfp8_npu`` as a `Kernel`: block FP8 becomes MXFP8 at load, activations at run time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.fallback import fell_back
from reconcile.grouped import GroupedWeight, format_name, group_count
from reconcile.kernel import Engine, LinearSpec, Stage, Support
from reconcile.numbers.mx import GROUP
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import operators
from reconcile_kernels.mxfp8_npu.device import (
    NPU,
    NPU_EMULATED,
    NPU_SCHEMAS,
    device_name,
    operators_of,
    place_of,
    support_of,
)
from reconcile_kernels.mxfp8_npu.experts import PreparedExperts, expert, prepare_experts
from reconcile_kernels.mxfp8_npu.fallback import Decision, decide
from reconcile_kernels.mxfp8_npu.layout import Buffers, as_float8, pack
from reconcile_kernels.mxfp8_npu.load import BLOCK_FORMATS, MX_FORMAT, load, resolved, stages


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
    """bfloat16 [N, K], of experts [E, N, K]."""
    reason: str
    engine: Engine

    @property
    def k(self) -> int:
        """Input features."""
        return self.weight.shape[-1]


def _dense(x: Tensor, prepared: PreparedDense, bias: Tensor | None) -> Tensor:
    """The unquantised product in the dtype of x, which is said to be that."""
    fell_back(prepared.reason)
    own = None if bias is None else bias.to(x)
    weight = prepared.weight.to(x.dtype)
    if weight.dim() == 2:
        return functional.linear(x, weight, own)
    y = x @ weight.transpose(1, 2)
    return y if own is None else y + own[:, None]


@dataclass(frozen=True, slots=True)
class Mxfp8Linear:
    """y = MX(x) MX(W)^T (+ b): both operands in MXFP8, sums in float32, one rounding at the end."""

    scale_alg: int = 0
    """How the shared exponent is found, for weights and activations alike."""
    engines: tuple[Engine, ...] = (NPU, NPU_EMULATED, NPU_SCHEMAS)
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
        """See `device`."""
        return support_of(engine)

    def can_implement(self, spec: LinearSpec) -> Support:
        """By the table of `fallback`: what runs dense is taken, and says so when it runs."""
        found = decide(spec)
        if found.kind == "not implemented":
            return Support(False, f"{self.name}: {found.reason}")
        if spec.format not in self.formats:
            return Support(False, f"{self.name} reads {', '.join(self.formats)}, not {spec.format}")
        if spec.activation_dtype not in (torch.bfloat16, torch.float32):
            return Support(False, f"{self.name}: x must be bfloat16 or float32")
        return Support(True, f"{found.reason}, N={spec.n}, K={spec.k}, scale_alg {self.scale_alg}")

    def route(self, spec: LinearSpec, engine: Engine) -> str:
        """How the layer runs, in words, for the report's notices."""
        return f"{self.name}: {decide(spec, device_name(engine)).reason}"

    def prepare(
        self, weight: QuantizedWeight | GroupedWeight, engine: Engine
    ) -> PreparedMx | PreparedExperts | PreparedDense:
        """Resolve, quantise, repack; the packed tensors alone are kept. See `decide` for dense.

        Raises:
            KernelError: another format, or an engine that does not run here.
            NotImplementedError: what `decide` refuses.
            ValueError: a scale grid that does not fit its blocks.
        """
        support = self.is_supported(engine)
        if not support:
            raise KernelError(f"{self.name}: {support.reason}")
        decision, place = self._decide(weight, engine), place_of(engine)
        if decision.kind == "not implemented":
            raise NotImplementedError(f"{self.name}: {decision.reason}")
        if decision.kind == "dense":
            dense = resolved(weight).to(place)
            return PreparedDense(weight=dense, reason=decision.reason, engine=engine)
        if isinstance(weight, GroupedWeight):
            return prepare_experts(weight, self.scale_alg, engine, place)
        buffers = Buffers()
        buffers.load(*(tensor.to(place) for tensor in pack(*load(weight, self.scale_alg))))
        assert buffers.codes is not None
        assert buffers.scales is not None
        return PreparedMx(codes=buffers.codes, scales=buffers.scales, engine=engine)

    def _decide(self, weight: QuantizedWeight | GroupedWeight, engine: Engine) -> Decision:
        """By the weight alone: its name is the path of its module."""
        spec = LinearSpec(
            n=weight.shape[0],
            k=weight.shape[1],
            format=format_name(weight),
            bias=weight.bias is not None,
            activation_dtype=torch.bfloat16,
            groups=group_count(weight),
            module=weight.name,
        )
        return decide(spec, device_name(engine))

    def stages(self, weight: QuantizedWeight, engine: Engine) -> Iterator[Stage]:
        """What `prepare` does to the weight, step by step."""
        decision = self._decide(weight, engine)
        if decision.kind != "dense":
            return stages(weight, self.scale_alg)
        facts = {"runs": f"dense: {decision.reason}"}
        values, reason = resolved(weight), decision.reason
        return iter([Stage(name="resolve", values=values, facts=facts, fell_back=reason)])

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
        if isinstance(prepared, PreparedExperts):
            return self._experts(given, prepared, bias)
        place = place_of(prepared.engine)
        if isinstance(prepared, PreparedDense):
            return _dense(given.to(place), prepared, bias).to(given.device)
        ops = operators_of(prepared.engine)
        if isinstance(x, tuple):
            codes, scales, dtype = x[0].to(place), x[1].to(place), torch.bfloat16
        else:
            rows, dtype = x.reshape(-1, prepared.k).to(place), x.dtype
            codes, scales = ops.npu_dynamic_mx_quant(
                rows, dst_type=torch.float8_e4m3fn, scale_alg=self.scale_alg
            )
        y: Tensor = ops.npu_quant_matmul(
            codes,
            as_float8(prepared.codes),
            prepared.scales,
            scale_dtype=ops.float8_e8m0fnu,
            pertoken_scale=scales,
            pertoken_scale_dtype=ops.float8_e8m0fnu,
            bias=None if bias is None else bias.to(place, torch.float32),
            output_dtype=dtype,
            group_sizes=operators.GROUP_SIZES,
        )
        return y.reshape(*given.shape[:-1], y.shape[-1]).to(given.device)

    def _experts(self, x: Tensor, prepared: PreparedExperts, bias: Tensor | None) -> Tensor:
        """Every expert on its own rows; an expert without rows gives none."""
        made = []
        for index, rows in enumerate(x):
            codes, scales = expert(prepared, index)
            one = PreparedMx(codes=codes, scales=scales, engine=prepared.engine)
            made.append(self.apply(rows, one, None if bias is None else bias[index]))
        return torch.stack(made)


MXFP8 = Mxfp8Linear()
"""The kernel that the entry point ``mxfp8_npu`` names."""
MXFP8_ALG_1 = Mxfp8Linear(scale_alg=1)
"""The same with ``scale_alg`` 1, which MiniMax-M3 takes."""
