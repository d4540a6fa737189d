"""The worst group of a batched linear as a plain linear that is diagnosed by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from reconcile.contract import Contract
from reconcile.diagnosis.between_groups import explain_one
from reconcile.diagnosis.evidence import Seen, right_model
from reconcile.diagnosis.groups import stacked
from reconcile.diagnosis.linear import Failure, diagnose_failure
from reconcile.diagnosis.model import LinearModel
from reconcile.grouped import GroupedWeight, PlainWeight
from reconcile.replay import Call, Prepared
from reconcile.report import Diagnosis


@dataclass(frozen=True, slots=True)
class OneGroup:
    """A batched kernel of which one group is asked; the others get the same rows."""

    prepared: Prepared
    group: int

    def call(self, x: Tensor) -> Call:
        """[M, K] to what the kernel gives for the group, [M, N]."""
        rows = x.reshape(-1, x.shape[-1])
        outcome = self.prepared.call(rows.expand(self.prepared.groups or 1, -1, -1).clone())
        if outcome.output is None:
            return outcome
        return replace(outcome, output=outcome.output[self.group])


def diagnose_group(
    weight: GroupedWeight,
    contract: Contract,
    x: Tensor,
    y: Tensor,
    attempt: Callable[[GroupedWeight], Prepared | Call],
) -> tuple[Diagnosis, ...]:
    """What explains the group with the most outputs outside the bound.

    Args:
        weight: the batched weight.
        contract: the kernel's whole contract.
        x: [M, G, K] as the kernel was given it, but for the order of its dimensions.
        y: [M, G, N].
        attempt: gives a kernel that is ready for a batched weight.
    """
    models = [right_model(own, contract.at(len(x))) for own in weight.groups]
    over = [_outside(model, x[:, g], y[:, g]) for g, model in enumerate(models)]
    group = max(range(len(over)), key=over.__getitem__)
    if swapped := explain_one(y.transpose(0, 1), x, *stacked(models), group):
        return swapped

    def prepare(own: PlainWeight) -> OneGroup | Call:
        groups = (*weight.groups[:group], own, *weight.groups[group + 1 :])
        prepared = attempt(replace(weight, groups=groups))
        return OneGroup(prepared, group) if isinstance(prepared, Prepared) else prepared

    failure = Failure(
        weight=weight.groups[group],
        contract=contract,
        x=x[:, group].contiguous(),
        y=y[:, group].contiguous(),
        prepare=prepare,
    )
    wrong = sum(map(bool, over))
    said = f"group {group}" if wrong == 1 else f"group {group}, the worst of {wrong} wrong ones"
    return tuple(
        replace(item, text=f"{said}: {item.text}", parameters=item.parameters | {"group": group})
        for item in diagnose_failure(failure)
    )


def _outside(model: LinearModel, x: Tensor, y: Tensor) -> int:
    """How many outputs [M, N] of one group are not what the reference allows."""
    exact, bound = model.exact(x)
    return int((Seen.of(y).excess(exact, bound, model) > 0).sum())
