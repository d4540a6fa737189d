"""Rank what explains a failing linear: best, a second independent fault, runner-up, or none.

Every hypothesis is measured by the same number: the share of the error energy beyond the rounding
bound that disappears when the reference is replaced by what the hypothesis says was computed,
on the failing rows and on the effective weight that impulses read out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import Hypothesis
from reconcile.diagnosis.model import Fit, LinearModel
from reconcile.report import Diagnosis

SURE = 0.9
"""Share of the error energy that one fault, or two together, must explain to be named."""
ENOUGH = 0.99
"""Share from which the slow hypotheses are not tried."""
PART = 0.1
"""Share that the first of two faults must explain at least."""
PER_PARAMETER = 1e-4
"""What a doubling of the number of fitted parameters must add to the share explained."""
SECONDS = 6.0
"""Processor time for fitting one row; hypotheses that had no turn are said."""
GENERAL = ("_ratio", "_offset", "code_table")
"""Names that say how, not why: they equal every special case and are no rival to it."""
NONE_FITS = "none_fits"
"""Name of the diagnosis where no hypothesis explains the row."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A fit with what it explains."""

    fit: Fit
    explains: float
    """Share of the error energy of the base model that the fit removes; below 0: it adds."""
    score: float
    """The share less what its parameters and its family cost."""


