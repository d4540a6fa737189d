"""One native pass over a (candidate, reference) pair, and the sums that it has in common with torch.

`measure` gives the `Totals` from which `reconcile.metrics.error_stats` makes its `ErrorStats`;
`reconcile.metrics` has the same in torch operators, for tensors that are not in this machine's
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
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
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


class _FusedStats(ctypes.Structure):
    """``struct FusedStats`` of fused_stats.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "finite",
                "nan_candidate",
                "inf_candidate",
                "nan_reference",
                "inf_reference",
                "mismatch",
                "mismatch_place",
                "bitwise_equal",
                "differing",
                "over_1ulp",
                "bias",
                "reference_constant",
                "max_abs_place",
                "max_rel_place",
                "rows",
                "columns",
                "bins",
            )
        ),
        ("max_ulp", ctypes.c_uint64),
        *(
            (name, ctypes.c_double)
            for name in (
                "max_abs",
                "max_abs_candidate",
                "max_abs_reference",
                "max_rel",
                "reference_amax",
            )
        ),
        ("sums", ctypes.c_double * len(SUMS)),
        ("row", ctypes.c_int64 * _WORST),
        ("column", ctypes.c_int64 * _WORST),
        ("row_nmse", ctypes.c_double * _WORST),
        ("column_max", ctypes.c_double * _WORST),
        ("exponent", ctypes.c_int64 * _BINS),
        ("count", ctypes.c_int64 * _BINS),
    )


def implementation() -> str:
    """Which code computes the statistics of CPU tensors here.

    ``native avx512``, ``native portable``, or ``torch`` with the reason: no compiler, a source
    that does not compile, a cache that cannot be written.
    """
    library, reason = _load()
    if library is None:
        return f"torch ({reason})"
    return "native avx512" if library.reconcile_fused_simd() else "native portable"


def measure(
    candidate: Tensor, reference: Tensor, *, threads: int | None = None, simd: bool = True
) -> Totals | None:
    """Totals of ``candidate`` against ``reference``; None where the native pass cannot have them.

    That is: there is no native library, or a tensor is not in this machine's memory, or not of
    dtype float64, float32, bfloat16 or float16. The two dtypes may differ. A tensor that is not
    contiguous is copied.

    Args:
        candidate: any shape with at least one element; a row is its last dimension.
        reference: the same shape.
        threads: torch's number by default, or 1 for pairs below `THREADS_FROM_BYTES`.
        simd: False takes the portable code even where the processor has AVX-512.

    Raises:
        MemoryError: no memory for the totals of each thread.
    """
    if not (_is_plain(candidate) and _is_plain(reference)):
        return None
    library = _load()[0]
    if library is None:
        return None
    c, r = candidate.resolve_neg().contiguous(), reference.resolve_neg().contiguous()
    columns = c.shape[-1] if c.dim() else 1
    if threads is None:
        small = c.nbytes + r.nbytes <= THREADS_FROM_BYTES
        threads = 1 if small else torch.get_num_threads()
    found = _FusedStats()
    failed = library.reconcile_fused_stats(
        _DTYPES[c.dtype],
        c.data_ptr(),
        _DTYPES[r.dtype],
        r.data_ptr(),
        c.numel() // columns,
        columns,
        threads,
        simd,
        ctypes.byref(found),
    )
    if failed:
        raise MemoryError(f"no memory to compare {list(c.shape)} with {threads} threads")
    return _totals(found, c.numel())


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
    call.argtypes = [number, pointer, number, pointer, size, size, number, number, pointer]
    call.restype = library.reconcile_fused_simd.restype = number
    library.reconcile_exact_sum.argtypes = [pointer, size]
    library.reconcile_exact_sum.restype = ctypes.c_double
    return library, ""


def _is_plain(x: Tensor) -> bool:
    return x.dtype in _DTYPES and x.device.type == "cpu" and x.layout == torch.strided


def _totals(found: _FusedStats, n: int) -> Totals:
    rows, columns, bins = found.rows, found.columns, found.bins
    return Totals(
        n=n,
        finite=found.finite,
        nan_candidate=found.nan_candidate,
        inf_candidate=found.inf_candidate,
        nan_reference=found.nan_reference,
        inf_reference=found.inf_reference,
        mismatch=found.mismatch,
        mismatch_place=_place(found.mismatch_place),
        bitwise_equal=bool(found.bitwise_equal),
        differing=found.differing,
        over_1ulp=found.over_1ulp,
        bias=found.bias,
        max_ulp=found.max_ulp,
        max_abs=found.max_abs,
        max_abs_place=_place(found.max_abs_place),
        max_abs_candidate=found.max_abs_candidate,
        max_abs_reference=found.max_abs_reference,
        max_rel=found.max_rel,
        max_rel_place=_place(found.max_rel_place),
        reference_amax=found.reference_amax,
        reference_constant=bool(found.reference_constant),
        sums=tuple(found.sums),
        worst_rows=tuple(zip(found.row[:rows], found.row_nmse[:rows], strict=True)),
        worst_columns=tuple(zip(found.column[:columns], found.column_max[:columns], strict=True)),
        histogram=tuple(zip(found.exponent[:bins], found.count[:bins], strict=True)),
    )


def _place(place: int) -> int | None:
    return None if place < 0 else place
