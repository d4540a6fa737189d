"""One failing call of a linear kernel: from the call to its diagnosis, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.diagnosis.by_rows import MOST_CALLS, regime, resized
from reconcile.diagnosis.engine import NONE_FITS, SECONDS, Energy, diagnose
from reconcile.diagnosis.evidence import Call, LinearEvidence, Pair, Seen, gather, right_model
from reconcile.diagnosis.families import linear_hypotheses
from reconcile.grouped import PlainWeight
from reconcile.replay import Call as Outcome
from reconcile.report import Diagnosis, Reason

NUMERIC = (Reason.OVER_LIMIT, Reason.BIAS, Reason.NONFINITE, Reason.UNWRITTEN)
"""Reasons whose cause shows in numbers; the others are causes themselves."""
NOT_DIAGNOSED = "not_diagnosed"
"""Name of the note that stands in where the diagnosis itself failed."""
ROWS_SECONDS = 2.0
"""Processor time for finding out which numbers of rows fail."""
FEW_ROWS = 48
MOST_ROWS = 512
"""Random rows that stand in for as many impulses or more; more of them where few show nothing."""


class Ready(Protocol):
    """A kernel that is ready for a weight."""

    def call(self, x: Tensor) -> Outcome:
        """Rows [M, K] to what the kernel gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that failed, and how to call again."""

    weight: PlainWeight
    contract: Contract
    """The kernel's whole contract."""
    x: Tensor
    """[..., K] as the kernel was given it, with its strides."""
    y: Tensor
    """[..., N]."""
    prepare: Callable[[PlainWeight], Ready | Outcome]
    """Gives a kernel that is ready for a weight."""
    impulse: bool = False
    """Whether x holds rows of the identity: random rows say more besides the read-out."""
    others: tuple[Pair, ...] = ()
    """Earlier calls of the same kernel."""
    unwritten: str = ""
    """Which elements poison showed to be unwritten, in words; empty: none, or not asked."""
    failing: tuple[int, ...] = ()
    """Numbers of rows with which calls like this one failed."""
    passing: tuple[int, ...] = ()
    """Numbers of rows with which they passed."""


def diagnose_failure(failure: Failure, seconds: float = SECONDS) -> tuple[Diagnosis, ...]:
    """Cause, second cause, runner-up, or that none fits; never raises.

    A fault in here is a note on the row: `NOT_DIAGNOSED`, explaining nothing.
    """
    try:
        with torch.no_grad():
            found = diagnose(evidence_of(failure), linear_hypotheses(), seconds)
    except Exception as error:  # noqa: BLE001 - the verdict must stand whatever happens here
        found = (note(error),)
    return _with_rows(failure, _with_poison(failure, found))


def _with_rows(failure: Failure, found: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """The first diagnosis, which says for which numbers of rows it fails if not for all."""
    if not found:
        return found
    try:
        with torch.no_grad():
            seen = regime(failure.failing, failure.passing, _trials(failure))
    except Exception:  # noqa: BLE001 - what it is about may fail as it likes
        return found
    if seen is None:
        return found
    text, more = f"{found[0].text}; {seen.text}", {"m": seen.m}
    return (replace(found[0], text=text, parameters=found[0].parameters | more), *found[1:])


def _trials(failure: Failure) -> Callable[[int], bool | None]:
    """The failing rows in calls of other sizes: whether anything lies outside the bound."""
    until, k = time.process_time() + ROWS_SECONDS, failure.weight.shape[1]
    x, y = failure.x.reshape(-1, k), failure.y.reshape(-1, failure.y.shape[-1])
    call = _caller(failure.prepare(failure.weight))
    worst = int(_outside(failure, x, y).sum(1).argmax())
    tried: dict[int, bool | None] = {}

    def fails(m: int) -> bool | None:
        if m not in tried and len(tried) < MOST_CALLS and time.process_time() < until:
            rows = resized(x, worst, m)
            got = call(rows.clone())
            tried[m] = None if got is None else bool(_outside(failure, rows, got).any())
        return tried.get(m)

    return fails


def _outside(failure: Failure, x: Tensor, y: Tensor) -> Tensor:
    """Which outputs [M, N] are not what the reference allows."""
    model = right_model(failure.weight, failure.contract.at(len(x)))
    exact, bound = model.exact(x)
    return Seen.of(y).excess(exact, bound, model) > 0


def _with_poison(failure: Failure, found: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """What poisoned memory shows needs no fit: it is NaN in one call and a number in the next."""
    if not failure.unwritten or any(item.name == "unwritten" for item in found[:1]):
        return found
    text = f"never written, or summed from what was never written: {failure.unwritten}"
    shown = Diagnosis(name="unwritten", explains=1.0, text=text)
    fitted = [item for item in found[:1] if item.name not in (NONE_FITS, NOT_DIAGNOSED)]
    return (shown, *(replace(item, role="runner_up") for item in fitted))


def note(error: Exception) -> Diagnosis:
    """The note that stands in for a diagnosis that could not be made."""
    text = f"the diagnosis itself failed: {type(error).__name__}: {error}"[:300]
    return Diagnosis(name=NOT_DIAGNOSED, explains=0.0, text=text)


def evidence_of(failure: Failure) -> LinearEvidence:
    """Call the kernel again: on impulses, and on random rows where those were what failed."""
    k = failure.weight.shape[1]
    x, y = failure.x.reshape(-1, k), failure.y.reshape(-1, failure.y.shape[-1])
    m = len(x)
    contract = failure.contract.at(m)
    unbiased = _caller(failure.prepare(_without_bias(failure.weight)))
    if failure.impulse:
        call = _caller(failure.prepare(failure.weight))
        for count in (FEW_ROWS, MOST_ROWS):
            rows = _random_rows(min(m, count), k, x.dtype)
            got = call(rows)
            if got is None or failure.contract.at(len(rows)) != contract:
                continue
            evidence = gather(failure.weight, contract, unbiased, rows, got)
            if not Energy.of(evidence, evidence.right).nothing:
                return evidence
        x, y = x[:MOST_ROWS], y[:MOST_ROWS]
    raw = _memory(failure.x)
    return gather(failure.weight, contract, unbiased, x, y, raw, failure.others)


def _random_rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(m)
    return torch.randn(m, k, generator=generator, dtype=torch.float64).to(dtype)


def _without_bias(weight: PlainWeight) -> PlainWeight:
    if weight.bias is None:
        return weight
    return replace(weight, bias=torch.zeros_like(weight.bias))


def _caller(prepared: Ready | Outcome) -> Call:
    """The guarded kernel; None where it gives nothing usable."""

    def call(x: Tensor) -> Tensor | None:
        if isinstance(prepared, Outcome):
            return None
        output = prepared.call(x).output
        return None if output is None else output.reshape(-1, output.shape[-1]).cpu()

    return call


def _memory(x: Tensor) -> tuple[Tensor, ...]:
    """What a kernel that ignores strides reads: from where x begins, or its storage does."""
    if x.is_contiguous():
        return ()
    k = x.shape[-1]
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    starts = dict.fromkeys((x.storage_offset(), 0))
    pieces = (whole[start : start + x.numel()] for start in starts)
    return tuple(piece.reshape(-1, k) for piece in pieces if piece.numel() == x.numel())
