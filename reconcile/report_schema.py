"""The JSON schema of ``report.json``, generated from the data types.

``python -m reconcile.report_schema`` prints it; ``docs/report.schema.json`` is a copy that a test
keeps equal. Keys are only ever added within one version, so unknown keys are allowed.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from reconcile.report import SCHEMA, ExitCode, Report, Verdict

NONFINITE = ("nan", "inf", "-inf")
"""How a number that JSON has no word for is spelt."""

REQUIRED = {
    "Report": ("schema", "verdict", "exit_code", "coverage", "first_divergence", "rows"),
    "Row": (
        *("level", "tap", "check", "shape", "pass", "kernel", "engine", "implementation"),
        *("execution", "fidelity", "verdict", "reason", "stats", "limits", "utilisation"),
        "diagnosis",
    ),
}
"""Keys that scripts may rely on in every report."""


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the content of ``report.json``."""
    body = TypeAdapter(Report).json_schema(ref_template="#/$defs/{model}", mode="serialization")
    types: dict[str, Any] = body.pop("$defs")
    row = types["Row"]["properties"]
    types["Row"]["properties"] = {name.rstrip("_"): value for name, value in row.items()}
    types["Row"]["required"] = list(REQUIRED["Row"])
    types["Number"] = {"anyOf": [{"type": "number"}, {"enum": list(NONFINITE)}]}
    named: dict[str, Any] = _relaxed(types)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "reconcile report",
        "type": "object",
        "required": list(REQUIRED["Report"]),
        "properties": _derived() | _relaxed(body["properties"]),
        "$defs": named | {"Number": types["Number"]},
    }


def _derived() -> dict[str, Any]:
    """Keys that are computed from the rows."""
    verdicts = [verdict.value for verdict in Verdict]
    return {
        "schema": {"const": SCHEMA},
        "verdict": {"enum": verdicts},
        "exit_code": {"enum": [ExitCode.PASS, ExitCode.FAIL, ExitCode.INCONCLUSIVE]},
        "first_divergence": {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["tap", "row"],
                    "properties": {"tap": {"type": "string"}, "row": {"type": "integer"}},
                },
                {"type": "null"},
            ]
        },
        "counts": {
            "type": "object",
            "required": verdicts,
            "properties": {verdict: {"type": "integer", "minimum": 0} for verdict in verdicts},
        },
        "m_tried": {
            "description": "by kernel, the numbers of rows M with which its ops were called",
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer", "minimum": 1}},
        },
    }


def _relaxed(part: Any) -> Any:  # noqa: ANN401
    """Unknown keys allowed, numbers as they are written, no defaults and no titles of fields."""
    if isinstance(part, list):
        return [_relaxed(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "number":
        return {"$ref": "#/$defs/Number"}
    kept = {
        name: value
        for name, value in part.items()
        if name not in ("default", "prefixItems", "maxItems", "minItems")
        and not (name == "additionalProperties" and value is False)
        and not (name == "title" and isinstance(value, str))
    }
    return {name: _relaxed(value) for name, value in kept.items()} | _pair(part)


def _pair(part: dict[str, Any]) -> dict[str, Any]:
    """Arrays of a fixed length keep it."""
    kept = {name: part[name] for name in ("maxItems", "minItems") if name in part}
    return kept | ({"prefixItems": _relaxed(part["prefixItems"])} if "prefixItems" in part else {})


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))  # noqa: T201
