"""What is known about a failing linear: its outputs on the failing rows and on impulses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.diagnosis.model import Impulses, LinearModel
from reconcile.grouped import PlainWeight
from reconcile.linears import reference_weight
from reconcile.numbers.limits import rounding_interval
from reconcile.weight import QuantizedWeight

READ_SECONDS = 2.0
"""Processor time that reading the effective weight may take; the share that was read is said."""
READ_MOST = 1 << 20
"""At most this many elements of the effective weight are read."""
WEIGHED = 1 << 18
"""On at most this many read elements every hypothesis is weighed."""
MOST_ROWS = 144
"""Of more failing rows than these a sample is weighed."""
AMPLITUDES = (3.0, 5.0, 7.0, 11.0, 13.0, 101.0, 107.0, 173.0, 211.0, 251.0)
"""Odd integers: the output's rounding hides other digits of the weight at each of them."""

Pair = tuple[Tensor, Tensor]
"""Rows [M, K] that a kernel was given and what it gave, [M, N]."""
Call = Callable[[Tensor], Tensor | None]
"""Rows [M, K] to what the kernel gives, [M, N], or None where it gives nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Outputs of the kernel and, once computed, the numbers that round to each."""

    y: Tensor
    """[M, N] in the output's dtype."""
    intervals: dict[str, tuple[Tensor, Tensor]]
    """By kind of rounding: the ends of the interval of numbers that round to each output."""

    @classmethod
    def of(cls, y: Tensor) -> Seen:
        """Outputs, widened on demand."""
        return cls(y, {})

    def excess(self, exact: Tensor, bound: Tensor, model: LinearModel) -> Tensor:
        """How far each output is from what the model allows, [M, N] float64; 0 inside.

        What is NaN or infinite on one side only counts as the largest finite size of either.
        """
        if model.store is not None:
            wide = self.y.double()
            low, high = model.store(exact - bound), model.store(exact + bound)
            over = torch.maximum(low - wide, wide - high).clamp_min(0.0)
        else:
            kind = model.contract.output_rounding
            if kind not in self.intervals:
                self.intervals[kind] = rounding_interval(self.y, kind)
            below, above = self.intervals[kind]
            over = (torch.maximum(below - exact, exact - above) - bound).clamp_min(0.0)
        return self._with_nonfinite(over, exact)

    def _with_nonfinite(self, over: Tensor, exact: Tensor) -> Tensor:
        if math.isfinite(float(over.sum())):
            return over
        wide = self.y.double()
        same = (wide.isnan() & exact.isnan()) | (wide == exact)
        size = max(_amax(exact), _amax(wide)) or 1.0
        return torch.where(
            torch.isfinite(over), over, torch.where(same, 0.0, over.new_tensor(size))
        )