@dataclass(slots=True)
class Ranking:
    """Fits of one round, best first, and what went wrong in hypotheses."""

    weighed: list[Weighed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tried: int = 0

    @property
    def best(self) -> float:
        """The largest share explained so far."""
        return max((item.explains for item in self.weighed), default=0.0)


@dataclass(frozen=True, slots=True)
class Energy:
    """Error energy beyond the bound, on the impulses and on the rows."""

    impulses: float | None
    """None where nothing was seen, or nothing is said, of the impulses."""
    rows: float

    @classmethod
    def of(cls, evidence: LinearEvidence, model: LinearModel) -> Energy:
        """That of one model."""
        impulses, rows = evidence.excess(model)
        return cls(
            impulses=None if impulses is None else float(impulses.square().sum()),
            rows=float(rows.square().sum()),
        )

    @property
    def nothing(self) -> bool:
        """Whether nothing is wrong."""
        return not self.impulses and self.rows == 0


def explained(before: Energy, after: Energy) -> float:
    """Share of the energy that is gone, the mean over the kinds of evidence that had some.

    Where one kind had none, what the hypothesis predicts there was not seen: it is refuted.
    """
    shares = []
    for had, has in ((before.impulses, after.impulses), (before.rows, after.rows)):
        if had is None or has is None:
            continue
        if had > 0:
            shares.append(1 - has / had)
        elif has > 0:
            return -math.inf
    return sum(shares) / len(shares) if shares else 0.0


def rank(
    evidence: LinearEvidence,
    base: LinearModel,
    hypotheses: Iterable[Hypothesis],
    until: float = math.inf,
) -> Ranking:
    """Fit every hypothesis to what ``base`` leaves unexplained."""
    ranking = Ranking()
    before = Energy.of(evidence, base)
    if before.nothing:
        return ranking
    late: list[str] = []
    for hypothesis in sorted(hypotheses, key=lambda item: item.last_resort):
        if hypothesis.last_resort and ranking.best >= ENOUGH:
            continue
        if time.process_time() > until:
            late.append(hypothesis.names[0])
            continue
        try:
            for fit in hypothesis.fit(evidence, base):
                share = explained(before, Energy.of(evidence, fit.model))
                ranking.weighed.append(_weighed(fit, share, hypothesis.cost))
                ranking.tried += 1
        except Exception as error:  # noqa: BLE001 - a fault of a hypothesis must not lose the row
            ranking.notes.append(f"{hypothesis.names[0]}: {type(error).__name__}: {error}"[:200])
    if late:
        ranking.notes.append(f"no time was left for {', '.join(late)}")
    ranking.weighed.sort(key=lambda item: -item.score)
    return ranking


def _weighed(fit: Fit, share: float, cost: int) -> Weighed:
    share = share if math.isfinite(share) else -math.inf
    penalty = PER_PARAMETER * math.log2(1 + fit.free) + PER_PARAMETER / 50 * cost
    return Weighed(fit, share, share - penalty)


def diagnose(
    evidence: LinearEvidence, hypotheses: Sequence[Hypothesis], seconds: float = SECONDS
) -> tuple[Diagnosis, ...]:
    """Cause, second cause where there are two, and runner-up; or that none fits."""
    until = time.process_time() + seconds
    if Energy.of(evidence, evidence.right).nothing:
        evidence = replace(evidence, slack=0.0)  # inside the bound, but leaning one way
    first = rank(evidence, evidence.right, hypotheses, until)
    if not first.weighed:
        return (_none(first, None),) if first.notes or first.tried else ()
    best = first.weighed[0]
    if best.explains >= SURE:
        second = _second(evidence, best, hypotheses, until)
        return _causes(evidence, first, best, second)
    pair = _pair(evidence, first, hypotheses, until)
    if pair is not None:
        return _causes(evidence, first, *pair)
    return (_none(first, best),)


def _second(
    evidence: LinearEvidence, best: Weighed, hypotheses: Sequence[Hypothesis], until: float
) -> Weighed | None:
    """What explains the rest, if something is left and something does."""
    rest = rank(evidence, best.fit.model, hypotheses, until)
    found = rest.weighed[0] if rest.weighed else None
    return found if found is not None and found.explains >= SURE else None


def _pair(
    evidence: LinearEvidence, first: Ranking, hypotheses: Sequence[Hypothesis], until: float
) -> tuple[Weighed, Weighed] | None:
    """Two faults of which neither alone explains enough."""
    tried = {item.fit.name: item for item in reversed(first.weighed) if item.explains >= PART}
    candidates = sorted(tried.values(), key=lambda item: -item.score)[:3]
    for one in candidates:
        other = _second(evidence, one, hypotheses, until)
        if other is not None:
            return one, other
    return None


def _causes(
    evidence: LinearEvidence, first: Ranking, best: Weighed, second: Weighed | None
) -> tuple[Diagnosis, ...]:
    said = [_cause(evidence, best, first)]
    if second is not None:
        said.append(_diagnosis(second, role="also"))
    taken = {item.name for item in said}
    other = next((item for item in first.weighed if item.fit.name not in taken), None)
    if other is not None and other.explains > 0:
        said.append(_diagnosis(other, role="runner_up"))
    return tuple(said)


def _cause(evidence: LinearEvidence, best: Weighed, ranking: Ranking) -> Diagnosis:
    equals = [
        item.fit.name
        for item in ranking.weighed[1:]
        if item.fit.name != best.fit.name
        and item.fit.free <= best.fit.free + 1
        and not item.fit.name.endswith(GENERAL)
        and abs(item.explains - best.explains) <= PER_PARAMETER
        and _same(best.fit.model, item.fit.model)
    ]
    found = _diagnosis(best, role="cause")
    text = found.text
    if evidence.coverage < 1:
        text += f"; {evidence.coverage:.0%} of the weight's columns were read"
    if equals:
        names = ", ".join(dict.fromkeys(equals))
        text += f"; the same numbers would come from {names}: nothing here tells them apart"
    notes = f"; notes: {'; '.join(ranking.notes)}" if ranking.notes else ""
    return Diagnosis(
        name=found.name,
        explains=found.explains,
        parameters=found.parameters,
        text=text + notes,
        role="cause",
    )


def _same(one: LinearModel, other: LinearModel) -> bool:
    """Whether two models predict the same numbers here."""
    fields = ("contract", "after", "store", "accumulate", "quantise", "before_bias")
    if any(getattr(one, name) != getattr(other, name) for name in fields):
        return False
    if one.weight.shape != other.weight.shape:
        return False
    near = torch.isclose(one.weight, other.weight, rtol=2.0**-20, atol=0.0, equal_nan=True)
    return bool(near.all()) and _same_bias(one, other)


def _same_bias(one: LinearModel, other: LinearModel) -> bool:
    if one.bias is None or other.bias is None:
        return one.bias is other.bias
    return bool(torch.isclose(one.bias, other.bias).all())


def _diagnosis(item: Weighed, role: str) -> Diagnosis:
    return Diagnosis(
        name=item.fit.name,
        explains=max(0.0, min(1.0, item.explains)),
        parameters=item.fit.parameters,
        text=item.fit.text,
        role=role,  # type: ignore[arg-type]
    )


def _none(ranking: Ranking, best: Weighed | None) -> Diagnosis:
    text = f"none of {ranking.tried} fits explains it"
    if best is not None and best.explains > 0:
        text += f"; the best, {best.fit.name}, explains {best.explains:.0%}: {best.fit.text}"
    if ranking.notes:
        text += f"; notes: {'; '.join(ranking.notes)}"
    share = 0.0 if best is None else max(0.0, min(1.0, best.explains))
    return Diagnosis(name=NONE_FITS, explains=share, text=text, role="cause")
