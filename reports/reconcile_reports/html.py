"""``report.html``: the whole report as one self-contained page."""

from __future__ import annotations

from markupsafe import Markup

from reconcile.report import Report, Verdict
from reconcile_reports import (
    depth,
    detail,
    funnel_map,
    loading,
    model_level,
    reproduce,
    story,
    summary,
)
from reconcile_reports.page import render_page
from reconcile_reports.picture import Picture, depth_picture
from reconcile_reports.rows_table import FOLDED, rows_table

FILENAME: str | None = "report.html"
"""Name of the file in a run directory."""


def render(report: Report) -> str:
    """The report as HTML."""
    details = detail.details(report)
    shown = detail.shown_at(details)
    prompts = model_level.prompts(report)
    return render_page(
        "html.jinja",
        report=report,
        summary=summary,
        loading=loading,
        story=story,
        detail=detail,
        verdicts=tuple(Verdict),
        maps=funnel_map.maps(report),
        curve=depth.curve(report),
        picture=_picture(report),
        table=rows_table(report, shown),
        folded=len(report.rows) > FOLDED,
        details=details,
        shown=shown,
        prompts=prompts,
        checks=tuple(dict.fromkeys(check for prompt in prompts for check in prompt.rows)),
        kernels=len({prompt.kernel for prompt in prompts}),
        reproduce=reproduce.block(report),
    )


def _picture(report: Report) -> tuple[Picture, Markup] | None:
    """The picture with its SVG marked as markup: `depth_picture` wrote every element of it."""
    picture = depth_picture(report)
    return None if picture is None else (picture, Markup(picture.svg))
