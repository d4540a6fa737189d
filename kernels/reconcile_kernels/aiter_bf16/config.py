"""Tile sizes by the number of rows, and what of the arithmetic depends on them."""

from __future__ import annotations

from dataclasses import dataclass

from reconcile.contract import Contract


@dataclass(frozen=True, slots=True)
class Config:
    """Tile sizes of one launch. All are powers of two, at least 16."""

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    """Over how many parts K is split at most; their sums are kept in float32."""

    def tiles(self, m: int, n: int) -> int:
        """How many of them cover [m, n]."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def split_k(self, k: int) -> int:
        """Length of one part of K: whole blocks."""
        blocks = -(-k // self.block_k)
        return -(-blocks // self.splits) * self.block_k

    def splits_of(self, k: int) -> int:
        """Parts that hold something: a short K does not reach all of them."""
        return -(-k // self.split_k(k))


BY_ROWS: tuple[tuple[int, Config], ...] = (
    (16, Config(16, 16, 512)),
    (32, Config(32, 32, 512)),
    (64, Config(32, 32, 256)),
    (128, Config(128, 128, 128, splits=4)),
    (256, Config(64, 64, 128)),
    (1024, Config(128, 128, 64)),
)
"""Largest M, and the tiles up to it: aiter's table for gfx950 at N = 1024, K = 4096 (file
``gfx950-BATCHED_GEMM-A16W16``), with 16 rows where it has 8."""
OTHERWISE = Config(128, 128, 64)
"""For more rows than the table has."""

ADDED = Config(16, 64, 16)
"""Tiles in which the sums of the parts are added."""


def config_for(m: int) -> Config:
    """The tiles for ``m`` rows."""
    return next((config for largest, config in BY_ROWS if m <= largest), OTHERWISE)


def contract() -> Contract:
    """What every engine promises.

    Sums are float32, blocks of K in ascending order; the order inside a block is the hardware's.
    The bias is added in float32, and there is one rounding. From 65 to 128 rows K is split in up to
    four parts, whose sums are kept in float32.
    """
    plain = Contract(accumulator="float32", epilogue=("bias", "round"), output="bfloat16")
    split = Contract(
        accumulator="float32",
        split_k=4,
        partials="float32",
        epilogue=("bias", "round"),
        output="bfloat16",
    )
    return Contract(
        accumulator="float32",
        epilogue=("bias", "round"),
        output="bfloat16",
        by_batch=((64, plain), (128, split)),
    )
