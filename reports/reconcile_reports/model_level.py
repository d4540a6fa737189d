"""The whole model: logits, top 10, KL by token, perplexity, prompt by prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reconcile.evidence import Ranking
from reconcile.report import Level, Report, Row
from reconcile_reports.figures import Figure, kl_figure
from reconcile_reports.wording import number, percent, real


@dataclass(frozen=True, slots=True)
class Prompt:
    """One pass of one candidate."""

    kernel: str
    pass_: str
    rows: dict[str, tuple[int, Row]]
    """By check: index and row."""
    facts: tuple[tuple[str, str], ...]
    ranking: Ranking | None
    kl: Figure | None


def prompts(report: Report) -> list[Prompt]:
    """Every pass that has rows of level model."""
    groups: dict[tuple[str, str], dict[str, tuple[int, Row]]] = {}
    for index, row in enumerate(report.rows):
        if row.level is Level.MODEL:
            groups.setdefault((row.kernel, row.pass_), {})[row.check] = (index, row)
    return [_prompt(kernel, pass_, rows) for (kernel, pass_), rows in groups.items()]


def _prompt(kernel: str, pass_: str, rows: dict[str, tuple[int, Row]]) -> Prompt:
    looks = [row.evidence for _, row in rows.values() if row.evidence]
    ranking = next((look.ranking for look in looks if look.ranking), None)
    values = next((look.kl_by_token for look in looks if look.kl_by_token), ())
    positions = ranking.positions if ranking else len(values)
    return Prompt(
        kernel=kernel,
        pass_=pass_,
        rows=rows,
        facts=tuple(_facts({k: v for _, row in rows.values() for k, v in row.stats.items()})),
        ranking=ranking,
        kl=kl_figure(values, positions) if values else None,
    )


def _facts(stats: dict[str, object]) -> list[tuple[str, str]]:
    """The numbers that a reader of a model wants, with units."""
    found = [
        ("same first token, share", _share(stats.get("argmax_agreement"))),
        ("same top-10 set, share", _share(stats.get("top10_sets_equal"))),
        ("margin overtaken, logits", number(stats.get("top10_set_gap"))),
        ("KL mean, nat", number(stats.get("kl_mean"))),
        ("KL largest, nat", number(stats.get("kl_max"))),
    ]
    ours, theirs = (perplexity(stats.get(f"nll_{side}")) for side in ("candidate", "reference"))
    difference = None if ours is None or theirs is None else ours - theirs
    return [
        *found,
        ("perplexity, candidate", number(ours)),
        ("perplexity, reference", number(theirs)),
        ("perplexity, difference", "-" if difference is None else f"{difference:+.3g}"),
    ]


def _share(value: object) -> str:
    share = real(value)
    return "-" if share is None else percent(share)


def perplexity(value: object) -> float | None:
    """Exp of a mean negative log likelihood; None without one.

    >>> perplexity(0.0), perplexity(None), perplexity(1e4)
    (1.0, None, inf)
    """
    loss = real(value)
    if loss is None or math.isnan(loss):
        return None
    return math.exp(loss) if loss < 700 else math.inf
