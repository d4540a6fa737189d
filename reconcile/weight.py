"""Number formats as values, and weights stored in them.

A `Format` is data: a code table, a packing (an invertible index map from logical codes to
stored bytes), the granularity of its scales and their convention. One algorithm serves all.
Granularity, orientation and convention are always declared, never inferred from shapes. How a
format is commonly misread is data too: its `Misreading` values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Literal

import torch
from torch import Tensor

from reconcile.contract import DTYPES
from reconcile.exceptions import FormatError, nearest
from reconcile.rounding import round_to
from reconcile.tile import DIGITS, Tile

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Packing:
    """Index map between logical codes [N, K] and the bytes that hold them.

    With ``g = 8 // bits`` codes per byte along the packed dimension of length L and
    U = ceil(L / g) bytes, logical index i lives in byte ``u`` and slot ``s``:
    ``interleaved``: u = i // g, s = i % g; ``planar``: u = i % U, s = i // U. Slot s occupies
    bits ``bits*s ...`` from the low end (``low_first``) or from the high end. ``tiled``: as
    ``tile`` says.
    """

    bits: int
    """Bits per code; divides 8."""
    dim: Literal[0, 1]
    """Packed dimension: 0 = N (output rows), 1 = K (input columns)."""
    arrangement: Literal["interleaved", "planar", "tiled"]
    """Whether neighbours share a byte, or codes that are U apart do, or a `Tile` places them."""
    low_first: bool = True
    """Whether slot 0 is in the least significant bits."""
    pad: bool = False
    """Whether a length that is no multiple of g is padded with code 0 (else it is refused)."""
    tile: Tile | None = None
    """The index map of arrangement ``tiled``."""

    def __post_init__(self) -> None:
        """Reject a code that does not fill bytes, and a tile without need."""
        if (self.tile is not None) != (self.arrangement == "tiled"):
            raise ValueError(
                f"packing: a tile belongs to arrangement 'tiled', got {self.arrangement!r}"
            )
        if self.tile is not None and (self.bits, self.dim, self.pad) != (2, 1, False):
            raise ValueError("packing: a tile has codes of 2 bits along K and no padding")
        if self.bits not in (1, 2, 4, 8):
            raise ValueError(f"packing.bits: expected 1, 2, 4 or 8, got {self.bits}")

    @property
    def per_byte(self) -> int:
        """Codes per byte."""
        return 8 // self.bits if self.tile is None else DIGITS[self.tile.base]

    @property
    def codes(self) -> int:
        """Number of different codes."""
        return 1 << self.bits if self.tile is None else self.tile.base

    def fits(self, shape: Shape) -> bool:
        """Whether a weight of this logical shape can be stored."""
        try:
            self.stored_shape(shape)
        except FormatError:
            return False
        return True

    def rounded_up(self, shape: Shape) -> Shape:
        """The smallest shape that holds ``shape`` and can be stored without padding."""
        steps = [1, 1]
        if self.tile is not None:
            steps = [self.tile.rows, self.tile.columns]
        else:
            steps[self.dim] = self.per_byte
        n, k = (-(-size // step) * step for size, step in zip(shape, steps, strict=True))
        return n, k

    def stored_shape(self, shape: Shape) -> Shape:
        """Shape of the byte tensor for logical ``shape``; FormatError for an odd tail."""
        if self.tile is not None:
            return self.tile.stored_shape(shape)
        length = shape[self.dim]
        if length % self.per_byte and not self.pad:
            raise FormatError(
                f"expected {'NK'[self.dim]} to be a multiple of {self.per_byte} (codes per "
                f"byte), got {length} in a weight of shape {list(shape)}; pad the weight "
                "before packing"
            )
        units = -(-length // self.per_byte)
        return (units, shape[1]) if self.dim == 0 else (shape[0], units)

    def _shifts(self) -> list[int]:
        shifts = [self.bits * slot for slot in range(self.per_byte)]
        return shifts if self.low_first else shifts[::-1]

    def unpack(self, stored: Tensor, shape: Shape) -> Tensor:
        """Bytes to logical codes, uint8 [N, K]. Padding beyond ``shape`` is dropped."""
        expected = self.stored_shape(shape)
        if stored.dtype != torch.uint8 or tuple(stored.shape) != expected:
            raise FormatError(
                f"expected uint8 {list(expected)} for a weight of shape {list(shape)}, got "
                f"{_describe(stored)}"
            )
        if self.tile is not None:
            return self.tile.unpack(stored, shape)
        mask = (1 << self.bits) - 1
        slots = [(stored >> shift) & mask for shift in self._shifts()]
        if self.arrangement == "planar":
            codes = torch.cat(slots, dim=self.dim)
        else:
            codes = torch.stack(slots, dim=self.dim + 1).flatten(self.dim, self.dim + 1)
        return codes.narrow(self.dim, 0, shape[self.dim]).contiguous()

    def pack(self, codes: Tensor) -> Tensor:
        """Logical codes, uint8 [N, K], to bytes; FormatError for a code of too many bits."""
        if codes.dtype != torch.uint8 or codes.dim() != 2:
            raise FormatError(f"expected codes as uint8 [N, K], got {_describe(codes)}")
        if self.tile is not None:
            _refuse(codes >= self.codes, codes, f"a code of {self.codes} or more")
            return self.tile.pack(codes)
        _refuse(codes >> self.bits != 0, codes, f"a code of more than {self.bits} bits")
        shape = (int(codes.shape[0]), int(codes.shape[1]))
        units = self.stored_shape(shape)[self.dim]
        missing = units * self.per_byte - shape[self.dim]
        if missing:
            tail = list(shape)
            tail[self.dim] = missing
            codes = torch.cat([codes, codes.new_zeros(tail)], dim=self.dim)
        if self.arrangement == "planar":
            slots = list(torch.split(codes, units, dim=self.dim))
        else:
            slots = [
                codes[slot :: self.per_byte] if self.dim == 0 else codes[:, slot :: self.per_byte]
                for slot in range(self.per_byte)
            ]
        stored = torch.zeros_like(slots[0], memory_format=torch.contiguous_format)
        for slot, shift in zip(slots, self._shifts(), strict=True):
            stored |= slot << shift
        return stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A number format: value[n, k] = table[code[n, k]] (* or /) scale."""

    name: str
    """Registered name, e.g. ``ternary_k_interleaved``."""
    table: tuple[float, ...]
    """Value of each code; of an invalid code what the public decoder gives."""
    invalid: frozenset[int] = frozenset()
    """Codes that no encoder writes; a checkpoint that holds one is refused."""
    packing: Packing
    """How codes lie in bytes."""
    code_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    """Dtypes in which the codes may be stored; the bytes of each are the codes."""
    granularity: Literal["tensor", "channel", "block"]
    """``tensor``: one scale [1]; ``channel``: one per output row [N]; ``block``: one per block,
    [ceil(N / block[0]), ceil(K / block[1])], the last block of a dimension may be partial."""
    block: Shape | None = None
    """Rows and columns of a block; only with granularity ``block``."""
    scale_convention: Literal["multiply", "divide"] = "multiply"
    """Whether the stored scale multiplies or divides the table's value."""
    scale_encoding: Literal["value", "e8m0"] = "value"
    """``value``: the number itself. ``e8m0``: a byte b that stands for 2^(b - 127), 255 for NaN
    (OCP MX v1.0), stored as uint8 or float8_e8m0fnu."""
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    """Dtypes in which the scale may be stored."""
    reference: str
    """The specification or file that defines the format."""
    misreadings: tuple[Misreading, ...] = field(default=(), compare=False, repr=False)
    """What those who implement the format get wrong; a diagnosis tries them."""

    def __post_init__(self) -> None:
        """Reject a table that does not give every code a value, and a block without need."""
        if (self.block is not None) != (self.granularity == "block") or min(self.block or (1,)) < 1:
            raise ValueError(
                f"{self.name}: a block belongs to granularity 'block' and is at least 1 x 1, got "
                f"{self.block} with {self.granularity!r}"
            )
        if len(self.table) != self.packing.codes:
            raise ValueError(
                f"{self.name}: expected a table of {self.packing.codes} values for codes of "
                f"{self.packing.bits} bits, got {len(self.table)}"
            )

    def scale_shape(self, shape: Shape) -> tuple[int, ...]:
        """Shape of the scale tensor for a logical weight of ``shape``."""
        if self.block is not None:
            return tuple(-(-size // step) for size, step in zip(shape, self.block, strict=True))
        return (1,) if self.granularity == "tensor" else (shape[0],)

    def scale_values(self, scales: Tensor) -> Tensor:
        """Stored scales to numbers, float64, exactly; E8M0 byte 255 is NaN."""
        if self.scale_encoding == "value":
            return scales.to(torch.float64)
        exponents = scales.view(torch.uint8).to(torch.int64) - 127
        values = ((exponents + 1023) << 52).view(torch.float64)  # the bits of 2^exponent
        return torch.where(exponents == 128, torch.nan, values)

    def spread(self, values: Tensor, shape: Shape) -> Tensor:
        """One value per scale to one per weight: broadcastable to, or exactly, [N, K]."""
        if self.block is not None:
            rows = values.repeat_interleave(self.block[0], 0)[: shape[0]]
            return rows.repeat_interleave(self.block[1], 1)[:, : shape[1]]
        return values if self.granularity == "tensor" else values[:, None]

    def unpack(self, stored: Tensor, shape: Shape) -> Tensor:
        """Stored bytes to codes, uint8 [N, K]; invalid codes pass through."""
        return self.packing.unpack(stored, shape)

    def pack(self, codes: Tensor) -> Tensor:
        """Codes, uint8 [N, K], to stored bytes."""
        return self.packing.pack(codes)

    def encode(self, values: Tensor) -> Tensor:
        """Table values [N, K] to codes; FormatError names the first value without a code.

        Of several codes for a value it takes the lowest; -0 gets its own code where there is one.
        """
        if values.dim() != 2:
            raise FormatError(f"{self.name}: expected values [N, K], got {_describe(values)}")
        codes = torch.zeros_like(values, dtype=torch.uint8)
        known = torch.zeros_like(values, dtype=torch.bool)
        for code, value in enumerate(self.table):
            if code in self.invalid:
                continue
            same = values.isnan() if math.isnan(value) else values == value
            better = same & (torch.signbit(values) if _is_negative_zero(value) else ~known)
            codes[better] = code
            known |= same
        _refuse(~known, values, f"{self.name}: value without a code")
        return codes

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Codes to table values, before the scale; invalid codes get the table's value."""
        return torch.tensor(self.table, dtype=dtype, device=codes.device)[codes.long()]

    def check_codes(self, codes: Tensor, name: str = "weight") -> None:
        """FormatError that counts the invalid codes and names the first one's place."""
        if self.invalid:
            refused = torch.zeros(len(self.table), dtype=torch.bool, device=codes.device)
            refused[sorted(self.invalid)] = True
            _refuse(refused[codes.long()], codes, f"{name}: invalid code in format {self.name}")


def _is_negative_zero(value: float) -> bool:
    return value == 0 and math.copysign(1, value) < 0


def _refuse(bad: Tensor, values: Tensor, what: str) -> None:
    """Raise FormatError for the first True of ``bad`` [N, K], with its place and the count."""
    if not bool(bad.any()):
        return
    row, column = (int(i) for i in bad.nonzero()[0])
    raise FormatError(
        f"{what}: {values[row, column].item()} at [n={row}, k={column}], "
        f"{int(bad.sum())} of {bad.numel()} in all"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A linear's weight [N, K] as its checkpoint stores it."""

    codes: Tensor
    """Stored codes, packed as ``format.packing`` says (uint8)."""
    scales: Tensor
    """Scale tensor of shape ``format.scale_shape(shape)``, in its stored dtype."""
    format: Format
    """The declared number format."""
    shape: Shape
    """Logical shape (N, K) = (output features, input features)."""
    name: str = ""
    """Module path, informational, e.g. ``model.layers.0.mlp.down_proj``."""
    bias: Tensor | None = None
    """Bias [N] or None."""

    @classmethod
    def from_tensors(
        cls,
        codes: Tensor,
        scales: Tensor,
        *,
        format: Format | str,  # noqa: A002 - the public name of the field
        shape: Shape,
        block: Shape | None = None,
        name: str = "",
        bias: Tensor | None = None,
    ) -> QuantizedWeight:
        """Check the declared format against dtypes, shapes and codes, then build.

        Args:
            codes: stored codes; of a float8 tensor that the format allows the bytes are taken.
            scales: stored scales.
            format: the declared format, or the name of a registered one.
            shape: logical (N, K); never inferred.
            block: the declared block, where it is not the format's own.
            name: module path, for messages.
            bias: [N] or None.

        Raises:
            FormatError: with the declaration and what the tensors are.
        """
        where = name or "weight"
        format = _known(format)  # noqa: A001
        _check_types(codes, scales, bias, shape, block, where)
        if block is not None:
            if format.granularity != "block":
                raise FormatError(
                    f"{where}: format {format.name} has one scale per {format.granularity}; a "
                    f"block {list(block)} does not fit it"
                )
            if min(block) < 1:
                raise FormatError(f"{where}: expected a block of at least 1 x 1, got {list(block)}")
            format = replace(format, block=block)  # noqa: A001
        if min(shape) < 1:
            raise FormatError(f"{where}: expected a weight of at least 1 x 1, got {list(shape)}")
        _check_codes(codes, format, shape, where)
        codes = codes.view(torch.uint8)
        _check_scales(scales, format, shape, where)
        if bias is not None and (
            tuple(bias.shape) != (shape[0],) or bias.dtype not in DTYPES.values()
        ):
            raise FormatError(
                f"{where}: expected a bias [{shape[0]}] in one of {', '.join(DTYPES)}; got "
                f"{_describe(bias)}"
            )
        weight = cls(codes=codes, scales=scales, format=format, shape=shape, name=name, bias=bias)
        unpacked = weight.unpacked()
        format.check_codes(unpacked, where)
        if format.packing.pad and not torch.equal(format.pack(unpacked), codes):
            raise FormatError(
                f"{where}: the padding beyond {list(shape)} holds codes other than 0, so the "
                "weight is larger than declared"
            )
        return weight

    def unpacked(self) -> Tensor:
        """Logical codes, uint8 [N, K]."""
        return self.format.unpack(self.codes, self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values [N, K]; exact in float64 where the scale multiplies.

        Where it divides, the float64 quotient is correctly rounded. Another ``dtype`` is
        reached by one rounding from float64.
        """
        scales = self.format.spread(self.format.scale_values(self.scales), self.shape)
        return round_to(self.scaled_by(scales), dtype)

    def scaled_by(self, scales: Tensor) -> Tensor:
        """Values [N, K], float64, under other scales: float64, broadcastable to [N, K]."""
        values = self.format.decode(self.unpacked())
        return values * scales if self.format.scale_convention == "multiply" else values / scales

    def zero_share(self) -> float:
        """Share of weights that decode to zero, in [0, 1]."""
        return float((self.format.decode(self.unpacked()) == 0).double().mean())


def _known(format: object) -> Format:  # noqa: A002
    """A format as it is, or the registered one of that name."""
    if isinstance(format, Format):
        return format
    points = {point.name: point for point in entry_points(group="reconcile.formats")}
    if not isinstance(format, str) or format not in points:
        hint = nearest(format, points) if isinstance(format, str) else f"Known: {', '.join(points)}"
        raise FormatError(f"expected a Format or the name of one, got {format!r:.80}: {hint}")
    found: Format = points[format].load()
    return found


def _check_types(
    codes: object, scales: object, bias: object, shape: object, block: object, where: str
) -> None:
    """FormatError unless everything is of the documented kind: this is a public door."""
    for what, given in (("codes", codes), ("scales", scales), ("bias", bias)):
        if not (isinstance(given, Tensor) or (what == "bias" and given is None)):
            raise FormatError(f"{where}: {what}: expected a tensor, got {type(given).__name__}")
    for what, pair in (("shape", shape), ("block", block)):
        if what == "block" and pair is None:
            continue
        if (
            not isinstance(pair, Sequence)
            or len(pair) != 2
            or any(type(n) is not int for n in pair)
        ):
            raise FormatError(f"{where}: {what}: expected two integers, got {pair!r:.80}")


@dataclass(frozen=True, slots=True)
class Misreading:
    """A mistake in reading a format, as the weight that somebody who makes it computes."""

    name: str
    """Unique within a format, e.g. ``scale_missing``."""
    text: str
    """What was done instead of the right thing, for a report."""
    read: Callable[[QuantizedWeight], Tensor]
    """Misread values, float64 [N, K]. Reads any legal weight; may equal the right reading on one
    that does not exercise the mistake."""
    cause: str = ""
    """Name of the diagnosis that it is a case of, e.g. ``scale_reused``; empty: its own name."""


def _check_codes(codes: Tensor, form: Format, shape: Shape, where: str) -> None:
    try:
        expected = form.packing.stored_shape(shape)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    if codes.dtype not in form.code_dtypes or tuple(codes.shape) != expected:
        raise FormatError(
            f"{where}: format {form.name} of a weight {list(shape)} stores "
            f"{' or '.join(map(_dtype_name, form.code_dtypes))} {list(expected)}; got "
            f"{_describe(codes)}"
        )
    if not codes.is_contiguous():
        raise FormatError(
            f"{where}: expected contiguous bytes, got strides {list(codes.stride())}, as of a "
            "transposed view"
        )


def _check_scales(scales: Tensor, form: Format, shape: Shape, where: str) -> None:
    expected = form.scale_shape(shape)
    if scales.dtype not in form.scale_dtypes or tuple(scales.shape) != expected:
        block = f" {list(form.block)}" if form.block else ""
        raise FormatError(
            f"{where}: format {form.name} has one scale per {form.granularity}{block}, shape "
            f"{list(expected)}, in one of {', '.join(map(_dtype_name, form.scale_dtypes))}; got "
            f"{_describe(scales)}{_shape_hint(tuple(scales.shape), expected)}"
        )
    if form.scale_encoding == "e8m0":
        return
    finite = torch.isfinite(scales)
    if not bool(finite.all()):
        raise FormatError(
            f"{where}: {int((~finite).sum())} of {scales.numel()} scales are not finite"
        )
    if form.scale_convention == "divide" and bool((scales == 0).any()):
        raise FormatError(f"{where}: a scale that divides is zero")


def _shape_hint(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """What to do about a scale shape that differs from the declared one by a spelling."""
    if got == expected:
        return ""
    if len(expected) == 2 and got == expected[::-1]:
        return "; that is the grid transposed: pass scales.t().contiguous()"
    if [size for size in got if size != 1] == [size for size in expected if size != 1]:
        sizes = ", ".join(map(str, expected)) if len(expected) > 1 else "-1"
        return f"; pass scales.reshape({sizes}) if it is that, spelled another way"
    return ""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    return f"{_dtype_name(tensor.dtype)} {list(tensor.shape)}"
