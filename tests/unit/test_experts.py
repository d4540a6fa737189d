"""Mixtures of experts: the same arithmetic as transformers', checkpoints, routing as sets."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from reconcile import registry
from reconcile.exceptions import CheckpointError, FormatError, KernelError, TapError
from reconcile.grouped import GroupedWeight, baseline_linear
from reconcile.judging.routing import choice_of, forced_routing, routing_stats
from reconcile.linears import DenseWeight
from reconcile.tracing.taps import taps
from reconcile.tracing.trace import Pass
from reconcile_kernels.mxfp8_npu.experts import prepare_experts
from reconcile_kernels.mxfp8_npu.linear import NPU_EMULATED
from reconcile_references import derived
from reconcile_references.checkpoint import read_tensors
from reconcile_references.experts import fused, split_experts

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


class Each(torch.nn.Module):
    """A batched linear of dense weights [E, N, K], expert by expert as transformers multiplies."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        linear = torch.nn.functional.linear
        return torch.stack([linear(x[:, e], w) for e, w in enumerate(self.weight)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_experts_compute_what_transformers_does(dtype):
    config = AutoConfig.for_model("qwen3_moe", **SIZES)
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        tokens = torch.randint(0, 32, (1, 40))
    held = model.model.layers[0].mlp.experts
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        split_experts(model)
        experts = model.model.layers[0].mlp.experts
        experts.w13, experts.w2 = Each(held.gate_up_proj), Each(held.down_proj)
        assert torch.allclose(model(input_ids=tokens).logits, expected, rtol=1e-2, atol=1e-6)


def test_experts_of_a_checkpoint_are_batched_linears():
    checkpoint = registry.model_source().load(derived.moe_fp8_block())
    batched = {n: w for n, w in checkpoint.weights.items() if isinstance(w, GroupedWeight)}
    assert sorted(batched) == [
        f"model.layers.{layer}.mlp.experts.{part}" for layer in (0, 1) for part in ("w13", "w2")
    ]
    stored = read_tensors(checkpoint.path)
    for name, weight in batched.items():
        parts = ("gate_proj", "up_proj") if name.endswith("w13") else ("down_proj",)
        assert len(weight.groups) == derived.EXPERTS
        for expert, group in enumerate(weight.groups):
            base = f"{name.rpartition('.')[0]}.{expert}"
            values = []
            for part in parts:
                codes = stored[f"{base}.{part}.weight"].to(torch.float64).numpy()
                scales = stored[f"{base}.{part}.weight_scale_inv"].double().numpy()
                n, k = codes.shape
                place = np.arange(n)[:, None] // 128, np.arange(k)[None] // 128
                values.append(codes * scales[place])
            assert np.array_equal(group.dequantize().numpy(), np.concatenate(values)), name
    assert checkpoint.structure.routers == ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    originals = checkpoint.originals(derived.moe_master())
    for name, weight in batched.items():
        noise = (weight.dequantize() - originals[name].double()).square().sum()
        assert -10 * math.log10(noise / originals[name].double().square().sum()) > 30


def test_experts_that_are_stored_dense_compute_what_transformers_does():
    """Expert by expert in the file, joined in the class that holds them."""
    folder = derived.moe_master()
    checkpoint = registry.model_source().load(folder)
    assert not any("experts" in name for name in checkpoint.weights)
    model = checkpoint.build(
        torch.float32, lambda _, weight: baseline_linear(weight, torch.float32)
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(5, 45)[None]
    with torch.no_grad():
        ours, expected = (m(input_ids=tokens).logits for m in (model, theirs.eval()))
    assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_a_dense_expert_that_is_missing_or_of_another_shape_is_named():
    tensors = read_tensors(derived.moe_master())
    skeleton = tiny_mixture()
    with pytest.raises(CheckpointError, match=r"missing tensors \(6\): model.layers.0.mlp.exp"):
        fused(skeleton, tensors)  # six experts, the file has four
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    config = AutoConfig.for_model("qwen3_moe", **SIZES | {"num_experts": 4})
    skeleton = AutoModelForCausalLM.from_config(config)
    with pytest.raises(CheckpointError, match=r"experts do not stack: .*size"):
        fused(skeleton, tensors | {name: tensors[name][:, :64]})


def rewritten(tmp_path, change):
    """The derived mixture with its config changed."""
    folder = tmp_path / "moe"
    shutil.copytree(derived.moe_fp8_block(), folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


REFUSED = {
    "an expert too many": (
        lambda c: c.update(num_experts=5),
        CheckpointError,
        r"missing tensors \(12\).*experts.4.down_proj.weight",
    ),
    "an expert too few": (
        lambda c: c.update(num_experts=3),
        CheckpointError,
        r"unused tensors \(12\)",
    ),
    "another block": (
        lambda c: c["quantization_config"].update(weight_block_size=[64, 64]),
        FormatError,
        r"block \[64, 64\]",
    ),
    "experts in FP8 that are declared dense": (
        lambda c: c["quantization_config"]["modules_to_not_convert"].append("model.layers.0.mlp"),
        CheckpointError,
        r"unused tensors \(12\): model.layers.0.mlp.experts.0.down_proj.weight_scale_inv",
    ),
    "one dense expert": (
        lambda c: c["quantization_config"]["modules_to_not_convert"].append(
            "model.layers.1.mlp.experts.2"
        ),
        CheckpointError,
        r"some experts of model.layers.1.mlp.experts stay dense and others not \(3\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mixture_that_does_not_fit_is_named(tmp_path, case):
    change, error, said = REFUSED[case]
    with pytest.raises(error, match=said):
        registry.model_source().load(rewritten(tmp_path, change))


# --- routing -------------------------------------------------------------------------------------

LOGITS = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 0.5, 0.25, 4.0]])
CHOSEN = torch.tensor([[0, 2], [3, 1]])


@pytest.mark.parametrize(
    ("candidate", "equal", "gap"),
    [
        ([[0, 2], [3, 1]], 1.0, 0.0),
        ([[2, 0], [1, 3]], 1.0, 0.0),  # another order is the same set
        ([[0, 1], [3, 1]], 0.5, 1.0),  # 2 left, 1 came: 2.0 - 1.0
        ([[0, 2], [3, 2]], 0.5, 0.25),
        ([[3, 1], [3, 2]], 0.0, 3.0),
    ],
)
def test_routing_as_sets(candidate, equal, gap):
    stats = routing_stats(torch.tensor(candidate), CHOSEN, LOGITS)
    assert (stats["sets_equal"], stats["set_gap"]) == (equal, gap)
    assert stats["least_margin"] == 0.25
    assert (stats["experts_unused"], stats["experts_idle"]) == (0, [])


def test_experts_without_a_token_are_named():
    stats = routing_stats(CHOSEN[:1], CHOSEN[:1], LOGITS[:1])
    assert (stats["experts_unused"], stats["experts_idle"]) == (2, [1, 3])


def test_routing_by_nan_is_no_agreement():
    spoilt = LOGITS.clone()
    spoilt[0, 0] = torch.nan
    assert math.isnan(routing_stats(CHOSEN, CHOSEN, spoilt)["set_gap"])
    with pytest.raises(ValueError, match="shapes differ"):
        routing_stats(CHOSEN[:1], CHOSEN, LOGITS)


def tiny_mixture(dtype=torch.float32):
    config = AutoConfig.for_model("qwen3_moe", **SIZES, norm_topk_prob=True)
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


ROUTER = "model.layers.0.mlp.gate"


@torch.no_grad()
def test_a_model_goes_on_with_the_experts_of_another_run():
    """Its own choice is recorded; scores are its own, of the given experts, in their order."""
    model, tokens = tiny_mixture(), torch.arange(20)[None]
    with taps(model, [ROUTER, ""]) as free:
        model(input_ids=tokens)
    (own,) = free.passes
    logits = own.tensors[f"{ROUTER}:out.0"]
    other = logits.topk(2, largest=False).indices
    like = Pass("k", "chained", tensors={f"{ROUTER}:out.0": logits, f"{ROUTER}:out.2": other})
    seen = []
    model.get_submodule("model.layers.0.mlp.experts").register_forward_pre_hook(
        lambda _, given: seen.append(given)
    )
    with taps(model, [ROUTER, ""]) as trace, forced_routing(model, [ROUTER], like):
        model(input_ids=tokens)
    (forced,) = trace.passes
    assert torch.equal(forced.tensors[f"{ROUTER}:out.2"], own.tensors[f"{ROUTER}:out.2"])
    assert not torch.equal(forced.tensors[":out.logits"], own.tensors[":out.logits"])
    _, chosen, scores = seen[0]
    shares = logits.softmax(-1).gather(-1, other)
    assert torch.equal(chosen, other)
    assert torch.allclose(scores, shares / shares.sum(-1, keepdim=True))
    with taps(model, [ROUTER, ""]) as trace, forced_routing(model, [ROUTER], own):
        model(input_ids=tokens)
    assert torch.equal(trace.passes[0].tensors[":out.logits"], own.tensors[":out.logits"])
    with taps(model, [ROUTER, ""]) as trace:  # nothing is left behind
        model(input_ids=tokens)
    assert torch.equal(trace.passes[0].tensors[":out.logits"], own.tensors[":out.logits"])


@torch.no_grad()
def test_a_router_that_chooses_otherwise_than_by_topk_is_refused():
    model = tiny_mixture()
    like = Pass("k", "chained", tensors={f"{ROUTER}:out.2": torch.zeros(3, 2, dtype=torch.int64)})
    with (
        forced_routing(model, [ROUTER], like),
        pytest.raises(TapError, match=r"called torch.topk 0 times on \[3, 2\] choices"),
    ):
        model(input_ids=torch.arange(20)[None])
    assert choice_of("model.norm", like) is None


def test_dense_groups_are_no_experts():
    dense = GroupedWeight(groups=(DenseWeight(tensor=torch.ones(4, 64)),))
    with pytest.raises(KernelError, match="experts in a number format"):
        prepare_experts(dense, 0, NPU_EMULATED)