def _amax(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearEvidence:
    """Everything that the hypotheses about one linear are fitted to."""

    weight: PlainWeight
    right: LinearModel
    """The reference."""
    read: tuple[Tensor, Tensor]
    """Every column that was read [R] and the effective weight there, float64 [N, R]; `columns`
    are those of them on which hypotheses are weighed."""
    given: Impulses
    """The impulses; none where the weight could not be read."""
    impulses: Seen
    """[C, N]."""
    x: Tensor
    """[M, K]: the failing rows, or random ones where those were impulses."""
    rows: Seen
    """[M, N] on them."""
    sampled: bool = False
    """Whether impulses were left out, so that of the others it is not known in which row of a
    call they were."""
    places: Tensor
    """[M] the row of the failing call that each row of ``x`` is."""
    whole: bool = True
    """Whether ``x`` is all that one call was given, not a sample of its rows."""
    raw: tuple[Tensor, ...] = ()
    """[M, K] each: what the memory of a failing x that is not contiguous holds, read in order."""
    slack: float = 1.0
    """Share of the bound that is granted: 0 where errors inside it lean one way."""
    others: tuple[Pair, ...] = ()
    """Earlier calls of the same kernel, for a stale output."""
    coverage: float = 1.0
    """Share of the weight's columns that was read."""

    @property
    def m(self) -> int:
        """Rows of the failing call."""
        return int(self.places[-1]) + 1

    @property
    def columns(self) -> Tensor:
        """[C] the k of each impulse."""
        return self.given.columns

    @property
    def readout(self) -> Tensor:
        """The effective weight as it was read, float64 [N, C]; outputs were rounded."""
        return (self.impulses.y.double() / self.right.amplitudes(self.given)[:, None]).T

    def excess(self, model: LinearModel) -> tuple[Tensor | None, Tensor]:
        """Excess on the impulses [C, N] and on the rows [M, N].

        None for the impulses where there are none, or the model says nothing of them.
        """
        impulses = None
        moved = model.after is not None and self.sampled
        if len(self.columns) and not model.rows_only and not moved:
            exact, bound = model.impulse(self.given)
            impulses = self.impulses.excess(exact, self.slack * bound, model)
        exact, bound = model.exact(self.x)
        return impulses, self.rows.excess(exact, self.slack * bound, model)


def right_model(weight: PlainWeight, contract: Contract) -> LinearModel:
    """The reference's own reading of a linear; ``contract``: the one for the number of rows."""
    bias = None if weight.bias is None else weight.bias.double()
    return LinearModel(
        weight=reference_weight(weight, contract, torch.float64), bias=bias, contract=contract
    )


def gather(
    weight: PlainWeight,
    contract: Contract,
    unbiased: Call,
    x: Tensor,
    y: Tensor,
    raw: tuple[Tensor, ...] = (),
    others: tuple[Pair, ...] = (),
) -> LinearEvidence:
    """Read the effective weight in calls of as many rows as failed.

    Args:
        weight: the weight as the reference decodes it.
        contract: the contract for the number of rows.
        unbiased: the kernel with a bias of zeros.
        x: [M, K] the rows on which it failed.
        y: [M, N] what it gave.
        raw: what the memory of x holds where x is not contiguous, see `LinearEvidence`.
        others: earlier calls.
    """
    plan = _impulses(weight, x.dtype)
    step = max(1, min(len(x), len(plan[0])))
    plan = _in_whole_calls(plan, step)
    read: list[Tensor] = []
    started = time.process_time()
    for start in range(0, len(plan[0]), step):
        got = unbiased(_rows(plan, slice(start, start + step), x))
        if got is None:
            break
        read.append(got)
        if time.process_time() - started > READ_SECONDS:
            break
    seen = torch.cat(read) if read else y.new_zeros((0, y.shape[-1]))
    columns, sizes = plan[0][: len(seen)], plan[1][: len(seen)]
    right = right_model(weight, contract)
    given = Impulses(columns, sizes.to(x.dtype), step)
    read_out = (seen.double() / right.amplitudes(given)[:, None]).T
    chosen = _telling(read_out - right.weight[:, columns])
    kept = _sampled(len(x))
    return LinearEvidence(
        weight=weight,
        right=right,
        read=(columns, read_out),
        given=Impulses(columns[chosen], given.sizes[chosen], step),
        impulses=Seen.of(seen[chosen]),
        x=x[kept],
        rows=Seen.of(y[kept]),
        sampled=len(chosen) < len(columns) or len(kept) < len(x),
        places=kept,
        whole=len(kept) == len(x),
        raw=raw,
        others=others,
        coverage=len(torch.unique(columns)) / weight.shape[1],
    )


def _telling(error: Tensor) -> Tensor:
    """Impulses on which to weigh: all, or those with the largest errors [N, C] and others."""
    n, count = error.shape
    most = max(64, WEIGHED // max(1, n))
    if count <= most:
        return torch.arange(count)
    worst = torch.nan_to_num(error.square().sum(0), nan=math.inf).topk(most // 2).indices
    others = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    others = others[~torch.isin(others, worst)][: most - len(worst)]
    return torch.cat([worst, others]).sort().values


def _sampled(m: int) -> Tensor:
    """All of few rows; of many the first, the last and some between."""
    if m <= MOST_ROWS:
        return torch.arange(m)
    return torch.cat([torch.arange(8), torch.linspace(8, m - 9, 16).long(), torch.arange(m - 8, m)])


def _impulses(weight: PlainWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns and amplitudes: all of K or a sample with both ends, then some at odd sizes."""
    n, k = weight.shape
    most = max(64, READ_MOST // n)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(k, generator=generator)
    columns = torch.arange(k)
    if k > most:
        ends = torch.cat([columns[: most // 4], columns[-(most // 4) :]])
        columns = torch.unique(torch.cat([ends, order])[: 2 * most])
        columns = torch.cat([ends, columns[torch.randperm(len(columns), generator=generator)]])
        columns = torch.unique(columns[:most])
        columns = columns[torch.randperm(len(columns), generator=generator)]
    again = order[: min(k, max(16, most // 16))]
    sizes = torch.tensor(AMPLITUDES)[torch.arange(len(again)) % len(AMPLITUDES)]
    if dtype == torch.bfloat16:
        sizes = sizes.to(dtype).to(torch.float32)  # 8 significant bits hold them all
    return torch.cat([again, columns]), torch.cat([sizes, torch.ones(len(columns))])


def _in_whole_calls(plan: tuple[Tensor, Tensor], step: int) -> tuple[Tensor, Tensor]:
    """The impulses, with the first ones again at the end to fill the last call of ``step`` rows."""
    missing = -len(plan[0]) % step
    columns, sizes = (torch.cat([part, part[:missing]]) for part in plan)
    return columns, sizes


def _rows(plan: tuple[Tensor, Tensor], part: slice, like: Tensor) -> Tensor:
    columns, sizes = plan[0][part], plan[1][part]
    x = torch.zeros(len(columns), like.shape[-1], dtype=like.dtype)
    x[torch.arange(len(columns)), columns] = sizes.to(like.dtype)
    return x


def logical_codes(weight: PlainWeight) -> Tensor | None:
    """Codes [N, K] of a quantised weight, int64; None of a dense one."""
    return weight.unpacked().long() if isinstance(weight, QuantizedWeight) else None


def effective_scale(weight: QuantizedWeight) -> Tensor:
    """What multiplies each code's value, float64 [N, K]."""
    spread = weight.format.spread(weight.format.scale_values(weight.scales), weight.shape)
    scale = spread if weight.format.scale_convention == "multiply" else 1 / spread
    return scale.expand(weight.shape)
