"""Time of the batched GEMM beside ``torch.bmm``: kernel, dispatch and end to end, kept apart.

    python -m reconcile_kernels.aiter_bf16.timing --engine triton --rows 1,8,37,128

prints, for (B, M, K, N) = (8, M, 4096, 1024) by default, two separate lines per M: ``aligned`` (is
it right: the bound) and ``kernel`` (is it faster: paired runs with an interval). ``dispatch`` is
the time that the route adds on the host, with a kernel that does nothing; ``end to end`` is a
decode step of the embedded model. All samples go to a JSON file, and every line names its place
there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconcile import registry
from reconcile.case import load_case
from reconcile.grouped import (
    GroupedReference,
    GroupedWeight,
    StoredWeight,
    baseline_linear,
    flat_rows,
)
from reconcile.judging.judge import judge_bound
from reconcile.kernel import Engine, choose_engine
from reconcile.linears import DenseWeight
from reconcile.numbers.paired import Paired, paired
from reconcile.tracing.taps import cache_argument, cache_of
from reconcile_kernels.aiter_bf16.batched import BATCHED_GEMM
from reconcile_kernels.aiter_bf16.route import Facts, Route

ROTATED = 256 << 20
"""Bytes of weights to go through, so that none is left in a cache from the call before."""


def main(arguments: list[str] | None = None) -> int:
    """Measure what the command line asks for; 2 where the engine does not run here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="hardware")
    parser.add_argument("--rows", default="1,8,37,128")
    parser.add_argument("--shape", default="8,4096,1024", help="B,K,N")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=20, help="calls per sample")
    parser.add_argument("--out", type=Path, default=Path("aiter_bf16-timing.json"))
    given = parser.parse_args(arguments)
    engine, note = choose_engine(BATCHED_GEMM, given.engine)
    if engine is None:
        print(f"not run: {note}")
        return 2
    batch, k, n = map(int, given.shape.split(","))
    body: dict[str, Any] = {"engine": asdict(engine), "note": note, "machine": _machine()}
    print(f"{note}\n{body['machine']}")
    with torch.no_grad():
        for m in map(int, given.rows.split(",")):
            size = f"B={batch} M={m} K={k} N={n}"
            aligned, kernel = _kernel(engine, (batch, m, k, n), given.rounds, given.calls)
            body[f"kernel {size}"] = asdict(kernel)
            print(f"aligned   {size}: {aligned}")
            print(f"kernel    {size}: {kernel.text()}; against torch.bmm  (kernel {size})")
        dispatch = _dispatch(given.rounds)
        body["dispatch"] = dispatch
        print(
            f"dispatch  {1e6 * statistics.median(dispatch):.1f} us on the host for each call of "
            f"the route, its copies included, with a kernel that does nothing  (dispatch)"
        )
        steps = _end_to_end(engine, given.rounds)
        body["end to end"] = asdict(steps)
        print(
            f"end to end: one decode step of the embedded model with the route, against plain "
            f"torch: {steps.text()}  (end to end)"
        )
    given.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"samples: {given.out}")
    return 0


