"""Prefill and decode as calls of their own, each with an identity."""

import pytest
import torch

from reconcile.capture.steps import steps
from reconcile.case import CandidateConfig, Case, CaseInfo, ModelConfig
from reconcile.exceptions import ConfigError
from reconcile.tracing.taps import fingerprint


def test_without_decode_a_prompt_is_one_pass_with_its_old_identity():
    (step,) = steps((3, 1, 4), 0)
    assert step.phase == ""
    assert step.key == fingerprint((), {"input_ids": torch.tensor([[3, 1, 4]])})


@pytest.mark.parametrize("decode", [1, 2, 3])
def test_every_token_is_fed_once(decode):
    ids = (3, 1, 4, 1, 5)
    found = steps(ids, decode)
    assert [s.phase for s in found] == ["prefill"] + ["decode"] * decode
    assert torch.cat([s.tokens for s in found], 1).tolist() == [list(ids)]
    assert all(s.tokens.shape[1] == 1 for s in found[1:])
    assert all(s.key.startswith(f"{s.phase}-") for s in found)
    assert [s.seen.shape[1] for s in found] == list(range(5 - decode, 6))


def test_an_identity_is_of_everything_before_it():
    """The same token at the same place after other tokens is another pass."""
    one, other = steps((3, 1, 4), 1)[1], steps((2, 1, 4), 1)[1]
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.key != other.key
    assert len({s.key for s in (*steps((3, 1, 4), 1), *steps((3, 1, 4), 2))}) == 4


def case(**changes):
    model = ModelConfig(checkpoint="x", decode=changes.pop("decode", 0))
    candidate = CandidateConfig(name="a", kernel="k", **changes)
    return Case(case=CaseInfo(name="c"), model=model, candidate=(candidate,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decode": -1}, "must not be negative"),
        ({"phases": ("decode",)}, "needs \\[model\\] decode"),
        ({"phases": (), "decode": 2}, "phases is empty"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        case(**changes)


def test_phases_with_decode():
    assert case(phases=("decode",), decode=2).candidate[0].phases == ("decode",)
