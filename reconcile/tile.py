"""Packings whose unit is larger than a byte: a block of the weight that fills a run of bytes.

A `Tile` is data, as a `Packing` is: for each element of the block the byte and the digit of that
byte which holds its code. Strided groups, permuted tiles and base-3 digits are such data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from reconcile.exceptions import FormatError

DIGITS: dict[int, int] = {3: 5, 4: 4}
"""Digits of a byte by base."""


@dataclass(frozen=True)
class Tile:
    """Index map of one block, rows x columns elements in row-major order, to its bytes.

    Blocks follow one another in row-major order of the weight. In base 4, digit d is the bits 2d
    and 2d + 1. In base 3 the first digit is the most significant of five, q = sum of
    code_d * 3^(4 - d), and the byte is ceil(256 q / 243), so that multiplying a byte by 3 shifts a
    digit out at the top.
    """

    rows: int
    """Rows of a block; divides N."""
    columns: int
    """Columns of a block; divides K, or N * K where ``flat``."""
    places: tuple[tuple[int, int], ...]
    """(byte, digit) of every element of a block."""
    base: Literal[3, 4] = 4
    """4: two bits per code; 3: five codes per byte."""
    flat: bool = False
    """Whether blocks run over the weight as one row of N * K elements, across its rows."""

    def __post_init__(self) -> None:
        """Reject a map that is not one to one."""
        if len(self.places) != self.rows * self.columns or len(set(self.places)) != len(
            self.places
        ):
            raise ValueError(
                f"tile: expected {self.rows * self.columns} different places, got "
                f"{len(self.places)} of which {len(set(self.places))} differ"
            )
        if not all(0 <= digit < DIGITS[self.base] for _, digit in self.places):
            raise ValueError(f"tile: expected digits below {DIGITS[self.base]} in base {self.base}")
        if self.flat and self.rows != 1:
            raise ValueError(f"tile: a flat block is one row, got {self.rows}")

    @cached_property
    def size(self) -> int:
        """Bytes of a block."""
        return 1 + max(byte for byte, _ in self.places)

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the byte tensor: [N, K * size / (rows * columns)], or [1, bytes] where flat."""
        n, k = (1, shape[0] * shape[1]) if self.flat else shape
        if n % self.rows or k % self.columns:
            block = f"{self.rows} x {self.columns}"
            what = "N * K" if self.flat else "N and K"
            raise FormatError(
                f"expected {what} to be whole blocks of {block}, got a weight of shape "
                f"{list(shape)}; pad the weight before packing"
            )
        return n, n // self.rows * (k // self.columns) * self.size // n

    def unpack(self, stored: Tensor, shape: tuple[int, int]) -> Tensor:
        """Bytes, uint8 of `stored_shape`, to codes, uint8 [N, K]."""
        n, k = (1, shape[0] * shape[1]) if self.flat else shape
        grid = (n // self.rows, k // self.columns)
        held = stored.reshape(*grid, self.size)[..., [byte for byte, _ in self.places]]
        digits = torch.tensor([digit for _, digit in self.places], device=stored.device)
        if self.base == 4:
            codes = (held >> (2 * digits).to(torch.uint8)) & 3
        else:
            shifted = (held.to(torch.int32) * 3**digits) & 0xFF
            codes = ((shifted * 3) >> 8).to(torch.uint8)
        tiles = codes.reshape(*grid, self.rows, self.columns)
        return tiles.transpose(1, 2).reshape(shape).contiguous()

    def pack(self, codes: Tensor) -> Tensor:
        """Codes, uint8 [N, K], to bytes, uint8 of `stored_shape`."""
        shape = (int(codes.shape[0]), int(codes.shape[1]))
        stored = self.stored_shape(shape)
        n, k = (1, shape[0] * shape[1]) if self.flat else shape
        grid = (n // self.rows, k // self.columns)
        tiles = codes.reshape(grid[0], self.rows, grid[1], self.columns).transpose(1, 2)
        weights = [self._weight(digit) for _, digit in self.places]
        terms = tiles.reshape(*grid, -1).to(torch.int32) * torch.tensor(weights, dtype=torch.int32)
        sums = torch.zeros(*grid, self.size, dtype=torch.int32)
        sums.index_add_(2, torch.tensor([byte for byte, _ in self.places]), terms)
        if self.base == 3:
            sums = (256 * sums + 242) // 243
        return sums.to(torch.uint8).reshape(stored)

    def _weight(self, digit: int) -> int:
        exponent = digit if self.base == 4 else 4 - digit
        return int(self.base**exponent)


def strided(stride: int, *, low_first: bool, flat: bool = False, repeat: int = 1) -> Tile:
    """Groups of ``4 * stride`` columns in ``stride`` bytes: slot s of byte p is p + s * stride.

    Args:
        stride: bytes of a group.
        low_first: whether slot 0 is in the low bits.
        flat: whether groups run across rows.
        repeat: groups per block.
    """
    slots = range(4) if low_first else range(3, -1, -1)
    places = tuple(
        (group * stride + byte, slot)
        for group in range(repeat)
        for slot in slots
        for byte in range(stride)
    )
    return Tile(rows=1, columns=len(places), places=places, flat=flat)
