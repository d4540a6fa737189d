"""``report.html``: the whole report as one self-contained page.

The page loads nothing and runs no script: its Content-Security-Policy allows one style sheet, by
its hash. Everything that came from data goes through Jinja2's autoescape.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from reconcile.report import Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.picture import Picture, depth_picture
from reconcile_reports.summary import Indexed, RanAs
from reconcile_reports.wording import number, one_line, plural, shape, visible

FILENAME: str | None = "report.html"
"""Name of the file in a run directory."""

IN_FULL = 25
"""Rows that are shown in full before the rest is folded away."""

_BAR = 48
"""Width of a full bar of utilisation."""


def render(report: Report) -> str:
    """The report as HTML."""
    style = _resource("html.css")
    text = _template().render(
        report=report,
        summary=summary,
        style=Markup(style),
        policy=_policy(style),
        picture=_picture(report),
        verdicts=tuple(Verdict),
        most=IN_FULL,
    )
    return text.rstrip() + "\n"


def _policy(style: str) -> str:
    """Allows the style sheet and nothing else."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _resource(name: str) -> str:
    return resources.files("reconcile_reports").joinpath(name).read_text("utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "line": _line,
        "path": _path,
        "visible": lambda value: visible(str(value)),
        "number": number,
        "plural": plural,
        "shape": shape,
        "bar": bar,
        "share_one": _shared_labels,
    }
    return environment.from_string(_resource("html.jinja"))


def _line(value: object) -> str:
    return one_line("" if value is None else str(value))


def _path(value: object) -> Markup:
    """A dotted name that may be broken over lines after a dot or colon."""
    parts = str(Markup.escape(_line(value))).replace(".", ".<wbr>").replace(":", ":<wbr>")
    return Markup(parts)


def _picture(report: Report) -> tuple[Picture, Markup] | None:
    """The picture with its SVG marked as markup: `depth_picture` wrote every element of it."""
    picture = depth_picture(report)
    return None if picture is None else (picture, Markup(picture.svg))


def bar(row: Row) -> int:
    """Length of the bar of a row's utilisation: full at its limit and above."""
    used = max(0.0, min(summary.utilisation_key(row), 1.0))
    return round(used * _BAR)


def _shared_labels(items: list[Indexed]) -> RanAs | None:
    """The labels of all ``items`` if they are the same, else None."""
    found = {summary.ran_as(item.row) for item in items}
    return found.pop() if len(found) == 1 else None
