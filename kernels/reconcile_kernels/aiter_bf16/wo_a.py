"""``aiter_bf16.wo_a``: the route around the batched GEMM as a `Kernel`, for use in a case.

In a case the candidate's ``phases`` say where the route is used; a call that reaches it is a decode
call. Off a gfx95 the route would be closed, and everything einsum; here it is held open over an
emulated engine, so that what the route adds (the transposes, the copies, the dispatch, what happens
on failure) is under test. The report shows the engine as emulated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from reconcile.contract import Contract
from reconcile.kernel import Engine, LinearSpec, Support
from reconcile_kernels.aiter_bf16.batched import AITER, BATCHED_GEMM, BatchedGemm
from reconcile_kernels.aiter_bf16.route import Batched, Facts, Route


@dataclass(frozen=True, slots=True)
class PreparedRoute:
    """A weight [G, R, D] and the route that its calls take."""

    weight: Tensor
    route: Route


class WoA:
    """o [T, G, D], wo_a [G, R, D] to [T, G, R] through `Route`."""

    name = "aiter_bf16.wo_a"
    formats = BatchedGemm.formats
    criteria = BatchedGemm.criteria
    contract: Contract = BatchedGemm.contract
    engines = BatchedGemm.engines

    def __init__(self, gemm: BatchedGemm = BATCHED_GEMM) -> None:
        """Over a batched GEMM, whose launches are counted."""
        self._gemm = gemm
        self._routes: dict[Engine, Route] = {}

    @property
    def launches(self) -> int:
        """Launches of the kernel behind the route."""
        return self._gemm.launches

    def is_supported(self, engine: Engine) -> Support:
        """Whether the kernel behind the route runs here, and whether the route is held open."""
        support = self._gemm.is_supported(engine)
        missing = Facts.here().missing
        if not support or not missing:
            return support
        return Support(True, f"{support.reason}; the route is held open although {missing}")

    def can_implement(self, spec: LinearSpec) -> Support:
        """What the kernel behind the route accepts, without a bias."""
        if spec.bias:
            return Support(False, f"{self.name}: wo_a has no bias")
        return self._gemm.can_implement(spec)

    def prepare(self, weight: Tensor, engine: Engine) -> PreparedRoute:
        """One route per engine and process, as in the server."""
        prepared = self._gemm.prepare(weight, engine)
        if engine not in self._routes:
            facts = Facts.here() if engine == AITER else Facts(True, True, True, True)
            self._routes[engine] = Route(facts, functools.partial(self._load, engine))
        return PreparedRoute(prepared.weight, self._routes[engine])

    def apply(self, x: Tensor, prepared: PreparedRoute, bias: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """X [G, T, D] to [G, T, R], as a decode call."""
        o = x.transpose(0, 1)
        return prepared.route(o, prepared.weight, is_decode=True).transpose(0, 1)

    def _load(self, engine: Engine) -> Batched:
        gemm = self._gemm

        def kernel(x: Tensor, w: Tensor) -> Tensor:
            return gemm.run(x, w, None, engine)

        return kernel


WO_A = WoA()
"""The kernel that the entry point ``aiter_bf16.wo_a`` names."""
