"""The block that runs a report's command again, from its provenance."""

from __future__ import annotations

import re
import shlex

from reconcile.report import Report
from reconcile_reports.detail import without_out
from reconcile_reports.wording import one_line

_REPEATED = re.compile(r"[A-Z][A-Z0-9_]*")
_PINNED = ("torch", "transformers", "numpy", "safetensors", "triton")


def block(report: Report) -> str:
    """Lines for a shell: check out, install, set, run; empty for a run without a command line.

    Lines that cannot be pasted as they are (an unknown commit, changed files) are comments.
    """
    if not report.command.startswith("reconcile "):
        return ""
    return "\n".join([*_commit(report), *_install(report), *_settings(report), _command(report)])


def _commit(report: Report) -> list[str]:
    commits = dict.fromkeys(side.commit for side in report.provenance if side.commit)
    lines = []
    for commit in commits:
        plain, plus, _ = one_line(commit).partition("+")
        if not re.fullmatch(r"[0-9a-f]{7,64}", plain):
            continue
        lines.append(f"git checkout {plain}")
        if plus:
            lines.append("# the working tree had changes that this commit does not hold")
    return lines or ["# no git commit was recorded"]


def _install(report: Report) -> list[str]:
    """Exact versions of what computes; a local build such as 2.13.0+cpu by its public version."""
    versions = {k: v for side in report.provenance for k, v in side.versions.items()}
    pinned = [
        f"{name}=={versions[name].partition('+')[0]}"
        for name in _PINNED
        if re.fullmatch(r"[0-9A-Za-z.+!]+", versions.get(name, ""))
    ]
    return [f"pip install {' '.join(pinned)}"] if pinned else []


def _settings(report: Report) -> list[str]:
    """Variables of the environment that were set, of the side that computed the candidate."""
    found = {k: v for side in report.provenance for k, v in side.settings.items()}
    return [
        f"export {name}={shlex.quote(one_line(value))}"
        for name, value in found.items()
        if _REPEATED.fullmatch(name)
    ]


def _command(report: Report) -> str:
    return one_line(without_out(report.command))
