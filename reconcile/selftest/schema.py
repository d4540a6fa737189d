"""What a suite is made of: mutants with the answer that must come, and clean variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from reconcile.report import Diagnosis, Report, Verdict

Area = Literal["formats", "kernels", "loaders", "references", "capture", "gate", "modules"]
"""Where a fault sits."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a user sees of one run: the exit code, and what is named first."""

    exit_code: int
    """0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input or a trace that is refused."""
    tap: str = ""
    """Tap of the first row that is not PASS; FAIL rows come before INCONCLUSIVE ones."""
    reason: str = ""
    """Its reason."""
    diagnosis: tuple[Diagnosis, ...] = ()
    """Explanations of the first failing row that has any, best first."""
    text: str = ""
    """Its sentence, or the message of the error that ended the run."""
    check: str = ""
    """Its check."""

    @classmethod
    def of(cls, report: Report) -> Seen:
        """The first divergence of a report; where nothing fails, the first row not PASS."""
        failing = [row for row in report.rows if row.verdict is Verdict.FAIL]
        bad = failing or [row for row in report.rows if row.verdict is not Verdict.PASS]
        if not bad:
            return cls(exit_code=report.exit_code)
        first = bad[0]
        explained = [row.diagnosis for row in bad if row.tap == first.tap and row.diagnosis]
        return cls(
            exit_code=report.exit_code,
            tap=first.tap,
            reason=first.reason.value if first.reason else "",
            diagnosis=explained[0] if explained else (),
            text=first.text,
            check=first.check,
        )


@dataclass(frozen=True, slots=True)
class Cause:
    """A diagnosis that is right: its name, and what its parameters must be."""

    name: str
    parameters: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    """Parameter to a check of its value; only what is listed is checked."""

    def matches(self, diagnosis: Diagnosis) -> bool:
        """Whether the diagnosis has the name, and the parameters that are listed."""
        return diagnosis.name == self.name and all(
            name in diagnosis.parameters and right(diagnosis.parameters[name])
            for name, right in self.parameters.items()
        )


class Trial(Protocol):
    """How a fault is run, and the same without the fault."""

    def run(self, *, faulty: bool) -> Seen:
        """What is seen of the mutant, or of its clean twin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault, one small patch, and the answer that must come."""

    id: str
    """``<file>/<fault>``, e.g. ``formats/fp8_subnormals``; unique."""
    area: Area
    source: str
    """The public report that it is taken from, e.g. ``vllm-project/vllm#7210``, and in what way."""
    patch: str
    """What is changed, in one sentence."""
    trial: Trial
    op: str = ""
    """The tap that must be named first; empty where no op is at fault."""
    causes: tuple[str | Cause, ...] = ()
    """Diagnoses that are right, the right one first; empty where a verdict is all there is."""
    exit_code: int = 1
    reasons: tuple[str, ...] = ()
    """Reasons that the first row not PASS may have; empty: any."""
    says: str = ""
    """Text that the message must hold, for runs that end with an error."""
    hard: bool = False
    """Among the hardest for published gates."""
    quick: bool = True
    """Part of the subset ``quick``, which CI runs."""

    def detected(self, seen: Seen) -> bool:
        """Whether the verdict, the reason and the message are the expected ones."""
        return (
            seen.exit_code == self.exit_code
            and (not self.reasons or seen.reason in self.reasons)
            and self.says in seen.text
        )

    def located(self, seen: Seen) -> bool:
        """Whether the right op is named first."""
        return seen.tap == self.op

    def rank(self, seen: Seen) -> int | None:
        """Place of the first acceptable diagnosis, 1 the best; None where none is."""
        causes = [Cause(cause) if isinstance(cause, str) else cause for cause in self.causes]
        for place, diagnosis in enumerate(seen.diagnosis, start=1):
            if any(cause.matches(diagnosis) for cause in causes):
                return place
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A correct kernel or a legal perturbation, which must never be flagged."""

    id: str
    """``<file>/<variant>``; unique."""
    what: str
    """What is unusual about it, in one sentence."""
    run: Callable[[int], Report]
    """Seed to report."""
    seeds: int = 40
