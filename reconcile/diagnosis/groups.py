"""Why a batched linear is wrong in a way that one group alone does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.diagnosis.between_groups import explain_groups
from reconcile.diagnosis.evidence import right_model
from reconcile.diagnosis.microscaling import quantised
from reconcile.diagnosis.model import LinearModel
from reconcile.grouped import GroupedWeight
from reconcile.report import Diagnosis
from reconcile.weight import QuantizedWeight

SURE = 0.9
"""Share of the error energy that a reading must explain to be named."""

NAMES = ("scale_reused", "group_reused", "group_shifted")
"""Diagnoses that this file can give."""

Reading = tuple[str, str, dict[str, object], list[Tensor]]
"""Name, words, parameters, and the weight of each group, float64 [N, K]."""


def diagnose_groups(
    weight: GroupedWeight, contract: Contract, x: Tensor, y: Tensor
) -> tuple[Diagnosis, ...]:
    """The group whose scales or weight stands in for the others, or a wrong layout; else empty.

    Args:
        weight: the batched weight.
        contract: the contract for this number of rows.
        x: [..., G, K] as the module was given it.
        y: [..., G, N] what it gave.
    """
    models = [right_model(group, contract) for group in weight.groups]
    rows = x.reshape(-1, len(models), x.shape[-1])
    given = y.reshape(-1, len(models), y.shape[-1]).double()
    operands = [model.operands(rows[:, g]) for g, model in enumerate(models)]

    def energy(weights: list[Tensor]) -> float:
        made = [a @ w.T + _bias(m) for a, w, m in zip(operands, weights, models, strict=True)]
        return float((torch.stack(made, 1) - given).square().sum())

    before = energy([model.weight for model in models])
    found = [
        Diagnosis(name=name, explains=1 - energy(weights) / before, parameters=where, text=text)
        for name, text, where, weights in _readings(weight, models)
        if before > 0
    ]
    best = sorted(found, key=lambda item: -item.explains)[:1]
    if best and best[0].explains >= SURE:
        return tuple(best)
    return explain_groups(given.transpose(0, 1), rows, *stacked(models))[:1] if before > 0 else ()


def stacked(models: list[LinearModel]) -> tuple[Tensor, Tensor | None]:
    """Weights [G, N, K] and, where there are any, biases [G, N], of all groups."""
    biases = [model.bias for model in models if model.bias is not None]
    weight = torch.stack([model.weight for model in models])
    return weight, torch.stack(biases) if len(biases) == len(models) else None


def _bias(model: LinearModel) -> Tensor:
    return torch.zeros(()) if model.bias is None else model.bias


def _readings(weight: GroupedWeight, models: list[LinearModel]) -> Iterator[Reading]:
    for step in (1, -1) if len(models) > 1 else ():
        moved = [models[(g + step) % len(models)].weight for g in range(len(models))]
        text = f"group g is multiplied by the weight of group g {step:+d}"
        yield "group_shifted", text, {"step": step}, moved
    for source in range(len(models)):
        scales = _under_scales_of(weight, models, source)
        if scales is not None:
            text = f"every group is multiplied under the scales of group {source}"
            yield "scale_reused", text, {"source": source}, scales
        text = f"every group is multiplied by the weight of group {source}"
        yield "group_reused", text, {"source": source}, [models[source].weight] * len(models)


def _under_scales_of(
    weight: GroupedWeight, models: list[LinearModel], source: int
) -> list[Tensor] | None:
    """Every group's codes under one group's scales; None of groups without scales."""
    groups = [group for group in weight.groups if isinstance(group, QuantizedWeight)]
    if len(groups) != len(models):
        return None
    made = [quantised(group, model) for group, model in zip(groups, models, strict=True)]
    bytes_ = made[source]
    if bytes_ is None:
        stored = groups[source].scales
        return [
            right_model(replace(group, scales=stored), model.contract).weight
            for group, model in zip(groups, models, strict=True)
        ]
    return [replace(own, scales=bytes_.scales).dequantize() for own in made if own is not None]
