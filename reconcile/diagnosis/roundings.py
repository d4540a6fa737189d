"""Where something is rounded that should not be, or otherwise: the contract under variation.

Each hypothesis evaluates the reference linear again under another arithmetic. Outputs that then
agree bit by bit are the strongest evidence there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reconcile.activation import QUANTISERS
from reconcile.contract import DTYPES, UNIT_ROUNDOFF
from reconcile.diagnosis.evidence import LinearEvidence, effective_scale
from reconcile.diagnosis.hypothesis import named, parameters
from reconcile.diagnosis.model import Fit, LinearModel, Map
from reconcile.rounding import round_to
from reconcile.weight import QuantizedWeight

NARROW = ("bfloat16", "float16")


def narrowed(dtype: str) -> Map:
    """Rounding to a dtype and back, float64 to float64."""
    return lambda y: round_to(y, DTYPES[dtype]).double()


@named("truncating_store", cost=0)
def store(_: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The output is cut off where it should be rounded."""
    if base.contract.output_rounding == "rne" and base.store is None:
        contract = replace(base.contract, output_rounding="rtz")
        text = f"the store to {base.contract.output} truncates instead of rounding to nearest"
        yield Fit("truncating_store", replace(base, contract=contract), text)


@named("double_rounding", cost=1)
def twice(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The result goes through another dtype, or is rounded before the scale is applied."""
    if base.store is not None:
        return
    last = narrowed(base.contract.output)
    for dtype in NARROW:
        if dtype == base.contract.output:
            continue
        middle = narrowed(dtype)
        model = replace(base, store=_chain(middle, last))
        text = f"the result is rounded to {dtype} before it is rounded to {base.contract.output}"
        yield Fit("double_rounding", model, text, parameters(through=dtype))
    scale = row_scale(evidence)
    if scale is None:
        return
    for dtype in dict.fromkeys((base.contract.output, *NARROW)):
        if UNIT_ROUNDOFF[dtype] < 2.0**-12:
            continue
        middle = narrowed(dtype)
        model = replace(base, store=_chain(_before(middle, scale, base.bias), last))
        text = f"the sum is rounded to {dtype} before the scale is applied, and again after"
        yield Fit("double_rounding", model, text, parameters(before="scale", dtype=dtype))


def row_scale(evidence: LinearEvidence) -> Tensor | None:
    """The scale of each output where it can be applied after the sum, [N]."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or weight.format.block is not None:
        return None
    return effective_scale(weight)[:, 0]


def _chain(first: Map, second: Map) -> Map:
    return lambda y: second(first(y))


def _before(rounding: Map, scale: Tensor, bias: Tensor | None) -> Map:
    added = torch.zeros_like(scale) if bias is None else bias
    return lambda y: rounding((y - added) / scale) * scale + added


@named("weight_rounding", cost=2)
def weight(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The weight is rounded before the product, or not although the contract says so."""
    declared = base.contract.weight_rounding
    if declared is not None:
        exact = evidence.weight.dequantize(torch.float64)
        text = f"the weight is not rounded to {declared}, which the contract declares"
        model = replace(base, weight=exact)
        if not torch.equal(exact, base.weight):
            yield Fit("weight_rounding", model, text, parameters(dtype=None))
    single = base.weight.float().double()
    for dtype in NARROW:
        rounded = round_to(single, DTYPES[dtype]).double()
        if not torch.equal(rounded, base.weight) and dtype != declared:
            text = f"the weight is rounded to {dtype} before the product"
            found = parameters(dtype=dtype)
            yield Fit("weight_rounding", replace(base, weight=rounded), text, found)
    if not isinstance(evidence.weight, QuantizedWeight):
        for name, rounded in _eighths(base.weight):
            text = f"the weight is rounded to {name} before the product"
            found = parameters(dtype=name)
            yield Fit("weight_rounding", replace(base, weight=rounded), text, found, 1)


def _eighths(values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """8-bit floats, as they are and under a scale per row or per tensor."""
    tensor = values.abs().max().clamp_min(1e-300)
    row = values.abs().amax(1, keepdim=True).clamp_min(1e-300)
    for what, scale in (("", None), (" per tensor", tensor / 448), (" per row", row / 448)):
        scaled = values if scale is None else values / scale
        codes = scaled.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()
        yield f"float8_e4m3fn{what}", codes if scale is None else codes * scale


@named("flush_subnormals", cost=1)
def flush(_: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """Subnormal operands or results count as zero."""
    if base.contract.flush_subnormals:
        return
    smallest = float(torch.finfo(DTYPES[base.contract.output]).smallest_normal)

    def flushed(x: Tensor) -> Tensor:
        wide = base.operands(x)
        return torch.where(wide.abs() < 2.0**-126, 0.0, wide)

    text = "subnormal inputs count as zero"
    yield Fit("flush_subnormals", replace(base, quantise=flushed), text, parameters(where="input"))
    last = base.store or narrowed(base.contract.output)

    def cut(y: Tensor) -> Tensor:
        stored = last(y)
        return torch.where(stored.abs() < smallest, 0.0, stored)

    text = "subnormal results become zero"
    yield Fit("flush_subnormals", replace(base, store=cut), text, parameters(where="output"))
    both = replace(base, quantise=flushed, store=cut)
    text = "subnormal inputs and results count as zero"
    yield Fit("flush_subnormals", both, text, parameters(where="both"), 1)


@named("saturation", cost=1)
def saturation(_: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """What overflows becomes the largest finite number, or NaN, instead of infinity."""
    last = base.store or narrowed(base.contract.output)
    largest = float(torch.finfo(DTYPES[base.contract.output]).max)

    def spoilt(y: Tensor) -> Tensor:
        stored = last(y)
        return torch.where(stored.isinf(), torch.nan, stored)

    for limit in (largest, 65504.0, 448.0):
        cut = _clamp(last, limit)
        text = f"results beyond {limit:.6g} become that number"
        yield Fit("saturation", replace(base, store=cut), text, parameters(limit=limit), 1)
    text = "what overflows becomes NaN instead of infinity"
    yield Fit("saturation", replace(base, store=spoilt), text, parameters(limit="nan"))


def _clamp(last: Map, limit: float) -> Map:
    return lambda y: last(y).clamp(-limit, limit)


# --------------------------------------------------------------------------- activations


@named("activation_quantised", "activation_scale", cost=3, last_resort=True)
def activations(_: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The activations go through another quantiser than the contract's, or lose its scale."""
    declared = base.contract.activation
    for name, quantise in QUANTISERS.items():
        if name == declared:
            continue
        what = f"instead of {declared}" if declared != "none" else "and the contract declares none"
        both = name.startswith("mxfp8") and declared.startswith("mxfp8")
        text = f"the activations are quantised by {name}, {what}"
        if both:  # the same codes under another power of two
            text = f"the scales of the activations follow the rule {name}, {what}"
        model = replace(base, quantise=quantise)
        title = "activation_scale" if both else "activation_quantised"
        yield Fit(title, model, text, parameters(quantiser=name))
    if declared != "none":
        text = f"the activations are not quantised, the contract declares {declared}"
        model = replace(base, quantise=lambda x: x)
        yield Fit("activation_quantised", model, text, parameters(quantiser=None))
    for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        text = f"the activations are cast to {dtype}"
        model = replace(base, quantise=_cast(getattr(torch, dtype)))
        yield Fit("activation_quantised", model, text, parameters(quantiser=dtype))
    for text, found, quantise in _scalings():
        model = replace(base, quantise=quantise)
        yield Fit("activation_scale", model, text, found)


def _cast(dtype: torch.dtype) -> Map:
    limit = torch.finfo(dtype).max
    return lambda x: x.float().clamp(-limit, limit).to(dtype).double()


def _scalings() -> Iterator[tuple[str, dict[str, object], Map]]:
    """Int8 and fp8 quantisers whose scale is lost, shared, or taken from something else."""
    for kind, largest in (("int8", 127.0), ("fp8", 448.0)):
        for rule in _RULES:
            if kind == "fp8" and rule.startswith("truncated"):
                continue
            quantise = _scaling(kind, largest, rule)
            yield f"{_RULES[rule]} ({kind})", parameters(rule=rule, quantiser=kind), quantise


_RULES = {
    "lost": "the activations are quantised and their scale is never applied",
    "tensor": "one activation scale for all rows instead of one per row",
    "reciprocal": "the activation scale is applied as a rounded reciprocal",
    "bfloat16": "the activation scale is rounded to bfloat16",
    "truncated": "activation codes are truncated instead of rounded",
    "truncated after a product": "activation codes are truncated instead of rounded",
    "double": "the activation scale is applied twice",
}


def _scaling(kind: str, largest: float, rule: str) -> Map:
    def quantise(x: Tensor) -> Tensor:
        wide = x.float()
        amax = wide.abs().amax(-1, keepdim=True).clamp_min(1e-7)
        if rule == "tensor":
            amax = amax.amax().expand_as(amax)
        scale = amax / torch.full_like(amax, largest)
        used = scale.bfloat16().float() if rule == "bfloat16" else scale
        scaled = wide * (1 / used) if rule == "reciprocal" else wide / used
        if rule == "truncated after a product":
            scaled = wide * (torch.full_like(amax, largest) / amax)
        if kind == "fp8":
            codes = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).double()
        elif rule.startswith("truncated"):
            codes = scaled.trunc().clamp(-largest - 1, largest).double()
        else:
            codes = scaled.round().clamp(-largest - 1, largest).double()
        if rule == "lost":
            return codes
        return codes * used.double() * (used.double() if rule == "double" else 1.0)

    return quantise


# --------------------------------------------------------------------------- accumulation

BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Lengths after which a running sum may be folded into a narrow accumulator."""
PROMISING = 0.3
"""Share that an order of summation must explain on a few columns to be weighed on all."""
SCREEN = 48
"""Number of those columns."""


@dataclass(frozen=True, slots=True)
class Folding:
    """Sums of blocks of K, exact, folded in order into an accumulator of ``dtype``."""

    dtype: str
    block: int
    scale: Tensor | None = None
    """[N]: the codes are summed and the scale is applied afterwards; None: the weights are."""

    def at(self, columns: Tensor) -> Folding:
        """The same for some of the N outputs."""
        return self if self.scale is None else replace(self, scale=self.scale[columns])

    def single(self, y: Tensor) -> Tensor:
        """What becomes of sums of one product each."""
        scale = 1.0 if self.scale is None else self.scale
        return narrowed(self.dtype)(y / scale) * scale

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """[M, K] and [N, K] to [M, N], float64."""
        w = w if self.scale is None else w / self.scale[:, None]
        total = torch.zeros(len(x), len(w), dtype=torch.float64)
        for start in range(0, x.shape[1], self.block):
            part = slice(start, start + self.block)
            total = total + x[:, part] @ w[:, part].T
            total = total.float().to(DTYPES[self.dtype]).double()
        return total if self.scale is None else total * self.scale


@dataclass(frozen=True, slots=True)
class Splitting:
    """Partial sums of K, each rounded to ``dtype``, added in float32."""

    dtype: str
    parts: int
    strided: int = 0
    """Length of the pieces that are dealt out to the parts in turn; 0: one piece each."""

    def at(self, _: Tensor) -> Splitting:
        """The same for some of the N outputs."""
        return self

    def single(self, y: Tensor) -> Tensor:
        """What becomes of sums of one product each."""
        return narrowed(self.dtype)(y)

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """[M, K] and [N, K] to [M, N], float64."""
        places = torch.arange(x.shape[1])
        piece = max(1, -(-x.shape[1] // self.parts))
        owner = places // self.strided % self.parts if self.strided else places // piece
        total = torch.zeros(len(x), len(w), dtype=torch.float64)
        for part in range(self.parts):
            mine = owner == part
            partial = round_to(x[:, mine] @ w[:, mine].T, DTYPES[self.dtype])
            total = (total + partial.double()).float().double()
        return total


@named("narrow_accumulator", cost=2, last_resort=True)
def accumulator(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The running sum is kept in fewer bits than declared."""
    if base.accumulate is not None:
        return
    scale = row_scale(evidence)
    declared = UNIT_ROUNDOFF[base.contract.accumulator]
    for dtype in NARROW:
        if UNIT_ROUNDOFF[dtype] <= declared:
            continue
        for block in (block for block in BLOCKS if block < evidence.x.shape[1]):
            for after in (None, scale) if scale is not None else (None,):
                sums = Folding(dtype, block, after)
                if not _promising(evidence, base, sums):
                    continue
                each = "after each product" if block == 1 else f"after every {block} products"
                text = f"the sum is kept in {dtype}, rounded {each}"
                found = parameters(dtype=dtype, block=block)
                yield Fit("narrow_accumulator", replace(base, accumulate=sums), text, found, 1)


@named("narrow_partials", cost=2, last_resort=True)
def partials(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The partial sums of a split K are kept in fewer bits than declared."""
    if base.accumulate is not None:
        return
    contract = base.contract
    declared = UNIT_ROUNDOFF[contract.partials] if contract.split_k > 1 else 0.0
    for dtype in NARROW:
        if UNIT_ROUNDOFF[dtype] <= declared:
            continue
        for parts in (2, 3, 4, 8, 16):
            for strided in (0, 32, 64, 128):
                if strided * parts > evidence.x.shape[1]:
                    continue
                sums = Splitting(dtype, parts, strided)
                if not _promising(evidence, base, sums):
                    continue
                text = f"{parts} partial sums over K are rounded to {dtype} before they are added"
                found = parameters(dtype=dtype, parts=parts, interleaved=strided)
                yield Fit("narrow_partials", replace(base, accumulate=sums), text, found, 1)


def _promising(evidence: LinearEvidence, base: LinearModel, sums: Folding | Splitting) -> bool:
    """Whether an order of summation explains the error on a few columns and rows."""
    n = base.weight.shape[0]
    some = torch.unique(torch.linspace(0, n - 1, min(n, SCREEN)).long())
    rows = slice(0, 32)
    x = base.operands(evidence.x[rows])
    bias = 0.0 if base.bias is None else base.bias[some]
    last = narrowed(base.contract.output)
    seen = evidence.rows.y[rows][:, some].double()
    before = (seen - last(x @ base.weight[some].T + bias)).square()
    after = (seen - last(sums.at(some)(x, base.weight[some]) + bias)).square()
    usable = torch.isfinite(before) & torch.isfinite(after)
    had = float(before[usable].sum())
    return had > 0 and 1 - float(after[usable].sum()) / had >= PROMISING


HYPOTHESES = (store, twice, weight, flush, saturation, activations, accumulator, partials)
