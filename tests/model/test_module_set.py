"""Every op passes alone and the model fails: the smallest set of modules that makes it fail."""

from pathlib import Path

import pytest

import reconcile
from reconcile.diagnosis.subsets import smallest_failing
from reconcile.report import Level, Verdict

KERNELS = Path(__file__).with_name("kernels.py")
DOWN, UP = "model.layers.2.mlp.down_proj", "model.layers.2.mlp.up_proj"


@pytest.fixture(scope="module")
def run():
    session = reconcile.session()
    return lambda kernel, only: session.run(kernel=f"{KERNELS}:{kernel}", only=only)


@pytest.mark.parametrize("only", ["model.layers.2.*", pytest.param("*", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kernel", "modules"),
    [("wrong_right_after_up_proj", {UP, DOWN}), ("coarse_in_layer_2_down", {DOWN})],
)
def test_the_smallest_set_is_named(run, kernel, modules, only):
    report = run(kernel, only)
    first = report.rows[report.first_divergence.row]
    alone = [r for r in report.rows if r.level is Level.OP and r.check == "isolated"]

    assert all(row.verdict is Verdict.PASS for row in alone)
    found = first.diagnosis[0]
    assert found.name == "module_set", (first.tap, first.check, first.diagnosis)
    assert set(found.parameters["modules"]) == modules
    assert all(module in found.text for module in modules)
    assert found.explains >= 0.9


@pytest.mark.parametrize("culprits", ["a", "h", "bg", "abh", "acegh", "abcdefgh"])
def test_smallest_failing_finds_exactly_the_culprits(culprits):
    found = smallest_failing("abcdefgh", lambda s: set(culprits) <= set(s), lambda: True)
    assert found.items == tuple(culprits)
    assert found.minimal


def test_of_two_causes_one_is_found():
    found = smallest_failing("abcdefgh", lambda s: "c" in s or {"e", "f"} <= set(s), lambda: True)
    assert found.items in (("c",), ("e", "f"))


def test_without_time_the_best_set_so_far_is_given():
    turns = iter([True, True, False])
    found = smallest_failing("abcdefgh", lambda s: "g" in s, lambda: next(turns))
    assert not found.minimal
    assert "g" in found.items
    assert found.tests == 2
