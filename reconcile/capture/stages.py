"""What a kernel's loading makes of a weight, step by step, against the reference's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.grouped import GroupedWeight, StoredWeight
from reconcile.kernel import Engine, Stage
from reconcile.linears import weight_chain
from reconcile.numbers import mx
from reconcile.replay import failed_call
from reconcile.report import Reason
from reconcile.weight import QuantizedWeight

Inspect = Callable[[QuantizedWeight, Engine], Iterable[Stage]]
"""A kernel's ``stages``."""


def all_stage_facts(
    weight: StoredWeight, contract: Contract, engine: Engine, inspect: Inspect
) -> list[dict[str, Any]]:
    """`stage_facts` of a weight, of a batched one group by group: ``resolve.3`` is group 3's.

    A dense weight has no stages.
    """
    if isinstance(weight, GroupedWeight):
        return [
            entry | {"name": f"{entry['name']}.{g}"}
            for g, group in enumerate(weight.groups)
            for entry in all_stage_facts(
                replace(group, name=f"{weight.name}.{g}"), contract, engine, inspect
            )
        ]
    if not isinstance(weight, QuantizedWeight):
        return []
    return stage_facts(weight, contract, engine, inspect)


def stage_facts(
    weight: QuantizedWeight, contract: Contract, engine: Engine, inspect: Inspect
) -> list[dict[str, Any]]:
    """One entry for each step: its name, reason (None: as the reference), text and statistics.

    ``differing``: values that are not the reference's after the same step. ``changed_share``,
    ``sqnr_db`` and ``max_rel`` are the step's own loss against the step before it, by the
    reference; for a quantising step also the share of groups that saturate. A declared step that
    the kernel does not show is an entry of its own; so is one in whose place the kernel fell back.
    """
    chain = weight_chain(weight, contract)
    pending = [name for name in chain if name != "decode"]
    before = expected = chain["decode"]
    other = ""
    found: list[dict[str, Any]] = []
    try:
        for stage in inspect(weight, engine):
            if stage.name in pending:
                pending.remove(stage.name)
                before, expected = expected, chain[stage.name]
            else:
                before = expected
            found.append(_entry(stage, before, expected, contract))
            other = other or stage.fell_back
    except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
        call = failed_call(error, "while its loading was inspected")
        return [*found, _fault("load", call.reason or Reason.RAISED, call.text)]
    missing = "the contract declares this step, the kernel does not show it"
    reason, text = (Reason.FELL_BACK, other) if other else (Reason.NOT_COMPARED, missing)
    return found + [_fault(name, reason, text) for name in pending]


def _entry(stage: Stage, before: Tensor, expected: Tensor, contract: Contract) -> dict[str, Any]:
    if stage.values.shape != expected.shape:
        text = f"expected values {list(expected.shape)}, got {list(stage.values.shape)}"
        return _fault(stage.name, Reason.SHAPE, text)
    values = stage.values.to(torch.float64)
    wrong = ~((values == expected) | (values.isnan() & expected.isnan()))
    stats = {"differing": int(wrong.sum()), **loss(before, expected), **stage.facts}
    if stage.name == "requantise":
        stats |= saturation(before, contract)
    reason, text = None, stage.fault
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        reason = Reason.OVER_LIMIT
        text = (
            f"{stats['differing']} of {wrong.numel()} values are not the reference's, first at "
            f"[{row}, {column}]: {float(values[row, column]):g} instead of "
            f"{float(expected[row, column]):g}"
        )
    elif stage.fault:
        reason = Reason.UNSTABLE
    return {"name": stage.name, "reason": reason, "text": text, "stats": stats}


def _fault(name: str, reason: Reason, text: str) -> dict[str, Any]:
    return {"name": name, "reason": reason, "text": text, "stats": {}}


def loss(before: Tensor, after: Tensor) -> dict[str, float]:
    """What a step loses: signal-to-noise ratio in dB, share of elements changed, largest change.

    ``max_rel`` is relative to the value before; where nothing changes the ratio is infinite.
    """
    both = before.isfinite() & after.isfinite()
    b, a = before[both], after[both]
    error = (a - b).abs()
    noise, power = float(error.square().sum()), float(b.square().sum())
    relative = torch.where(error > 0, error / b.abs(), 0.0)
    ratio = torch.tensor(power / noise if noise else torch.inf, dtype=torch.float64)
    return {
        "sqnr_db": float(10 * torch.log10(ratio)),
        "changed_share": float((error > 0).double().mean()) if error.numel() else 0.0,
        "max_rel": float(relative.max()) if error.numel() else 0.0,
    }


def saturation(before: Tensor, contract: Contract) -> dict[str, float]:
    """Share of groups in which the declared quantiser clamps an element."""
    assert contract.weight_requantised is not None
    rule = mx.named(contract.weight_requantised)
    clamped = mx.saturating(before, mx.quantise(before, rule).scales, rule)
    return {"saturating_share": float(clamped.double().mean())}
