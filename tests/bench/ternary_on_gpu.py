"""The CUDA variants on a GPU: right first, then captured in a graph, then beside cuBLAS in float16.

    python tests/bench/ternary_on_gpu.py [--out FILE]
    compute-sanitizer --tool memcheck  python tests/bench/ternary_on_gpu.py --small
    compute-sanitizer --tool racecheck python tests/bench/ternary_on_gpu.py --small
    ncu --set full -k regex:ternary -o ternary python tests/bench/ternary_on_gpu.py --small

Exit codes: 0 every variant was right and was measured, 1 one was wrong, 2 nothing ran, with the
reason. ``--small`` takes one shape and few rows, for tools that slow a program down. The goals: 3
times cuBLAS at M = 1 for the two large shapes, no slower up to M = 32, the dense route above the
crossover. No GPU was at hand when this was written: nothing here has been run on one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import reconcile
from reconcile.bench.compiler_report import ARCHITECTURES, usage, usage_text
from reconcile.bench.crossover import Crossovers, load_crossovers, table_text
from reconcile.bench.timing import measure
from reconcile.checking.probes import random_weight, synthetic
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine
from reconcile_kernels.ternary_cuda import MASKS, MMA, TILED, VECTORISED
from reconcile_references.ternary import TERNARY_K_INTERLEAVED

VARIANTS = (VECTORISED, TILED, MASKS, MMA)
SHAPES = ((2048, 2048), (6144, 2048), (8192, 8192), (28672, 8192))
ROWS = (1, 8, 32, 128, 512, 2048)
GOALS = (3.0, 1.0)
"""Times cuBLAS at M = 1 for the large shapes, and up to M = 32."""


class FromTheCpu:
    """A kernel whose x and y are on the CPU, as `check_linear` wants them."""

    def __init__(self, kernel, engine):
        self.name, self.contract, self.formats = kernel.name, kernel.contract, kernel.formats
        self.engines, self.kernel = (engine,), kernel
        self.is_supported, self.can_implement = kernel.is_supported, kernel.can_implement
        self.prepare = kernel.prepare

    def apply(self, x, prepared, bias=None):
        return self.kernel.apply(x.cuda(), prepared, bias).cpu()


def main() -> int:
    options = _options()
    engines = {kernel: _cuda(kernel) for kernel in VARIANTS}
    for kernel, engine in engines.items():
        if not (support := kernel.is_supported(engine)):
            print(f"not run: {kernel.name}: {support.reason}")
            return 2
    shapes, rows = (SHAPES[:1], ROWS[:3]) if options.small else (SHAPES, ROWS)
    wrong = [kernel.name for kernel, engine in engines.items() if not _right(kernel, engine)]
    wrong += [kernel.name for kernel, engine in engines.items() if not _captured(kernel, engine)]
    if wrong:
        print(f"wrong, and not measured: {', '.join(wrong)}")
        return 1
    found = []
    for shape in shapes:
        for kernel, engine in engines.items():
            try:
                found.append(
                    measure(kernel, engine, shape, torch.float16, TERNARY_K_INTERLEAVED, rows)
                )
                print(table_text(found[-1]), flush=True)
            except KernelError as error:
                print(f"{kernel.name}: not measured: {error}", flush=True)
        _goals(found, shape)
    older = load_crossovers(options.out) if options.out.exists() else Crossovers(measurements=())
    Crossovers(measurements=older.merged(found)).save(options.out)
    for kernel in VARIANTS:
        for architecture in ARCHITECTURES:
            print(usage_text(usage(kernel.cuda_library, architecture), 128))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".reconcile") / "crossover.json")
    parser.add_argument("--small", action="store_true")
    return parser.parse_args()


def _cuda(kernel) -> Engine:
    return next(engine for engine in kernel.engines if engine.name == "cuda")


def _weight(n: int, k: int):
    form = TERNARY_K_INTERLEAVED
    like = synthetic(form, torch.ones(n, k), torch.ones(form.scale_shape((n, k))))
    return random_weight(like, (n, k), torch.Generator().manual_seed(0))


def _right(kernel, engine) -> bool:
    """All probes in both 16-bit dtypes."""
    passed = True
    for dtype in kernel.dtypes:
        name = str(dtype).removeprefix("torch.")
        contract = reconcile.Contract(
            scale_applied="after_sum",
            accumulator_rounding=kernel.contract.accumulator_rounding,
            output=name,
        )
        wrapped = FromTheCpu(kernel, engine)
        report = reconcile.check_linear(wrapped, _weight(448, 256), dtype=dtype, contract=contract)
        print(f"{kernel.name} {name}: exit code {report.exit_code}, {len(report.rows)} rows")
        if report.exit_code:
            print(report.explain())
            passed = False
    return passed


def _captured(kernel, engine) -> bool:
    """A replayed CUDA graph gives the bits of an eager call, on another input too."""
    prepared = kernel.prepare(_weight(448, 256), engine)
    x = torch.randn(8, 256, device="cuda", dtype=torch.float16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernel.apply(x, prepared)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.apply(x, prepared)
    same = True
    for seed in range(2):
        generator = torch.Generator("cuda").manual_seed(seed)
        x.copy_(torch.randn(x.shape, generator=generator, device="cuda").half())
        graph.replay()
        same = same and torch.equal(y, kernel.apply(x, prepared))
    print(f"{kernel.name}: graph replay {'equals' if same else 'DIFFERS FROM'} eager")
    return same


def _goals(found, shape) -> None:
    here = [m for m in found if (m.setting.n, m.setting.k) == shape]
    for m in (1, 8, 32):
        ratios = [p.ratio for measurement in here for p in measurement.points if p.m == m]
        goal = GOALS[0] if m == 1 and shape in SHAPES[2:] else GOALS[1]
        best = max(ratios, default=0.0)
        print(f"N x K = {shape}, M = {m}: best {best:.2f}x cuBLAS, goal {goal:g}x")


if __name__ == "__main__":
    sys.exit(main())
