"""``reconcile bench``: a kernel's time beside torch's, and from which M on which is faster."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from reconcile import registry
from reconcile.bench.compiler_report import ARCHITECTURES, usage, usage_text
from reconcile.bench.crossover import (
    Crossovers,
    EndToEnd,
    Measurement,
    load_crossovers,
    table_text,
)
from reconcile.bench.timing import ROUNDS, ROWS, end_to_end, measure, weight_format
from reconcile.capture.provenance import environment
from reconcile.case import load_case
from reconcile.commands.common import command, path_argument, words
from reconcile.contract import DTYPES
from reconcile.exceptions import BuildError, ConfigError, KernelError
from reconcile.kernel import Kernel, choose_engine
from reconcile.report import ExitCode
from reconcile.session import Session

DEFAULT = Path(".reconcile") / "crossover.json"
"""Where the table is kept."""


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "bench", _bench, "a kernel's time beside torch's, over M")
    parser.add_argument("--kernel", help="only this kernel (default: every registered one)")
    parser.add_argument("--engine", default="auto", help="engine, or hardware | vendor | auto")
    parser.add_argument("--shape", action="append", type=_shape, metavar="NxK", help="repeatable")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows M")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of x")
    parser.add_argument("--weight-format", help="number format (default: the kernel's first)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of all paths")
    parser.add_argument("--out", type=path_argument, default=DEFAULT, help=f"table ({DEFAULT})")
    parser.add_argument("--case", help="also a forward pass of this case's model, end to end")
    parser.add_argument(
        "--compiler-report", action="store_true", help="also registers and spills of CUDA sources"
    )


def _bench(options: argparse.Namespace) -> int:
    rows = _rows(options.rows)
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: expected one of {', '.join(DTYPES)}")
    if options.threads < 1 or options.rounds < 1:
        raise ConfigError("--threads and --rounds: expected at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    measured: list[Measurement] = []
    missing = 0
    try:
        for name in [options.kernel] if options.kernel else registry.kernel_names():
            kernel = registry.kernel(name)
            for shape in options.shape or [(4096, 4096)]:
                try:
                    measured.append(_measure(kernel, shape, rows, options))
                    print(table_text(measured[-1]), flush=True)
                except KernelError as error:
                    missing += 1
                    print(f"{name}: not measured: {error}", flush=True)
            if options.compiler_report:
                missing += _compiler_report(kernel)
    finally:
        torch.set_num_threads(before)
    if measured:
        _keep(measured, options)
    return ExitCode.PASS if measured and not (missing and options.kernel) else ExitCode.INCONCLUSIVE


def _measure(
    kernel: Kernel, shape: tuple[int, int], rows: tuple[int, ...], options: argparse.Namespace
) -> Measurement:
    engine, note = choose_engine(kernel, options.engine)
    if engine is None:
        raise KernelError(note)
    form, dtype = weight_format(kernel, options.weight_format), DTYPES[options.dtype]
    found = measure(kernel, engine, shape, dtype, form, rows=rows, rounds=options.rounds)
    facts = environment(
        "bench", options.dtype, options.command_line, kernel, model="", checkpoint_sha256=""
    )
    whole: tuple[EndToEnd, ...] = ()
    if options.case is not None:
        case = load_case(registry.case_file(options.case))
        plan = Session(case).plans(case, "*", None)[0]
        whole = end_to_end(kernel, engine, plan.checkpoint, dtype, plan.prompts[0])
    return replace(found, end_to_end=whole, provenance=asdict(facts))


def _compiler_report(kernel: Kernel) -> int:
    """Print it; 1 where there is a CUDA source, but no report."""
    library = getattr(kernel, "cuda_library", None)
    if library is None:
        return 0
    for architecture in ARCHITECTURES:
        try:
            print(usage_text(usage(library, architecture), getattr(kernel, "block_threads", 128)))
        except BuildError as error:
            print(f"{kernel.name}: compiler report not run: {error}", file=sys.stderr)
            return 1
    return 0


def _keep(measured: list[Measurement], options: argparse.Namespace) -> None:
    """Add to the table, in place of older measurements of the same."""
    path: Path = options.out
    older = load_crossovers(path) if path.exists() else Crossovers(measurements=())
    Crossovers(measurements=older.merged(measured)).save(path)
    print(f"table: {path}")


def _rows(text: str) -> tuple[int, ...]:
    parts = words(text)
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--rows {text!r}: expected positive numbers, e.g. 1,8,64")
    return tuple(sorted({int(part) for part in parts}))


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.lower().partition("x")
    if not (n.isdigit() and k.isdigit() and int(n) and int(k)):
        raise argparse.ArgumentTypeError("expected NxK, e.g. 4096x4096")
    return int(n), int(k)
