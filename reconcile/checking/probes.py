"""Level-0 probes: inputs on which the right answer is known to the last bit, or nearly.

They are generated from the weight's format and the kernel's contract, so that a new format or
kernel gets them for nothing. Each says what it can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from reconcile.contract import DTYPES, UNIT_ROUNDOFF, Contract
from reconcile.linears import DenseWeight
from reconcile.weight import Format, QuantizedWeight

BUDGET = 2e10
"""Multiply-adds that one probe may cost; beyond it slabs of K are sampled."""
SMALL_SCALES = (0.25, 0.5, 1.0, 2.0)
"""Powers of two that the integer probe uses as scales."""
TAILS = (8, 16, 32)
"""What a last block may hold besides one element more or less: the widths of vectors and tiles."""
MARGIN = 64
"""Rows, columns and blocks on either side of which the edge sweep goes."""

AnyWeight = QuantizedWeight | DenseWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One call with a known answer."""

    name: str
    """``impulse``, ``code_table``, ``integer``, ``edge``, ``special``, ``layout`` or ``bound``."""
    sees: str
    """What it can see, for the report."""
    weight: AnyWeight
    x: Tensor
    """[M, K] in the activations' dtype."""
    columns: Tensor | None = None
    """For impulses: the k of each row, where x is ``amplitude`` times that row of the identity."""
    amplitude: float = 1.0
    expect: Literal["bound", "exact", "rounded", "special"] = "bound"
    """``bound``: within the a-priori bound of the non-zero products; ``exact``: equal by value;
    ``rounded``: the exact sum, rounded once as the contract says."""
    products: int = 0
    """Most non-zero products per element; 0: K."""
    synthetic: bool = False
    """The weight is made up: a kernel may decline its shape."""
    layout: str = ""
    """How x lies in memory, where it is not contiguous."""


