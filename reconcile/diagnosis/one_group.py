"""The worst group of a batched linear as a plain linear that is diagnosed by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from reconcile.contract import Contract
from reconcile.diagnosis.evidence import right_model
from reconcile.diagnosis.linear import Failure, diagnose_failure
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
    group = _worst(weight, contract, x, y)

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
    return tuple(
        replace(
            item, text=f"group {group}: {item.text}", parameters=item.parameters | {"group": group}
        )
        for item in diagnose_failure(failure)
    )


def _worst(weight: GroupedWeight, contract: Contract, x: Tensor, y: Tensor) -> int:
    over = []
    for number, own in enumerate(weight.groups):
        exact, bound = right_model(own, contract.at(len(x))).exact(x[:, number])
        inside = (y[:, number].double() - exact).abs() <= bound
        over.append(int((~inside).sum()))
    return max(range(len(over)), key=over.__getitem__)
