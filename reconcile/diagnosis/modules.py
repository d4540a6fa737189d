"""Modules that fail although their ops pass: diagnosed by varying the reference module.

The reference layer runs again on the very inputs that the candidate's got, with one common mistake
at a time; how much of the error disappears, at the layer's output or at that of a block inside it,
is what the mistake explains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from reconcile.capture.candidate import prepare_all
from reconcile.capture.passes import Stream
from reconcile.capture.plan import Plan
from reconcile.capture.steps import Step
from reconcile.contract import Contract
from reconcile.diagnosis.engine import NONE_FITS, SURE
from reconcile.diagnosis.hypothesis import few
from reconcile.diagnosis.linear import Failure, diagnose_failure
from reconcile.diagnosis.norm_fits import diagnose_norm
from reconcile.diagnosis.pristine import pristine
from reconcile.diagnosis.variations import first_wrong, variations, varied, windows
from reconcile.grouped import StoredWeight, baseline_linear, reference_linear
from reconcile.judging.routing import forced_routing
from reconcile.linears import DenseWeight
from reconcile.replay import Call, KernelLinear, Prepared
from reconcile.report import Diagnosis, Level, Row, Verdict
from reconcile.tracing.norms import KIND
from reconcile.tracing.ports import output_tap, ports
from reconcile.tracing.taps import forced_inputs, main_input
from reconcile.tracing.trace import Tap, Trace

MOST = 3
"""Distinct failing modules of one run that are diagnosed, the first ones."""
SECONDS = 15.0
"""Processor time after which no further variation is tried."""
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
    for row in rows:
        failing = row.level is Level.MODULE and row.verdict is Verdict.FAIL and row.stats
        if not failing or row.check == "chained":
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
        step = self._step(row.pass_)
        if step is None or step.phase == "decode":
            return ()  # one token on top of a cache is not run again
        r = reference.select("isolated")[row.pass_]
        c = candidate.select("isolated")[row.pass_].tensors[row.tap].double()
        right = r.tensors[row.tap].double()
        module = Tap.parse(row.tap).module
        part = module if module in self.plan.parts else module.rpartition(".")[0]
        given = ports(r, part, "in")
        alone = self.model.get_submodule(module)
        if isinstance(alone, nn.Linear):
            y = candidate.select("isolated")[row.pass_].tensors[row.tap]
            return self._linear(alone, module, given[main_input(given)], y)
        error = float((c - right).square().sum())
        found = []
        routers, routed = self.plan.checkpoint.structure.routers, reference.select("chained")
        with (
            pristine(self.model) as replaced,
            forced_routing(self.model, routers, routed[row.pass_]),
        ):
            again = self._run(part, given, step, module).double()
            if float((again - right).square().sum()) > SAME * error:
                return (_other_library(float((c - again).square().sum()) / error),)
            for name, where, text, y in self._tried(
                part, module, given, step, first_wrong(c, right)
            ):
                if y.shape == c.shape and error > 0:
                    share = 1 - float((c - y.double()).square().sum()) / error
                    found.append(_diagnosis(name, where, text, share))
        return _with_replaced(_ranked(found), replaced)

    def _linear(self, right: nn.Linear, module: str, x: Tensor, y: Tensor) -> tuple[Diagnosis, ...]:
        """A linear that no kernel computes, such as the head: the candidate's is called again."""
        plan = self.plan
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

    def _step(self, key: str) -> Step | None:
        steps = (step for ids in self.plan.prompts for step in self.plan.steps(ids))
        return next((step for step in steps if step.key == key), None)

    def _tried(
        self, part: str, module: str, given: dict[str, Tensor], step: Step, first: int | None
    ) -> Iterator[tuple[str, str, str, Tensor]]:
        """Name, place, words, and output of a module of the part, under each mistake."""
        structure = self.plan.checkpoint.structure
        if part == structure.norm:
            yield "final_norm", part, "the final norm is left out", given["in0"]
            again = self._run(part, given, step)
            twice = self._run(part, given | {"in0": again}, step)
            yield "final_norm", part, "the final norm is applied twice", twice
        if part not in structure.layers:
            return
        layer = self.model.get_submodule(part)
        for variation in (*variations(layer), *windows(layer, first)):
            where = f"{part}.{variation.where}"
            if not f"{where}.".startswith(f"{module}."):
                continue  # it changes nothing in there, or what comes in, which is right
            if time.process_time() > self.until:
                return
            with varied(layer, variation):
                y = self._run(part, given, step, module)
            yield variation.name, where, variation.text, y
        if module == part:
            text = (
                "the output is what the layer adds: the stream is another element of what it "
                "returns"
            )
            whole = self._run(part, given, step)
            yield "tuple_element", part, text, whole - given["in0"].to(whole.dtype)
        number = structure.layers.index(part)
        for shift in (-1, 1):
            if 0 <= number + shift < len(structure.layers):
                other = structure.layers[number + shift]
                twin = f"{other}{module.removeprefix(part)}"
                y = self._run(other, given, step, twin)
                yield "layer_shift", module, f"computes what {twin} should", y

    def _run(
        self, part: str, given: dict[str, Tensor], step: Step, module: str | None = None
    ) -> Tensor:
        """The output of a part, or of a module inside it, on given inputs of the part."""
        stream = Stream(self.plan, self.model, precise=True)
        watched = module or part
        with forced_inputs(self.model, {part: given}, self.plan.reference_dtype):
            recorded = stream.record(step, (), inside=[watched])
        return recorded.tensors[output_tap(watched, recorded)]


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
