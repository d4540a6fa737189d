"""Kept failing calls: written once, capped and counted, run again, removed by hand."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from reconcile import Session
from reconcile.cli import main
from reconcile.exceptions import ConfigError
from reconcile.gate.snapshots import load, read_facts, run_again

CASE = """
[case]
name = "kept"
[model]
checkpoint = "checkpoint"
prompts = "prompts.json"
max_tokens = 4
[[candidate]]
name = "edited"
kernel = "k.py:kernel"
modules = ["model.layers.0.self_attn.*"]
contract = { scale_applied = "after_sum" }
[levels]
run = ["op"]
"""
KERNEL = """
import torch

def kernel(x, weight, bias=None):
    codes = torch.stack([(weight.codes >> s) & 3 for s in (0, 2, 4, 6)], -1).flatten(1)
    w = torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]
    return ((x.float() @ w.T) * (1.1 * weight.scales.float())).to(x.dtype)
"""
RIGHT = KERNEL.replace("1.1 * ", "")


@pytest.fixture
def folder(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny().write(tmp_path / "checkpoint")
    (tmp_path / "prompts.json").write_text("[[3, 5, 7, 9]]")
    (tmp_path / "case.toml").write_text(CASE)
    (tmp_path / "k.py").write_text(KERNEL)
    return tmp_path


def outcome(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    return code, "".join(capsys.readouterr())


def files(run="run"):
    return sorted(Path(run, "snapshots").glob("*.safetensors"))


def test_a_failing_run_keeps_the_first_call_of_each_op(folder, capsys):
    assert outcome(capsys, "run", "case.toml", "--out", "run")[0] == 1
    names = [file.name for file in files()]
    assert names == [f"model.layers.0.self_attn.{p}_proj-out.safetensors" for p in "koqv"]
    kept = load(files()[0])
    with safe_open(folder / "checkpoint/model.safetensors", "pt") as stored:
        codes = stored.get_tensor("model.layers.0.self_attn.k_proj.weight")
    assert torch.equal(kept.weight.codes, codes)
    assert (kept.x.dtype, kept.y.dtype) == (torch.bfloat16, torch.bfloat16)
    assert kept.facts.kernel == "k.py:kernel"


def test_a_passing_run_keeps_nothing(folder, capsys):
    (folder / "k.py").write_text(RIGHT)
    assert outcome(capsys, "run", "case.toml", "--out", "run")[0] == 0
    assert not Path("run/snapshots").exists()


def test_nothing_is_overwritten(folder, capsys):
    for _ in range(2):
        outcome(capsys, "run", "case.toml", "--out", "run")
    assert len(files()) == 8
    assert any(file.stem.endswith("-2") for file in files())


def test_a_kept_call_is_run_again_with_the_kernel_as_it_is_now(folder, capsys):
    outcome(capsys, "run", "case.toml", "--out", "run")
    file = files()[0]
    code, text = outcome(capsys, "explain", "--snapshot", file)
    assert code == 1
    assert "now:  FAIL; the output has the bits kept" in text
    (folder / "k.py").write_text(RIGHT)
    code, text = outcome(capsys, "explain", "--snapshot", file)
    assert code == 0
    assert "now:  PASS; the output has not the bits kept" in text


def test_the_kept_call_needs_neither_model_nor_checkpoint(folder, capsys):
    outcome(capsys, "run", "case.toml", "--out", "run")
    for file in (folder / "checkpoint").iterdir():
        file.unlink()
    report, same = run_again(load(files()[0]))
    assert (report.exit_code, same) == (1, True)


def test_what_is_left_out_is_counted(folder, monkeypatch):
    monkeypatch.setattr("reconcile.gate.snapshots.MOST", 1)
    session = Session("case.toml")
    report = session.run()
    assert len(session.album.kept) == 1
    assert any(text.startswith("3 failing calls are not kept") for text in report.notices)


def test_list_and_remove(folder, capsys):
    assert outcome(capsys, "snapshots") == (0, "0 snapshots\n")
    outcome(capsys, "run", "case.toml", "--out", "run")
    code, text = outcome(capsys, "snapshots", "run")
    assert code == 0
    assert text.count("k.py:kernel on python") == 4
    assert outcome(capsys, "snapshots", "--remove", files()[0])[0] == 0
    assert len(files()) == 3
    assert outcome(capsys, "snapshots", "--remove", "run")[1].endswith("3 snapshots removed\n")
    assert not files()


@pytest.mark.parametrize(
    "arguments",
    [
        ("snapshots", "--remove"),
        ("snapshots", "nowhere"),
        ("explain",),
        ("explain", "run"),
        ("explain", "run", "tap", "--snapshot", "x"),
        ("explain", "--snapshot", "nowhere"),
    ],
    ids=" ".join,
)
def test_bad_usage(folder, capsys, arguments):
    assert outcome(capsys, *arguments)[0] == 3


@pytest.mark.parametrize("damage", ["text", "truncated", "another file"])
def test_a_damaged_snapshot_is_an_error(folder, capsys, damage):
    outcome(capsys, "run", "case.toml", "--out", "run")
    file = files()[0]
    if damage == "text":
        file.write_text("nothing")
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        file.write_bytes((folder / "checkpoint/model.safetensors").read_bytes())
    for read in (load, read_facts):
        with pytest.raises(ConfigError, match="not a snapshot"):
            read(file)


def test_a_failing_op_that_gave_nothing_is_counted(folder):
    raising = KERNEL.replace("    codes =", "    raise ValueError('no')\n    codes =")
    (folder / "k.py").write_text(raising)
    session = Session("case.toml")
    report = session.run()
    assert report.exit_code == 1
    assert not session.album.kept
    assert any(text.startswith("4 failing ops are not kept") for text in report.notices)
