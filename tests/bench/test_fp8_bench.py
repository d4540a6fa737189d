"""FP8 W8A16 linear layers beside torch's bfloat16 linear on the decoded weight, and vLLM's op.

    make bench                                    # or only this file:
    OMP_NUM_THREADS=1 python -m pytest tests/bench/test_fp8_bench.py -s --benchmark-only \
        --override-ini addopts=--import-mode=importlib
    OMP_NUM_THREADS=1 .venvs/vllm/bin/python -m pytest ...    # the same beside vLLM's own op

N = K = 4096 and one thread; `N`, `K` and `ROUNDS` may be set in the environment. Every round times
every candidate, one after the other, by the processor's time of this process; a ratio is the
median over the rounds of the ratio within a round. The weights rotate through more memory than
the last cache holds, so that each call finds its weight cold. What is timed is the whole call
from Python. Nothing is asserted about the times.
"""

import ctypes
import os
import random
import statistics
import time
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from reconcile.checking.probes import random_weight
from reconcile.native import NativeLibrary
from reconcile.weight import QuantizedWeight
from reconcile_kernels import vllm_fp8
from reconcile_kernels.amx_fp8 import W8A16
from reconcile_references.fp8 import FP8_E4M3_BLOCK, FP8_E4M3_CHANNEL, FP8_E4M3_TENSOR

N = int(os.environ.get("N", "4096"))
K = int(os.environ.get("K", "4096"))
ROUNDS = int(os.environ.get("ROUNDS", "15"))
ROTATED = 256 << 20
"""Bytes of weights that a candidate goes through before it meets one again."""
STREAMS = (1, 2, 4, 8)
NAIVE_ROUNDS = 3
ENGINE = next(engine for engine in W8A16.engines if engine.name == "avx512_bf16")
READER = NativeLibrary(
    name="read_streams",
    sources=(Path(__file__).with_name("read_streams.cpp"),),
    flags=("-pthread",),
)
pytestmark = pytest.mark.skipif(
    not W8A16.is_supported(ENGINE), reason=W8A16.is_supported(ENGINE).reason
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight_of(form):
    scales = torch.ones(form.scale_shape((N, K)))
    codes = torch.zeros(N, K, dtype=torch.uint8)
    like = QuantizedWeight(codes=codes, scales=scales, format=form, shape=(N, K))
    return random_weight(like, (N, K), torch.Generator().manual_seed(0))


def copies(make, nbytes):
    return [make() for _ in range(-(-ROTATED // nbytes))]


@pytest.fixture(scope="module")
def weights():
    """Lists of equal weights by candidate, each as large as `ROTATED`; and what multiplies them."""
    plain = weight_of(FP8_E4M3_TENSOR)
    dense = plain.dequantize(torch.bfloat16)
    found = {"torch": (linear, copies(dense.clone, dense.nbytes))}
    for form in (FP8_E4M3_TENSOR, FP8_E4M3_CHANNEL, FP8_E4M3_BLOCK):
        weight, name = weight_of(form), form.name.removeprefix("fp8_e4m3_")
        found[name] = (
            W8A16.apply,
            copies(lambda weight=weight: W8A16.prepare(weight, ENGINE), N * K),
        )
    theirs, (engine,) = vllm_fp8.W8A16, vllm_fp8.W8A16.engines
    if theirs.is_supported(engine):
        found["vllm"] = (theirs.apply, copies(lambda: theirs.prepare(plain, engine), N * K))
    return found


def rotating(call, operands):
    def step():
        step.turn = (step.turn + 1) % len(operands)
        return call(operands[step.turn])

    step.turn = 0
    return step


def naive(x, weight):
    """What torch offers without a kernel: convert, scale, multiply."""
    codes, scale = weight.codes.view(torch.float8_e4m3fn), weight.scales.bfloat16()
    return lambda: linear(x, codes.to(torch.bfloat16) * scale)


def readers(weights):
    """Two packed weights read and nothing else, by several numbers of streams."""
    call = READER.load().read_streams
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    call.argtypes += [ctypes.c_int]
    packed = [prepared.packed for prepared in weights["tensor"][1]]
    pairs = list(zip(packed[::2], packed[1::2], strict=False))

    def by(streams):
        return lambda pair: call(pair[0].data_ptr(), pair[1].data_ptr(), N * K, streams, 1)

    return {f"read {n}": rotating(by(n), pairs) for n in STREAMS}


def rounds(calls, repeats):
    """Seconds of one call of every candidate, in every round, each in an order of its own.

    In a fixed order the candidate after torch, which reads twice the bytes, loses 8 % by its place.
    """
    found = []
    order = random.Random(0)
    for _ in range(ROUNDS + 1):
        times = {}
        for name, call in order.sample(list(calls.items()), len(calls)):
            begin = time.process_time()
            for _ in range(repeats):
                call()
            times[name] = (time.process_time() - begin) / repeats
        found.append(times)
    return found[1:]


def ratio(found, one, other):
    return statistics.median(other(row) / one(row) for row in found)


@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 16, 64, 512])
def test_fp8_linear(m, weights, benchmark):
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()
    calls = {
        name: rotating(lambda prepared, call=call: call(x, prepared), operands)
        for name, (call, operands) in weights.items()
    }
    calls |= readers(weights)
    found = benchmark.pedantic(lambda: rounds(calls, 8 if m <= 16 else 1), rounds=1)

    def of(name):
        return lambda row: row[name]

    def reading(row):
        return min(row[f"read {n}"] for n in STREAMS)

    result = {}
    for name in weights:
        seconds = statistics.median(map(of(name), found))
        result[f"{name} ms"] = 1e3 * seconds
        if name != "torch":
            result[f"torch / {name}"] = ratio(found, of(name), of("torch"))
        if name not in ("torch", "vllm"):
            result[f"{name}: GFLOP/s"] = 2e-9 * m * N * K / seconds
            result[f"{name}: share of read bandwidth"] = ratio(
                found, of(name), lambda row: reading(row) / 2
            )
        if name not in ("torch", "vllm") and "vllm" in weights:
            result[f"vllm / {name}"] = ratio(found, of(name), of("vllm"))
    result["read GB/s"] = 2e-9 * N * K / statistics.median(map(reading, found))
    benchmark.extra_info.update(result)
    show(f"M={m}, N={N}, K={K}, one thread", result)


@pytest.mark.parametrize("m", [1, 64])
def test_beside_converting_each_time(m, weights, benchmark):
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()
    call, operands = weights["tensor"]
    ours = rotating(lambda prepared: call(x, prepared), operands)
    calls = {"ours": ours, "converting": naive(x, weight_of(FP8_E4M3_TENSOR))}
    found = benchmark.pedantic(lambda: rounds(calls, 1)[:NAIVE_ROUNDS], rounds=1)
    result = {"converting / ours": ratio(found, lambda r: r["ours"], lambda r: r["converting"])}
    benchmark.extra_info.update(result)
    show(f"M={m}: codes.to(bfloat16) * scale, then linear", result)


def show(title, result):
    print(f"\n{title}")
    for name, value in result.items():
        print(f"  {name:36} {value:10.3f}")
