"""The report's block "reproduce this", pasted into a shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

from reconcile.cli import main
from reconcile.report import Report
from reconcile_reports import reproduce

KERNEL = f"{Path(__file__).with_name('kernels.py')}:clean"


def comparable(row):
    return (row.tap, row.check, row.pass_, row.verdict, row.utilisation, row.digest)


def test_the_pasted_block_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["run", "--kernel", KERNEL, "--level", "op", "--only", "*.0.mlp.down_proj"]
    assert main([*words, "--out", "first"]) == 0
    body = json.loads((tmp_path / "first" / "report.json").read_text())
    first = Report.from_dict(body)
    lines = reproduce.block(first).splitlines()
    # the commit and the versions are those of this process: checking out and installing them
    # would change nothing but the files under test
    pasted = [line for line in lines if not line.startswith(("git ", "pip ", "#"))]
    assert any(line.startswith("reconcile run") for line in pasted)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        "\n".join(pasted),
        shell=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / ".reconcile" / "latest" / "report.json").read_text())
    second = Report.from_dict(again)
    assert list(map(comparable, second.rows)) == list(map(comparable, first.rows))
    assert all(row.digest for row in first.rows if row.level == "op")
