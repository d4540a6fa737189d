"""`reconcile watch`: every save is checked, nothing is stale, and nothing ends the watch."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from reconcile import Session, load_case
from reconcile.capture.reference_cache import reference_key
from reconcile.report import Verdict
from reconcile.watch.watcher import Checker

CASE = """
[case]
name = "watched"
[model]
checkpoint = "checkpoint"
prompts = "prompts.json"
max_tokens = 4
[[candidate]]
name = "edited"
kernel = "k.py:kernel"
modules = ["model.layers.0.self_attn.*"]
contract = { scale_applied = "after_sum" }
"""
KERNEL = """
import torch

def kernel(x, weight, bias=None):
    codes = torch.stack([(weight.codes >> s) & 3 for s in (0, 2, 4, 6)], -1).flatten(1)
    w = torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]
    return ((x.float() @ w.T) * weight.scales.float()).to(x.dtype)
"""
WRONG = KERNEL.replace("weight.scales.float()", "(1.1 * weight.scales.float())")
CRASH = KERNEL.replace("    codes =", "    import os; os.abort()\n    codes =")
EXITS = KERNEL.replace("    codes =", "    import os; os._exit(0)\n    codes =")
SYNTAX = KERNEL.replace("def kernel", "def kernel(")


@pytest.fixture
def folder(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path / "cache"))
    tiny().write(tmp_path / "checkpoint")
    (tmp_path / "prompts.json").write_text("[[3, 5, 7, 9]]")
    (tmp_path / "case.toml").write_text(CASE)
    (tmp_path / "k.py").write_text(KERNEL)
    return tmp_path


def last(checker):
    """The final event of one check."""
    event = list(checker.check())[-1]
    assert event.final, event
    return event


def test_a_check_sees_the_file_as_it_is_now(folder):
    checker = Checker("case.toml")
    seen = []
    for text in (KERNEL, WRONG, KERNEL):
        (folder / "k.py").write_text(text)
        event = last(checker)
        assert event.report is not None, event.error
        seen.append(event.report.verdict)
    assert seen == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CRASH, "ended by SIGABRT: the kernel crashed"),
        (EXITS, "ended with exit code 0: the kernel ended the process"),
        (SYNTAX, "cannot import"),
    ],
    ids=["crash", "exit", "syntax"],
)
def test_what_ends_a_check_does_not_end_the_watch(folder, text, said):
    checker = Checker("case.toml")
    (folder / "k.py").write_text(text)
    event = last(checker)
    assert said in event.error
    assert event.report is None
    (folder / "k.py").write_text(KERNEL)
    assert last(checker).report.verdict is Verdict.PASS


def test_the_op_level_comes_first_and_ends_where_it_fails(folder):
    checker = Checker("case.toml")
    levels = [
        {row.level.value for row in event.report.rows}
        for event in checker.check()
        if event.report is not None
    ]
    assert levels == [{"weight", "op"}, {"weight", "op", "module", "model"}]
    (folder / "k.py").write_text(WRONG)
    reports = [event.report for event in checker.check() if event.report is not None]
    assert len(reports) == 1


def test_a_kept_reference_gives_the_rows_of_a_fresh_one(folder, tmp_path):
    fresh = Session("case.toml").run().rows
    kept = tmp_path / "kept"
    assert Session("case.toml", reference_folder=kept).run().rows == fresh
    (only,) = kept.iterdir()
    written = only.stat().st_mtime_ns
    assert Session("case.toml", reference_folder=kept).run().rows == fresh
    assert [(entry, entry.stat().st_mtime_ns) for entry in kept.iterdir()] == [(only, written)]


def test_a_damaged_kept_reference_is_not_used(folder, tmp_path):
    kept = tmp_path / "kept"
    fresh = Session("case.toml", reference_folder=kept).run().rows
    (only,) = kept.iterdir()
    (only / "manifest.json").write_text("{")
    assert Session("case.toml", reference_folder=kept).run().rows == fresh


CHANGES = [
    ("prompts", lambda folder: (folder / "prompts.json").write_text("[[3, 5, 7, 8]]")),
    ("tokens", lambda folder: edit(folder / "case.toml", "max_tokens = 4", "max_tokens = 3")),
    ("contract", lambda folder: edit(folder / "case.toml", '"after_sum"', '"after_block"')),
    ("modules", lambda folder: edit(folder / "case.toml", "layers.0.", "layers.1.")),
    ("checkpoint", lambda folder: edit(folder / "checkpoint/config.json", "1e-06", "1e-05")),
]


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def key():
    session = Session("case.toml")
    (plan,) = session.plans(session.case)
    return reference_key(plan)


@pytest.mark.parametrize("change", [c[1] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_the_key_changes_with_everything_the_reference_depends_on(folder, change):
    before = key()
    assert key() == before
    change(folder)
    assert key() != before


def test_the_key_changes_with_the_source_and_the_seed(folder, monkeypatch):
    before = key()
    session = Session(replace(load_case("case.toml"), seed=1))
    (plan,) = session.plans(session.case)
    assert reference_key(plan) != before
    source_hash = "reconcile.capture.reference_cache._source_hash"
    monkeypatch.setattr(source_hash, lambda name: f"other {name}")
    assert key() != before


def test_the_key_does_not_change_with_the_kernel(folder):
    before = key()
    (folder / "k.py").write_text(WRONG)
    assert key() == before


def until(lines, process, count):
    """Wait for ``count`` lines of output."""
    end = time.monotonic() + 240
    while len(lines) < count and process.poll() is None and time.monotonic() < end:
        lines.append(process.stdout.readline().rstrip())
    assert len(lines) >= count, lines


def test_saving_a_file_gives_the_next_verdict(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "reconcile", "watch", "case.toml", "--checks", "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = []
    try:
        until(lines, process, 2)
        assert "PASS (op;" in lines[0]
        assert "PASS (model, module, op;" in lines[1]
        time.sleep(0.5)
        saved = Path("k.py.new")  # as editors do: write another file, then rename it
        saved.write_text(WRONG)
        saved.replace("k.py")
        until(lines, process, 4)
        assert "FAIL (op;" in lines[2]
        assert lines[2].endswith("after k.py")
        assert "FAIL over_limit" in lines[3]
        time.sleep(0.5)
        Path("k.py").write_text(SYNTAX)
        rest = process.communicate(timeout=240)[0]
        assert "no verdict: cannot import" in rest
        assert process.returncode == 2
    finally:
        process.kill()
