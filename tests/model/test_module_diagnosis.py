"""Faults of the candidate's model outside its linears, on the embedded model: module and cause."""

from pathlib import Path

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

import reconcile
from reconcile.replay import KernelLinear
from reconcile.report import Level, Verdict
from reconcile_references.models import TransformersCheckpoint

KERNEL = f"{Path(__file__).with_name('kernels.py')}:clean"
LAYER = "model.layers.2"
ONLY = f"{LAYER}.*"


@pytest.fixture(scope="module")
def session():
    return reconcile.session()


@pytest.fixture
def run(session, monkeypatch):
    """A run whose candidate is built with a fault; reference and plain torch are as they are."""

    def call(break_model, levels=("op", "module")):
        build = TransformersCheckpoint.build

        def broken(self, dtype, make_linear):
            model = build(self, dtype, make_linear)
            if any(isinstance(module, KernelLinear) for module in model.modules()):
                break_model(model.get_submodule(LAYER), model)
            return model

        session.run(kernel=KERNEL, levels=("op",), only=ONLY)  # the reference is kept from here on
        monkeypatch.setattr(TransformersCheckpoint, "build", broken)
        report = session.run(kernel=KERNEL, levels=levels, only=ONLY)
        assert report.verdict is Verdict.FAIL, report.explain()
        return report.rows[report.first_divergence.row]

    return call


def changed(module, change):
    module.register_forward_hook(lambda _, args, y: change(y, args))


def epsilon(layer, model):
    layer.input_layernorm.variance_epsilon = 1e-5


def plus_one(layer, model):
    norm = layer.post_attention_layernorm
    norm.weight = torch.nn.Parameter(norm.weight + 1, requires_grad=False)


def swapped_modules(layer, model):
    attention = layer.self_attn
    attention.k_proj, attention.v_proj = attention.v_proj, attention.k_proj


def swapped_after_the_split(layer, model):
    """A fused qkv whose parts are taken in the order q, v, k."""
    attention = layer.self_attn
    forward = attention.forward

    def swapped(*args, **kwargs):
        k, v = attention.k_proj, attention.v_proj
        kept = k.forward, v.forward
        k.forward, v.forward = kept[1], kept[0]
        try:
            return forward(*args, **kwargs)
        finally:
            k.forward, v.forward = kept

    attention.forward = swapped


def interleaved_rope(layer, model):
    """Neighbours 2i and 2i + 1 are rotated, not i and i + 16."""

    def rotated(x, cos, sin):
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = (t[:, None, :, :16] for t in (cos, sin))
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    forward = layer.self_attn.forward

    def with_pairs(*args, **kwargs):
        kept = modeling_qwen3.apply_rotary_pos_emb
        modeling_qwen3.apply_rotary_pos_emb = lambda q, k, cos, sin, **_: (
            rotated(q, cos, sin),
            rotated(k, cos, sin),
        )
        try:
            return forward(*args, **kwargs)
        finally:
            modeling_qwen3.apply_rotary_pos_emb = kept

    layer.self_attn.forward = with_pairs


def no_mask(layer, model):
    def hook(_, args, kwargs):
        return args, kwargs | {"attention_mask": torch.zeros_like(kwargs["attention_mask"])}

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def no_scale(layer, model):
    layer.self_attn.scaling = 1.0


def no_residual(layer, model):
    streams = []
    layer.post_attention_layernorm.register_forward_pre_hook(
        lambda _, args: streams.append(args[0].clone())
    )
    layer.register_forward_hook(
        lambda _, args, y: (
            y - streams[-1] if isinstance(y, torch.Tensor) else (y[0] - streams[-1], *y[1:])
        )
    )


def overflowing_norm(layer, model):
    """Squares saturate at 16: nothing in the probe for epsilons is that large."""
    norm = layer.post_attention_layernorm

    def forward(x):
        wide = x.float()
        power = wide.square().clamp_max(16.0).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(power + norm.variance_epsilon)).to(x.dtype) * norm.weight

    norm.forward = forward


