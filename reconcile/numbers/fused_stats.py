"""One native pass over a (candidate, reference) pair, and the order of its sums.

`measure` gives the `Totals` from which `metrics.error_stats` makes its `ErrorStats`;
`metrics` has the same in torch operators, for tensors that are not in this machine's
memory and for machines without a C++ compiler. Both give the same numbers bit for bit, because
both add in the same order:

1. the terms are float64;
2. a row [C] is cut into blocks of `BLOCK` elements, element i of a block is added to partial sum
   i % `LANES`, and the partial sums are folded in halves;
3. the sums of blocks are added exactly, and rounded once.

So neither chunks, nor threads, nor vector instructions change a bit.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from reconcile.exceptions import BuildError
from reconcile.native import NativeLibrary

BLOCK = 1024
"""Elements of a row that are added in float64 before the exact sum."""
LANES = 16
"""Partial sums of a block."""
SUMS = ("abs", "error", "power", "candidate", "dot")
"""Sums over the finite pairs: |c - r|, (c - r)^2, r^2, c^2 and c r."""
THREADS_FROM_BYTES = 4 << 20
"""Smaller pairs are read by one thread: starting another takes as long."""
LEVELS = ("portable", "avx2", "avx512")
"""Instructions for which there is code, worst first."""

_WORST = 5
_BINS = 2100
_FOLDER = Path(__file__).parent
LIBRARY = NativeLibrary(
    name="fused_stats",
    sources=(_FOLDER / "fused_stats.cpp",),
    headers=tuple(_FOLDER / f"fused_{name}.h" for name in ("exact", "state", "avx512")),
    flags=("-pthread",),
)
_DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}

Pairs = tuple[tuple[int, float], ...]


class Totals(NamedTuple):
    """What one pass over a pair finds; places are flat indices, None where there is none."""

    n: int
    finite: int
    """Elements that are finite on both sides; the numbers below are about these."""
    nan_candidate: int
    inf_candidate: int
    nan_reference: int
    inf_reference: int
    mismatch: int
    """Elements where the two differ in being NaN, +inf or -inf."""
    mismatch_place: int | None
    bitwise_equal: bool
    differing: int
    over_1ulp: int
    bias: int
    """Sum of sign(r) * clip(ulps from r rounded to c, -1, 1)."""
    max_ulp: int
    max_abs: float
    max_abs_place: int | None
    max_abs_candidate: float
    max_abs_reference: float
    max_rel: float
    max_rel_place: int | None
    reference_amax: float
    reference_constant: bool
    sums: tuple[float, ...]
    """In the order of `SUMS`, each the exact sum of the sums of blocks, rounded once."""
    worst_rows: Pairs
    worst_columns: Pairs
    histogram: tuple[tuple[int, int], ...]
    """Empty unless asked for."""


# struct FusedStats of fused_stats.cpp: a fixed head, then two arrays of which `bins` entries count
_HEAD = struct.Struct(f"=11q Q 6q 5d {len(SUMS)}d {2 * _WORST}q {2 * _WORST}d")
_ARRAY = 8 * _BINS
_Head = ctypes.c_char * _HEAD.size
_Buffer = ctypes.c_char * (_HEAD.size + 2 * _ARRAY)


def implementation() -> str:
    """Which code computes the statistics of CPU tensors here.

    ``native`` and one of `LEVELS`, or ``torch`` with the reason: no compiler, a source
    that does not compile, a cache that cannot be written.
    """
    library, reason = _load()
    if library is None:
        return f"torch ({reason})"
    return f"native {LEVELS[library.reconcile_fused_level()]}"


def measure(
    candidate: Tensor,
    reference: Tensor,
    *,
    histogram: bool = False,
    threads: int | None = None,
    level: str = LEVELS[-1],
) -> Totals | None:
    """Totals of ``candidate`` against ``reference``; None where the native pass cannot have them.

    That is: there is no native library, or a tensor is not in this machine's memory, or not of
    dtype float64, float32, bfloat16 or float16. The two dtypes may differ. A tensor that is not
    contiguous is copied.

    Args:
        candidate: any shape with at least one element; a row is its last dimension.
        reference: the same shape.
        histogram: whether to fill in ``Totals.histogram``, which costs as much as the rest.
        threads: torch's number by default, or 1 for pairs below `THREADS_FROM_BYTES`.
        level: the best instructions to use, where the processor has them; one of `LEVELS`.

    Raises:
        MemoryError: no memory for the totals of each thread.
    """
    c_dtype, r_dtype = _plain_dtype(candidate), _plain_dtype(reference)
    library = _load()[0]
    if c_dtype is None or r_dtype is None or library is None:
        return None
    c, r = candidate.resolve_neg().contiguous(), reference.resolve_neg().contiguous()
    n, columns = c.numel(), c.shape[-1] if c.dim() else 1
    if threads is None:
        small = c.nbytes + r.nbytes <= THREADS_FROM_BYTES
        threads = 1 if small else torch.get_num_threads()
    found = _Buffer() if histogram else _Head()
    failed = library.reconcile_fused_stats(
        c_dtype,
        c.data_ptr(),
        r_dtype,
        r.data_ptr(),
        n // columns,
        columns,
        threads,
        LEVELS.index(level),
        histogram,
        found,
    )
    if failed:
        raise MemoryError(f"no memory to compare {list(c.shape)} with {threads} threads")
    return _totals(found, n)


def exact_sum(values: Tensor) -> float:
    """The sum of a float64 vector, exact and rounded once, by the native code.

    Raises:
        BuildError: there is no native library.
    """
    library, reason = _load()
    if library is None:
        raise BuildError(reason)
    x = values.to(torch.float64).contiguous()
    return float(library.reconcile_exact_sum(x.data_ptr(), x.numel()))


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none."""
    try:
        library = LIBRARY.load()
    except BuildError as error:
        return None, str(error)
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    call = library.reconcile_fused_stats
    shape, options = [size, size], [number, number, number]
    call.argtypes = [number, pointer, number, pointer, *shape, *options, pointer]
    call.restype = library.reconcile_fused_level.restype = number
    library.reconcile_exact_sum.argtypes = [pointer, size]
    library.reconcile_exact_sum.restype = ctypes.c_double
    return library, ""


