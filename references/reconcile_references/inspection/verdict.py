"""From evidence to a ranking, and to how much of it is proved.

A rival is *refuted* where a twin or the model's own predictions prefer the leader by a wide margin.
The histogram and the profiles of rows and columns order the ranking and can speak against a
declaration, but they prove nothing: anyone can make bytes whose histogram is what one likes.

============== ============================================================================
proved         every rival is refuted by a twin or by the model
declared       config or container declare it, the bytes agree, nothing speaks against it
likely         one published layout is left; unpublished ones that fit are not refuted
ambiguous      several are left that nothing tells apart
unexplained    no layout fits the bytes
============== ============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from reconcile.weight import Format, Packing
from reconcile_references.inspection.candidates import Candidate, same_layout
from reconcile_references.inspection.evidence import Evidence, asymmetry

AGREES = 0.5
"""Correlation with a twin from which a layout counts as its own. Ternary rounding of a normal or
uniform weight leaves 0.8 to 0.9; a wrong order of the codes gives 0."""
APART = 0.25
"""Correlation by which a rival must fall behind."""
NATS = 0.5
"""Loss per token by which the leader must beat the frequencies of the tokens, and a rival must
fall behind."""
STRAY = 8.0
"""Standard deviations by which the profiles of two packings must differ."""
SCALE_APART = 2.0
"""Factor by which the scale's two conventions must differ to be told apart by magnitudes."""
LOPSIDED = 0.2
"""Asymmetry of a histogram that speaks against a table where another's is below a fifth of it."""


class Confidence(StrEnum):
    """How much is known of a layout."""

    PROVED = "proved"
    DECLARED = "declared"
    LIKELY = "likely"
    AMBIGUOUS = "ambiguous"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate with everything that was measured for it."""

    candidate: Candidate
    declared: bool
    asymmetry: float
    profile: float
    """Sum of z^2 over pairs of related rows and columns, and their number."""
    pairs: int
    twin: float | None = None
    """Correlation with the twin."""
    scale_error: float | None = None
    """|log2| of the twin's mean magnitude over the weight's."""
    loss: float | None = None
    """Loss of the model, nats per token."""

    @property
    def score(self) -> float:
        """Orders candidates; see the parts."""
        total = 4.0 * self.candidate.published + 6.0 * self.declared - 20 * self.asymmetry
        total += min(20.0, (self.profile - self.pairs) / max(1.0, (2 * self.pairs) ** 0.5) / 2)
        total += 0.0 if self.twin is None else 200 * self.twin
        total -= 0.0 if self.scale_error is None else 10 * min(8.0, self.scale_error)
        total -= 0.0 if self.loss is None else 60 * min(self.loss, 20.0)
        return float(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What was found for a group of tensors that are stored alike."""

    stems: tuple[str, ...]
    confidence: Confidence
    ranking: tuple[Scored, ...]
    ties: tuple[str, ...]
    """Rivals that nothing refutes, best first."""
    reasons: tuple[str, ...]
    """In plain words, what speaks for the leader and what is not known."""
    declared: str = ""
    """Names of the declared formats; empty: none."""

    @property
    def best(self) -> Scored | None:
        """The leader of the ranking."""
        return self.ranking[0] if self.ranking else None


def score(
    candidates: Sequence[Candidate],
    evidence: Mapping[Packing, Evidence],
    declared: Collection[Format],
) -> list[Scored]:
    """What was measured for each candidate, without the model."""
    return [_score(candidate, _of(evidence, candidate), declared) for candidate in candidates]


def _score(candidate: Candidate, found: Evidence, declared: Collection[Format]) -> Scored:
    form = candidate.format
    zeros = [c for c, value in enumerate(form.table) if value == 0 and c not in form.invalid]
    profile = next((found.profile[zero] for zero in zeros if zero in found.profile), None)
    return Scored(
        candidate=candidate,
        declared=any(same_layout(form, other) for other in declared),
        asymmetry=asymmetry(form, found.counts),
        profile=profile.total if profile else 0.0,
        pairs=profile.pairs if profile else 0,
        twin=found.twin.agreement(form.table) if found.twin else None,
    )


def _of(evidence: Mapping[Packing, Evidence], candidate: Candidate) -> Evidence:
    return evidence[replace(candidate.format.packing, pad=False)]


def rank(scored: Iterable[Scored]) -> list[Scored]:
    """Best first; of equals, published ones and then in the order of their names.

    Where the model was run, those it was not run for were refuted before and come last.
    """
    held = list(scored)
    run = any(one.loss is not None for one in held)
    return sorted(
        held, key=lambda s: (run and s.loss is None, -round(s.score, 6), s.candidate.name)
    )


