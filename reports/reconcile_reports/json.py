"""``report.json``: the whole report for programs."""

from __future__ import annotations

import json

from reconcile.report import Report

FILENAME: str | None = "report.json"
"""Name of the file in a run directory."""


def render(report: Report) -> str:
    """The report as JSON text; `Report.from_dict` reads it back.

    Non-finite numbers are spelt ``"nan"``, ``"inf"``, ``"-inf"``.

    Raises:
        ValueError: a non-finite number that the report did not spell out.
    """
    return json.dumps(report.to_dict(), allow_nan=False, indent=2) + "\n"
