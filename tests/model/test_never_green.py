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
from reconcile.session import Session

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
import sys
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

CONTRACT = reconcile.Contract(scale_applied="after_sum")

def right(x, weight, bias=None):
    codes = torch.stack([(weight.codes >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    values = torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]
    return (x.float() @ values.T * weight.scales.float()).to(x.dtype)

class Ends:
    # right, but asked once too often it ends the program as if all were well
    def __init__(self, when):
        self.when, self.asked = when, 0

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "when"):
            self.asked += 1
            if self.asked > 2 or name in ("is_supported", "can_implement", "launches", "route"):
                raise SystemExit(0)
        return object.__getattribute__(self, name)

    name, formats, contract, launches = "ends", None, CONTRACT, None
    engines = (Engine("python"),)
    def is_supported(self, engine):
        return Support(True, "yes")
    def can_implement(self, spec):
        return Support(True, "any")
    def route(self, spec, engine):
        return "here"
    def prepare(self, weight, engine):
        return weight
    def apply(self, x, prepared, bias=None):
        return right(x, prepared, bias)

NEVER, SUPPORTED, IMPLEMENTED, ROUTED, ENGINES, STATED = map(
    Ends, ("", "is_supported", "can_implement", "route", "engines", "contract")
)

def falls_back(x, weight, bias=None):
    reconcile.fell_back("no luck")
    return right(x, weight)

def falls_back_once(x, weight, bias=None):
    if weight.name.endswith("q_proj") and weight.name not in SEEN:
        SEEN.append(weight.name)
        reconcile.fell_back("no luck")
    return right(x, weight)

SEEN = []

def wrong_unless_poisoned(x, weight, bias=None):
    return right(x, weight) * (1 if torch.are_deterministic_algorithms_enabled() else 3)

wrong_unless_poisoned.contract = reconcile.Contract(scale_applied="after_sum", deterministic=False)
WORKSPACE = {}

def shares_a_workspace(x, weight, bias=None):
    y = right(x, weight)
    if x.numel() == x.shape[-1]:
        return y
    return WORKSPACE.setdefault((weight.name, y.shape), torch.empty_like(y)).copy_(y)

def flushes(x, weight, bias=None):
    torch.set_flush_denormal(True)
    return right(x, weight)

def widens_in_the_model(x, weight, bias=None):
    y = right(x, weight)
    if sys._getframe(2).f_code.co_name == "forward":
        torch.set_default_dtype(torch.float64)
    return y

def raises_in_the_model(x, weight, bias=None):
    assert sys._getframe(2).f_code.co_name != "forward", "only here"
    return right(x, weight)

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
    assert (found, said in " ".join(text.split())) == (code, True), text


@pytest.mark.parametrize(
    "kernel", ["NEVER", "SUPPORTED", "IMPLEMENTED", "ROUTED", "ENGINES", "STATED"]
)
def test_a_kernel_that_ends_the_program(case, capsys, kernel):
    """With code 0, in any of its attributes: that is no PASS, and not silent."""
    code, text = outcome(capsys, "run", case(kernel=f"k.py:{kernel}"))
    if kernel == "NEVER":
        assert code == 0, text
    else:
        assert (code, "called sys.exit(0)" in text) == (3, True), text


@pytest.mark.parametrize("level", ["op", "module", "model"])
@pytest.mark.parametrize("kernel", ["falls_back", "falls_back_once"])
def test_what_other_code_computed_is_no_pass_at_any_level(case, capsys, kernel, level):
    code, text = outcome(capsys, "run", case(kernel=f"k.py:{kernel}"), "--level", level)
    assert (code, "no luck" in text) == (2, True), text


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("wrong_unless_poisoned", "outside the bound"),
        ("shares_a_workspace", "a workspace is shared"),
        ("flushes", "what the processor does with subnormals from kept to flushed"),
        ("widens_in_the_model", "default dtype from torch.float32 to torch.float64"),
    ],
)
def test_what_a_kernel_does_besides(case, capsys, kernel, said):
    code, text = outcome(capsys, "run", case(kernel=f"k.py:{kernel}"))
    assert (code, said in " ".join(text.split())) == (1, True), text
    assert torch.get_default_dtype() is torch.float32
    assert torch.tensor(2.0**-126) * 0.5 > 0


@pytest.mark.parametrize("level", ["op", "module", "model"])
def test_a_kernel_that_raises_in_the_model_only(case, capsys, level):
    code, text = outcome(capsys, "run", case(kernel="k.py:raises_in_the_model"), "--level", level)
    assert (code, "only here" in " ".join(text.split())) == (1, True), text


def test_a_task_is_not_lost_with_a_reference_that_was_kept(case, tmp_path):
    """Kept while only level op was run, by a session or in a folder: it answered no task."""
    items = '[{"prompt": [3, 4], "answer": [5]}]'
    (tmp_path / "task.json").write_text(f'{{"source": "here", "items": {items}}}')
    name = case(gate='[task]\nfile = "task.json"')
    for _ in range(2):
        session = Session(name, reference_folder=tmp_path / "kept")
        session.run(levels=["op"])
        rows = session.run(levels=["op", "model"]).rows
        assert [row.check for row in rows].count("task") == 1


def test_answers_to_another_task_are_not_compared(case, capsys, tmp_path):
    def task(answer):
        items = f'[{{"prompt": [3, 4], "answer": [{answer}]}}]'
        (tmp_path / "task.json").write_text(f'{{"source": "here", "items": {items}}}')

    task(5)
    name = case(gate='[task]\nfile = "task.json"')
    Path(name).write_text(Path(name).read_text().replace('run = ["op"]', 'run = ["op", "model"]'))
    assert outcome(capsys, "capture", name, "--side", "reference", "-o", "ref")[0] == 0
    task(6)
    arguments = ("capture", name, "--side", "candidate", "--inputs", "ref", "-o", "cand")
    code, text = outcome(capsys, *arguments)
    assert (code, "another task" in text) == (3, True), text


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

    monkeypatch.setattr("reconcile.judging.judge.error_stats", broken)
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
