"""``vllm_ascend.mxfp8``: vllm-ascend's own published linear method, on emulated operators.

`AscendW8A8MXFP8DynamicLinearMethod` is taken from the installed package and neither changed nor
copied: its loading lays out the weight, its `apply` calls torch_npu, whose two operators run here
as `registered` makes them. vLLM and the rest of vllm-ascend, which need a device, are stood in for
by modules without content.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu.linear import MXFP8
from reconcile_kernels.mxfp8_npu.load import MX_FORMAT
from reconcile_kernels.mxfp8_npu.registered import register

ENGINE = Engine("vllm-ascend", implementation="vendor", execution="emulated", fidelity="semantic")
"""The published class on the CPU; its two NPU operators are ours."""
_FILE = "vllm_ascend/quantization/methods/w8a8_mxfp8.py"
_PACKAGES = (
    "vllm_ascend",
    "vllm_ascend.quantization",
    "vllm_ascend.quantization.methods",
    "vllm_ascend.device",
)
"""Packages whose files are real; their ``__init__`` is not run."""
_STOOD_IN = (
    "vllm",
    "vllm.config",
    "vllm.logger",
    "vllm.platforms",
    "vllm.triton_utils",
    "vllm.utils",
    "vllm.utils.math_utils",
    "vllm_ascend.ascend_config",
    "vllm_ascend.ascend_forward_context",
    "vllm_ascend.envs",
    "vllm_ascend.flash_common3_context",
    "vllm_ascend.ops",
    "vllm_ascend.ops.fused_moe",
    "vllm_ascend.ops.fused_moe.experts_selector",
    "vllm_ascend.ops.fused_moe.moe_runtime_args",
    "vllm_ascend.quantization.utils",
    "vllm_ascend.utils",
)
"""Modules that the file imports and that a linear layer does not use."""


@dataclass(frozen=True, slots=True)
class VllmAscendMxfp8:
    """y = MX(x) MX(W)^T (+ b) by vllm-ascend's method; weights are stored in MXFP8."""

    name: str = "vllm_ascend.mxfp8"
    contract: Contract = field(default=MXFP8.contract)
    engines: tuple[Engine, ...] = (ENGINE,)
    formats: tuple[str, ...] = (MX_FORMAT,)

    def is_supported(self, engine: Engine) -> Support:  # noqa: ARG002
        """Where torch_npu and vllm-ascend are installed."""
        missing = [name for name in ("torch_npu", "vllm_ascend") if not _is_installed(name)]
        if missing:
            return Support(False, f"{' and '.join(missing)} not installed; `make npu` installs it")
        return Support(True, f"vllm-ascend {_version('vllm-ascend')}, {_FILE}")

    def can_implement(self, spec: LinearSpec) -> Support:
        """As `mxfp8_npu`, without experts."""
        if spec.groups is not None:
            return Support(False, f"{self.name}: experts run by another class")
        return MXFP8.can_implement(spec)

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> nn.Module:
        """A layer with the checkpoint's tensors, through the method's own loading.

        Raises:
            KernelError: it is not installed.
        """
        support = self.is_supported(engine)
        if not support:
            raise KernelError(f"{self.name}: {support.reason}")
        layer = nn.Module()
        codes = weight.codes.view(torch.float8_e4m3fn)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        scales = weight.scales.view(torch.uint8)
        layer.weight_scale = nn.Parameter(scales, requires_grad=False)
        _method().process_weights_after_loading(layer)
        return layer

    def apply(self, x: Tensor, prepared: nn.Module, bias: Tensor | None = None) -> Tensor:
        """The method's own `apply`."""
        y: Tensor = _method().apply(prepared, x, bias)
        return y


@functools.cache
def _method() -> Any:  # noqa: ANN401 - a class of another package
    """The published method, imported once, with our operators under it."""
    register()
    spec = importlib.util.find_spec("vllm_ascend")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]).parent
    for name in _PACKAGES:
        sys.modules[name] = _package(name, root / name.replace(".", "/"))
    for name in _STOOD_IN:
        sys.modules[name] = _StandIn(name)
    sys.modules["vllm.utils.math_utils"].cdiv = _ceil_div  # type: ignore[attr-defined]
    settings = types.SimpleNamespace(quant_description={"group_size": 32})
    config = types.SimpleNamespace(quant_config=settings)
    get: Callable[[], object] = lambda: config  # noqa: E731
    sys.modules["vllm.config"].get_current_vllm_config = get  # type: ignore[attr-defined]
    module = importlib.import_module("vllm_ascend.quantization.methods.w8a8_mxfp8")
    return module.AscendW8A8MXFP8DynamicLinearMethod()


def _is_installed(name: str) -> bool:
    """Whether a package can be imported, or stands in for itself already."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _package(name: str, place: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [str(place)]
    return module


class _StandIn(types.ModuleType):
    """A module in which every name is there and means nothing."""

    __path__: list[str] = []  # noqa: RUF012 - a module's own attribute

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


VLLM_ASCEND = VllmAscendMxfp8()
"""The kernel that the entry point ``vllm_ascend.mxfp8`` names."""
