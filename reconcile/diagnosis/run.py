"""Diagnoses of a run's failing rows: ops by fitting, modules by variation, sets by search."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from pydantic import TypeAdapter
from torch import Tensor

from reconcile.capture.plan import Plan
from reconcile.diagnosis.groups import diagnose_groups
from reconcile.diagnosis.linear import NUMERIC, Failure, diagnose_failure, note
from reconcile.diagnosis.module_set import diagnose_set
from reconcile.diagnosis.modules import diagnose_modules
from reconcile.diagnosis.one_group import diagnose_group
from reconcile.diagnosis.phases import with_phase
from reconcile.grouped import GroupedWeight, reference_linear
from reconcile.replay import Prepared
from reconcile.report import Diagnosis, Level, Reason, Row, Verdict
from reconcile.tracing.trace import Pass, Tap, Trace

MOST_OPS = 3
"""Distinct failing ops of one run that are fitted, the first ones in execution order."""
SECONDS = 12.0
"""Processor time after which no further op is fitted."""


def diagnosed(
    plan: Plan, reference: Trace, candidate: Trace, rows: tuple[Row, ...]
) -> tuple[Row, ...]:
    """The rows of a candidate, failing ones with what explains them; verdicts stay as they are.

    Costs nothing where nothing fails, and never raises: a fault in here is a note on the row.
    """
    if not any(row.verdict is Verdict.FAIL for row in rows):
        return rows
    try:
        with torch.no_grad():
            done = _ops(plan, reference, candidate, rows)
            done = diagnose_modules(plan, reference, candidate, done)
            return with_phase(diagnose_set(plan, reference, candidate, done))
    except Exception as error:  # noqa: BLE001 - the verdict must stand whatever happens here
        first = next(i for i, row in enumerate(rows) if row.verdict is Verdict.FAIL)
        noted = replace(rows[first], diagnosis=(note(error),))
        return (*rows[:first], noted, *rows[first + 1 :])


FACT = "diagnoses"
"""Where a candidate's trace keeps them: a comparison has neither kernel nor model."""
_LIST = TypeAdapter(tuple[Diagnosis, ...])


def keep(candidate: Trace, rows: Sequence[Row]) -> None:
    """Write the rows' diagnoses into the candidate's trace, for `attached`."""
    candidate.facts[FACT] = [
        {"row": _place(row), "found": _LIST.dump_python(row.diagnosis, mode="json")}
        for row in rows
        if row.diagnosis
    ]


