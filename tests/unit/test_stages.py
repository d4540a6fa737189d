"""Stages of loading: what is compared, what is only shown, what a wrong stage does to its op."""

import dataclasses

import pytest
import torch

import reconcile
from reconcile import registry
from reconcile.capture.stages import loss, stage_facts
from reconcile.checking.probes import random_weight, synthetic
from reconcile.contract import Contract
from reconcile.kernel import PYTHON, Stage
from reconcile.linears import weight_chain
from reconcile.registry import formats
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import MXFP8

CONTRACT = Contract(weight_rounding="bfloat16", weight_requantised="mxfp8_ascend_0")


def weight_of(name, shape=(40, 96)):
    form = formats()[name]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(seedling, shape, torch.Generator().manual_seed(0))
    return QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)


WEIGHT = weight_of("fp8_e4m3_block")
CHAIN = weight_chain(WEIGHT, CONTRACT)


def right(**changes):
    steps = {
        "resolve": Stage(name="resolve", values=CHAIN["resolve"].bfloat16()),
        "requantise": Stage(name="requantise", values=CHAIN["requantise"]),
        "repack": Stage(name="repack", values=CHAIN["requantise"], facts={"layout": "[K, N]"}),
    }
    return [step for step in (steps | changes).values() if step is not None]


def facts(steps, weight=WEIGHT):
    return stage_facts(weight, CONTRACT, PYTHON, lambda *_: iter(steps))


def test_a_right_loading_has_no_fault_and_shows_its_losses():
    found = facts(right())
    assert [(step["name"], step["reason"]) for step in found] == [
        ("resolve", None),
        ("requantise", None),
        ("repack", None),
    ]
    resolve, requantise, repack = (step["stats"] for step in found)
    exact, dense, mx = CHAIN["decode"], CHAIN["resolve"], CHAIN["requantise"]
    assert resolve["changed_share"] == float((exact != dense).double().mean()) > 0
    noise = float((mx - dense).square().sum() / dense.square().sum())
    assert requantise["sqnr_db"] == pytest.approx(-10 * torch.log10(torch.tensor(noise)).item())
    assert 0 < requantise["saturating_share"] < 1
    assert (repack["changed_share"], repack["sqnr_db"]) == (0, float("inf"))
    assert repack["layout"] == "[K, N]"


def broken(name, **changes):
    values = CHAIN["requantise" if name == "repack" else name].clone()
    values[3, 5] += 1
    return {name: Stage(name=name, values=values, **changes)}


@pytest.mark.parametrize("name", ["resolve", "requantise", "repack"])
def test_one_wrong_value_is_found_where_it_arises(name):
    found = {step["name"]: step for step in facts(right(**broken(name)))}
    assert found[name]["reason"] == "over_limit"
    assert "1 of 3840 values are not the reference's, first at [3, 5]" in found[name]["text"]
    assert [step for step in found if found[step]["reason"]] == [name]


@pytest.mark.parametrize(
    ("steps", "name", "reason", "said"),
    [
        (right(requantise=None), "requantise", "not_compared", "does not show it"),
        (
            right(repack=Stage(name="repack", values=torch.zeros(2, 2))),
            "repack",
            "shape",
            "[40, 96]",
        ),
        (
            right(repack=Stage(name="repack", values=CHAIN["requantise"], fault="moved")),
            "repack",
            "unstable",
            "moved",
        ),
    ],
)
def test_what_else_a_stage_may_break(steps, name, reason, said):
    step = next(step for step in facts(steps) if step["name"] == name)
    assert step["reason"] == reason
    assert said in step["text"]


def test_a_loading_that_raises_is_a_row():
    def inspect(*_):
        yield right()[0]
        raise ValueError("no memory")

    found = stage_facts(WEIGHT, CONTRACT, PYTHON, inspect)
    assert [step["name"] for step in found] == ["resolve", "load"]
    assert found[1]["reason"] == "raised"
    assert "no memory" in found[1]["text"]


def test_a_weight_in_mxfp8_is_not_quantised_again():
    weight = weight_of("mxfp8_e4m3")
    assert list(weight_chain(weight, CONTRACT)) == ["decode"]
    found = facts([Stage(name="repack", values=weight.dequantize())], weight)
    assert [(step["name"], step["reason"]) for step in found] == [("repack", None)]


def test_loss_of_nothing_is_infinite():
    assert loss(torch.ones(2, 2), torch.ones(2, 2)) == {
        "sqnr_db": float("inf"),
        "changed_share": 0.0,
        "max_rel": 0.0,
    }


# --- in a run ------------------------------------------------------------------------------------


class WrongRepack:
    """``mxfp8_npu`` that swaps the two bytes of a pair while it repacks."""

    def __init__(self):
        self._right = MXFP8

    def __getattr__(self, name):
        return getattr(self._right, name)

    name = "wrong_repack"

    def can_implement(self, spec):
        return self._right.can_implement(spec)

    def is_supported(self, engine):
        return self._right.is_supported(engine)

    def apply(self, x, prepared, bias=None):
        return self._right.apply(x, prepared, bias)

    def prepare(self, weight, engine):
        prepared = self._right.prepare(weight, engine)
        return dataclasses.replace(prepared, scales=prepared.scales.flip(-1).contiguous())

    def stages(self, weight, engine):
        for step in self._right.stages(weight, engine):
            wrong = step.values * 2 if step.name in ("repack", "persist") else step.values
            yield dataclasses.replace(step, values=wrong)


def test_an_op_whose_weight_was_loaded_wrong_is_blocked_by_its_stage(monkeypatch):
    monkeypatch.setattr(registry, "kernel", lambda *_: WrongRepack())
    case = reconcile.load_case(registry.case_file("tiny-mxfp8"))
    case = dataclasses.replace(case, gate=dataclasses.replace(case.gate, require=()))
    report = reconcile.run(case, only="model.layers.0.mlp.up_proj", levels=["op"])
    first = next(report.failures())
    assert (first.level, first.check, first.reason) == ("stage", "repack", "over_limit")
    ops = [row for row in report.rows if row.level == "op"]
    assert {row.reason for row in ops} == {"blocked"}
    assert "its weight is wrong from the stage repack on" in ops[0].text
