"""Foreign traces: what two sets of tensors alone say of the cause."""

import pytest
import torch

import reconcile
from reconcile.report import Verdict
from reconcile.tracing.trace import Pass, Trace

LAYERS = 4


def stack(change=lambda tensors: None):
    """A residual stream of random layers with a final norm, as somebody else's trace."""
    generator = torch.Generator().manual_seed(3)
    stream = torch.randn(1, 24, 32, generator=generator)
    tensors = {}
    for layer in range(LAYERS):
        added = torch.randn(1, 24, 32, generator=generator)
        tensors[f"layers.{layer}:in0"] = stream
        tensors[f"layers.{layer}.mlp:out"] = added
        stream = stream + added
        tensors[f"layers.{layer}:out.0"] = stream
        tensors[f"layers.{layer}:out.1"] = added * 2 - 1
    tensors["norm:in0"] = stream
    tensors["norm:out"] = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True)) * 3
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    return Trace(passes=[Pass("a", "chained", tensors)])


def put(tap, value):
    def change(t):
        noise = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(4))
        t[tap] = value(t) + 1e-4 * noise

    return change


ROLL = torch.arange(32).roll(5)
SWAP = torch.tensor([1, 0, *range(2, 24)])
FAULTS = [
    ("layer_shift", "layers.2:out.0", lambda t: t["layers.1:out.0"]),
    ("layer_shift", "layers.1.mlp:out", lambda t: t["layers.2.mlp:out"]),
    ("tuple_element", "layers.2:out.0", lambda t: t["layers.2:out.1"]),
    ("residual_missing", "layers.2:out.0", lambda t: t["layers.2:out.0"] - t["layers.2:in0"]),
    ("residual_doubled", "layers.2:out.0", lambda t: t["layers.2:out.0"] + t["layers.2:in0"]),
    ("final_norm", "norm:out", lambda t: t["norm:in0"]),
    ("final_norm", "layers.3:out.0", lambda t: t["norm:out"]),
    ("constant_ratio", "layers.0.mlp:out", lambda t: t["layers.0.mlp:out"] * 0.25),
    ("column_permutation", "layers.0.mlp:out", lambda t: t["layers.0.mlp:out"][..., ROLL]),
    ("row_permutation", "layers.0.mlp:out", lambda t: t["layers.0.mlp:out"][:, SWAP]),
    (
        "head_order",
        "layers.0.mlp:out",
        lambda t: t["layers.0.mlp:out"].unflatten(-1, (4, 8))[..., [2, 0, 3, 1], :].flatten(-2),
    ),
]


def failing(change):
    report = reconcile.compare(stack(), stack(change))
    return [row for row in report.rows if row.verdict is Verdict.FAIL]


@pytest.mark.parametrize(("name", "tap", "value"), FAULTS, ids=[f"{f[0]}, {f[1]}" for f in FAULTS])
def test_the_cause_is_named_from_the_tensors_alone(name, tap, value):
    (row,) = failing(put(tap, value))
    found = [(d.role, d.name, d.explains, d.text) for d in row.diagnosis]
    assert row.tap == tap
    assert row.diagnosis, row.text
    assert row.diagnosis[0].name == name, found
    assert row.diagnosis[0].explains > 0.99


def test_noise_has_no_cause():
    (row,) = failing(put("layers.2:out.0", lambda t: t["layers.2:out.0"].sin() * 3))
    assert row.diagnosis == ()


def test_a_fault_of_the_explanation_changes_nothing(monkeypatch):
    monkeypatch.setattr("reconcile.diagnosis.traces.explain_tap", None)
    (row,) = failing(put("norm:out", lambda t: t["norm:in0"]))
    assert row.diagnosis == ()


def test_a_pass_is_not_explained(monkeypatch):
    monkeypatch.setattr("reconcile.diagnosis.traces.explain_tap", None)
    assert failing(lambda t: None) == []
