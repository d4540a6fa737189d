"""What every HTML page has: one style sheet, one script, a policy that allows only these two.

A page loads nothing. Its Content-Security-Policy names the style sheet and the script by their
hashes, so that nothing that came from data could run even if it were not escaped; and everything
that came from data goes through Jinja2's autoescape or `markupsafe.escape`.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from reconcile_reports.wording import number, one_line, percent, plural, shape, visible

_TEMPLATES = ("page.jinja", "html.jinja", "diff.jinja")


def render_page(template: str, **values: object) -> str:
    """A template of this package as a whole page."""
    style, script = _resource("html.css"), _resource("html.js")
    text = (
        _environment()
        .get_template(template)
        .render(style=Markup(style), script=Markup(script), policy=_policy(style, script), **values)
    )
    return text.rstrip() + "\n"


def _policy(style: str, script: str) -> str:
    """Allows the style sheet and the script, and nothing else."""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"sha256-{digest}"


@cache
def _resource(name: str) -> str:
    return resources.files("reconcile_reports").joinpath(name).read_text("utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=DictLoader({name: _resource(name) for name in _TEMPLATES}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "line": line,
        "path": path,
        "ticks": ticks,
        "visible": lambda value: visible(str(value)),
        "number": number,
        "percent": percent,
        "plural": plural,
        "shape": shape,
    }
    return environment


def line(value: object) -> str:
    """On one line, nothing hidden; empty for None."""
    return one_line("" if value is None else str(value))


def path(value: object) -> Markup:
    """A dotted name that may be broken over lines after a dot or colon."""
    parts = str(Markup.escape(line(value))).replace(".", ".<wbr>").replace(":", ":<wbr>")
    return Markup(parts)


def ticks(text: str) -> Markup:
    """A sentence whose parts between backticks are code.

    >>> str(ticks("the `a<b.c` fails"))
    'the <code>a&lt;b.<wbr>c</code> fails'
    """
    parts = str(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(path(part)) if at % 2 else Markup.escape(line_ends(part))
        for at, part in enumerate(parts)
    )


def line_ends(text: str) -> str:
    """`line` that keeps one blank at either end."""
    inner = line(text)
    before = " " if text[:1].isspace() else ""
    after = " " if inner and text[-1:].isspace() else ""
    return f"{before}{inner}{after}"