def _plain_dtype(x: Tensor) -> int | None:
    """The number of the dtype, or None where the native code cannot read the tensor."""
    return _DTYPES.get(x.dtype) if x.is_cpu and x.layout is torch.strided else None


def _totals(found: ctypes.Array[ctypes.c_char], n: int) -> Totals:
    head = _HEAD.unpack_from(found)
    (
        finite,
        nan_candidate,
        inf_candidate,
        nan_reference,
        inf_reference,
        mismatch,
        mismatch_place,
        bitwise_equal,
        differing,
        over_1ulp,
        bias,
        max_ulp,
        max_abs_place,
        max_rel_place,
        reference_constant,
        rows,
        columns,
        bins,
        max_abs,
        max_abs_candidate,
        max_abs_reference,
        max_rel,
        reference_amax,
    ) = head[:23]
    places, values = head[28:38], head[38:]
    histogram: tuple[tuple[int, int], ...] = ()
    if bins:
        exponents = struct.unpack_from(f"={bins}q", found, _HEAD.size)
        counts = struct.unpack_from(f"={bins}q", found, _HEAD.size + _ARRAY)
        histogram = tuple(zip(exponents, counts, strict=True))
    return Totals(
        n,
        finite,
        nan_candidate,
        inf_candidate,
        nan_reference,
        inf_reference,
        mismatch,
        None if mismatch_place < 0 else mismatch_place,
        bool(bitwise_equal),
        differing,
        over_1ulp,
        bias,
        max_ulp,
        max_abs,
        None if max_abs_place < 0 else max_abs_place,
        max_abs_candidate,
        max_abs_reference,
        max_rel,
        None if max_rel_place < 0 else max_rel_place,
        reference_amax,
        bool(reference_constant),
        head[23:28],
        tuple(zip(places[:rows], values[:rows], strict=True)),
        tuple(
            zip(places[_WORST : _WORST + columns], values[_WORST : _WORST + columns], strict=True)
        ),
        histogram,
    )
