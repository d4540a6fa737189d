"""The engines of ``mxfp8_npu``: where its tensors lie, and who computes the two operators."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from reconcile.kernel import Engine, Support
from reconcile_kernels.mxfp8_npu import operators
from reconcile_kernels.mxfp8_npu.fallback import ASCEND_950
from reconcile_kernels.mxfp8_npu.registered import register

NPU = Engine("npu", implementation="vendor")
"""torch_npu's operators on an NPU; on another than an Ascend 950 every layer is dense."""
NPU_EMULATED = Engine("npu-emulated", execution="emulated", fidelity="semantic")
"""The documented arithmetic of the same operators on the CPU; the order of the sum is ours."""
NPU_SCHEMAS = Engine("npu-schemas", execution="emulated", fidelity="semantic")
"""The calls of ``npu``, through torch_npu's own declarations, that end in the same arithmetic."""


def support_of(engine: Engine) -> Support:
    """The emulation runs wherever torch does, ``npu-schemas`` beside torch_npu, ``npu`` on one."""
    if engine == NPU_EMULATED:
        return Support(True, "the documented operators on the CPU; no NPU is used")
    if engine == NPU_SCHEMAS:
        return torch_npu_here()
    return npu_device() if engine == NPU else Support(False, f"no engine {engine.name!r}")


def torch_npu_here() -> Support:
    """Whether torch_npu can be imported."""
    if importlib.util.find_spec("torch_npu") is None:
        return Support(False, "torch_npu is not installed")
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # noqa: BLE001 - it raises what its libraries raise
        return Support(False, f"torch_npu does not import: {type(error).__name__}: {error}")
    return Support(True, "torch_npu's declarations over the documented operators on the CPU")


def npu_device() -> Support:
    """Whether torch_npu is installed and sees an NPU, and which."""
    here = torch_npu_here()
    if not here:
        return here
    try:
        npu = importlib.import_module("torch_npu").npu
        name = str(npu.get_device_name()) if npu.is_available() else ""
    except Exception as error:  # noqa: BLE001 - it raises what its libraries raise
        return Support(False, f"torch_npu: {type(error).__name__}: {error}")
    return Support(bool(name), name or "torch_npu sees no NPU")


def device_name(engine: Engine) -> str:
    """What the layer is taken to run on: the emulations stand for an Ascend 950."""
    return npu_device().reason if engine == NPU else ASCEND_950


def place_of(engine: Engine) -> str:
    """Torch's name of where the operators find their tensors."""
    return "npu" if engine == NPU else "cpu"


def operators_of(engine: Engine) -> Any:  # noqa: ANN401 - a module, ours or torch_npu
    """The module that has ``npu_dynamic_mx_quant`` and ``npu_quant_matmul``."""
    if engine == NPU_EMULATED:
        return operators
    if engine == NPU_SCHEMAS:
        register()
    return importlib.import_module("torch_npu")
