"""Modules that fail although their ops pass: diagnosed by varying the reference module.

The reference layer runs again on the very inputs that the candidate's got, with one common mistake
at a time; how much of the error disappears, at the layer's output or at that of a block inside it,
is what the mistake explains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from reconcile.capture.candidate import prepare_all
from reconcile.capture.plan import Plan
from reconcile.capture.steps import Step
from reconcile.contract import Contract
from reconcile.diagnosis.attempts import all_families, all_variations
from reconcile.diagnosis.engine import ENOUGH, NONE_FITS, SURE
from reconcile.diagnosis.fits import Family, solve
from reconcile.diagnosis.heads import head_causes
from reconcile.diagnosis.hypothesis import few
from reconcile.diagnosis.linear import Failure, diagnose_failure
from reconcile.diagnosis.norm_fits import diagnose_norm
from reconcile.diagnosis.playback import Playback
from reconcile.diagnosis.pristine import pristine
from reconcile.diagnosis.rotary import frequencies_of
from reconcile.diagnosis.variations import first_wrong
from reconcile.grouped import StoredWeight, baseline_linear, reference_linear
from reconcile.linears import DenseWeight
from reconcile.replay import Call, KernelLinear, Prepared
from reconcile.report import Diagnosis, Level, Row, Verdict
from reconcile.tracing.norms import KIND
from reconcile.tracing.ports import ports
from reconcile.tracing.taps import main_input
from reconcile.tracing.trace import Tap, Trace

MOST = 3
"""Distinct failing modules of one run that are diagnosed, the first ones."""
SECONDS = 15.0
"""Processor time after which no further variation is tried."""
ABOUT = 0.95
"""Share below which a named cause is said to be about right."""
SAME = 1e-2
"""Share of the error by which the reference may miss its own kept output when it runs again."""
NAMES = ("layer_shift", "final_norm", "tuple_element")
"""Names that are given here, besides those of norms and variations."""


def diagnose_modules(
    plan: Plan, reference: Trace, candidate: Trace, rows: tuple[Row, ...]
) -> tuple[Row, ...]:
    """The rows with what explains the modules that fail by themselves."""
    known: dict[str, tuple[Diagnosis, ...]] = {}
    bench: _Bench | None = None
    done = []
    first = next((row for row in rows if row.verdict is Verdict.FAIL), None)
    for row in rows:
        failing = row.level is Level.MODULE and row.verdict is Verdict.FAIL and row.stats
        if not failing or (row.check == "chained" and row is not first):
            done.append(row)
            continue
        if row.tap not in known and len(known) < MOST:
            kind = KIND if row.check == "small_rows" else row.check
            module = Tap.parse(row.tap).module
            if kind == KIND or _is_norm(plan, reference, module):
                known[row.tap] = _norm(plan, reference, candidate, row, kind)
            else:
                bench = bench or _Bench.of(plan)
                known[row.tap] = bench.diagnose(reference, candidate, row)
        done.append(replace(row, diagnosis=known.get(row.tap, ())))
    return tuple(done)


def _is_norm(plan: Plan, reference: Trace, module: str) -> bool:
    """Whether it is a norm inside a layer; the final one may also be left out or doubled."""
    alone = reference.select(KIND)
    norms = {Tap.parse(tap).module for item in alone.values() for tap in item.tensors}
    return module in norms - set(plan.parts)


def _norm(
    plan: Plan, reference: Trace, candidate: Trace, row: Row, kind: str
) -> tuple[Diagnosis, ...]:
    r = reference.select(kind)[row.pass_]
    c = candidate.select(kind)[row.pass_].tensors
    module = Tap.parse(row.tap).module
    given = ports(r, module, "in")
    x = given[main_input(given)]
    found = diagnose_norm(x, c[row.tap], r.tensors[row.tap])
    final = module == plan.checkpoint.structure.norm
    return _ranked([_in_module(_named(item, final), module) for item in found])


def _named(found: Diagnosis, final: bool) -> Diagnosis:
    """The final norm left out is a convention of its own: hidden states before or after it."""
    return replace(found, name="final_norm") if final and found.name == "norm_missing" else found


def _in_module(found: Diagnosis, module: str) -> Diagnosis:
    return replace(
        found,
        parameters=found.parameters | {"module": module},
        text=f"{module}: {found.text}",
    )


def _ranked(found: Sequence[Diagnosis]) -> tuple[Diagnosis, ...]:
    """Best and runner-up, or that none fits."""
    best = sorted(found, key=lambda item: -item.explains)
    if not best or best[0].explains < SURE:
        text = f"none of {len(found)} variations of the module explains it"
        if best and best[0].explains > 0:
            text += f"; the best, {best[0].name}, explains {best[0].explains:.0%}: {best[0].text}"
        share = max(0.0, best[0].explains) if best else 0.0
        return (Diagnosis(name=NONE_FITS, explains=share, text=text),)
    if best[0].explains < ABOUT:
        best[0] = replace(best[0], text=f"about (explains {best[0].explains:.0%}): {best[0].text}")
    others = [item for item in best[1:] if item.name != best[0].name and item.explains > 0]
    return (best[0], *(replace(item, role="runner_up") for item in others[:1]))


@dataclass(frozen=True, slots=True)
class _Again:
    """A module of the candidate's model, called alone."""

    module: nn.Module

    def call(self, x: Tensor) -> Call:
        """Rows [M, K] to what the module gives, [M, N]."""
        device = next(self.module.parameters()).device
        return Call(output=self.module(x.to(device)).cpu())


