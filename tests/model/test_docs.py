"""What the documents show is run: the toy repository, the notebook, the CI files."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from reconcile.cli import _parser
from reconcile.report import Coverage, Level, Reason, Report, Row, Verdict
from reconcile_reports import github

DOCS = Path(__file__).parents[2] / "docs"
TOY = DOCS / "adopt" / "toy"


def pytest_in(folder):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def toy(tmp_path):
    return shutil.copytree(TOY, tmp_path / "toy", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_toy_repository_is_green(toy):
    done = pytest_in(toy)
    assert done.returncode == 0, done.stdout
    assert "PASS: check_linear kernel" in done.stdout


def test_the_broken_toy_kernel_is_named(toy):
    source = toy / "toy_kernels.py"
    source.write_text(source.read_text().replace("block=128)", "block=112)"))
    done = pytest_in(toy)
    assert done.returncode == 1
    assert "n = 112, 224, 336, the format's blocks of 128 rows at n = 128, 256, 384" in done.stdout


def test_the_document_shows_the_file():
    shown = re.findall(r"```python\n(.*?)```", (DOCS / "adopt.md").read_text(), re.DOTALL)
    assert (TOY / "test_toy_kernels.py").read_text() in shown


def test_the_notebook_runs():
    """Its code cells in order, in one namespace."""
    cells = json.loads((DOCS / "tutorial.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    space = {}
    for number, text in enumerate(code):
        exec(compile(text, f"cell {number}", "exec"), space)
    assert space["report"].verdict is Verdict.PASS
    assert space["broken"].verdict is Verdict.FAIL
    assert space["model"].verdict is Verdict.PASS
    assert space["row"].diagnosis[0].name == "scale_mantissa_dropped"
    assert space["report"]._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


def commands_in(body):
    """Every `reconcile ...` line of a workflow or an action."""
    steps = body.get("runs", body)["steps"] if "runs" in body else []
    for job in body.get("jobs", {}).values():
        steps = [*steps, *job["steps"]]
    for step in steps:
        for line in step.get("run", "").splitlines():
            if line.startswith("reconcile "):
                yield re.sub(r"\$\{\{.*?\}\}", "x", line)


@pytest.mark.parametrize("name", ["action.yml", "workflow.yml"])
def test_the_commands_of_the_ci_files_exist(name):
    lines = list(commands_in(yaml.safe_load((DOCS / "ci" / name).read_text())))
    assert lines
    for line in lines:
        words = [word for word in shlex.split(line)[1:] if word != "x" or name == "workflow.yml"]
        _parser().parse_args(words)


BAD = Row(
    level=Level.OP, tap="a,b:out", check="isolated", verdict=Verdict.FAIL,
    reason=Reason.OVER_LIMIT, text="100 % wrong\nat n = 3",
)  # fmt: skip


def report(*rows):
    return Report(case="c: d", rows=rows, coverage=Coverage(expected=1, compared=1))


def test_annotations_are_escaped_one_line_each():
    lines = github.render(report(BAD)).splitlines()
    assert lines[0].startswith("::error title=reconcile%3A c%3A d::`a,b` fails 1 of 1 check")
    assert lines[1] == (
        "::error title=op a%2Cb%3Aout::FAIL over_limit  op a,b:out isolated: "
        "100 %25 wrong%0Aat n = 3"
    )
    assert len(github.render(report(*[BAD] * 30)).splitlines()) == 10


def test_github_gets_annotations_and_a_summary(tmp_path, monkeypatch, capsys):
    from reconcile.commands.output import _tell_github

    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    _tell_github(report(BAD))
    assert "::error" in capsys.readouterr().out
    assert summary.read_text().startswith("before\n#")
