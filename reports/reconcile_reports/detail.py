"""The rows that a page shows in full, and what it shows of each."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from reconcile.evidence import Element
from reconcile.report import Diagnosis, Level, Report, Row, Verdict
from reconcile_reports import story, summary
from reconcile_reports.figures import Figure, heat_figure, histogram_figure, profile_figure
from reconcile_reports.summary import Gated, Indexed
from reconcile_reports.wording import number, one_line

MOST = {Verdict.FAIL: 60, Verdict.INCONCLUSIVE: 40, Verdict.PASS: 12}
"""Rows in full by verdict; every row is in the table of rows."""

UNITS = {
    "n": "elements",
    "differing": "elements",
    "over": "elements",
    "zeros_over": "elements",
    "max_abs": "output units",
    "max_abs_candidate": "output units",
    "max_abs_reference": "output units",
    "mean_abs": "output units",
    "rmse": "output units",
    "max_rel": "ratio",
    "nmse": "ratio",
    "worst_row_nmse": "ratio",
    "cosine": "ratio",
    "max_ulp": "ulp",
    "bias": "ulp, mean",
    "bias_t": "t value",
    "utilisation": "share of limit",
    "tolerance_share": "share of limit",
    "growth_share": "share of limit",
    "frac_over_1ulp": "share",
    "zero_share": "share",
    "top10_set_gap": "logits",
    "top10_order_gap": "logits",
    "top10_sets_equal": "share",
    "top10_orders_equal": "share",
    "argmax_agreement": "share",
    "kl_mean": "nat",
    "kl_max": "nat",
    "nll_reference": "nat",
    "nll_candidate": "nat",
}
"""Unit of each statistic."""
_ENDINGS = {
    "_max_abs": "output units",
    "_nmse": "ratio",
    "_candidate": "elements",
    "_reference": "elements",
    "_mismatch": "elements",
    "_db": "dB",
    "_rmse": "output units",
    "_amax": "output units",
}


@dataclass(frozen=True, slots=True)
class Detail:
    """One row in full."""

    index: int
    row: Row
    alike: tuple[int, ...]
    """Indices of the other rows that differ from it in their pass only."""
    best: Diagnosis | None
    others: tuple[Diagnosis, ...]
    """The runner-up first."""
    cause: int | None
    """Index of the failing row that explains it."""
    figures: tuple[Figure, ...]
    worst: tuple[Element, ...]
    errors: tuple[tuple[str, str], ...]
    """Quantisation, decoder and kernel error apart, where they are known."""
    commands: tuple[str, ...]


def details(report: Report) -> list[Detail]:
    """Failing rows, inconclusive ones, then the passing ones nearest to their limits."""
    groups = _alike(report)
    found = []
    for verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS):
        items = [group for group in groups if group[0].row.verdict is verdict]
        if verdict is Verdict.PASS:
            items = [group for group in items if group[0].row.evidence is not None]
            items.sort(key=lambda group: -summary.utilisation_key(group[0].row))
        found += [_detail(report, group) for group in items[: MOST[verdict]]]
    return found


def shown_at(found: list[Detail]) -> dict[int, int]:
    """For each row that is shown in full, alone or for others: the index of its detail."""
    return {index: item.index for item in found for index in (item.index, *item.alike)}


def _alike(report: Report) -> list[list[Indexed]]:
    """Rows that differ only in their pass; of each group first the one that was looked at."""
    groups: dict[tuple[object, ...], list[Indexed]] = {}
    for item in summary.indexed(report):
        row = item.row
        key = (row.verdict, row.reason, row.level, row.tap, row.check, row.shape, row.kernel)
        groups.setdefault(key, []).append(item)
    return [sorted(group, key=lambda item: item.row.evidence is None) for group in groups.values()]


def _detail(report: Report, group: list[Indexed]) -> Detail:
    item = group[0]
    row, evidence = item.row, item.row.evidence
    fitted = story.explanations(row)
    return Detail(
        index=item.index,
        row=row,
        alike=tuple(other.index for other in group[1:]),
        best=fitted[0] if fitted else None,
        others=tuple(fitted[1:]),
        cause=story.cause_of(report, row),
        figures=_figures(row),
        worst=evidence.worst if evidence else _old_elements(row),
        errors=_three_errors(report, row),
        commands=tuple(reproduce(report, row)),
    )


def _figures(row: Row) -> tuple[Figure, ...]:
    evidence = row.evidence
    if evidence is None:
        return ()
    found = []
    if evidence.heat is not None and evidence.heat.rows * evidence.heat.columns > 1:
        found.append(heat_figure(evidence.heat))
    if evidence.histogram is not None:
        found.append(histogram_figure(evidence.histogram))
    profiles = (evidence.row_profile, evidence.column_profile)
    return (*found, *(profile_figure(item) for item in profiles if item and item.size > 1))


def _old_elements(row: Row) -> tuple[Element, ...]:
    """The worst elements that a failing row keeps among its statistics."""
    listed = row.stats.get("worst_elements")
    if not isinstance(listed, list):
        return ()
    return tuple(
        Element(index=tuple(index), candidate=c, reference=r, error=error, ulps=None)
        for index, c, r, error in listed
    )


def _three_errors(report: Report, row: Row) -> tuple[tuple[str, str], ...]:
    """What quantisation lost, whether two decoders agree, and what the kernel adds."""
    if row.level is not Level.OP or not row.stats:
        return ()
    module = row.tap.partition(":")[0]
    weight = next(
        (r for r in report.rows if r.level is Level.WEIGHT and r.tap.startswith(f"{module}:")), None
    )
    stats = weight.stats if weight else {}
    noise = stats.get("quantisation_sqnr_db")
    agrees = stats.get("second_decoder_agrees")
    said = [
        (
            "quantisation (original against decoded weight)",
            "unknown: the case names no original"
            if noise is None
            else f"signal to noise {number(noise)} dB; no kernel's fault",
        ),
        (
            "decoder (a second one against ours)",
            "no second decoder"
            if agrees is None
            else (
                "none: bit by bit the same" if agrees else "they differ: the reference is suspect"
            ),
        ),
        (
            "kernel (candidate against reference on the decoded weight)",
            f"max |c - r| {number(row.stats.get('max_abs'))}, nmse {number(row.stats.get('nmse'))}",
        ),
    ]
    return tuple(said) if weight else tuple(said[2:])


def statistics(row: Row) -> list[Gated]:
    """Every statistic but those that the page draws."""
    drawn = {"worst_elements", "histogram", "worst_rows", "worst_columns"}
    return [
        item
        for item in summary.statistics(row)
        if item.name not in drawn and not item.name.endswith("_by_layer")
    ]


def unit(name: str) -> str:
    """Unit of a statistic, empty where it has none.

    >>> unit("max_abs"), unit("local_max_abs"), unit("deterministic")
    ('output units', 'output units', '')
    """
    ending = next((u for end, u in _ENDINGS.items() if name.endswith(end)), "")
    return UNITS.get(name, ending)


def reproduce(report: Report, row: Row) -> list[str]:
    """Commands that show this row again: in words, and by running its module alone."""
    if not report.command.startswith("reconcile "):
        return []
    module = row.tap.partition(":")[0]
    found = [shlex.join(["reconcile", "explain", "RUN", one_line(row.tap)])]
    if row.level is Level.OP and report.command.startswith("reconcile run"):
        found.append(f"{without_out(report.command)} --level op --only {shlex.quote(module)}")
    return [one_line(command) for command in found]


def without_out(command: str) -> str:
    """A command line without its output directory: a second run must not overwrite the first.

    >>> without_out("reconcile run a.toml --out x --seed 1")
    'reconcile run a.toml --seed 1'
    """
    return re.sub(r" --out[ =]('[^']*'|\S+)", "", command)