@dataclass(frozen=True, slots=True)
class _Bench:
    """The reference model, on which mistakes are tried."""

    plan: Plan
    model: nn.Module
    until: float

    @classmethod
    def of(cls, plan: Plan) -> _Bench:
        model = plan.checkpoint.build(
            plan.reference_dtype,
            lambda _, weight: reference_linear(weight, plan.arithmetic, plan.reference_dtype),
        )
        return cls(plan, model, time.process_time() + SECONDS)

    def diagnose(self, reference: Trace, candidate: Trace, row: Row) -> tuple[Diagnosis, ...]:
        """Try every variation of a part, or of a block inside it, on the inputs of the part."""
        steps = self._steps(row.pass_)
        ours = {p.key: p for p in candidate.passes if p.kind == row.check}
        theirs = {p.key: p for p in reference.passes if p.kind == row.check}
        if not steps or any(step.key not in theirs or step.key not in ours for step in steps):
            return ()
        r, c = theirs[row.pass_], ours[row.pass_].tensors[row.tap]
        right = r.tensors[row.tap].double()
        module = Tap.parse(row.tap).module
        part = module if module in self.plan.parts else module.rpartition(".")[0]
        free = row.check == "chained"
        if free and part not in self.plan.checkpoint.structure.layers:
            return ()
        given = {
            step.key: _of_main(ports(ours[step.key], part, "in"))
            if free
            else ports(theirs[step.key], part, "in")
            for step in steps
        }
        routed = reference.select("chained")
        if isinstance(self.model.get_submodule(module), nn.Linear):
            x = given[row.pass_][main_input(given[row.pass_])]
            return self._head(module, x, right, c) or self._linear(module, x, c)
        error = float((c.double() - right).square().sum())
        with pristine(self.model) as replaced:

            def play(other: str) -> Playback:
                inputs = [(step, routed[step.key], given[step.key]) for step in steps]
                return Playback.of(self.plan, self.model, other, inputs)

            played = play(part)
            again = played.output(module).double()
            if not free and float((again - right).square().sum()) > SAME * error:
                return (_other_library(float((c.double() - again).square().sum()) / error),)
            trial = _Trial(played, module, c.double(), again, self.until)
            found = tuple(self._tried(trial, given[row.pass_], play))
        ranked = _ranked([_said(item, trial.where()) for item in found])
        return _with_replaced(ranked, replaced)

    def _head(self, module: str, x: Tensor, right: Tensor, y: Tensor) -> tuple[Diagnosis, ...]:
        """What is wrong with the head, where one mistake explains it."""
        head = self.model.get_submodule(module)
        embeddings = self.model.get_input_embeddings()  # type: ignore[operator]
        table: Tensor | None = getattr(embeddings, "weight", None)
        weight: Tensor = head.weight  # type: ignore[assignment]
        if table is None or table.shape != weight.shape or torch.equal(table, weight):
            table = None
        given, wanted, got = (side.reshape(-1, side.shape[-1]) for side in (x, right, y))
        found = head_causes(given, wanted, got, table, self._in_time)
        best = _ranked([_in_module(item, module) for item in found])
        return () if best[0].name == NONE_FITS else best

    def _in_time(self) -> bool:
        return time.process_time() < self.until

    def _linear(self, module: str, x: Tensor, y: Tensor) -> tuple[Diagnosis, ...]:
        """A linear that no kernel computes, such as the head: the candidate's is called again."""
        plan = self.plan
        right: nn.Linear = self.model.get_submodule(module)  # type: ignore[assignment]
        ready = prepare_all(plan)

        def linear(name: str, stored: StoredWeight) -> nn.Module:
            plain = baseline_linear(stored, plan.dtype)
            prepared = ready.get(name)
            return KernelLinear(prepared, plain) if isinstance(prepared, Prepared) else plain

        built = plan.checkpoint.build(plan.dtype, linear)
        again = _Again(built.to(plan.config.device).get_submodule(module))
        rows, out = x.reshape(-1, x.shape[-1]).to(plan.dtype), y.reshape(-1, y.shape[-1])
        held: Tensor | None = right.bias
        same = again.call(rows).output
        if held is not None or same is None or not torch.equal(same.cpu(), out):
            return ()  # what is called here is not what ran, or its weight cannot be read out
        failure = Failure(
            weight=DenseWeight(tensor=right.weight.detach(), name=module),
            contract=Contract(output=str(plan.dtype).removeprefix("torch.")),
            x=rows,
            y=out,
            prepare=lambda _: again,
        )
        return tuple(_in_module(item, module) for item in diagnose_failure(failure))

    def _steps(self, key: str) -> tuple[Step, ...]:
        """The calls of a pass's prompt up to the pass."""
        for ids in self.plan.prompts:
            steps = self.plan.steps(ids)
            for number, step in enumerate(steps):
                if step.key == key:
                    return steps[: number + 1]
        return ()

    def _tried(
        self, trial: _Trial, given: dict[str, Tensor], play: Callable[[str], Playback]
    ) -> Iterator[Diagnosis]:
        """Causes of a module's error, each with its share."""
        structure, part, module = self.plan.checkpoint.structure, trial.played.part, trial.module
        if part == structure.norm:
            yield from _of_final_norm(trial, given)
        if part not in structure.layers:
            return
        if module == part:
            yield _stream_of_another(trial, given)
        number = structure.layers.index(part)
        for shift in (-1, 1):
            if 0 <= number + shift < len(structure.layers):
                other = structure.layers[number + shift]
                twin = f"{other}{module.removeprefix(part)}"
                share = trial.share(play(other).output(twin))
                yield _diagnosis("layer_shift", module, f"computes what {twin} should", share)
        layer = self.model.get_submodule(part)
        rope = frequencies_of(self.model)
        best = 0.0
        for item in all_variations(layer, rope, first_wrong(trial.y, trial.right)):
            if not trial.inside(item.where):
                continue  # it changes nothing in there, or what comes in, which is right
            if not self._in_time():
                return
            share = trial.share(trial.played.output(module, item.hooks))
            best = max(best, share)
            yield _diagnosis(item.name, f"{part}.{item.where}", item.text, share)
        for family in all_families(layer, rope) if best < ENOUGH else ():
            if not trial.inside(family.where) or not self._in_time():
                continue
            value, share = solve(partial(trial.share_of, family), family, self._in_time)
            found = _diagnosis(family.name, f"{part}.{family.where}", family.text(value), share)
            yield replace(found, parameters=found.parameters | {"value": value})


