"""The reference model against a float64 model written here from the formulas alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from reconcile.contract import Contract
from reconcile.exceptions import CheckpointError
from reconcile.linears import ReferenceLinear
from reconcile.registry import model_source
from reconcile_references.precise import preserve_float64

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/reconcile_fixtures"
PACKED = FIXTURES / "tiny-lm-ternary"
PROMPTS = [p["tokens"] for p in json.loads((FIXTURES / "prompts.json").read_text())["prompts"]]


# --- the oracle: numpy, float64, no code of the package and none of transformers -----------------


def unpack(stored):
    """Every tensor of the packed file as float64: byte j of a row holds k = 4j + i in bits 2i."""
    dense = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_scale"):
            continue
        if tensor.dtype != torch.uint8:
            dense[name] = tensor.double().numpy()
            continue
        data = tensor.numpy()
        values = np.zeros((data.shape[0], 4 * data.shape[1]))
        for i in range(4):
            values[:, i::4] = np.array([0, 1, -1, np.nan])[(data >> (2 * i)) & 3]
        scale = stored[f"{name}_scale"].double().numpy()
        dense[name] = values * scale[:, None]
    return dense


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """RoPE, half-split: x [T, heads, D]; pair (d, d + D/2) turns by position * theta^(-2d/D)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q, k, v):
    """Causal attention of query heads q [T, H, D] over k, v [T, H / group, D]."""
    group, out = q.shape[1] // k.shape[1], np.zeros_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        scores[np.triu_indices(len(q), 1)] = -np.inf
        share = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = share / share.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out


def oracle(weights, config, ids):
    """Logits [T, V] of a Qwen3, Qwen2 or Llama decoder; norms of q, k and biases where stored."""
    eps, theta = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    width = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = rms_norm(x, weights[f"{at}input_layernorm.weight"], eps)
        q, k, v = (
            linear(h, f"{at}self_attn.{part}_proj").reshape(len(ids), -1, width) for part in "qkv"
        )
        if f"{at}self_attn.q_norm.weight" in weights:
            q = rms_norm(q, weights[f"{at}self_attn.q_norm.weight"], eps)
            k = rms_norm(k, weights[f"{at}self_attn.k_norm.weight"], eps)
        mixed = attend(rotate(q, theta), rotate(k, theta), v).reshape(len(ids), -1)
        x = x + linear(mixed, f"{at}self_attn.o_proj")
        h = rms_norm(x, weights[f"{at}post_attention_layernorm.weight"], eps)
        gate = linear(h, f"{at}mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, f"{at}mlp.up_proj"), f"{at}mlp.down_proj"
        )
    return linear(rms_norm(x, weights["model.norm.weight"], eps), "lm_head")


# --- the reference -----------------------------------------------------------------------------


def load(folder):
    return model_source().load(folder)


def build(checkpoint, dtype):
    return checkpoint.build(dtype, lambda _, w: ReferenceLinear(w, Contract(), dtype))


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def distance(obtained, expected):
    """Largest difference relative to the largest expected value."""
    assert obtained.shape == expected.shape
    return np.abs(obtained.double().numpy() - expected).max() / np.abs(expected).max()


@pytest.fixture(scope="module")
def packed():
    return load(PACKED)


@pytest.fixture(scope="module")
def plain():
    return unpack(load_file(PACKED / "model.safetensors"))


@pytest.fixture(scope="module")
def config():
    return json.loads((PACKED / "config.json").read_text())


@pytest.fixture(scope="module")
def reference(packed):
    return build(packed, torch.float64)