class _Routed(nn.Module):
    """The route in a model, without the guards of a reconciliation."""

    def __init__(self, weight: StoredWeight, engine: Engine, device: str) -> None:
        super().__init__()
        self._weight = weight.dequantize(torch.bfloat16).to(device)
        self._route = Route(
            Facts(True, True, True, True),
            lambda: lambda x, w: BATCHED_GEMM.run(x, w, None, engine),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., G, D] to [..., G, R], as a decode call."""
        y = self._route(x.reshape(-1, *x.shape[-2:]), self._weight, True)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _end_to_end(engine: Engine, rounds: int) -> Paired:
    """Seconds of decode steps of the embedded model, each side with a KV cache of its own."""
    case = load_case(registry.embedded_case("dsv4-wo_a"))
    checkpoint = registry.model_source().load(registry.checkpoint(case.model.checkpoint, case.base))
    device = _device(engine)

    def routed(name: str, weight: StoredWeight) -> nn.Module:
        if name.endswith("o_a_proj"):
            return _Routed(weight, engine, device)
        return baseline_linear(weight, torch.bfloat16)

    def plain(_: str, weight: StoredWeight) -> nn.Module:
        return baseline_linear(weight, torch.bfloat16)

    made = [checkpoint.build(torch.bfloat16, make).to(device) for make in (routed, plain)]
    return paired(_decoder(made[0]), _decoder(made[1]), rounds)


def _decoder(model: nn.Module) -> Callable[[], float]:
    """Seconds of the next decode step."""
    device = next(model.parameters()).device
    token = torch.full((1, 1), 5, device=device)
    kept = [cache_of(model(input_ids=token.expand(1, 8), use_cache=True))]

    def step() -> float:
        _wait()
        started = time.perf_counter()
        output = model(input_ids=token, use_cache=True, **{cache_argument(model): kept[0]})
        _wait()
        seconds = time.perf_counter() - started
        kept[0] = cache_of(output)
        return seconds

    return step


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device(engine: Engine) -> str:
    here = torch.cuda.is_available() and engine.execution == "hardware"
    return "cuda" if here else "cpu"


def _machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "processor": platform.processor(), "torch": torch.__version__}


def _kernel(
    engine: Engine, shape: tuple[int, int, int, int], rounds: int, calls: int
) -> tuple[str, Paired]:
    batch, m, k, n = shape
    device = _device(engine)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, batch, k, generator=generator).bfloat16().to(device).transpose(0, 1)
    w = torch.randn(batch, n, k, generator=generator).bfloat16().to(device)
    copies = max(1, min(16, ROTATED // (w.numel() * 2)))
    weights = [w.clone() for _ in range(copies)]
    ours = _sample(lambda c: BATCHED_GEMM.run(x, weights[c % copies], None, engine), calls)
    theirs = _sample(lambda c: torch.bmm(x, weights[c % copies].transpose(1, 2)), calls)
    y = BATCHED_GEMM.run(x, w, None, engine)
    return _aligned(x.cpu(), w.cpu(), y.cpu()), paired(ours, theirs, rounds)


def _aligned(x: Tensor, w: Tensor, y: Tensor) -> str:
    """Whether the numbers are right, which says nothing about speed."""
    count, m, k = x.shape
    groups = tuple(DenseWeight(tensor=part) for part in w)
    contract = BATCHED_GEMM.contract
    exact = GroupedReference(GroupedWeight(groups=groups), contract, torch.float64)
    lying = x.transpose(0, 1)
    finding = judge_bound(
        flat_rows(y.transpose(0, 1), count),
        flat_rows(exact(lying), count),
        flat_rows(exact.magnitude(lying), count),
        k,
        contract.at(m),
        "float64",
    )
    if finding.reason is not None:
        return f"no: {finding.reason.value}: {finding.text}"
    return f"yes: {finding.utilisation:.3f} of the a-priori bound"


def _sample(call: Callable[[int], Tensor], calls: int) -> Callable[[], float]:
    """Seconds per call, of some calls in a row; on a GPU by its own clock."""

    def on_cpu() -> float:
        started = time.perf_counter()
        for index in range(calls):
            call(index)
        return (time.perf_counter() - started) / calls

    def on_gpu() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for index in range(calls):
            call(index)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    return on_gpu if torch.cuda.is_available() else on_cpu


def _dispatch(rounds: int, calls: int = 200) -> list[float]:
    """Host seconds of one call of the open route around a kernel that returns a ready tensor."""
    o, w = torch.zeros(1, 8, 16).bfloat16(), torch.zeros(8, 16, 16).bfloat16()
    ready = torch.zeros(8, 1, 16).bfloat16()
    route = Route(Facts(True, True, True, True), lambda: lambda _x, _w: ready)
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            route(o, w, True)
        samples.append((time.perf_counter() - started) / calls)
    return samples


if __name__ == "__main__":
    raise SystemExit(main())
