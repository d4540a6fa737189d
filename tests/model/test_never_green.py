"""Nothing is green for the wrong reason: each of these must not exit 0, and says why."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import reconcile
from reconcile.cli import main
from reconcile.linears import ReferenceLinear

CASE = """
[case]
name = "small"
[model]
checkpoint = "checkpoint"
prompts = "prompts.json"
max_tokens = 4
[[candidate]]
name = "naive"
kernel = "{kernel}"
modules = {modules}
[levels]
run = ["op"]
[gate]
require = {require}
{gate}
"""
KERNELS = """
import torch
import reconcile
from reconcile.kernel import Engine, Support
from reconcile.linears import ReferenceLinear

class Unsupported:
    name, formats, contract = "unsupported", None, reconcile.Contract(scale_applied="after_sum")
    engines = (Engine("cuda", "ours", "hardware", "bit_exact"),)
    def is_supported(self, engine):
        return Support(False, "no such device")
    def can_implement(self, spec):
        return Support(True, "any")
    def prepare(self, weight, engine):
        return weight
    def apply(self, x, prepared, bias=None):
        raise AssertionError

UNSUPPORTED = Unsupported()

def declines(x, weight, bias=None):
    raise NotImplementedError("not this shape")

def calls_the_reference(x, weight, bias=None):
    judge = ReferenceLinear(weight, reconcile.Contract(), torch.float64)
    return judge(x).to(x.dtype)

def zeros(x, weight, bias=None):
    return x.new_zeros(*x.shape[:-1], weight.shape[0])

def slow(x, weight, bias=None):
    import time
    open("started", "w").close()
    time.sleep(60)
    return zeros(x, weight)
"""


@pytest.fixture
def case(tmp_path, tiny, monkeypatch):
    """Writes a case of a tiny checkpoint and gives its path."""
    monkeypatch.chdir(tmp_path)
    tiny().write(tmp_path / "checkpoint")
    (tmp_path / "prompts.json").write_text("[[3, 5, 7, 9]]")
    (tmp_path / "k.py").write_text(KERNELS)

    def write(kernel="ternary_cuda.naive", modules='["model.layers.0.self_attn.*"]', gate="", **f):
        require = f.get("require", "[]")
        text = CASE.format(kernel=kernel, modules=modules, require=require, gate=gate)
        (tmp_path / "case.toml").write_text(text)
        return "case.toml"

    return write


def outcome(capsys, *arguments):
    """(exit code, everything that was printed)."""
    code = main([str(argument) for argument in arguments])
    return code, "".join(capsys.readouterr())


def test_the_case_is_green_for_the_right_reason(case, capsys):
    assert outcome(capsys, "run", case())[0] == 0


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"kernel": "k.py:UNSUPPORTED"}, 2, "no such device"),
        ({"kernel": "k.py:declines"}, 2, "not this shape"),
        ({"kernel": "k.py:calls_the_reference"}, 1, "called the reference that judges it"),
        ({"kernel": "k.py:zeros"}, 1, "over_limit"),
        ({"modules": '["model.nothing.*"]'}, 3, "model.nothing"),
        ({"require": '["ternary_cuda.other"]'}, 2, "ternary_cuda.other"),
        ({"require": '["ternary_cuda.naive@cuda"]'}, 2, "ternary_cuda.naive@cuda"),
        ({"gate": 'accepted = "none.json"'}, 3, "none.json: no such file of accepted errors"),
        (
            {"gate": '[limits]\n"*" = { atol = 1.0, rtol = 0.0, source = "wide" }'},
            3,
            "zeros",
        ),
    ],
    ids=[
        "all kernels unsupported",
        "every shape declined",
        "a kernel that calls the reference",
        "zeros",
        "zero modules matched",
        "a required kernel that is not there",
        "a required engine that did not run",
        "accepted file missing",
        "a tolerance that zeros would pass",
    ],
)
def test_a_run_that_is_not_green(case, capsys, changes, code, said):
    found, text = outcome(capsys, "run", case(**changes))
    assert (found, said in text) == (code, True), text


@pytest.mark.parametrize("prompts", ["[]", "[[]]", '[""]', "{}"])
def test_empty_prompts(case, capsys, prompts, tmp_path):
    name = case()
    (tmp_path / "prompts.json").write_text(prompts)
    assert outcome(capsys, "run", name)[0] == 3


def test_one_shard_of_a_merge_is_missing(case, capsys):
    name = case(require='["ternary_cuda.naive", "k.py:UNSUPPORTED"]')
    outcome(capsys, "run", name, "--out", "one")
    body = json.loads(Path("one/report.json").read_text())
    body["notices"] = [text for text in body["notices"] if "restricted" not in text]
    Path("one/report.json").write_text(json.dumps(body))
    code, text = outcome(capsys, "merge", "one", "--out", "all")
    assert code == 2
    assert "UNSUPPORTED" in text
    code, text = outcome(capsys, "merge", "one", "two", "--out", "all")
    assert code == 3
    assert "two" in text


def test_an_error_of_the_comparison_inside_a_row(case, capsys, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("in the comparison")

    monkeypatch.setattr("reconcile.judge.error_stats", broken)
    code, text = outcome(capsys, "run", case())
    assert code == 4
    assert "in the comparison" in text


def test_both_sides_in_one_piece_of_memory():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with reconcile.taps(model, ["*"]) as trace:
        model(torch.randn(3, 8))
    report = reconcile.compare(trace, trace)
    assert report.rows
    assert {row.reason for row in report.rows} == {reconcile.Reason.CAPTURE_INVALID}
    assert report.exit_code == 2


def test_a_kernel_is_no_judge_of_itself():
    weight = torch.randn(32, 64, dtype=torch.bfloat16)

    def kernel(x, weight, bias=None):
        from reconcile.linears import DenseWeight

        judge = ReferenceLinear(DenseWeight(tensor=weight), reconcile.Contract(), torch.float64)
        return judge(x).to(x.dtype)

    report = reconcile.check_linear(kernel, weight, probes=["bound"])
    assert report.exit_code == 1
    assert "called the reference" in report.explain()


def process(*arguments):
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "reconcile", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_killed_run_leaves_no_report(case):
    running = process("run", case(kernel="k.py:slow"), "--out", "run")
    end = time.monotonic() + 120
    while not Path("started").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert Path("started").exists()
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert running.returncode == -signal.SIGKILL
    assert not list(Path().glob("run/*"))
    assert not Path(".reconcile/latest").exists()


def test_a_full_disk_is_bad_input_and_leaves_no_half_report(case):
    """A file size limit stands in for the disk: write(2) fails in both cases."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "import torch, transformers; from reconcile.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY));"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", case(), "--out", "run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "cannot write the report" in done.stderr
    assert not Path("run/report.json").exists()


def test_two_runs_in_one_directory_at_the_same_time(case, capsys):
    name = case()
    both = [process("run", name) for _ in range(2)]
    for running in both:
        out, _ = running.communicate(timeout=300)
        assert running.returncode == 0, out
    runs = sorted(Path(".reconcile/runs").iterdir())
    assert len(runs) == 2
    one, two = (json.loads((run / "report.json").read_text())["rows"] for run in runs)
    assert one == two
    assert outcome(capsys, "report", ".reconcile/latest")[0] == 0


def test_a_closed_pipe_does_not_change_the_exit_code(case):
    """Nobody reads what is said; the code still tells bad input from FAIL."""
    running = subprocess.Popen(
        [sys.executable, "-m", "reconcile", "run", case(modules='["nothing"]')],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    running.stdout.close()
    assert running.wait(timeout=240) == 3
