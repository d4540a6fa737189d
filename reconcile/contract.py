"""What a kernel promises about its arithmetic; the reference applies it, limits derive from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from reconcile.exceptions import ContractError

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Floating-point dtypes that activations, accumulators and outputs may have, by torch name."""

MX = ("mxfp8", "mxfp8_rceil", "mxfp8_ascend_0", "mxfp8_ascend_1")
"""MXFP8 by the rule of `reconcile.numbers.mx` in the name's end; ``mxfp8`` alone is ``floor``."""
ACTIVATIONS = ("none", "per_token_int8", "per_token_fp8", *MX)
"""What ``Contract.activation`` may be."""

UNIT_ROUNDOFF: dict[str, float] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}
"""u of round-to-nearest: half the spacing of the dtype just above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The declared arithmetic of a linear kernel, y = x W^T (+ b).

    A field that the kernel is free in is left at its default; the bound then covers every
    choice. Dtypes are torch names.
    """

    activation: Literal[
        "none",
        "per_token_int8",
        "per_token_fp8",
        "mxfp8",
        "mxfp8_rceil",
        "mxfp8_ascend_0",
        "mxfp8_ascend_1",
    ] = "none"
    """Quantiser applied to x before the product; its arithmetic is in `reconcile.activation`."""
    weight_rounding: str | None = None
    """Dtype to which code * scale is rounded before the product; None: not rounded."""
    weight_requantised: (
        Literal["mxfp8", "mxfp8_rceil", "mxfp8_ascend_0", "mxfp8_ascend_1"] | None
    ) = None
    """Quantiser applied to the weight when it is loaded, after ``weight_rounding``. A weight that
    is stored in MXFP8 is taken as it is: neither rounded nor quantised again."""
    scale_applied: Literal["before", "after_block", "after_sum"] = "before"
    """Where the weight's scale enters: in the weight, after each K block, or after the sum."""
    accumulator: str = "float32"
    """Dtype of the running sum over K."""
    accumulator_rounding: Literal["rne", "rtz"] = "rne"
    """``rne``: to nearest, ties to even. ``rtz``: truncation, as tensor cores do."""
    k_block: int | None = None
    """Length of the K block after which a partial sum is folded in; None: not blocked."""
    split_k: int = 1
    """How many partial sums over K are added at the end."""
    partials: str = "float32"
    """Dtype in which the partial sums of ``split_k`` are kept."""
    epilogue: tuple[str, ...] = ("scale", "bias", "round")
    """Steps after the sum, in order."""
    output: str = "bfloat16"
    """Dtype of y."""
    output_rounding: Literal["rne", "rtz"] = "rne"
    """How the accumulator is rounded to ``output``."""
    flush_subnormals: bool = False
    """Subnormal operands and results count as zero (FTZ and DAZ)."""
    deterministic: bool = True
    """The same call gives the same bits."""
    batch_invariant: bool = False
    """A row gives the same bits alone and inside any batch."""
    by_batch: tuple[tuple[int, Contract], ...] = ()
    """Pairs (largest M, contract): the arithmetic where it changes with the row count M."""

    def __post_init__(self) -> None:
        """Reject what no bound is known for."""
        for field in ("accumulator", "partials", "output"):
            _require(field, getattr(self, field), DTYPES)
        _require("activation", self.activation, ACTIVATIONS)
        if self.weight_requantised is not None:
            _require("weight_requantised", self.weight_requantised, MX)
        _require("scale_applied", self.scale_applied, ("before", "after_block", "after_sum"))
        for field in ("accumulator_rounding", "output_rounding"):
            _require(field, getattr(self, field), ("rne", "rtz"))
        for field in ("epilogue", "by_batch"):
            if not isinstance(getattr(self, field), tuple):
                raise ContractError(f"contract.{field}: expected a tuple")
        if self.weight_rounding is not None:
            _require("weight_rounding", self.weight_rounding, DTYPES)
        for step in self.epilogue:
            _require("epilogue", step, ("scale", "bias", "round"))
        counts: list[tuple[str, object]] = [("split_k", self.split_k)]
        counts += [] if self.k_block is None else [("k_block", self.k_block)]
        for pair in self.by_batch:
            parts: tuple[object, ...] = tuple(pair)
            if len(parts) != 2 or not isinstance(parts[1], Contract):
                raise ContractError(
                    f"contract.by_batch: expected pairs (largest M, Contract), got {pair!r:.80}"
                )
            counts.append(("by_batch", pair[0]))
        for field, count in counts:
            if type(count) is not int or count < 1:
                raise ContractError(f"contract.{field}: expected at least 1, got {count!r}")

    def at(self, m: int) -> Contract:
        """The contract for a call with ``m`` rows."""
        for largest, contract in sorted(self.by_batch, key=lambda pair: pair[0]):
            if m <= largest:
                return contract
        return self

    @property
    def output_dtype(self) -> torch.dtype:
        """``output`` as a torch dtype."""
        return DTYPES[self.output]


def _require(field: str, value: object, known: Iterable[str]) -> None:
    if value not in tuple(known):
        raise ContractError(f"contract.{field}: expected one of {', '.join(known)}, got {value!r}")