@dataclass(frozen=True, slots=True)
class _Trial:
    """A failing module, and how much of its error a mistake explains."""

    played: Playback
    module: str
    y: Tensor
    """The candidate's output."""
    right: Tensor
    until: float

    def share(self, other: Tensor) -> float:
        """The share of the error energy that is gone with another output."""
        error = float((self.y - self.right).square().sum())
        if other.shape != self.y.shape or error <= 0:
            return 0.0
        left = float((self.y - other.double()).square().sum())
        return 1 - left / error if math.isfinite(left) else 0.0

    def share_of(self, family: Family, value: float) -> float:
        """That of a family's mistake with one value."""
        return self.share(self.played.output(self.module, family.hooks(value)))

    def inside(self, where: str) -> bool:
        """Whether a place in the part is in the module."""
        return f"{self.played.part}.{where}.".startswith(f"{self.module}.")

    def where(self) -> str:
        """From which position on it is wrong, where that is not the first."""
        first = first_wrong(self.y, self.right, SILENT)
        if first is None:
            return ""
        count = self.y.shape[-2]
        if first == count - 1:
            return f"only the last of {count} positions is wrong"
        return f"positions 0 to {first - 1} are right, it is wrong from position {first} on"


SILENT = 7.0
"""Logarithm of the factor by which the squared error grows where positions before it are right."""