def refuted(leader: Scored, rival: Scored, guessing: float | None) -> str:
    """The witness that prefers the leader by a wide margin; empty where none does."""
    if leader.twin is not None and rival.twin is not None:
        if leader.twin >= AGREES and leader.twin - rival.twin >= APART:
            return "twin"
        close = leader.scale_error is not None and rival.scale_error is not None
        if leader.twin >= AGREES and close and _scale_apart(leader, rival):
            return "twin"
    if leader.loss is None or rival.loss is None or guessing is None:
        return ""
    wins = leader.loss <= guessing - NATS and rival.loss >= leader.loss + NATS
    return "model" if wins else ""


def _scale_apart(leader: Scored, rival: Scored) -> bool:
    """Whether the magnitudes choose between the two conventions of the scale."""
    if leader.scale_error is None or rival.scale_error is None:
        return False
    return leader.scale_error < 0.5 and rival.scale_error > leader.scale_error + SCALE_APART / 2


def stray(leader: Scored, rival: Scored) -> bool:
    """Whether the profiles prefer the leader's packing by `STRAY` standard deviations."""
    if leader.pairs != rival.pairs or not leader.pairs:
        return False
    return bool(leader.profile - rival.profile >= STRAY * 2 * leader.pairs**0.5)


def judge(
    stems: Sequence[str],
    scored: Sequence[Scored],
    declared: Collection[Format],
    guessing: float | None,
    alike: Callable[[Candidate, Candidate], bool],
) -> Layout:
    """The ranking of a group and how much of it is proved.

    Args:
        stems: the tensors of the group.
        scored: candidates that fit every one of them.
        declared: formats that config or container declare, of which one is meant.
        guessing: loss of a model that guesses, where the model was run.
        alike: whether two candidates give the same weight on these tensors.
    """
    ranking = rank(scored)
    said = " or ".join(sorted(form.name for form in declared))
    if not ranking:
        return Layout(
            stems=tuple(stems),
            confidence=Confidence.UNEXPLAINED,
            ranking=(),
            ties=(),
            reasons=("no known packing and table fit these bytes",),
            declared=said,
        )
    leader, rivals = ranking[0], ranking[1:]
    open_ = [
        rival
        for rival in rivals
        if not refuted(leader, rival, guessing) and not alike(leader.candidate, rival.candidate)
    ]
    near = [rival for rival in open_ if not stray(leader, rival)]
    witnessed = any(refuted(leader, rival, guessing) for rival in rivals)
    confidence = _confidence(leader, witnessed, open_, near)
    return Layout(
        stems=tuple(stems),
        confidence=confidence,
        ranking=tuple(ranking),
        ties=tuple(rival.candidate.name for rival in (open_ if confidence != "likely" else near)),
        reasons=tuple(_reasons(leader, rivals, open_, guessing, said)),
        declared=said,
    )


def _confidence(
    leader: Scored, witnessed: bool, open_: Sequence[Scored], near: Sequence[Scored]
) -> Confidence:
    """``witnessed``: a twin or the model has refuted somebody."""
    if witnessed and not open_:
        return Confidence.PROVED
    against = leader.asymmetry > LOPSIDED and any(
        rival.asymmetry < leader.asymmetry / 5 for rival in open_
    )
    others = sum(rival.declared for rival in open_)
    if leader.declared and not others and not against and not _outdone(leader, open_):
        return Confidence.DECLARED
    published = [rival for rival in near if rival.candidate.published]
    if leader.candidate.published and not published and not against:
        return Confidence.LIKELY
    return Confidence.AMBIGUOUS


def _outdone(leader: Scored, rivals: Sequence[Scored]) -> bool:
    """Whether the profiles prefer another packing to the leader's."""
    return any(stray(rival, leader) for rival in rivals)


def _reasons(
    leader: Scored,
    rivals: Sequence[Scored],
    open_: Sequence[Scored],
    guessing: float | None,
    said: str,
) -> list[str]:
    found = []
    if said:
        agrees = "and the bytes agree" if leader.declared else "but the bytes prefer another"
        found.append(f"declared {said}, {agrees}")
    if leader.twin is not None:
        best = max((r.twin for r in rivals if r.twin is not None), default=0.0)
        found.append(f"correlation with the twin {leader.twin:.3f}, best rival {best:.3f}")
    if leader.loss is not None and guessing is not None:
        losses = sorted(r.loss for r in rivals if r.loss is not None)
        best_loss = f", best rival {losses[0]:.2f}" if losses else ""
        found.append(
            f"loss of the model {leader.loss:.2f} nats per token{best_loss}; "
            f"token frequencies {guessing:.2f}"
        )
    if leader.pairs:
        packing = replace(leader.candidate.format.packing, pad=False)
        others = [
            rival.profile
            for rival in rivals
            if replace(rival.candidate.format.packing, pad=False) != packing
        ]
        if others:
            found.append(
                f"profiles of rows and columns: {leader.profile:.0f} over {leader.pairs} pairs, "
                f"best other packing {max(others):.0f}"
            )
    if open_:
        found.append(f"not refuted: {len(open_)} other layouts that fit the same bytes")
    return found
