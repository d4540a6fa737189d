"""Which row of a layer fails, and which are blocked, when blocks inside it are wrong."""

import pytest
import torch

from reconcile.judging.inside import BETWEEN, judge_layer
from reconcile.judging.judge import Finding
from reconcile.report import Reason
from reconcile.tracing.trace import Pass

LAYER = "layers.0"
INNER = ("layers.0.norm1", "layers.0.attn", "layers.0.norm2", "layers.0.mlp")
STREAM = ("norm1", "attn", "norm2", "mlp")


def recorded():
    """Every block's input and output, and the layer's output."""
    taps = [f"{LAYER}.{block}:{port}" for block in STREAM for port in ("in0", "out")]
    return Pass("p", "isolated", {tap: torch.ones(2) for tap in (*taps, f"{LAYER}:out")})


def judged(wrong, failed=()):
    """Reason and text by tap, where the taps in ``wrong`` are over their limits."""

    def judge(tap, c, r):
        assert tap in r.tensors
        over = tap.removeprefix(f"{LAYER}.") in wrong
        return Finding({}, reason=Reason.OVER_LIMIT if over else None, text="over")

    pair = (recorded(), recorded())
    found = judge_layer(LAYER, INNER, {"p": pair}, frozenset(failed), judge)
    return {str(tap): (finding.reason, finding.text) for tap, _, finding in found.blocks} | {
        str(tap): (finding.reason, finding.text) for tap, _, finding in found.whole
    }


ATTENTION = ("attn:out", "norm2:in0", "norm2:out", "mlp:in0", "mlp:out", "layers.0:out")
TABLE = [
    ("nothing", (), (), []),
    ("attention", ATTENTION, (), ["layers.0.attn:out"]),
    ("a norm", ("norm1:out", "attn:in0", *ATTENTION), (), ["layers.0.norm1:out"]),
    ("the MLP", ("mlp:out", "layers.0:out"), (), ["layers.0.mlp:out"]),
    ("two blocks in parallel", ("attn:out", "mlp:out", "layers.0:out"), (),
     ["layers.0.attn:out", "layers.0.mlp:out"]),
    ("between", ("norm2:in0", "norm2:out", "mlp:in0", "mlp:out", "layers.0:out"), (),
     ["layers.0:out"]),
    ("the last sum", ("layers.0:out",), (), ["layers.0:out"]),
    ("an op of the attention", ATTENTION, ("layers.0.attn.q_proj",), []),
    ("an op of the attention, which hardly shows there", ATTENTION[1:],
     ("layers.0.attn.q_proj",), []),
    ("an op of the MLP and the attention", ATTENTION, ("layers.0.mlp.up_proj",),
     ["layers.0.attn:out"]),
    ("a layer of a like name", ATTENTION, ("layers.00.attn.q_proj",), ["layers.0.attn:out"]),
    ("between, in a layer that is right at its end", ("norm2:in0", "norm2:out"), (),
     ["layers.0.norm2:out"]),
]  # fmt: skip


@pytest.mark.parametrize(("what", "wrong", "failed", "named"), TABLE, ids=[r[0] for r in TABLE])
def test_what_fails_by_itself(what, wrong, failed, named):
    found = judged(set(wrong), failed)

    assert [tap for tap, (reason, _) in found.items() if reason is Reason.OVER_LIMIT] == named
    shown = {tap for tap, (reason, _) in found.items() if reason is not None}
    outputs = {tap if tap.startswith(LAYER) else f"{LAYER}.{tap}" for tap in wrong if ":out" in tap}
    assert shown == outputs  # a row that others explain is blocked, never a pass
    assert list(found) == [*(f"{block}:out" for block in INNER), "layers.0:out"]


def test_what_is_wrong_between_blocks_is_said_where_it_fails():
    found = judged({"norm2:in0", "norm2:out", "layers.0:out"})

    assert BETWEEN in found["layers.0:out"][1]
    assert "layers.0.norm2" in found["layers.0:out"][1]
    assert found["layers.0.norm2:out"] == (Reason.BLOCKED, f"explained by {BETWEEN}; over")


def test_a_block_that_one_side_lacks_is_judged_and_one_that_both_lack_is_not():
    c, r = recorded(), recorded()
    for side, blocks in ((c, ("attn", "mlp")), (r, ("mlp",))):
        side.tensors = {
            tap: tensor
            for tap, tensor in side.tensors.items()
            if not any(f".{block}:" in tap for block in blocks)
        }
    asked = []
    judge_layer(
        LAYER, INNER, {"p": (c, r)}, frozenset(), lambda tap, *_: asked.append(tap) or Finding({})
    )
    assert asked == ["layers.0:out", *(f"layers.0.{b}:out" for b in ("norm1", "attn", "norm2"))]
