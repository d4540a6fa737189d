"""``report.json``: the whole report for programs."""

from __future__ import annotations

import json

from reconcile.report import Report

FILENAME: str | None = "report.json"
"""Name of the file in a run directory."""


def render(report: Report) -> str:
    """The report as JSON text; `Report.from_dict` reads it back.

    One row stands on one line. Non-finite numbers are spelt ``"nan"``, ``"inf"``, ``"-inf"``.

    Raises:
        ValueError: a non-finite number that the report did not spell out.
    """
    body = report.to_dict()
    rows = [_dump(row) for row in body.pop("rows")]
    head = ",\n".join(f"{_dump(key)}: {_dump(value)}" for key, value in body.items())
    listed = "[\n" + ",\n".join(rows) + "\n]" if rows else "[]"
    return f'{{\n{head},\n"rows": {listed}\n}}\n'


def _dump(value: object) -> str:
    return json.dumps(value, allow_nan=False)
