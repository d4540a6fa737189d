"""What a report keeps of a row's tensors, so that a reader can see the error without them.

Everything here is small: at most `MOST_BINS` bins along an axis, `MOST_ELEMENTS` elements. No
tensors and no torch in this file; `reconcile.judging.examine` computes the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_BINS = 32
"""Bins along either axis of a heat map."""
MOST_STEPS = 64
"""Bins of a profile, and positions of a series."""
MOST_ELEMENTS = 10
"""Elements of a list of the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One element of both sides."""

    index: tuple[int, ...]
    candidate: float
    reference: float
    """Before rounding to the candidate's dtype."""
    error: float
    """candidate - reference; infinite where only one of them is finite."""
    ulps: int | None
    """Distance in representable values of the candidate's dtype from the reference rounded once;
    None where either is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The largest error of each bin of a matrix, down-sampled."""

    rows: int
    """Rows of the whole matrix."""
    columns: int
    row_axis: str
    """What a row is: ``m`` (a row of activations) or ``k`` (an impulse of the weight)."""
    column_axis: str
    bin_rows: int
    """Rows of the matrix in one bin; the last bin may hold fewer."""
    bin_columns: int
    tile_rows: int | None
    """Rows between two boundaries of the format's blocks; None where rows have none."""
    tile_columns: int | None
    unit: str
    """``share of the bound`` or ``|c - r|``."""
    values: tuple[tuple[float, ...], ...]
    """[bins of rows][bins of columns]: the largest of each bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Errors by size beside those of a reference that was only rounded to the output's dtype.

    Pairs (e, count): elements with 2^(e-1) <= |error| < 2^e.
    """

    seen: tuple[tuple[int, int], ...]
    """Of c - r."""
    expected: tuple[tuple[int, int], ...]
    """Of fl(r) - r: what one correct rounding leaves."""
    seen_zero: int
    """Elements without any error."""
    expected_zero: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The root mean square error along one axis, in bins."""

    axis: str
    size: int
    """Length of the axis."""
    step: int
    """Places in one bin; the last bin may hold fewer."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One rank of the largest logits at one position."""

    rank: int
    token: int
    """The reference's token of this rank."""
    logit: float
    """The reference's logit of it."""
    margin: float | None
    """By how much it leads the next rank in the reference; None at the last."""
    candidate_token: int
    """The candidate's token of this rank."""
    candidate_logit: float
    """The candidate's logit of the reference's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The largest logits at the position where the two sides differ most."""

    position: int
    """Place in the prompt; the logits predict the token after it."""
    positions: int
    ranks: tuple[Ranked, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was kept of one row's tensors."""

    worst: tuple[Element, ...] = ()
    """Largest |c - r| first, NaN before all; elements without error are left out."""
    heat: HeatMap | None = None
    histogram: Histogram | None = None
    row_profile: Profile | None = None
    column_profile: Profile | None = None
    ranking: Ranking | None = None
    """Only of model rows."""
    kl_by_token: tuple[float, ...] = field(default=())
    """KL(reference || candidate) in nats at each position, in bins the largest."""
