"""How long error statistics take, beside what reading the two tensors takes.

    make bench                                    # or only this file:
    python -m pytest tests/bench/test_metrics_bench.py -s --benchmark-only \
        --override-ini addopts=--import-mode=importlib

Every candidate is timed in every round, one after the other in the same process; a ratio is the
median over the rounds of the ratio within a round. One thread is timed by the processor's time
of this process, two by the clock. `ELEMENTS` and `ROUNDS` may be set in the environment. The
numbers are printed and kept in the benchmark's extra_info; nothing is asserted about them.
"""

import ctypes
import math
import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from reconcile.native import NativeLibrary, find_cxx
from reconcile.numbers import metrics
from reconcile.numbers.fused_stats import implementation, measure
from reconcile.numbers.metrics import error_stats

ELEMENTS = int(os.environ.get("ELEMENTS", str(1 << 26)))
ROUNDS = int(os.environ.get("ROUNDS", "7"))
COLUMNS = 4096
STREAMS = (1, 2, 4, 8)
SLOW_ROUNDS = 1
"""Rounds in which what takes seconds takes part."""
TAP = 1 << 16

READER = NativeLibrary(
    name="read_streams",
    sources=(Path(__file__).with_name("read_streams.cpp"),),
    flags=("-pthread",),
)
pytestmark = pytest.mark.skipif(
    find_cxx() is None, reason="no C++ compiler: looked for $CXX, c++, g++, clang++"
)


def pair(elements, dtype, columns=COLUMNS):
    """A candidate with an error of 0.1 % of the standard deviation, and its reference."""
    g = torch.Generator().manual_seed(0)
    r = torch.randn(elements // columns, columns, generator=g)
    c = torch.randn(r.shape, generator=g).mul_(1e-3).add_(r)
    return c.to(dtype), r.to(dtype)


def reader(c, r, threads, streams):
    call = READER.load().read_streams
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    call.argtypes += [ctypes.c_int]
    call.restype = ctypes.c_uint64
    return lambda: call(c.data_ptr(), r.data_ptr(), c.nbytes, streams, threads)


def straightforward(c, r):
    """The same statistics as one would write them, on whole tensors."""
    c64, r64 = c.to(torch.float64), r.to(torch.float64)
    error = c64 - r64
    size, amount = error.abs(), r64.abs()
    ints = torch.int32 if c.dtype == torch.float32 else torch.int16
    lowest = torch.iinfo(ints).min
    ahead, behind = (x.view(ints).to(torch.int64) for x in (c, r))
    ahead = torch.where(ahead < 0, lowest - ahead, ahead)
    behind = torch.where(behind < 0, lowest - behind, behind)
    distance = (ahead - behind).abs()
    relative = torch.where(amount > 0, size / amount, -1.0)
    row_nmse = (error * error).sum(1) / (r64 * r64).sum(1)
    return [
        *(int(x.isnan().sum()) for x in (c, r)),
        *(int(x.isinf().sum()) for x in (c, r)),
        int((c.isfinite() != r.isfinite()).sum()),
        torch.equal(c, r),
        int((c != r).sum()),
        float(size.max()),
        int(size.argmax()),
        float(relative.max()),
        int(relative.argmax()),
        float(size.mean()),
        math.sqrt(float((error * error).mean())),
        float((error * error).sum() / (r64 * r64).sum()),
        row_nmse.topk(5),
        size.amax(0).topk(5),
        float((c64 * r64).sum() / ((c64 * c64).sum().sqrt() * (r64 * r64).sum().sqrt())),
        float((r64.sign() * (ahead - behind).clamp(-1, 1)).mean()),
        int(distance.max()),
        float((distance > 1).double().mean()),
        float(amount.max()),
        bool(r.min() == r.max()),
    ]


def accepted(c, r):
    torch.testing.assert_close(c, r, rtol=1.0, atol=1.0)


def timed(clock, call, repeats=1):
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats


def rounds(calls, clock, slow=(), repeats=1):
    """Seconds of every call in every round; the slow ones are nan in some rounds."""
    for name, call in calls.items():
        if name not in slow:
            call()
    return [
        {
            name: timed(clock, call, repeats) if name not in slow or i < SLOW_ROUNDS else math.nan
            for name, call in calls.items()
        }
        for i in range(ROUNDS)
    ]


def median_ratio(found, one, other):
    ratios = [other(row) / one(row) for row in found]
    return statistics.median(ratio for ratio in ratios if not math.isnan(ratio))


def read(row):
    return min(row[f"read {streams}"] for streams in STREAMS)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors(dtype, threads, benchmark):
    c, r = pair(ELEMENTS, dtype)
    calls = {f"read {n}": reader(c, r, threads, n) for n in STREAMS}
    calls |= {
        "error_stats": lambda: error_stats(c, r),
        "histogram too": lambda: error_stats(c, r, histogram=True),
        "equal": lambda: error_stats(r, r),
        "assert_close": lambda: accepted(c, r),
        "torch chunks": lambda: metrics._torch_totals(c, r),
        "torch whole": lambda: straightforward(c, r),
    }
    clock = time.process_time if threads == 1 else time.perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = benchmark.pedantic(
            lambda: rounds(calls, clock, ("torch chunks", "torch whole")), rounds=1
        )
    finally:
        torch.set_num_threads(before)
    bytes_read = c.nbytes + r.nbytes
    milliseconds = 1e3 * statistics.median(row["error_stats"] for row in found)
    result = {
        "read GB/s": bytes_read / 1e9 / statistics.median(map(read, found)),
        "error_stats ms": milliseconds,
        "GB/s": bytes_read / 1e6 / milliseconds,
        "share of read": median_ratio(found, lambda row: row["error_stats"], read),
        "share of read, histogram too": median_ratio(found, lambda row: row["histogram too"], read),
        "share of read, equal": median_ratio(found, lambda row: row["equal"], read),
    } | {
        f"{name} / error_stats": median_ratio(
            found, lambda row: row["error_stats"], lambda row, name=name: row[name]
        )
        for name in ("assert_close", "torch chunks", "torch whole")
    }
    benchmark.extra_info.update(result)
    show(f"{ELEMENTS} elements, {dtype}, {threads} thread(s), {implementation()}", result)


@pytest.mark.parametrize("columns", [256, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tap(dtype, columns, benchmark):
    c, r = pair(TAP, dtype, columns)
    calls = {
        "error_stats": lambda: error_stats(c, r),
        "native pass": lambda: measure(c, r),
        "assert_close": lambda: accepted(c, r),
        "torch chunks": lambda: metrics._torch_totals(c, r),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = benchmark.pedantic(lambda: rounds(calls, time.process_time, repeats=100), rounds=1)
    finally:
        torch.set_num_threads(before)
    result = {
        "error_stats us": 1e6 * statistics.median(row["error_stats"] for row in found),
        "native pass us": 1e6 * statistics.median(row["native pass"] for row in found),
    } | {
        f"error_stats / {name}": median_ratio(
            found, lambda row, name=name: row[name], lambda row: row["error_stats"]
        )
        for name in ("assert_close", "torch chunks")
    }
    benchmark.extra_info.update(result)
    show(f"{list(c.shape)}, {dtype}, 1 thread, {implementation()}", result)


def show(title, result):
    print(f"\n{title}")
    for name, value in result.items():
        print(f"  {name:32} {value:.3g}")
