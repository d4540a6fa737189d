"""The comparison of two traces of which nothing but the tensors is known."""

import pytest
import torch
from torch import nn

import reconcile
from reconcile.case import Tolerance
from reconcile.report import Reason
from reconcile.tracing.mapping import Split
from reconcile.tracing.trace import Pass, Trace


def _trace(tensors, key="k"):
    copies = {tap: tensor.clone() for tap, tensor in tensors.items()}
    return Trace(passes=[Pass(key, "chained", copies)])


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

CASES = [
    # candidate, reference, exit code, reason
    ("equal", {"a:out": X}, {"a:out": X.double()}, 0, None),
    ("close", {"a:out": X + 1e-4}, {"a:out": X}, 0, None),
    ("far", {"a:out": X + 1e-2}, {"a:out": X}, 1, Reason.OVER_LIMIT),
    ("NaN", {"a:out": torch.full((4, 8), torch.nan)}, {"a:out": X}, 1, Reason.NONFINITE),
    ("both NaN", *[{"a:out": torch.full((4, 8), torch.nan)}] * 2, 2, Reason.REFERENCE_SUSPECT),
    ("shape", {"a:out": X[:1]}, {"a:out": X}, 1, Reason.SHAPE),
    ("missing", {}, {"a:out": X}, 2, Reason.NOT_COMPARED),
    ("surplus", {"a:out": X, "b:out": X}, {"a:out": X}, 2, Reason.NOT_COMPARED),
    ("zeros", *[{"a:out": torch.zeros(4, 8)}] * 2, 2, Reason.VACUOUS),
    ("tiny", {"a:out": X * 0}, {"a:out": X * 1e-6}, 2, Reason.VACUOUS),
    ("constant", *[{"a:out": torch.ones(4, 8)}] * 2, 2, Reason.VACUOUS),
    ("nothing", {}, {}, 2, None),
    ("only integers", {"a:in0": torch.ones(2).int()}, {"a:in0": torch.ones(2).int()}, 2, None),
]


@pytest.mark.parametrize(
    ("candidate", "reference", "exit_code", "reason"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_verdicts(candidate, reference, exit_code, reason):
    report = reconcile.compare(_trace(reference), _trace(candidate))

    assert report.exit_code == exit_code
    assert {row.reason for row in report.rows if row.reason} == ({reason} if reason else set())


def test_passes_are_paired_by_their_inputs_not_by_their_number():
    def made(*names):
        scale = {"a": 1, "b": 2}
        return Trace(passes=[Pass(n, "chained", {"m:out": scale[n] * X}) for n in names])

    assert reconcile.compare(made("a", "b"), made("b", "a")).exit_code == 0
    assert reconcile.compare(made("a", "b"), made("a")).exit_code == 2


def test_limits_by_glob_and_their_source():
    limits = {"a:*": Tolerance(atol=0.1, rtol=0.0, source="seen in the field")}
    report = reconcile.compare(_trace({"a:out": X}), _trace({"a:out": X + 0.05}), limits=limits)
    assert report.exit_code == 0
    assert "seen in the field" in report.rows[0].limits.source
    assert report.rows[0].limits.kind == "fixed"


@pytest.mark.parametrize(("dtype", "number"), [("float32", 1e-3), ("bfloat16", 2.0**-7)])
def test_the_default_is_never_tighter_than_an_ulp(dtype, number):
    x = X.to(getattr(torch, dtype))
    report = reconcile.compare(_trace({"a:out": X}), _trace({"a:out": x}))
    assert f"atol={number:g}" in report.rows[0].limits.source


def test_taps_of_two_real_modules_and_a_fused_one():
    torch.manual_seed(0)
    q, k = nn.Linear(8, 4, bias=False), nn.Linear(8, 2, bias=False)
    fused = nn.Linear(8, 6, bias=False)
    fused.weight.data = torch.cat([q.weight, k.weight]).data

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = q, k

        def forward(self, x):
            return self.q(x).sum() + self.k(x).sum()

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = fused

        def forward(self, x):
            return self.qk(x).sum()

    pair, one = Pair(), Fused()
    with reconcile.taps(pair, ["q", "k"], inputs=False) as reference:
        pair(X)
    with reconcile.taps(one, ["qk"], inputs=False) as candidate:
        one(X)

    split = Split("qk:out", (("q:out", 4), ("k:out", 2)))
    assert reconcile.compare(reference, candidate, mapping=[split]).exit_code == 0
    swapped = Split("qk:out", (("k:out", 2), ("q:out", 4)))
    assert reconcile.compare(reference, candidate, mapping=[swapped]).exit_code == 1
    assert reconcile.compare(reference, candidate).exit_code == 2


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (torch.arange(4), torch.arange(4) + 1, Reason.NOT_COMPARED),
        (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool), Reason.NOT_COMPARED),
        (torch.zeros(0, 8), torch.zeros(0, 8), Reason.NOT_COMPARED),
        (X.to(torch.float8_e4m3fn), X, Reason.NOT_COMPARED),
        (X.to(torch.complex64), X.to(torch.complex64) + 1, Reason.NOT_COMPARED),
        (X.to("meta"), X, Reason.NOT_COMPARED),
        (X.to_sparse(), X, Reason.NOT_COMPARED),
        (X.to(torch.int8), X, Reason.DTYPE),
        (X, X.to(torch.int8), Reason.DTYPE),
    ],
    ids=["integers", "flags", "empty", "float8", "complex", "meta", "sparse", "int", "of int"],
)
def test_tensors_without_statistics_are_never_green_and_never_a_crash(ours, theirs, reason):
    beside = {"b:out": X}
    report = reconcile.compare(
        Trace(passes=[Pass("k", "chained", {"a:out": theirs} | beside)]),
        Trace(passes=[Pass("k", "chained", {"a:out": ours, "b:out": X.clone()})]),
    )
    (row,) = (row for row in report.rows if row.tap == "a:out")
    assert row.reason is reason
    assert report.exit_code == (1 if reason is Reason.DTYPE else 2)


def test_equal_integers_are_no_row():
    sides = [{"a:out": torch.arange(4), "b:out": X.clone()} for _ in range(2)]
    report = reconcile.compare(*(Trace(passes=[Pass("k", "chained", side)]) for side in sides))
    assert [(row.tap, row.reason) for row in report.rows] == [("b:out", None)]
