"""Where a module's tensors are in a recorded pass."""

from __future__ import annotations

from torch import Tensor

from reconcile.exceptions import TraceError
from reconcile.tracing.trace import Pass, Tap


def output_tap(module: str, recorded: Pass) -> str:
    """The tap of a module's first floating-point output: ``out`` or ``out.0`` ..."""
    for name, tensor in recorded.tensors.items():
        tap = Tap.parse(name)
        if tap.module == module and tap.port.startswith("out") and tensor.is_floating_point():
            return name
    raise TraceError(f"{module} has no output in pass {recorded.key}")


def logits_tap(recorded: Pass) -> str:
    """The tap of the model's logits."""
    for name in (":out.logits", ":out"):
        if name in recorded.tensors:
            return name
    return output_tap("", recorded)


def ports(recorded: Pass, module: str, prefix: str) -> dict[str, Tensor]:
    """Tensors of a module's ports that begin with ``prefix``, by port."""
    found = {}
    for name in recorded.tensors:
        tap = Tap.parse(name)
        if tap.module == module and tap.port.startswith(prefix):
            found[tap.port] = recorded.tensors[name]
    return found
