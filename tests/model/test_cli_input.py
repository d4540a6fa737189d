"""What a newcomer types: paths, names and options that do not fit, and what is said to them."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reconcile
from reconcile.cli import main
from reconcile.commands.common import chosen_case
from reconcile.commands.output import forget
from reconcile.exceptions import ConfigError, KernelError
from reconcile.report import Coverage, Level, Report, Row, Verdict
from reconcile.session import override
from reconcile.tracing.trace import write_atomically
from reconcile.watch.watcher import Checker

CASE = """
[case]
name = "made"
[model]
checkpoint = "checkpoint"
prompts = "prompts.json"
max_tokens = 4
[[candidate]]
name = "mine"
kernel = "k.py:kernel"
contract = { scale_applied = "after_sum" }
"""
KERNEL = """
import torch

def kernel(x, weight, bias=None):
    codes = torch.stack([(weight.codes >> s) & 3 for s in (0, 2, 4, 6)], -1).flatten(1)
    w = torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]
    return ((x.float() @ w.T) * weight.scales.float()).to(x.dtype)
"""


@pytest.fixture
def case(tmp_path, tiny, monkeypatch):
    """A case in a folder of its own; the working directory is the one above."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    tiny().write(folder / "checkpoint")
    (folder / "prompts.json").write_text("[[3, 5, 7, 9]]")
    (folder / "case.toml").write_text(CASE)
    (folder / "k.py").write_text(KERNEL)
    return Path("mine/case.toml")


@pytest.fixture
def cli(capsys):
    """Run one command; gives (exit code, stdout, stderr)."""

    def run(*arguments):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


# --------------------------------------------------------------------------- paths


def test_a_kernel_of_the_api_starts_from_the_working_directory(case):
    Path("mine/k.py").rename("here.py")
    report = reconcile.run(case, kernel="here.py:kernel", only="*.0.mlp.*", levels=["op"])
    assert report.verdict is Verdict.PASS, report.explain()


def test_a_kernel_that_lies_beside_the_case_only_is_named(case):
    with pytest.raises(ConfigError, match="paths start from the working directory") as raised:
        reconcile.run(case, kernel="k.py:kernel")
    assert str(Path("mine/k.py").resolve()) in str(raised.value)
    assert f"{Path('k.py').resolve()}: no such file" in str(raised.value)


def test_the_api_and_the_command_line_take_one_path_for_one_file(case):
    Path("other.py").write_text(KERNEL)
    loaded = reconcile.load_case(case)
    options = {"config": str(case), "kernel": "other.py:kernel", "engine": None}
    typed = chosen_case(type("Options", (), options)())
    assert override(loaded, kernel="other.py:kernel").candidate == typed.candidate
    assert typed.candidate[0].kernel == f"{Path('other.py').resolve()}:kernel"


def test_accepted_errors_lie_beside_the_case(case, cli):
    limited = ("--only", "*.0.mlp.*", "--level", "op")
    assert cli("run", case, *limited, "--out", "run")[0] == 0
    assert cli("accept", "run", "--why", "first", "-o", "mine/a.json")[0] == 0
    case.write_text(CASE + '[gate]\naccepted = "a.json"\n')
    code, out, err = cli("run", case, *limited, "--out", "again")
    assert (code, err) == (0, "")
    assert "rows are held to errors accepted earlier" in " ".join(out.split())


# --------------------------------------------------------------------------- names