def _said(found: Diagnosis, where: str) -> Diagnosis:
    return replace(found, text=f"{found.text}; {where}") if where else found


def _of_main(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The hidden states alone: tables and masks are the reference's own."""
    main = main_input(given)
    return {main: given[main]}


def _of_final_norm(trial: _Trial, given: dict[str, Tensor]) -> Iterator[Diagnosis]:
    part, x = trial.played.part, given[main_input(given)]
    text = "the final norm is left out"
    yield _diagnosis("final_norm", part, text, trial.share(x))
    norm = trial.played.model.get_submodule(part)
    twice = norm(trial.right.to(next(norm.parameters()).dtype))
    yield _diagnosis("final_norm", part, "the final norm is applied twice", trial.share(twice))


def _stream_of_another(trial: _Trial, given: dict[str, Tensor]) -> Diagnosis:
    text = "the output is what the layer adds: the stream is another element of what it returns"
    x = given[main_input(given)].to(trial.right.dtype)
    share = trial.share(trial.right - x)
    return _diagnosis("tuple_element", trial.played.part, text, share)


def _diagnosis(name: str, where: str, text: str, share: float) -> Diagnosis:
    return Diagnosis(
        name=name,
        explains=max(0.0, min(1.0, share)),
        parameters={"module": where},
        text=f"{where}: {text}",
    )


def _other_library(left: float) -> Diagnosis:
    """The reference that runs here is not the one that was captured: no mistake can be tried."""
    text = (
        "the reference model, run again here, does not give what it gave when it was captured: "
        "its library or its weights are changed in this process, and mistakes cannot be tried on it"
    )
    if left <= 1 - SURE:
        text += "; it gives what the candidate gives, so that the change is the cause"
    return Diagnosis(name=NONE_FITS, explains=0.0, text=text)


def _with_replaced(
    found: tuple[Diagnosis, ...], replaced: tuple[str, ...]
) -> tuple[Diagnosis, ...]:
    if not replaced:
        return found
    text = f"{found[0].text}; in this process the library's own {few(replaced)} was replaced"
    return (replace(found[0], text=text), *found[1:])
