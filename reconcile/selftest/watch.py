"""The published gates on the very outputs that our probes judge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from reconcile.checking.probe_judge import WATCH
from reconcile.checking.probes import AnyWeight, Probe
from reconcile.contract import Contract
from reconcile.linears import BaselineLinear, ReferenceLinear
from reconcile.selftest.gates import GATES, Outputs


@dataclass(slots=True)
class Watched:
    """Which gates refused something, on random activations and on all probes."""

    random: dict[str, bool] = field(default_factory=dict)
    """Gate to whether it refused a call on random activations: how such gates are used."""
    probes: dict[str, bool] = field(default_factory=dict)
    """The same on all probes with finite answers: what our inputs would do for them."""
    _baseline: tuple[AnyWeight, BaselineLinear] | None = None

    def see(
        self, reference: ReferenceLinear, probe: Probe, candidate: Tensor, contract: Contract
    ) -> None:
        """Judge one call by every gate."""
        x = probe.x.reshape(-1, probe.x.shape[-1])
        exact = reference(x)
        if not bool(exact.isfinite().all()) or probe.expect == "special":
            return
        if self._baseline is None or self._baseline[0] is not probe.weight:
            plain = BaselineLinear(probe.weight, candidate.dtype, contract)
            self._baseline = (probe.weight, plain)
        outputs = Outputs(candidate, exact, self._baseline[1](x).to(candidate.dtype))
        for gate in GATES:
            refused = not gate.accepts(outputs)
            self.probes[gate.name] = self.probes.get(gate.name, False) or refused
            if probe.name == "bound":
                self.random[gate.name] = self.random.get(gate.name, False) or refused


@contextmanager
def watching() -> Iterator[Watched]:
    """While the block runs, every judged probe is judged by the published gates too."""
    watched = Watched()
    token = WATCH.set(watched.see)
    try:
        yield watched
    finally:
        WATCH.reset(token)