def half_a_vocabulary(layer, model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    model.lm_head.weight[128:] = 0


def next_layer(layer, model):
    layers = model.model.layers
    layers[2], layers[3] = layers[3], layers[2]


def norm_left_out(layer, model):
    changed(model.model.norm, lambda y, args: args[0])


def in_its_attention(layer, name, function):
    """A function of the model's file is another while this layer's attention runs."""
    forward = layer.self_attn.forward

    def other(*args, **kwargs):
        kept = getattr(modeling_qwen3, name)
        setattr(modeling_qwen3, name, function)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(modeling_qwen3, name, kept)

    layer.self_attn.forward = other


def tiled_heads(layer, model):
    """KV heads 0, 1, 0, 1 where 0, 0, 1, 1 are meant."""
    in_its_attention(layer, "repeat_kv", lambda states, count: states.repeat(1, count, 1, 1))


def sees_ten_keys(layer, model):
    """A band of ten keys, itself included."""

    def hook(_, args, kwargs):
        mask = kwargs["attention_mask"]
        rows, columns = torch.meshgrid(*map(torch.arange, mask.shape[-2:]), indexing="ij")
        return args, kwargs | {"attention_mask": mask.masked_fill(rows - columns >= 10, -1e30)}

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def half_of_the_heads(layer, model):
    """The output projection of the first half of its inputs, as one rank of two has it."""

    def part(x):
        inner = layer.mlp.act_fn(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x)
        inner[..., inner.shape[-1] // 2 :] = 0
        return layer.mlp.down_proj(inner)

    layer.mlp.forward = part


def activated_up(layer, model):
    """The activation is applied to the up half of a fused gate_up."""
    mlp = layer.mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def relu(layer, model):
    layer.mlp.act_fn = torch.nn.ReLU()


def residual_twice(layer, model):
    streams = []
    norm = layer.input_layernorm.forward
    layer.input_layernorm.forward = lambda x: (streams.append(x.clone()), norm(x))[1]
    attention = layer.self_attn.forward

    def added(*args, **kwargs):
        out, *rest = attention(*args, **kwargs)
        return (out + streams.pop(), *rest)

    layer.self_attn.forward = added


def returns_what_it_adds(layer, model):
    """A layer that returns (delta, stream), of which the first is taken."""
    forward = layer.forward
    layer.forward = lambda x, *args, **kwargs: forward(x, *args, **kwargs) - x


MODULES = [
    ("epsilon 1e-5", epsilon, "epsilon", f"{LAYER}.input_layernorm"),
    ("1 + weight", plus_one, "norm_weight_plus_one", f"{LAYER}.post_attention_layernorm"),
    ("k and v modules", swapped_modules, "qkv_order", f"{LAYER}.self_attn.k_proj"),
    ("k and v split", swapped_after_the_split, "qkv_order", f"{LAYER}.self_attn.k_proj"),
    ("RoPE pairs", interleaved_rope, "rope_pairing", f"{LAYER}.self_attn"),
    ("ReLU", relu, "activation_function", f"{LAYER}.mlp"),
    ("no mask", no_mask, "mask", f"{LAYER}.self_attn"),
    ("heads tiled", tiled_heads, "gqa_tiling", f"{LAYER}.self_attn"),
    ("ten keys", sees_ten_keys, "mask", f"{LAYER}.self_attn"),
    ("one rank", half_of_the_heads, "partial_sum", f"{LAYER}.mlp.down_proj"),
    ("gate and up", activated_up, "gate_up_order", f"{LAYER}.mlp"),
    ("residual twice", residual_twice, "residual_doubled", f"{LAYER}.self_attn"),
    ("tuple element", returns_what_it_adds, "tuple_element", LAYER),
    ("next layer", next_layer, "layer_shift", f"{LAYER}.self_attn.q_proj"),
    ("no scale", no_scale, "attention_scale", f"{LAYER}.self_attn"),
    ("no residual", no_residual, "residual_missing", f"{LAYER}.mlp"),
    ("final norm", norm_left_out, "final_norm", "model.norm"),
    ("half of the head", half_a_vocabulary, "n_tail_dropped", "lm_head"),
]


SLOW = {"epsilon 1e-5", "k and v modules", "no mask"}
"""Each takes seconds, and its family has another."""


@pytest.mark.parametrize(
    ("what", "fault", "name", "module"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (row[0] in SLOW)) for row in MODULES],
    ids=[row[0] for row in MODULES],
)
def test_module_and_cause_are_named(run, what, fault, name, module):
    first = run(fault)
    found = [(d.role, d.name, d.explains, d.text) for d in first.diagnosis]
    assert first.diagnosis, (first.level, first.tap, first.check, first.reason, first.text)
    best = first.diagnosis[0]

    assert (best.name, best.parameters.get("module")) == (name, module), (first.tap, found)
    assert best.explains >= 0.9


BLOCKS = [
    ("attention", tiled_heads, f"{LAYER}.self_attn:out.0"),
    ("MLP", relu, f"{LAYER}.mlp:out"),
    ("norm, on large rows alone", overflowing_norm, f"{LAYER}.post_attention_layernorm:out"),
    ("between blocks", no_residual, f"{LAYER}:out"),
]


@pytest.mark.parametrize(("what", "fault", "tap"), BLOCKS, ids=[row[0] for row in BLOCKS])
def test_the_block_at_fault_is_named_first(run, what, fault, tap):
    first = run(fault, levels=("module",))
    assert (first.level, first.check, first.tap) == (Level.MODULE, "isolated", tap)


def test_the_epsilons_are_solved_for(run):
    first = run(epsilon)
    assert (first.level, first.check) == (Level.MODULE, "small_rows")
    found = first.diagnosis[0].parameters
    assert (found["epsilon"], found["reference"]) == (1e-5, 1e-6)
