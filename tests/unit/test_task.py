"""Accuracy with intervals, and what may be called a difference."""

import json
import math

import pytest
import torch

import reconcile
from reconcile.exceptions import ConfigError
from reconcile.judging.task import (
    BATCH,
    answers,
    batches,
    interval,
    judge_task,
    read_task,
    sign_test,
)

ITEM = {"prompt": [1, 2], "answer": [3]}


@pytest.mark.parametrize(("right", "n"), [(0, 10), (10, 10), (5, 10), (95, 100), (473, 500)])
def test_the_interval_holds_what_the_score_test_accepts(right, n):
    """Wilson (1927): its ends are the shares p with (right / n - p)^2 = z^2 p (1 - p) / n."""
    low, high = interval(right, n)
    assert low <= right / n <= high
    for p in (low, high):
        assert (right / n - p) ** 2 == pytest.approx(1.96**2 * p * (1 - p) / n, rel=1e-3)


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 5, 1.0),
        (8, 1, 2 * (9 + 1) / 2**9),
        (1, 8, 2 * (9 + 1) / 2**9),
        (10, 0, 2 / 2**10),
    ],
)
def test_sign_test(lost, won, p):
    """Twice the tail of coins as uneven."""
    assert sign_test(lost, won) == pytest.approx(p)


def judged(right, reference, candidate):
    """n items, of which the sides have the given ones right."""
    n = right
    theirs = [[1] if place in reference else [0] for place in range(n)]
    ours = [[1] if place in candidate else [0] for place in range(n)]
    return judge_task([[1]] * n, theirs, ours)


def test_one_percent_of_500_is_no_difference():
    """0.952 against 0.946: three items of 500."""
    finding = judged(500, set(range(476)), set(range(473)))
    assert finding.reason is None
    assert "0.952" in finding.text
    assert "0.946" in finding.text
    assert "no difference is claimed" in finding.text


def test_a_sure_loss_fails():
    finding = judged(500, set(range(476)), set(range(400)))
    assert finding.reason is reconcile.Reason.OVER_LIMIT
    assert finding.stats["lost"] == 76


def test_equal_accuracies_can_hide_a_loss():
    """Both have 90 %, on other items: chance, and none of it is claimed."""
    finding = judged(200, set(range(180)), set(range(20, 200)))
    assert finding.stats["lost"] == finding.stats["won"] == 20
    assert finding.reason is None


def test_a_better_candidate_passes():
    assert judged(500, set(range(400)), set(range(500))).reason is None


def test_a_reference_that_knows_nothing_says_nothing():
    assert judged(100, set(), {1, 2}).reason is reconcile.Reason.VACUOUS


def test_the_limit_is_the_level():
    finding = judged(100, set(range(100)), set(range(90)))
    assert finding.limits.kind == "fixed"
    assert finding.stats["evidence"] == pytest.approx(-math.log10(2 / 1024))
    assert finding.reason is None  # p = 0.00195 does not reach 0.001


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        json.dumps({"items": [ITEM]}),
        json.dumps({"source": "s", "items": []}),
        json.dumps({"source": "s", "items": [ITEM | {"answer": []}]}),
        json.dumps({"source": "s", "items": [ITEM | {"answer": [99]}]}),
        json.dumps({"source": "s", "items": [ITEM | {"answer": ["3"]}]}),
    ],
)
def test_what_is_no_task_is_refused(tmp_path, body):
    file = tmp_path / "task.json"
    file.write_text(body)
    with pytest.raises(ConfigError, match=r"task"):
        read_task(file, 10)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such task file"):
        read_task(tmp_path / "none.json", 10)


class Counts(torch.nn.Module):
    """Answers t + 1, whatever came before; its cache is the number of tokens seen."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        logits = torch.nn.functional.one_hot((input_ids + 1) % 10, 10).float()
        seen = (past_key_values or 0) + input_ids.shape[1]

        class Output(dict):
            pass

        output = Output(logits=logits)
        output.logits, output.past_key_values = logits, seen
        return output


def test_answers_are_greedy_and_in_order(tmp_path):
    items = [{"prompt": [i % 7] * (1 + i % 2), "answer": [0, 0]} for i in range(BATCH * 2 + 3)]
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"source": "s", "items": items}))
    task = read_task(file, 10)
    assert max(map(len, batches(task))) <= BATCH
    phases = []
    found = answers(Counts(), task, phases.append)
    assert found == [[i % 7 + 1, i % 7 + 2] for i in range(len(items))]
    assert phases == ["prefill", "decode"] * len(list(batches(task)))