def test_quantised_weights_are_the_independently_unpacked_ones(packed, plain):
    assert len(packed.weights) == 42
    for name, weight in packed.weights.items():
        assert np.array_equal(weight.dequantize().numpy(), plain[f"{name}.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dense_tensors_are_the_stored_ones(packed, plain, dtype):
    """Stored in bfloat16, so that no dtype rounds them."""
    state = build(packed, dtype).state_dict()
    dense = {name for name in plain if name.rpartition(".")[0] not in packed.weights}
    assert set(state) == dense
    for name in sorted(dense):
        assert state[name].dtype == dtype
        assert np.array_equal(state[name].double().numpy(), plain[name])


@pytest.mark.parametrize("index", range(4))
def test_float64_logits_are_those_of_the_formulas(packed, reference, plain, config, index):
    ids = PROMPTS[index]
    with packed.precise(torch.float64):
        obtained = logits(reference, ids)
    assert obtained.dtype == torch.float64
    assert distance(obtained, oracle(plain, config, ids)) < 1e-12


def test_without_precise_the_float32_islands_show(packed, reference, plain, config):
    expected = oracle(plain, config, PROMPTS[0])
    assert 1e-8 < distance(logits(reference, PROMPTS[0]), expected) < 1e-5


def test_the_float32_reference_is_as_far_as_float32_is(packed, plain, config):
    model = build(packed, torch.float32)
    expected = oracle(plain, config, PROMPTS[0])
    with packed.precise(torch.float32):
        obtained = logits(model, PROMPTS[0])
    assert obtained.dtype == torch.float32
    assert 1e-9 < distance(obtained, expected) < 1e-5
    assert torch.equal(obtained, logits(model, PROMPTS[0]))  # precise changes nothing here


def test_the_frequencies_of_rope_are_float64_in_the_reference_alone(packed, reference, config):
    exact = config["rope_parameters"]["rope_theta"] ** (-np.arange(16) / 16)
    wide = dict(reference.named_buffers())["model.rotary_emb.inv_freq"]
    assert np.abs(wide.numpy() / exact - 1).max() < 1e-15
    narrow = dict(build(packed, torch.bfloat16).named_buffers())["model.rotary_emb.inv_freq"]
    assert narrow.dtype == torch.float32


def test_the_reference_is_frozen_and_evaluates(reference):
    assert not reference.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert reference.config._attn_implementation == "eager"


def test_two_builds_share_nothing(packed, reference):
    other = build(packed, torch.float64)
    other.model.norm.weight.zero_()
    assert reference.model.norm.weight.abs().min() > 0
    assert packed.dense["model.norm.weight"].abs().min() > 0


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("qwen3", "ternary_k_interleaved", {}),
        ("qwen3", "ternary_hf", {}),
        ("qwen3", "ternary_hf_divide", {"tie_word_embeddings": True}),
        ("llama", "ternary_k_interleaved", {}),
        ("llama", "ternary_hf_divide", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", "ternary_k_interleaved", {}),
    ],
)
def test_other_architectures_agree_with_the_formulas(tiny, tmp_path, kind, name, changes):
    made = tiny(kind=kind, name=name, **changes)
    for tensor, value in made.tensors.items():
        if tensor.endswith(".bias"):
            value += torch.randn(value.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
            made.dense[tensor] = value.double().numpy()
    biased = kind == "qwen2" or "attention_bias" in changes
    checkpoint = load(made.write(tmp_path))
    assert any(weight.bias is not None for weight in checkpoint.weights.values()) is biased
    ids = list(range(3, 39, 2))
    with checkpoint.precise(torch.float64):
        obtained = logits(build(checkpoint, torch.float64), ids)
    width = {"head_dim": made.config.get("head_dim")}
    assert distance(obtained, oracle(made.dense, made.config | width, ids)) < 1e-12


# --- precise -----------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 5, dtype=torch.float64) / 3


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.half(),
        lambda x: x.to("cpu", torch.float32, copy=True),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32).log() + x.exp().sum().log(),
    ],
)
def test_precise_keeps_float64_through_casts(cast):
    with preserve_float64():
        kept = cast(X)
    assert kept.dtype == torch.float64
    assert torch.allclose(kept, X, rtol=0, atol=1e-15)


def test_precise_widens_what_is_made_and_leaves_the_rest():
    narrow, integers = X.float(), torch.tensor([1, 2**24 + 1])
    with preserve_float64():
        assert integers.float()[1].item() == 2**24 + 1
        assert torch.arange(3, dtype=torch.float32).dtype == torch.float64
        assert narrow.bfloat16().dtype == torch.bfloat16
        assert (narrow + 1).dtype == torch.float32
        assert X.long().dtype == torch.int64
        assert (X > 0).dtype == torch.bool
    assert X.float().dtype == torch.float32  # outside nothing is changed


@pytest.mark.parametrize(
    ("operation", "narrow"),
    [
        ("sum", lambda _: X.sum(dtype=torch.float32)),
        ("copy_", lambda narrow: narrow.copy_(X)),
        ("add_", lambda narrow: narrow.add_(X)),
        ("add", lambda narrow: torch.add(X, X, out=narrow)),
        ("_to_copy", lambda _: X.to(torch.float8_e4m3fn)),
        ("cumsum", lambda _: X.cumsum(0, dtype=torch.bfloat16)),
    ],
)
def test_precise_refuses_an_operation_that_narrows(operation, narrow):
    target = torch.ones(5)
    with (
        preserve_float64(),
        pytest.raises(
            CheckpointError, match=rf"aten\.{operation}\..* narrows float64 to"
        ) as caught,
    ):
        narrow(target)
    assert '[reference] dtype = "float32"' in str(caught.value)


def test_a_model_that_narrows_cannot_serve(packed):
    class Narrowing(nn.Module):
        def forward(self, x):
            return x.sum(dtype=torch.float32)

    model = packed.build(torch.float64, lambda *_: Narrowing())
    with (
        packed.precise(torch.float64),
        pytest.raises(CheckpointError, match=r"aten\.sum.* narrows"),
    ):
        logits(model, PROMPTS[0])