KERNELS = [
    ("folder:f", "folder is a folder: expected a Python file in it", "it has one.py, two.py"),
    ("./folder:f", "folder is a folder: expected a Python file in it", "FILE.py:f"),
    ("folder", "folder is a folder: expected a Python file in it", "FILE.py:FUNCTION"),
    ("folder/k.cu:f", "k.cu is no Python file", "path/to/file.py:f"),
    ("./nope:f", "nope: no such file", "path/to/file.py:f"),
    ("nope.py:f", "nope.py: no such file", "path/to/file.py:f"),
    ("folder/one.py", "names no function", "folder/one.py:FUNCTION"),
    ("folder/one.py:", "names no function", "give folder/one.py:FUNCTION"),
    ("beside:f", "cannot import beside", "for the file beside.py give beside.py:ATTR"),
    ("", "names no kernel", "path/to/file.py:attr"),
    (":f", "names no kernel", "path/to/file.py:attr"),
    ("ternary_cuda.naiv", 'did you mean "ternary_cuda.naive"', "path/to/file.py:attr"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("folder/one.py", "folder/two.py", "folder/k.cu", "beside.py"):
        Path(name).touch()
    return tmp_path


@pytest.mark.parametrize(("kernel", "came", "do"), KERNELS, ids=[k[0] for k in KERNELS])
@pytest.mark.parametrize("command", ["run", "watch", "build"])
def test_a_kernel_that_is_none(folder, cli, command, kernel, came, do):
    if (command, kernel) in (("build", ""), ("watch", "beside:f")):
        return  # all of them; what is not imported yet may be saved in a moment
    checks = ("--checks", 1) if command == "watch" else ()
    code, out, err = cli(command, "--kernel", kernel, *checks)
    assert (code, out) == (3, "")
    assert came in err
    assert do in err


def test_a_module_with_a_file_may_have_the_name_of_a_folder(folder, monkeypatch):
    Path("json").mkdir()
    with pytest.raises(KernelError, match="json has no 'linear'"):
        reconcile.registry.kernel("json:linear")


FOLDERS = [
    ((), ["is a folder: expected a case file (TOML)", "tiny-ternary"]),
    (("a.toml",), ["is a folder: expected a case file (TOML); it has", "given/a.toml"]),
    (("model.safetensors",), ["`reconcile inspect given --write-toml my-case.toml`"]),
]


@pytest.mark.parametrize(("files", "said"), FOLDERS)
@pytest.mark.parametrize("command", ["run", "watch", "capture"])
def test_a_folder_in_place_of_a_case(tmp_path, monkeypatch, cli, command, files, said):
    monkeypatch.chdir(tmp_path)
    Path("given").mkdir()
    for name in files:
        Path("given", name).touch()
    more = ("--side", "reference", "-o", "x") if command == "capture" else ()
    code, out, err = cli(command, "given", *more)
    assert (code, out) == (3, "")
    assert all(text in err for text in said), err


# --------------------------------------------------------------------------- many names


def test_of_many_modules_the_nearest_are_named_and_the_list_is_told(cli):
    code, _, err = cli("run", "--only", "*.4.mlp.dwn_proj")
    assert code == 3
    assert 'did you mean "model.layers.4.mlp.down_proj"?' in err
    assert len(re.findall(r"model\.layers\.\d", err)) <= 4
    assert "`reconcile run CASE --list` prints all" in err
    code, out, _ = cli("run", "--list")
    assert code == 0
    assert out.startswith("naive: 42 of 42 modules with a weight to judge\n")
    assert len(out.splitlines()) == 43
    code, out, _ = cli("run", "--list", "--only", "*.4.mlp.*")
    assert out.splitlines()[1:] == [
        f"  model.layers.4.mlp.{name}_proj" for name in ("gate", "up", "down")
    ]


def _report(folder):
    rows = tuple(
        Row(level=Level.OP, tap=f"layer.{n}.{name}:out", check="c", verdict=Verdict.PASS)
        for n in range(40)
        for name in ("up_proj", "down_proj")
    )
    report = Report(case="c", rows=rows, coverage=Coverage(expected=80, compared=80))
    folder.mkdir()
    render, name = reconcile.registry.reporter("json")
    (folder / name).write_text(render(report))
    return folder


def test_of_many_taps_the_nearest_are_named_and_the_list_is_told(cli, tmp_path):
    run = _report(tmp_path / "run")
    for wrong, near in (("layer.7.dwn_proj", "layer.7.down_proj:out"), ("nonexistent", "layer.")):
        code, _, err = cli("explain", run, wrong)
        assert code == 3
        assert near in err
        assert err.count("layer.") <= 5  # with the one that was asked for
        assert "`reconcile explain RUN` lists all" in err
    code, out, _ = cli("explain", run)
    assert code == 0
    assert out.splitlines()[:2] == ["PASS: c: 80 taps", "layer.0.up_proj:out  1 PASS"]
    assert len(out.splitlines()) == 81
    assert cli("explain", run, "--reproducer", "x")[0] == 3


# --------------------------------------------------------------------------- watch


def test_watch_takes_what_run_takes(case, cli):
    Path("other.py").write_text(KERNEL)
    code, out, err = cli(
        *("watch", case, "--checks", 1, "--kernel", "other.py:kernel", "--only", "*.0.mlp.*"),
        *("--level", "op", "--engine", "auto", "--seed", "3"),
    )
    assert (code, err) == (0, "")
    assert "PASS (op; " in out
    assert "only 3 of the model's 14 modules" in out


def test_a_checker_restricts(case):
    *_, event = Checker(case, only="*.1.mlp.up_proj").check(("op",))
    assert event.report.scope.modules == 1


# --------------------------------------------------------------------------- the output

SCRIPT = [sys.executable, "-m", "reconcile"]


def test_a_reader_that_has_seen_enough_changes_no_exit_code(tmp_path):
    run = _report(tmp_path / "run")
    for arguments, code in ((("explain", run), 0), (("explain", run, "nonexistent"), 3)):
        with subprocess.Popen(
            [*SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as child:
            child.stdout.close()
            err = child.stderr.read().decode()
            assert child.wait() == code, err
        assert "BrokenPipe" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full_is_no_fault_of_the_tool(tmp_path):
    run = _report(tmp_path / "run")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*SCRIPT, "explain", run], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 3
    assert b"cannot write: No space left on device" in done.stderr


def test_the_version_is_told(cli):
    assert cli("--version")[:2] == (0, "reconcile 0.1.0\n")


# --------------------------------------------------------------------------- files of reports


def _edited(text, **changes):
    return json.dumps(json.loads(text) | changes)


REPORTS = [
    ("cut off", lambda text: text[: len(text) // 2], "unreadable, cut off or no JSON"),
    ("empty", lambda _: "", "unreadable, cut off or no JSON"),
    ("bytes", lambda _: "\ufeff\0", "unreadable, cut off or no JSON"),
    ("a list", lambda _: "[]", "expected a report, got list"),
    ("schema", lambda text: _edited(text, schema=2), "expected schema 1, got 2; read it with"),
    ("newer", lambda text: _edited(text, later=1), "later: Unexpected keyword argument; read it"),
    ("verdict", lambda text: _edited(text, verdict="FAIL"), "the stored verdict FAIL"),
]


@pytest.mark.parametrize(("edit", "said"), [r[1:] for r in REPORTS], ids=[r[0] for r in REPORTS])
@pytest.mark.parametrize("command", ["report", "explain", "diff", "merge", "accept"])
def test_a_report_that_cannot_be_read(cli, tmp_path, command, edit, said):
    run = _report(tmp_path / "run")
    (run / "report.json").write_text(edit((run / "report.json").read_text()))
    more = {"explain": ["x"], "diff": [run], "accept": ["--why", "y"]}.get(command, [])
    code, out, err = cli(command, run, *more)
    assert (code, out) == (3, "")
    assert f"{run}/report.json: " in err
    assert said in err
    assert len(err.splitlines()) == 1


# --------------------------------------------------------------------------- places to write to


@pytest.mark.parametrize("out", ["taken", "taken/x"])
def test_a_place_that_is_a_file_is_said_before_the_work(cli, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    monkeypatch.setattr("reconcile.commands.run.Session", lambda _: pytest.fail("began to work"))
    code, _, err = cli("run", "--out", out)
    assert code == 3
    assert "taken is a file; give --out DIR" in err


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path, monkeypatch):
    def full(self, text, encoding):
        self.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "report.html", "something long")
    assert list(tmp_path.iterdir()) == []


ENDS = KERNEL.replace("    codes =", "    import os; os._exit(0)\n    codes =")


def test_an_earlier_report_is_never_read_as_that_of_this_run(case, cli):
    """Neither its page beside a newer report, nor its verdict after a run that did not end."""
    only = ("--only", "*.0.mlp.up_proj", "--level", "op", "--out", "run")
    assert cli("run", case, *only)[0] == 0
    assert {path.name for path in Path("run").iterdir()} >= {"report.html", "summary.md"}
    Path("mine/k.py").write_text(KERNEL.replace("1.0", "1.5"))
    assert cli("run", case, *only, "--format", "json")[0] == 1
    assert {path.name for path in Path("run").iterdir()} == {"report.json", "snapshots"}

    Path("mine/k.py").write_text(ENDS)
    done = subprocess.run([*SCRIPT, "run", case, *only], capture_output=True, check=False)
    assert done.returncode == 0  # what the kernel said
    assert {path.name for path in Path("run").iterdir()} == {"snapshots"}


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"schema": 1, "tests": []}'])
def test_files_of_other_tools_stay(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    (tmp_path / "junit.xml").write_text("theirs")
    forget(tmp_path)
    assert (tmp_path / "junit.xml").read_text() == "theirs"
    assert (tmp_path / "report.json").read_text() == text


def test_a_full_disk_leaves_no_half_of_a_snapshot(case, cli, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    Path("mine/k.py").write_text(KERNEL.replace("1.0", "1.5"))
    monkeypatch.setattr("reconcile.gate.snapshots.save_file", full)
    code, _, err = cli("run", case, "--only", "*.0.mlp.up_proj", "--level", "op", "--out", "run")
    assert (code, "No space left" in err) == (3, True)
    assert [path for path in Path("run").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("arguments", [["run", "--seed", "x"], ["nothing"], []])
def test_a_usage_error_is_3_also_where_nobody_reads_it(arguments):
    with subprocess.Popen([*SCRIPT, *arguments], stderr=subprocess.PIPE) as child:
        child.stderr.close()
        assert child.wait() == 3


# --------------------------------------------------------------------------- names, terminals

PLACE = "sp ace/\u00fcn\u00ef \u65e5\u672c"


@pytest.mark.parametrize("terminal", [{"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "40"}])
def test_blanks_and_letters_of_others(case, terminal):
    Path(PLACE).parent.mkdir()
    Path("mine").rename(PLACE)
    place = Path(PLACE, "case.toml")
    place.write_text(CASE.replace('"made"', '"f\u00e4ll \u65e5"'), encoding="utf-8")
    arguments = [
        "run",
        place,
        "--kernel",
        f"{PLACE}/k.py:kernel",
        "--level",
        "op",
        "--out",
        "o \u00fc",
    ]
    done = subprocess.run(
        [*SCRIPT, *arguments], env=os.environ | terminal, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    first = done.stdout.splitlines()[0]
    said = (
        b"PASS: f\\xe4ll \\u65e5"
        if "PYTHONIOENCODING" in terminal
        else "PASS: f\u00e4ll \u65e5".encode()
    )
    assert first.startswith(said)
    assert b"\x1b" not in done.stdout
    assert len(list(Path("o \u00fc").iterdir())) == 4


# --------------------------------------------------------------------------- interruptions


def _interrupted(arguments, until):
    """Interrupt a command as soon as ``until`` is there; exit code and standard error."""
    with subprocess.Popen(
        [*SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        until(child)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    return child.returncode, err.decode()


def test_an_interrupted_run_reports_nothing(case):
    Path("mine/k.py").write_text(
        KERNEL + "\nfrom pathlib import Path\nimport time\nPath('began').touch()\ntime.sleep(60)\n"
    )

    def began(child):
        while not Path("began").exists() and child.poll() is None:
            time.sleep(0.01)

    code, err = _interrupted(["run", str(case), "--out", "run"], began)
    assert (code, err) == (4, "reconcile: interrupted; nothing was reported\n")
    assert not Path("run").exists()


@pytest.mark.parametrize(("text", "code"), [(KERNEL, 0), (KERNEL.replace("1.0", "1.5"), 1)])
def test_a_watch_that_is_interrupted_ends_with_its_last_verdict(case, text, code):
    Path("mine/k.py").write_text(text)

    def judged(child):
        assert b" (op; " in child.stdout.readline()
        time.sleep(0.3)

    assert _interrupted(["watch", str(case), "--level", "op"], judged) == (code, "")


# --------------------------------------------------------------------------- as run does


def test_capture_takes_the_levels_that_run_takes(case, cli):
    only = ("--only", "*.0.mlp.up_proj", "--level", "op")
    assert cli("capture", case, *only, "--side", "reference", "-o", "ref")[0] == 0
    candidate = ("--side", "candidate", "--inputs", "ref", "-o", "cand")
    assert cli("capture", case, *only, *candidate)[0] == 0
    code, out, _ = cli("compare", "ref", "cand")
    assert code == 0
    assert "(only 1 of the model's 14 modules, only level op)" in " ".join(out.split())


def test_a_reproducer_finds_the_kernel_from_another_folder(case, cli, monkeypatch):
    Path("wrong.py").write_text(KERNEL.replace("1.0", "1.5"))
    place, only = case.resolve(), ("--only", "*.0.mlp.up_proj", "--level", "op")
    assert cli("run", place, "--kernel", "wrong.py:kernel", *only, "--out", "bad")[0] == 1
    monkeypatch.chdir("mine")
    code, _, err = cli(
        *("explain", "../bad", "model.layers.0.mlp.up_proj", "--reproducer", "small")
    )
    assert (code, err) == (0, "")
    assert Path("small/reproduce.py").is_file()


def test_a_reproducer_of_a_kernel_that_the_case_no_longer_names(case, cli):
    Path("mine/k.py").write_text(KERNEL.replace("1.0", "1.5"))
    only = ("--only", "*.0.mlp.up_proj", "--level", "op")
    assert cli("run", case, *only, "--out", "bad")[0] == 1
    Path("mine/other.py").write_text(KERNEL)
    case.write_text(CASE.replace("k.py", "other.py"))
    code, _, err = cli("explain", "bad", "model.layers.0.mlp.up_proj", "--reproducer", "small")
    assert code == 3
    assert "the run's kernel k.py:kernel is none of the case's now: other.py:kernel" in err