def impulses(
    weight: AnyWeight, contract: Contract, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """Rows of the identity: the output is the effective weight, once in each regime of M.

    Also a sweep of small integer amplitudes, which shows a scale that is kept in low precision:
    at one amplitude it hides behind the output's rounding 94 times in 100.
    """
    weight = _with_bias(weight, weight, torch.zeros_like)
    n, k = weight.shape
    whole = min(k, max(1, int(BUDGET / (n * k))))
    regimes = [largest for largest, _ in contract.by_batch]
    order = torch.randperm(k, generator=generator) if whole < k else torch.arange(k)
    yield _impulse(weight, dtype, order[:whole])
    for m in regimes:
        for start in range(0, min(k, 16 * m), m):
            chosen = torch.randperm(k, generator=generator)[: min(m, k - start)]
            yield _impulse(weight, dtype, chosen)
    amplitudes = torch.randint(1, 256, (min(8, k),), generator=generator).tolist()
    for amplitude in amplitudes:
        chosen = torch.randperm(k, generator=generator)[: min(16, k)]
        yield _impulse(weight, dtype, chosen, float(amplitude))


def _impulse(
    weight: AnyWeight, dtype: torch.dtype, columns: Tensor, amplitude: float = 1.0
) -> Probe:
    x = torch.zeros(len(columns), weight.shape[1], dtype=dtype)
    x[torch.arange(len(columns)), columns] = amplitude
    share = len(columns) / weight.shape[1]
    sees = "decode, scale, layout and the rounding of every weight it reaches"
    return Probe(
        name="impulse",
        sees=f"{sees}; {share:.0%} of K at amplitude {amplitude:g}",
        weight=weight,
        x=x,
        columns=columns,
        amplitude=amplitude,
        products=1,
    )


def code_tables(
    weight: AnyWeight, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """Weights that hold every code of the format, under scales that are no powers of two.

    Codes of NaN stand in rows of their own, one each: 0 * NaN spoils a whole row.
    """
    if isinstance(weight, DenseWeight):
        return
    form = weight.format
    legal = [c for c in range(len(form.table)) if c not in form.invalid]
    finite = [c for c in legal if math.isfinite(form.table[c])]
    odd = [c for c in legal if not math.isfinite(form.table[c])]
    n, k = _table_shape(form)
    for codes, what in ((finite, "every finite code"), (odd, "every code that is not finite")):
        if not codes:
            continue
        grid = torch.tensor(finite)[torch.randint(len(finite), (n, k), generator=generator)]
        if codes is odd:
            rows = torch.arange(len(odd)) * (n // len(odd))
            grid[rows, torch.randint(k, (len(odd),), generator=generator)] = torch.tensor(odd)
        else:
            places = torch.randperm(n * k, generator=generator)
            spread = torch.tensor(finite).repeat(-(-n * k // len(finite)))[: n * k]
            grid = grid.flatten().index_copy(0, places, spread).view(n, k)
        made = synthetic(form, grid, _odd_scales(form, (n, k), generator))
        made = _with_bias(made, weight, torch.zeros_like)
        sees = f"{what} of {form.name} at {'several places' if codes is finite else 'one place'}"
        probe = _impulse(made, dtype, torch.arange(k))
        yield replace(probe, name="code_table", sees=sees, synthetic=True)


def nan_scales(
    weight: AnyWeight, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """A weight with one block under the E8M0 byte 255, which is NaN and no infinity."""
    if isinstance(weight, DenseWeight) or weight.format.scale_encoding != "e8m0":
        return
    form = weight.format
    shape = _table_shape(form)
    finite = torch.tensor(_finite_codes(form))
    grid = finite[torch.randint(len(finite), shape, generator=generator)]
    scales = _odd_scales(form, shape, generator)
    scales[0, -1] = 255
    made = _with_bias(synthetic(form, grid, scales), weight, torch.zeros_like)
    probe = _impulse(made, dtype, torch.arange(shape[1]))
    sees = "the scale byte 255, which stands for NaN and spoils its rows"
    yield replace(probe, name="code_table", sees=sees, synthetic=True)


def _table_shape(form: Format) -> tuple[int, int]:
    """A shape that holds every code several times, in more than one block, without edges."""
    rows, columns = form.block or (1, 1)
    return max(2 * rows, 256), max(2 * columns, 128)


def integers(
    weight: AnyWeight, contract: Contract, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """Small integers times quanta: every order of summation is exact, and so is the output.

    Sees dropped, doubled or misplaced terms, narrow accumulators and wrong split-K.
    """
    k = weight.shape[1]
    quantum = min(SMALL_SCALES)
    largest = 2.0 * max(SMALL_SCALES)  # |w| <= 2, times the largest scale
    narrow = contract.partials if contract.split_k > 1 else contract.accumulator
    digits = min(-math.log2(UNIT_ROUNDOFF[d]) for d in (narrow, contract.output))
    terms = max(1, int(2.0**digits * quantum / largest))
    made = _with_bias(integer_weight(weight, generator), weight, torch.ones_like)
    rows = min(max(4, 2 * -(-k // terms)), 256)
    x = torch.zeros(rows, k, dtype=dtype)
    for row in range(rows):
        start = row * terms % k
        chosen = (torch.arange(min(terms, k)) + start) % k
        signs = torch.randint(2, (len(chosen),), generator=generator) * 2 - 1
        x[row, chosen] = signs.to(dtype)
    yield Probe(
        name="integer",
        sees=f"dropped, doubled or misplaced terms; {min(terms, k)} products a row, all K covered",
        weight=made,
        x=x,
        expect="exact" if contract.activation == "none" else "bound",
        synthetic=True,
    )
    if contract.activation == "none":
        yield from _stores(made, contract, dtype, generator)


def _stores(
    made: AnyWeight, contract: Contract, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """Integer sums that the accumulator holds and the output does not: one rounding is left.

    Many lie half-way between two values of the output. Nothing where the accumulator, or the
    dtype of partial sums, has no bits to spare.
    """
    narrow = contract.partials if contract.split_k > 1 else contract.accumulator
    inner, outer = (-math.log2(UNIT_ROUNDOFF[d]) for d in (narrow, contract.output))
    if inner < outer + 10:  # 64 terms of at most 16 quanta, times the largest x
        return
    k = made.shape[1]
    terms = min(k, 64)
    largest = int(2**outer)  # sums of 64 terms then need a few bits more than the output has
    x = torch.zeros(8, k, dtype=dtype)
    for row in range(8):
        chosen = torch.randperm(k, generator=generator)[:terms]
        drawn = torch.randint(-largest, largest + 1, (terms,), generator=generator)
        x[row, chosen] = drawn.to(dtype)
    yield Probe(
        name="integer",
        sees="the rounding of the store: exact sums, many of them half-way between two outputs",
        weight=made,
        x=x,
        expect="rounded",
        synthetic=True,
    )


def edges(
    weight: AnyWeight, contract: Contract, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """Shapes at the borders: N and K one off a block, N = K, and M where kernels branch.

    Also two M that nobody can know: a kernel is not right because it is right at the others.
    """
    n, k = weight.shape
    step_n, step_k = _steps(weight)
    shapes = {(2 * step_n, 3 * step_k)}
    for rows in (step_n, 2 * step_n):
        for off in (-1, 0, 1):
            shapes |= {(rows + off, 2 * step_k), (rows + off, step_k + step_k // 2)}
    for columns in (step_k, 2 * step_k):
        for off in (-1, 0, 1):
            shapes.add((2 * step_n, columns + off))
    shapes |= {(2 * step_n + off, 2 * step_k + off) for off in TAILS}
    shapes.add((2 * step_k, 2 * step_k))
    counts = {*range(1, 18), *(m + off for m in (32, 64, 128) for off in (-1, 0, 1))}
    counts |= {24, 48, 257, *torch.randint(18, 127, (2,), generator=generator).tolist()}
    counts |= {m + off for m, _ in contract.by_batch for off in (0, 1)}
    for rows, columns in sorted(s for s in shapes if min(s) > 0 and s != (n, k)):
        made = random_weight(weight, (rows, columns), generator)
        if made is None:
            continue
        made = _with_bias(made, weight, lambda b: torch.randn(b.shape, generator=generator).to(b))
        x = _slabs(5, columns, step_k, dtype, generator)
        sees = f"edges of N={rows}, K={columns}"
        yield Probe(name="edge", sees=sees, weight=made, x=x, synthetic=True)
    for m in sorted(counts):
        x = _slabs(m, k, step_k, dtype, generator)
        yield Probe(name="edge", sees=f"M={m}, and K slab by slab", weight=weight, x=x)
    x = _one_sign(weight, dtype, generator)
    yield Probe(name="edge", sees="sums of one sign: what a narrow sum holds", weight=weight, x=x)


def _one_sign(weight: AnyWeight, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows of 1, of -1, and of the signs of three of the weight's rows: their sums are largest.

    Random rows have sums of the size sqrt(K), in which an integer accumulator that is too narrow
    never overflows.
    """
    n, k = weight.shape
    chosen = torch.randperm(n, generator=generator)[:3]
    ones = torch.ones(1, k, dtype=torch.float64)
    signs = torch.sign(weight.dequantize(torch.float64)[chosen]).nan_to_num()
    return torch.cat([ones, -ones, signs]).to(dtype)


def _steps(weight: AnyWeight) -> tuple[int, int]:
    if isinstance(weight, QuantizedWeight) and weight.format.block is not None:
        rows, columns = weight.format.block
        return max(rows, MARGIN), max(columns, MARGIN)
    return MARGIN, MARGIN


def _slabs(m: int, k: int, step: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random rows; each second one is zero outside one slab of K."""
    x = torch.randn(m, k, generator=generator, dtype=torch.float64)
    for row in range(1, m, 2):
        start = (row // 2) * step % k
        keep = torch.zeros(k, dtype=torch.bool)
        keep[start : start + step] = True
        x[row, ~keep] = 0
    return x.to(dtype)


def specials(
    weight: AnyWeight, contract: Contract, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[Probe]:
    """Rows of zeros, -0, subnormals, the dtype's largest, one infinity, one NaN; one is ordinary.

    NaN must reach every output of its row whose weight is not zero, and no other row.
    """
    k = weight.shape[1]
    info = torch.finfo(dtype)
    x = torch.randn(7, k, generator=generator, dtype=torch.float64)
    x[0], x[1] = 0.0, -0.0
    x[2] = x[2] * info.smallest_normal / 4
    x[3] = torch.sign(x[3]) * 2.0 ** _large(weight, contract, info.max)
    x = x.to(dtype)
    x[4, torch.randint(k, (1,), generator=generator)] = torch.inf
    x[5, torch.randint(k, (1,), generator=generator)] = torch.nan
    yield Probe(
        name="special",
        sees="zeros of both signs, subnormals, large values, infinity and NaN, row by row",
        weight=_with_bias(weight, weight, torch.zeros_like),  # a bias would hide small outputs
        x=x,
        expect="special",
    )


def _large(weight: AnyWeight, contract: Contract, largest: float) -> int:
    """Exponent of an x that is large, and whose products no order of summation overflows."""
    top = torch.finfo(DTYPES[contract.accumulator]).max
    sums = float(weight.dequantize(torch.float64).abs().sum(1).max())
    half = math.log2(min(largest, top)) // 2
    return int(min(half, math.log2(top) - math.log2(max(sums, 1.0)) - 1))


def layouts(weight: AnyWeight, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Probe]:
    """The same values in other memory: a transposed view, and rows inside poisoned padding."""
    k = weight.shape[1]
    x = torch.randn(6, k, generator=generator, dtype=torch.float64).to(dtype)
    padded = torch.full((6, 2 * k + 3), torch.nan, dtype=dtype)
    padded[:, 3 : k + 3] = x
    views = (
        ("rows 2K + 3 apart in NaN, from offset 3", padded[:, 3 : k + 3]),
        ("transposed", x.T.contiguous().T),
        ("in three dimensions, [2, 3, K]", x.view(2, 3, k)),
        ("in three dimensions, [1, 1, K]", x[:1].view(1, 1, k)),
        ("in three dimensions, [3, 2, K], a view of [2, 3, K]", x.view(2, 3, k).transpose(0, 1)),
        ("in four dimensions, [3, 1, 2, K]", x.view(3, 1, 2, k)),
    )
    for layout, view in views:
        sees = f"strides and leading dimensions: x is {layout}"
        yield Probe(name="layout", sees=sees, weight=weight, x=view, layout=layout)


def random_rows(
    weight: AnyWeight,
    batch_sizes: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Iterator[Probe]:
    """Gaussian rows of the given numbers, judged by the a-priori bound."""
    k = weight.shape[1]
    for m in batch_sizes:
        x = torch.randn(m, k, generator=generator, dtype=torch.float64).to(dtype)
        sees = "rounding, accumulation and everything that is not small"
        yield Probe(name="bound", sees=sees, weight=weight, x=x)


# --------------------------------------------------------------------------- weights


def synthetic(form: Format, codes: Tensor, scales: Tensor) -> QuantizedWeight:
    """A weight of ``form`` with these logical codes [N, K] and stored scales."""
    shape = (int(codes.shape[0]), int(codes.shape[1]))
    packed = form.pack(codes.to(torch.uint8))
    return QuantizedWeight(codes=packed, scales=scales, format=form, shape=shape, name="synthetic")


def _with_bias(made: Any, like: AnyWeight, fill: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """``made`` with a bias where ``like`` has one: a kernel may not expect to be without."""
    if like.bias is None:
        return made
    return replace(made, bias=fill(like.bias.new_empty(made.shape[0])))


def random_weight(
    like: AnyWeight, shape: tuple[int, int], generator: torch.Generator
) -> AnyWeight | None:
    """A random weight of the same kind in another shape; None where the format has no such."""
    if isinstance(like, DenseWeight):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return DenseWeight(tensor=values.to(like.tensor.dtype), name="synthetic")
    form = like.format
    if not form.packing.fits(shape):
        return None
    finite = torch.tensor(_finite_codes(form))
    codes = finite[torch.randint(len(finite), shape, generator=generator)]
    return synthetic(form, codes, _odd_scales(form, shape, generator))


def integer_weight(like: AnyWeight, generator: torch.Generator) -> AnyWeight:
    """The same shape with values in {-2, -1, 0, 1, 2} that the format has, times powers of two."""
    if isinstance(like, DenseWeight):
        values = torch.randint(-2, 3, like.shape, generator=generator)
        return DenseWeight(tensor=values.to(like.tensor.dtype), name="synthetic")
    form = like.format
    wanted = [c for c in _finite_codes(form) if form.table[c] in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    codes = torch.tensor(wanted)[torch.randint(len(wanted), like.shape, generator=generator)]
    sizes = torch.tensor(SMALL_SCALES)
    chosen = sizes[torch.randint(len(sizes), form.scale_shape(like.shape), generator=generator)]
    return synthetic(form, codes, _stored(form, chosen.double(), like.scales.dtype))


def _finite_codes(form: Format) -> list[int]:
    return [
        code
        for code, value in enumerate(form.table)
        if code not in form.invalid and math.isfinite(value)
    ]


def _odd_scales(form: Format, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Distinct scales in [2^-6, 2^-4), no powers of two where the encoding has others."""
    size = form.scale_shape(shape)
    if form.scale_encoding == "e8m0":
        return torch.randint(119, 125, size, generator=generator, dtype=torch.uint8)
    values = 2.0**-6 * (1 + 3 * torch.rand(size, generator=generator, dtype=torch.float64))
    return values.to(form.scale_dtypes[0])


def _stored(form: Format, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two as the format stores them."""
    if form.scale_encoding == "e8m0":
        return (torch.log2(values) + 127).round().to(torch.uint8)
    return values.to(dtype)
