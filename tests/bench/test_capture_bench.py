"""What capturing costs: forward time with every module tapped over plain forward time.

The figures are printed and stored, never asserted: time depends on what else runs.
"""

import shutil
import statistics
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from reconcile.tracing.taps import taps

ROUNDS = 9
TARGETS = {"memory": 1.12, "disk": 1.45}


@pytest.fixture(scope="module")
def model():
    """About 132M parameters, 187 modules, float32, random weights."""
    config = Qwen3Config(
        hidden_size=768,
        intermediate_size=2432,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=30_000,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_taps_over_plain_forward(benchmark, model, tmp_path):
    ids = torch.randint(0, 30_000, (1, 128), generator=torch.Generator().manual_seed(0))

    def forward():
        model(input_ids=ids, use_cache=False)

    def memory():
        with taps(model) as trace:
            forward()
        return len(trace.passes[0].tensors)

    def disk():
        with taps(model, to=tmp_path / "trace"):
            forward()

    def timed(way):
        """Wall and CPU seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        way()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        shutil.rmtree(tmp_path / "trace", ignore_errors=True)
        return spent

    rounds = []

    def one_round():
        rounds.append([timed(way) for way in (forward, memory, disk)])

    with torch.inference_mode():
        taps_per_pass = memory()
        benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=2)
    rounds = rounds[-ROUNDS:]  # without the warm-up
    info = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "taps": taps_per_pass,
        "plain_ms": 1e3 * statistics.median(plain[0] for plain, *_ in rounds),
    }
    for place, (name, target) in enumerate(TARGETS.items(), start=1):
        for kind, clock in enumerate(("wall", "cpu")):
            ratios = [row[place][kind] / row[0][kind] for row in rounds]
            info[f"{name}_{clock}_ratio"] = statistics.median(ratios)
        info[f"{name}_target"] = target
    benchmark.extra_info.update(info)
    print("\n" + ", ".join(f"{name} {value:.4g}" for name, value in info.items()))