def attached(candidate: Trace, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The failing rows with the diagnoses that the candidate's trace keeps."""
    kept = {tuple(item["row"]): item["found"] for item in candidate.facts.get(FACT, ())}
    return tuple(
        replace(row, diagnosis=_LIST.validate_python(kept[tuple(_place(row))]))
        if row.verdict is Verdict.FAIL and tuple(_place(row)) in kept
        else row
        for row in rows
    )


def _place(row: Row) -> list[str]:
    return [row.level.value, row.tap, row.check, row.pass_, "x".join(map(str, row.shape))]


def _ops(plan: Plan, reference: Trace, candidate: Trace, rows: Sequence[Row]) -> tuple[Row, ...]:
    known: dict[str, tuple[Diagnosis, ...]] = {}
    started = time.process_time()
    done = []
    for row in rows:
        module = Tap.parse(row.tap).module
        if (
            row.level is not Level.OP
            or row.verdict is not Verdict.FAIL
            or row.reason not in NUMERIC
            or module not in plan.checkpoint.weights
        ):
            done.append(row)
            continue
        in_time = not known or time.process_time() - started < SECONDS
        if module not in known and len(known) < MOST_OPS and in_time:
            known[module] = _op(plan, reference, candidate, row, module, _sizes(rows, row.tap))
        done.append(replace(row, diagnosis=known.get(module, ())))
    return tuple(done)


def _sizes(rows: Sequence[Row], tap: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of rows with which an op fails, and those with which it passes."""
    seen = [row for row in rows if row.tap == tap and row.check == "isolated" and row.shape]
    failing = {row.shape[0] for row in seen if row.verdict is Verdict.FAIL}
    passing = {row.shape[0] for row in seen if row.verdict is Verdict.PASS}
    return tuple(failing), tuple(passing - failing)


def _op(
    plan: Plan,
    reference: Trace,
    candidate: Trace,
    row: Row,
    module: str,
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[Diagnosis, ...]:
    """The diagnosis of the op of one failing row."""
    isolated = row.check != "chained"
    kind = "isolated" if isolated else "chained"
    ours, theirs = candidate.select(kind), reference.select(kind)
    c, r = ours[row.pass_], theirs[row.pass_]
    name = str(Tap(module, "in0"))
    x = (r if isolated else c).tensors[name]
    y = c.tensors[str(Tap(module, "out"))]
    port = "out" if isolated else "ref.out"
    if (other := _another_op(module, y, (r if isolated else c).tensors, port)) is not None:
        return (other,)
    if (shift := _another_layer(plan, module, x, y)) is not None:
        return (shift,)
    weight = plan.checkpoint.weights[module]
    if plan.engine is None:
        return ()
    if isinstance(weight, GroupedWeight):
        alone = c.tensors.get(str(Tap(module, "out.row"))) if row.shape[1:2] == (1,) else None
        return _groups(plan, weight, x, y, alone)
    others = _calls(theirs if isolated else ours, ours, module, row.pass_)
    flat, out = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    if row.shape and row.shape[0] == 1 and len(flat) > 1:
        alone = c.tensors[str(Tap(module, "out.row"))]
        others.append((flat, out))  # a kernel may answer one row from what it gave for all
        flat, out = flat[len(flat) // 2 :][:1], alone.reshape(1, -1)
    engine, kernel = plan.engine, plan.kernel
    failure = Failure(
        weight=weight,
        contract=plan.arithmetic,
        x=flat.to(plan.dtype),
        y=out,
        prepare=lambda given: Prepared.attempt(kernel, engine, given, plan.dtype),
        others=tuple(others),
        unwritten=row.text if row.reason is Reason.UNWRITTEN else "",
        failing=sizes[0],
        passing=sizes[1],
    )
    return diagnose_failure(failure)


def _groups(
    plan: Plan, weight: GroupedWeight, x: Tensor, y: Tensor, alone: Tensor | None
) -> tuple[Diagnosis, ...]:
    """What is wrong between the groups, or else in the worst one.

    Args:
        plan: the candidate's.
        weight: of G groups.
        x: [..., G, K].
        y: [..., G, N].
        alone: the output of the middle row alone, [..., G, N], where that is what failed.
    """
    count = len(weight.groups)
    rows, out = (side.reshape(-1, count, side.shape[-1]) for side in (x.to(plan.dtype), y))
    if alone is not None and len(rows) > 1:
        rows, out = rows[len(rows) // 2 :][:1], alone.reshape(1, count, -1)
    between = diagnose_groups(weight, plan.arithmetic.at(len(rows)), rows, out)
    if between or plan.engine is None:
        return between
    kernel, engine = plan.kernel, plan.engine
    return diagnose_group(
        weight,
        plan.arithmetic,
        rows,
        out,
        lambda given: Prepared.attempt(kernel, engine, given, plan.dtype),
    )


def _calls(
    given: Mapping[str, Pass], passes: Mapping[str, Pass], module: str, key: str
) -> list[tuple[Tensor, Tensor]]:
    """What the op was given, rows [M, K], and gave, [M, N], in other passes."""
    first, last = str(Tap(module, "in0")), str(Tap(module, "out"))
    return [
        (given[name].tensors[first].flatten(0, -2), one.tensors[last].flatten(0, -2))
        for name, one in passes.items()
        if name != key and last in one.tensors and first in given[name].tensors
    ]


def _another_layer(plan: Plan, module: str, x: Tensor, y: Tensor) -> Diagnosis | None:
    """Whether the output is what the same op of a neighbouring layer should give on this input."""
    layers = plan.checkpoint.structure.layers
    here = next((i for i, layer in enumerate(layers) if module.startswith(f"{layer}.")), None)
    if here is None:
        return None
    rest, weights = module.removeprefix(layers[here]), plan.checkpoint.weights

    def error(name: str) -> float:
        right = reference_linear(weights[name], plan.arithmetic, plan.reference_dtype)
        return float((right(x).double() - y.double()).square().sum())

    wrong = error(module)
    for other in (here + 1, here - 1):
        name = f"{layers[other]}{rest}" if 0 <= other < len(layers) else ""
        if name not in weights or weights[name].shape != weights[module].shape:
            continue
        left = error(name)
        if left <= ALIKE * wrong:
            return Diagnosis(
                name="layer_shift",
                explains=1 - left / wrong,
                parameters={"module": module, "instead": name},
                text=f"gives what {name} should: another layer's weight is used",
            )
    return None


ALIKE = 1e-3
"""Share of the error energy that may remain where an output is that of another op."""


def _another_op(
    module: str, output: Tensor, right: Mapping[str, Tensor], port: str
) -> Diagnosis | None:
    """Whether the output is what a sibling with the same input should give."""
    own = right[str(Tap(module, port))].double()
    y = output.double()
    wrong = float((y - own).square().sum())
    parent = module.rpartition(".")[0]
    for name, other in right.items():
        sibling = Tap.parse(name)
        if sibling.port != port or sibling.module == module or other.shape != y.shape:
            continue
        if sibling.module.rpartition(".")[0] != parent:
            continue
        left = float((y - other.double()).square().sum())
        if left <= ALIKE * wrong:
            found = sibling.module.rpartition(".")[2]
            return Diagnosis(
                name="qkv_order",
                explains=1 - left / wrong,
                parameters={"module": module, "instead": sibling.module},
                text=f"gives the output of {found}: parts of a fused weight or output are swapped",
            )
    return None
