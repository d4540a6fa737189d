"""What a change did to every row: two reports of the same case, row by row.

Rows are the same where level, tap, check, shape and pass are; kernel and engine may differ, for
that is what is compared. Statements about bits rest on the digests of the candidate's outputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from reconcile.report import ExitCode, Level, Limits, Provenance, Report, Row, Verdict

Key = tuple[object, ...]


class Change(StrEnum):
    """What happened to one row."""

    NEWLY_FAILING = "newly failing"
    NEWLY_OPEN = "no longer decided"
    LOST = "only before"
    NEWLY_PASSING = "newly passing"
    NEW = "only after"
    MOVED = "moved"
    SAME = "same"


_BAD = (Verdict.FAIL, Verdict.INCONCLUSIVE)
_CHANGES = {
    Verdict.FAIL: Change.NEWLY_FAILING,
    Verdict.INCONCLUSIVE: Change.NEWLY_OPEN,
    Verdict.PASS: Change.NEWLY_PASSING,
}
"""What a row became that was something else, or was not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One row before and after; None where a side has no such row."""

    before: Row | None
    after: Row | None
    before_index: int | None
    after_index: int | None

    @property
    def row(self) -> Row:
        """The later of the two."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def change(self) -> Change:
        """What happened, the worst first."""
        if self.before is None:
            return _CHANGES[self.row.verdict] if self.row.verdict in _BAD else Change.NEW
        if self.after is None:
            return Change.LOST
        was, now = self.before.verdict, self.after.verdict
        if was is not now:
            return _CHANGES[now]
        return Change.MOVED if _numbers(self.before) != _numbers(self.after) else Change.SAME

    @property
    def same_bits(self) -> bool | None:
        """Whether the candidate's output has the same bits; None where a side has no digest."""
        if not self.before or not self.after or not (self.before.digest and self.after.digest):
            return None
        return self.before.digest == self.after.digest

    @property
    def factor(self) -> float | None:
        """Utilisation after over before: above 1 is nearer to the limit; None without both."""
        if self.before is None or self.after is None:
            return None
        return _ratio(self.after.utilisation, self.before.utilisation)

    @property
    def limit_moved(self) -> bool:
        """Whether the row is judged by another limit than before."""
        return bool(self.before and self.after) and _limit(self.before) != _limit(self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two reports side by side."""

    before: Report
    after: Report
    pairings: tuple[Pairing, ...]
    """In the order of the later report; rows that only the earlier one has stand at the end."""
    facts: tuple[tuple[str, str, str], ...]
    """(what, before, after) of everything in the provenance that differs."""

    def having(self, change: Change) -> tuple[Pairing, ...]:
        """The rows with this change, those nearest to or furthest beyond their limits first."""
        found = (item for item in self.pairings if item.change is change)
        return tuple(sorted(found, key=_size, reverse=True))

    def counts(self) -> dict[Change, int]:
        """Rows by change; every change is present."""
        counts = Counter(item.change for item in self.pairings)
        return {change: counts[change] for change in Change}

    def bits(self) -> tuple[int, int]:
        """(rows whose outputs have the same bits, rows of which that is known)."""
        known = [item.same_bits for item in self.pairings if item.same_bits is not None]
        return sum(known), len(known)

    def limits_moved(self) -> tuple[Pairing, ...]:
        """Rows that are judged by another limit."""
        return tuple(item for item in self.pairings if item.limit_moved)

    @property
    def exit_code(self) -> int:
        """1: something fails that did not; 2: something is lost or undecided; 0: neither.

        Undecided are also two reports without a common row, and a later report that is
        INCONCLUSIVE as a whole, e.g. for its coverage, where the earlier one was not.
        """
        counts = self.counts()
        if counts[Change.NEWLY_FAILING]:
            return ExitCode.FAIL
        common = any(item.before and item.after for item in self.pairings)
        verdicts = (self.before.verdict, self.after.verdict)
        lost = verdicts[1] is Verdict.INCONCLUSIVE and verdicts[0] is not Verdict.INCONCLUSIVE
        if counts[Change.NEWLY_OPEN] or counts[Change.LOST] or lost or not common:
            return ExitCode.INCONCLUSIVE
        return ExitCode.PASS


def difference(before: Report, after: Report) -> Difference:
    """What changed from one report to the other."""
    several = [{row.kernel for row in report.rows} for report in (before, after)]
    by_kernel = several[0] == several[1] and len(several[0]) > 1
    ours, theirs = _keyed(after.rows, by_kernel), _keyed(before.rows, by_kernel)
    pairings = [
        Pairing(
            before=before.rows[theirs[key]] if key in theirs else None,
            after=after.rows[ours[key]] if key in ours else None,
            before_index=theirs.get(key),
            after_index=ours.get(key),
        )
        for key in dict.fromkeys([*ours, *theirs])
    ]
    return Difference(
        before=before,
        after=after,
        pairings=tuple(pairings),
        facts=tuple(_facts(before, after)),
    )


def _keyed(rows: Iterable[Row], by_kernel: bool) -> dict[Key, int]:
    """Index of each row by what it compares; equal ones are told apart by their order."""
    found: dict[Key, int] = {}
    seen: Counter[Key] = Counter()
    for index, row in enumerate(rows):
        # a row about the whole model stands at the tap where it is worst, which may move
        tap = "" if row.level is Level.MODEL else row.tap
        key = (row.level, tap, row.check, row.shape, row.pass_, row.kernel if by_kernel else "")
        found[(*key, seen[key])] = index
        seen[key] += 1
    return found


def _numbers(row: Row) -> tuple[str, ...]:
    """What a reader compares; as text, so that NaN equals NaN."""
    names = ("max_abs", "nmse", "max_ulp", "kl_mean", "top10_set_gap", "growth_share")
    return (str(row.utilisation), str(row.reason), *(str(row.stats.get(name)) for name in names))


def _limit(row: Row | None) -> Limits | None:
    return row.limits if row else None


def _ratio(after: float | None, before: float | None) -> float | None:
    if after is None or before is None or math.isnan(after) or math.isnan(before):
        return None
    if before == 0 or math.isinf(before):
        return None if after == before else (math.inf if before == 0 else 0.0)
    return after / before


def _size(item: Pairing) -> tuple[float, float]:
    """How much a row matters: by its change of utilisation, then by its utilisation."""
    used = item.row.utilisation
    factor = item.factor
    moved = 0.0 if factor is None else math.inf if factor <= 0 else abs(math.log(factor))
    size = -1.0 if used is None else math.inf if math.isnan(used) else used
    if item.change in (Change.MOVED, Change.NEWLY_PASSING):
        return moved, size
    return size, moved


def _facts(before: Report, after: Report) -> Iterator[tuple[str, str, str]]:
    """Everything in the provenance that is not the same on both sides."""
    ours, theirs = _flat(after), _flat(before)
    for name in dict.fromkeys([*theirs, *ours]):
        was, now = theirs.get(name, "-"), ours.get(name, "-")
        if was != now:
            yield name, was, now


def _flat(report: Report) -> dict[str, str]:
    facts = {"case": report.case}
    for at, side in enumerate(report.provenance):
        role = "reference" if side.side == "reference" else f"candidate {at}"
        facts |= {f"{role}: {name}": value for name, value in _side(side).items()}
    kernels = dict.fromkeys(f"{row.kernel} on {row.engine}" for row in report.rows if row.kernel)
    return facts | {"kernels": ", ".join(kernels) or "-"}


def _side(side: Provenance) -> dict[str, str]:
    """The facts of one side, flat; when and by which command it ran is no difference."""
    plain = {
        "weights": side.checkpoint_sha256,
        "dtype": side.dtype,
        "machine": side.machine,
        "CPU features": side.cpu,
        "commit": side.commit,
    }
    tables = (side.versions, side.settings, side.hashes, side.build)
    named = {name: value for table in tables for name, value in table.items()}
    return plain | named | {f"seed {name}": str(seed) for name, seed in side.seeds.items()}
