"""The native MXFP8 quantiser beside torchao's `to_mx`; memory of resolving and requantising.

    make bench                                    # or only this file:
    PYTHONPATH=.venvs/torchao python -m pytest tests/bench/test_mx_bench.py -s --benchmark-only \
        --override-ini addopts=--import-mode=importlib

torchao lies in a folder of its own, which `make bench` fills. Every round times both, one after
the other, with the same number of threads, by the processor's time of this process; the ratio is
the median over the rounds of the ratio within a round. Codes and bytes are compared in the same
run. Memory is the peak of a process of its own over its level before. Nothing is asserted about
times.
"""

import os
import statistics
import subprocess
import sys
import time
import warnings

import pytest
import torch

from reconcile_kernels.mxfp8_npu.quantise import implementation, quantise

SIDE = int(os.environ.get("SIDE", "4096"))
ROUNDS = int(os.environ.get("ROUNDS", "9"))
MODES = {"floor": "FLOOR", "rceil": "RCEIL"}


def seconds(call):
    """Processor's time of this process: the cores are shared."""
    started = time.process_time()
    call()
    return time.process_time() - started


@pytest.fixture
def to_mx():
    """torchao's quantiser, by the mode's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    return lambda x, mode: module.to_mx(
        x, torch.float8_e4m3fn, 32, module.ScaleCalculationMode[mode]
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", MODES)
def test_quantising(benchmark, to_mx, rule, dtype, threads):
    x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scales, codes = to_mx(x, MODES[rule])
        mine = quantise(x, rule, threads=threads)
        assert torch.equal(mine[0], codes.view(torch.uint8).reshape(mine[0].shape))
        assert torch.equal(mine[1], scales.view(torch.uint8).reshape(mine[1].shape))
        rounds = [
            (
                seconds(lambda: quantise(x, rule, threads=threads)),
                seconds(lambda: to_mx(x, MODES[rule])),
            )
            for _ in range(ROUNDS)
        ]
        benchmark(quantise, x, rule, threads=threads)
    finally:
        torch.set_num_threads(before)
    ours, theirs = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(
        f"\n{rule} {dtype} {SIDE} x {SIDE}, {threads} threads, {implementation()}: "
        f"{ours * 1e3:.2f} ms, torchao {theirs * 1e3:.1f} ms, {ratio:.1f}x, bit for bit equal"
    )


MEASURE = """
import sys, torch
torch.set_num_threads(1)
from reconcile_kernels.mxfp8_npu import load
def memory(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field))
n, k, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def run(codes, scales):
    if what == "resolve":
        return load.resolve_block_scales(codes, scales, (128, 128))
    return load.requantise_into(codes, codes, scales, (128, 128), 0, torch.bfloat16)
run(torch.zeros(128, 128, dtype=torch.uint8), torch.ones(1, 1))
codes = torch.randint(0, 0x7E, (n, k), dtype=torch.uint8)
scales = torch.rand(n // 128, k // 128)
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
result = run(codes, scales)
print((memory("VmHWM") - before - result.nbytes) / (2 * n * k))
"""


def extra_share(what, n=16384, k=8192):
    """Peak memory beside the result, as a share of the dense bfloat16 weight."""
    command = [sys.executable, "-c", MEASURE, str(n), str(k), what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("what", ["resolve", "requantise in place"])
def test_memory(benchmark, what):
    share = benchmark.pedantic(extra_share, args=(what.split()[0],), rounds=1)
    print(f"\n{what} 16384 x 8192: {share:.2%} of the dense weight beside the result")
