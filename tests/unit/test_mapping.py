import pytest
import torch

from reconcile.exceptions import TraceError
from reconcile.tracing.mapping import AddResidual, Rename, Split, Unflatten, map_trace
from reconcile.tracing.trace import Pass, Trace

QKV = Split("a.qkv:out", (("a.q:out", 4), ("a.k:out", 2), ("a.v:out", 2)))


def _tensors(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {k.replace("__", ":"): torch.randn(v, generator=generator) for k, v in shapes.items()}


def test_split_cuts_in_the_declared_order_and_joins_again():
    tensors = {"x:out": torch.ones(1), "a.qkv:out": torch.arange(16.0).view(2, 8)}

    split = QKV.apply(tensors)

    assert list(split) == ["x:out", "a.q:out", "a.k:out", "a.v:out"]
    assert split["a.k:out"].tolist() == [[4.0, 5.0], [12.0, 13.0]]
    back = QKV.invert(split)
    assert torch.equal(back["a.qkv:out"], tensors["a.qkv:out"])
    assert list(back) == ["x:out", "a.qkv:out"]


def test_residual_is_added_and_subtracted():
    rule = AddResidual("l:out.0", "l:out.1", "l:out")
    tensors = {"l:out.0": torch.tensor([1.0, 2.0]), "l:out.1": torch.tensor([0.5, 0.25])}

    mapped = rule.apply(tensors)

    assert mapped["l:out"].tolist() == [1.5, 2.25]
    assert rule.invert(mapped)["l:out.0"].tolist() == [1.0, 2.0]


def test_the_sum_is_rounded_to_the_tensors_dtype():
    rule = AddResidual("h", "r", "s")
    big, small = torch.tensor([256.0]).bfloat16(), torch.tensor([0.5]).bfloat16()
    assert rule.apply({"h": small, "r": big})["s"].dtype == torch.bfloat16
    assert rule.apply({"h": small, "r": big})["s"].item() == 256.0


def test_unflatten_drops_padding():
    rule = Unflatten("x:out", 3)
    tensors = _tensors(x__out=(5, 4))
    mapped = rule.apply(tensors)
    assert mapped["x:out"].shape == (1, 3, 4)
    assert torch.equal(rule.invert(mapped)["x:out"], tensors["x:out"][:3])


def test_rename_and_back():
    tensors = _tensors(a__out=(2, 2))
    there = Rename("a:out", "b:out").apply(tensors)
    assert list(there) == ["b:out"]
    assert list(Rename("a:out", "b:out").invert(there)) == ["a:out"]


@pytest.mark.parametrize(
    ("rule", "tensors", "said"),
    [
        (QKV, _tensors(b__out=(2, 8)), "was not captured"),
        (QKV, {"a.qkv:out": torch.ones(2, 9)}, "expected a last dimension of 8 = 4 \\+ 2 \\+ 2"),
        (AddResidual("h", "r", "s"), {"h": torch.ones(1)}, "its residual r was not captured"),
        (Rename("a", "b"), {"a": torch.ones(1), "b": torch.ones(1)}, "already exists"),
        (Unflatten("x", 3), {"x": torch.ones(2, 4)}, "at least 3 rows"),
        (Unflatten("x", 3), {"x": torch.ones(1, 3, 4)}, "two dimensions"),
    ],
)
def test_a_rule_that_does_not_fit_is_an_error(rule, tensors, said):
    with pytest.raises(TraceError, match=said):
        rule.apply(tensors)


def test_map_trace_maps_every_pass():
    passes = [Pass(str(i), "chained", {"a.qkv:out": torch.ones(1, 8)}) for i in range(2)]
    mapped = map_trace(Trace(passes=passes), [QKV, Rename("a.q:out", "query:out")])
    assert [next(iter(p.tensors)) for p in mapped.passes] == ["query:out", "query:out"]
    assert list(passes[0].tensors) == ["a.qkv:out"]
