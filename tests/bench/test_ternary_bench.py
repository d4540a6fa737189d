"""Ternary linear layers on AVX-512 beside torch's bfloat16 linear on the decoded weight.

    make bench                                    # or only this file:
    OMP_NUM_THREADS=1 python -m pytest tests/bench/test_ternary_bench.py -s --benchmark-only \
        --override-ini addopts=--import-mode=importlib

N = K = 4096 and one thread; `N`, `K` and `ROUNDS` may be set in the environment. Every round times
every candidate, one after the other, by the processor's time of this process; a ratio is the
median over the rounds of the ratio within a round. The weights rotate through more memory than
the last cache holds, so that each call finds its weight cold. What is timed is the whole call
from Python. Nothing is asserted about the times.
"""

import os
import statistics
import time

import pytest
import torch
from torch.nn.functional import linear

from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cpu import BF16, INT8
from reconcile_references.ternary import TERNARY_K_INTERLEAVED

N = int(os.environ.get("N", "4096"))
K = int(os.environ.get("K", "4096"))
ROUNDS = int(os.environ.get("ROUNDS", "15"))
ROTATED = 256 << 20
"""Bytes of weights that a candidate goes through before it meets one again."""
KERNELS = {"bf16": BF16, "int8": INT8}

pytestmark = pytest.mark.skipif(
    not all(kernel.is_supported(kernel.engines[0]) for kernel in KERNELS.values()),
    reason="no AVX-512 with VNNI and BF16, or no compiler",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights():
    """Lists of equal weights by candidate, each as large as `ROTATED`."""
    codes = torch.randint(0, 3, (N, K), generator=torch.Generator().manual_seed(0))
    packed = TERNARY_K_INTERLEAVED.pack(codes.to(torch.uint8))
    scales = torch.rand(N, generator=torch.Generator().manual_seed(1)) + 0.5
    weight = QuantizedWeight.from_tensors(
        packed, scales, format=TERNARY_K_INTERLEAVED, shape=(N, K)
    )
    dense = weight.dequantize(torch.bfloat16)
    found = {"torch": [dense.clone() for _ in range(-(-ROTATED // dense.nbytes))]}
    for name, kernel in KERNELS.items():
        count = -(-ROTATED // (N * K // 4))
        found[name] = [kernel.prepare(weight, kernel.engines[0]) for _ in range(count)]
    return found


def candidates(x, weights):
    def rotating(call, prepared):
        def step():
            step.turn = (step.turn + 1) % len(prepared)
            return call(x, prepared[step.turn])

        step.turn = 0
        return step

    calls = {"torch": rotating(linear, weights["torch"])}
    return calls | {name: rotating(k.apply, weights[name]) for name, k in KERNELS.items()}


def rounds(calls, repeats):
    """Seconds of one call of every candidate, in every round."""
    found = []
    for _ in range(ROUNDS + 1):
        times = {}
        for name, call in calls.items():
            begin = time.process_time()
            for _ in range(repeats):
                call()
            times[name] = (time.process_time() - begin) / repeats
        found.append(times)
    return found[1:]


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 64, 512])
def test_ternary_beside_dense(m, weights, benchmark):
    x = torch.randn(m, K, generator=torch.Generator().manual_seed(2)).bfloat16()
    calls = candidates(x, weights)
    exact = x.double() @ weights["torch"][0].double().T
    for name, call in calls.items():
        error = (call().double() - exact).norm() / exact.norm()
        assert error < 0.02, (name, error)
    found = benchmark.pedantic(lambda: rounds(calls, max(1, 16 // m)), rounds=1)
    result = {f"{name} ms": 1e3 * statistics.median(row[name] for row in found) for name in calls}
    for name in KERNELS:
        ratio = statistics.median(row["torch"] / row[name] for row in found)
        result[f"torch / {name}"] = ratio
    benchmark.extra_info.update(result)
    numbers = "  ".join(f"{name} {value:.3g}" for name, value in result.items())
    print(f"\nM={m}, N={N}, K={K}: {numbers}")
