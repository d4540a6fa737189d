"""Running a suite: every mutant with its clean twin, every variant on its seeds."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reconcile.report import ExitCode
from reconcile.selftest.schema import Mutant, Seen, Variant
from reconcile.selftest.suite import QUICK_SEEDS, Suite, load_suite
from reconcile.selftest.trials import BatchedTrial, OpTrial, clean_twin
from reconcile.selftest.watch import Watched, watching

Refused = dict[str, bool]
"""Gate to whether it refused."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one mutant."""

    id: str
    area: str
    source: str
    patch: str
    op: str
    causes: tuple[str, ...]
    """Names of the acceptable causes, the right one first."""
    hard: bool
    several_ops: bool
    """Whether another op could have been named."""
    exit_code: int
    tap: str
    reason: str
    check: str
    text: str
    named: tuple[str, ...]
    """Names of the diagnoses, best first."""
    explains: tuple[float, ...]
    detected: bool
    located: bool
    rank: int | None
    """Place of the first acceptable diagnosis."""
    twin: str
    """Why the clean twin is not clean; empty: it passes."""
    gates: Refused | None
    """Published gates on random activations; None: they see no outputs, or no wrong ones."""
    gates_probes: Refused | None
    """The same on all our probes' outputs."""
    seconds: float
    """Processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """What came of one clean variant."""

    id: str
    what: str
    checks: int
    alarms: tuple[str, ...]
    """Seed and text of each report that is not PASS."""
    gates: dict[str, int] = field(default_factory=dict)
    """Gate to the number of checks in which it refused random activations."""
    gates_probes: dict[str, int] = field(default_factory=dict)
    """The same on all our probes' outputs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a suite."""

    mutants: tuple[Result, ...]
    variants: tuple[Clean, ...]


def run_mutant(mutant: Mutant, *, gates: bool = True) -> Result:
    """The mutant and its clean twin; ``gates``: the published gates look on."""
    started = time.process_time()
    with watching() if gates else nullcontext(Watched()) as watched:
        seen = mutant.trial.run(faulty=True)
    twin = clean_twin(mutant.trial)
    comparable = _wrong_outputs(mutant) and bool(watched.random)
    return Result(
        id=mutant.id,
        area=mutant.area,
        source=mutant.source,
        patch=mutant.patch,
        op=mutant.op,
        causes=tuple(c if isinstance(c, str) else c.name for c in mutant.causes),
        hard=mutant.hard,
        several_ops=bool(mutant.op) and not isinstance(mutant.trial, OpTrial),
        exit_code=seen.exit_code,
        tap=seen.tap,
        reason=seen.reason,
        check=seen.check,
        text=seen.text,
        named=tuple(d.name for d in seen.diagnosis),
        explains=tuple(round(d.explains, 3) for d in seen.diagnosis),
        detected=mutant.detected(seen),
        located=mutant.located(seen),
        rank=mutant.rank(seen),
        twin="" if twin.exit_code == ExitCode.PASS else _why(twin),
        gates=dict(watched.random) if comparable else None,
        gates_probes=dict(watched.probes) if comparable else None,
        seconds=round(time.process_time() - started, 2),
    )


def _wrong_outputs(mutant: Mutant) -> bool:
    """Whether a gate that compares one output with a reference could see the fault at all."""
    besides = {"input_mutated", "unstable", "reference_suspect", "not_run"}
    judged = isinstance(mutant.trial, OpTrial | BatchedTrial)
    return judged and not besides & set(mutant.reasons) and mutant.exit_code == ExitCode.FAIL


def _why(seen: Seen) -> str:
    return f"exit code {seen.exit_code}: {seen.tap} {seen.reason} {seen.text}".strip()


def run_variant(variant: Variant, seeds: int, *, gates: bool = True) -> Clean:
    """The variant on seeds 0, 1, ...; ``gates``: the published gates look on."""
    alarms = []
    refused: dict[str, int] = {}
    refused_probes: dict[str, int] = {}
    for seed in range(seeds):
        with watching() if gates else nullcontext(Watched()) as watched:
            report = variant.run(seed)
        if report.exit_code != ExitCode.PASS:
            alarms.append(f"seed {seed}: {_why(Seen.of(report))}")
        _count(refused, watched.random)
        _count(refused_probes, watched.probes)
    return Clean(
        id=variant.id,
        what=variant.what,
        checks=seeds,
        alarms=tuple(alarms),
        gates=refused,
        gates_probes=refused_probes,
    )


def _count(into: dict[str, int], refused: Refused) -> None:
    for gate, no in refused.items():
        into[gate] = into.get(gate, 0) + no


def run_suite(
    suite: Suite, subset: str, jobs: int = 1, progress: Progress = lambda _: None
) -> Outcome:
    """Every mutant and variant of the suite, in ``jobs`` processes."""
    tasks = [("mutant", m.id, 0) for m in suite.mutants]
    tasks += [("variant", v.id, _seeds(v, subset)) for v in suite.variants]
    found: dict[str, Result | Clean] = {}
    for result in _results(suite.folder, tasks, jobs):
        found[result.id] = result
        progress(result.id)
    mutants = [found[m.id] for m in suite.mutants]
    variants = [found[v.id] for v in suite.variants]
    return Outcome(
        tuple(r for r in mutants if isinstance(r, Result)),
        tuple(c for c in variants if isinstance(c, Clean)),
    )


def _seeds(variant: Variant, subset: str) -> int:
    return variant.seeds if subset == "full" else min(QUICK_SEEDS, variant.seeds)


Task = tuple[str, str, int]
"""Kind, id and number of seeds."""


def _results(folder: Path, tasks: list[Task], jobs: int) -> Iterator[Result | Clean]:
    if jobs == 1:
        for task in tasks:
            yield _one(folder, task)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool:
        # the long ones first
        ordered = sorted(tasks, key=lambda task: -task[2])
        for future in as_completed([pool.submit(_one, folder, task) for task in ordered]):
            yield future.result()


def _start() -> None:
    torch.set_num_threads(1)


_loaded = functools.cache(load_suite)


def _one(folder: Path, task: Task) -> Result | Clean:
    suite, (kind, name, seeds) = _loaded(folder), task
    if kind == "mutant":
        return run_mutant(next(m for m in suite.mutants if m.id == name))
    return run_variant(next(v for v in suite.variants if v.id == name), seeds)
