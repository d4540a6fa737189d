"""Faults outside the linears: the candidate's norms, attention, residuals and order of layers."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from reconcile.selftest import CaseTrial, Mutant, Variant
from reconcile.selftest.trials import embedded_session
from reconcile_references.models import TransformersCheckpoint


def altered(change):
    """While it holds, the candidate's model is changed before it runs; the reference's is not."""
    original = TransformersCheckpoint.build

    def build(self, dtype, make_linear):
        model = original(self, dtype, make_linear)
        if dtype is not torch.float64:
            change(model)
        return model

    @contextmanager
    def patch():
        with mock.patch.object(TransformersCheckpoint, "build", build):
            yield

    return patch


def wrapped(module, change):
    """``change(output)`` after every call of the module's own forward."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def replaced(name, function):
    """A function of the model's module is another while the candidate runs."""

    @contextmanager
    def patch():
        with mock.patch.object(qwen3, name, function):
            yield

    return patch


def in_attention_of(layer, name, function):
    """A function of the model's module is another, in the attention of one layer alone."""
    right = getattr(qwen3, name)
    inside = [False]

    def chosen(*args, **kwargs):
        return (function if inside[0] else right)(*args, **kwargs)

    def change(model):
        attention = model.model.layers[layer].self_attn
        forward = attention.forward

        def run(*args, **kwargs):
            inside[0] = True
            try:
                return forward(*args, **kwargs)
            finally:
                inside[0] = False

        attention.forward = run

    @contextmanager
    def patch():
        with altered(change)(), mock.patch.object(qwen3, name, chosen):
            yield

    return patch


def interleaved_rope(q, k, cos, sin, *_, **__):
    """Neighbouring pairs are rotated, not halves."""
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].repeat_interleave(2, -1)[:, None] for x in (cos, sin))

    def rotate(x):
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def tiled(states, count):
    """KV heads 0, 1, 0, 1 in place of 0, 0, 1, 1."""
    return states.repeat(1, count, 1, 1)


def epsilon(model):
    model.model.layers[2].input_layernorm.variance_epsilon = 1e-5


def epsilon_of_all(model):
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.variance_epsilon = 1e-2


def one_plus_weight(model):
    model.model.layers[2].post_attention_layernorm.weight.data += 1


def weight_before_the_cast(model):
    """The weight is multiplied in float32, before the result is rounded."""
    for layer in model.model.layers:
        norm = layer.input_layernorm

        def forward(x, norm=norm):
            wide = x.float()
            scaled = wide * torch.rsqrt(
                wide.square().mean(-1, keepdim=True) + norm.variance_epsilon
            )
            return (scaled * norm.weight.float()).to(x.dtype)

        norm.forward = forward


def rounds_before_the_weight(model):
    """The normalised input is rounded to bfloat16, then multiplied by a float32 weight."""
    norm = model.model.layers[2].post_attention_layernorm

    def forward(x):
        wide = x.float()
        power = wide.square().mean(-1, keepdim=True)
        rounded = (wide * torch.rsqrt(power + norm.variance_epsilon)).bfloat16()
        return (norm.weight.float() * rounded.float()).to(x.dtype)

    norm.forward = forward


def in_float32(case):
    """The candidate computes in float32: where it rounds to bfloat16 inside shows."""
    return case.with_candidate(dtype="float32")


def swapped_layers(model):
    layers = model.model.layers
    layers[2], layers[3] = layers[3], layers[2]


def without_final_norm(model):
    model.model.norm.forward = lambda x: x


def head_without_rows(model):
    model.lm_head.weight.data[128:] = 0


def head_untied(model):
    model.lm_head.weight.data.zero_()


def scale_of_attention(model):
    model.model.layers[2].self_attn.scaling = 1.0


def with_layer(index, function):
    """Layer ``index`` is ``function(layer, x, **kwargs)``."""

    def change(model):
        layer = model.model.layers[index]
        layer.forward = lambda x, **kwargs: function(layer, x, **kwargs)

    return change


def residual_missing(layer, x, **kwargs):
    """The attention's residual is not added."""
    y, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    return y + layer.mlp(layer.post_attention_layernorm(y))


def residual_doubled(layer, x, **kwargs):
    """The MLP's residual is added twice."""
    y, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    y = x + y
    return y + layer.mlp(layer.post_attention_layernorm(y)) + y


def residual_before_the_norm(layer, x, **kwargs):
    """The MLP reads the attention's output without the stream, which is added later."""
    y, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    return x + y + layer.mlp(layer.post_attention_layernorm(y))


def residual_in_the_attention(model):
    """The attention adds the stream itself, and the layer adds it again."""
    layer = model.model.layers[3]
    kept = []
    before = layer.input_layernorm.forward
    layer.input_layernorm.forward = lambda x: (kept.append(x), before(x))[1]
    wrapped(layer.self_attn, lambda out: (out[0] + kept.pop(), *out[1:]))


def gelu(model):
    model.model.layers[3].mlp.act_fn = torch.nn.GELU(approximate="tanh")


def delta_without_residual(model):
    """Layer 2 returns what it adds, as engines do that return (delta, residual)."""
    layer = model.model.layers[2]
    forward = layer.forward
    layer.forward = lambda x, *args, **kwargs: forward(x, *args, **kwargs) - x


def without_mask(model):
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, attention_mask=None, **kwargs: forward(
        *args, attention_mask=None, **kwargs
    )


def window_of_16(model):
    """Keys more than 16 places back are hidden."""
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def run(*args, attention_mask=None, **kwargs):
        if attention_mask is not None:
            size = attention_mask.shape[-1]
            far = torch.ones(size, size, dtype=torch.bool).tril(-16)
            lowest = torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask.masked_fill(far, lowest)
        return forward(*args, attention_mask=attention_mask, **kwargs)

    attention.forward = run


CLEAN = "reconcile_mutants.loaders:clean"
QUICK = frozenset({"rope_pairs_of_one", "residual_missing", "layers_swapped", "final_norm_skipped"})
"""Mutants of the quick subset; each takes a run of the whole model."""


def mutant(name, op, causes, source, text, patch, change=None):
    return Mutant(
        id=f"modules/{name}",
        area="modules",
        source=source,
        patch=text,
        trial=CaseTrial(
            faulty=CLEAN,
            clean=CLEAN,
            patch=patch,
            change=change,
        ),
        op=op,
        causes=causes,
        quick=name in QUICK,
    )


def layer(index):
    return f"model.layers.{index}:out"


def attention(index):
    return f"model.layers.{index}.self_attn:out.0"


def mlp(index):
    return f"model.layers.{index}.mlp:out"


MUTANTS = (
    mutant(
        "epsilon_of_all", "model.layers.0.input_layernorm:out", ("epsilon",),
        "huggingface/transformers#38025: an epsilon that is not passed on",
        "epsilon 1e-2 in every layer's norms", altered(epsilon_of_all),
    ),
    mutant(
        "epsilon_of_one", "model.layers.2.input_layernorm:out", ("epsilon",),
        "paiml/aprender#1606: epsilon hard-coded, 1e-5 against 1e-6",
        "epsilon 1e-5 in the input norm of layer 2", altered(epsilon),
    ),
    mutant(
        "norm_weight_plus_one", "model.layers.2.post_attention_layernorm:out",
        ("norm_weight_plus_one",),
        "vllm-project/vllm#42325: 1 + w or w",
        "1 is added to the weight of one norm of layer 2", altered(one_plus_weight),
    ),
    mutant(
        "norm_rounds_early", "model.layers.2.post_attention_layernorm:out",
        ("norm_rounding_order",),
        "vllm-project/vllm#29810: the weight multiplied after the cast to bfloat16",
        "one norm of layer 2 rounds to bfloat16 before its float32 weight",
        altered(rounds_before_the_weight), in_float32,
    ),
    mutant(
        "rope_pairs", attention(0), ("rope_pairing",),
        "vllm-project/vllm-metal#44: neighbouring pairs against halves",
        "RoPE rotates neighbouring pairs", replaced("apply_rotary_pos_emb", interleaved_rope),
    ),
    mutant(
        "rope_pairs_of_one", attention(2), ("rope_pairing",),
        "vllm-project/vllm-metal#44: neighbouring pairs against halves",
        "RoPE of layer 2 rotates neighbouring pairs",
        in_attention_of(2, "apply_rotary_pos_emb", interleaved_rope),
    ),
    mutant(
        "gqa_tiled", attention(0), ("gqa_tiling",),
        "onnx/onnx#7274: KV heads are tiled, not repeated",
        "KV heads 0, 1, 0, 1, ...", replaced("repeat_kv", tiled),
    ),
    mutant(
        "gqa_tiled_in_one", attention(4), ("gqa_tiling",),
        "apple/axlearn#842: KV heads are tiled, not repeated",
        "KV heads 0, 1, 0, 1, ... in layer 4", in_attention_of(4, "repeat_kv", tiled),
    ),
    mutant(
        "no_mask", attention(1), ("mask",),
        "pytorch/pytorch#103749: a mask that is not applied",
        "layer 1 attends to later tokens", altered(without_mask),
    ),
    mutant(
        "window", attention(1), ("mask",),
        "huggingface/transformers#39408: a window that counts keys otherwise",
        "layer 1 attends to 16 keys", altered(window_of_16),
    ),
    mutant(
        "softmax_scale", attention(2), ("attention_scale",),
        "flashinfer-ai/flashinfer#4979: a scale that only another branch applies",
        "the scores of layer 2 are not scaled", altered(scale_of_attention),
    ),
    mutant(
        "activation", mlp(3), ("activation_function",),
        "huggingface/candle#3745: an MLP with the other of SiLU and GELU",
        "GELU in the MLP of layer 3, where SiLU is right", altered(gelu),
    ),
    mutant(
        "residual_missing", layer(3), ("residual_missing",),
        "ndif-team/nnterp#42: a residual that is added elsewhere",
        "the attention's residual of layer 3 is omitted",
        altered(with_layer(3, residual_missing)),
    ),
    mutant(
        "residual_doubled", layer(3), ("residual_doubled",),
        "ndif-team/nnsight#642: a residual that is added twice",
        "the residual of layer 3's MLP is added twice",
        altered(with_layer(3, residual_doubled)),
    ),
    mutant(
        "residual_late", layer(3), (),
        "ndif-team/nnterp#42: a residual that is added elsewhere",
        "the MLP of layer 3 reads the attention's output, not the stream",
        altered(with_layer(3, residual_before_the_norm)),
    ),
    mutant(
        "residual_in_attention", attention(3), ("residual_doubled",),
        "ndif-team/nnsight#642: a residual that is added twice",
        "the attention of layer 3 adds the stream, too", altered(residual_in_the_attention),
    ),
    mutant(
        "deferred_residual", layer(2), ("tuple_element", "residual_missing"),
        "ndif-team/nnterp#42: a layer returns what it adds, and the residual apart",
        "layer 2 returns its output less its input", altered(delta_without_residual),
    ),
    mutant(
        "layers_swapped", "model.layers.2.self_attn.q_proj:out", ("layer_shift",),
        "vllm-project/speculators#313: layer indices one off",
        "layers 2 and 3 change places", altered(swapped_layers),
    ),
    mutant(
        "final_norm_skipped", "model.norm:out", ("final_norm",),
        "huggingface/transformers#26142: the last hidden state before or after the norm",
        "the final norm is not applied", altered(without_final_norm),
    ),
    mutant(
        "head_zero", "lm_head:out", (),
        "sgl-project/sglang#35358: all hidden states match, the head is not loaded",
        "the head is zero", altered(head_untied),
    ),
    mutant(
        "head_half", "lm_head:out", ("n_tail_dropped",),
        "vllm-project/vllm#46835: a part of the vocabulary is not loaded",
        "half of the head's rows are zero", altered(head_without_rows),
    ),
)  # fmt: skip


def own_layer(layer, x, **kwargs):
    """The layer written anew, its sums in float32."""
    y, _ = layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs)
    y = (x.float() + y.float()).to(x.dtype)
    return (y.float() + layer.mlp(layer.post_attention_layernorm(y)).float()).to(x.dtype)


def wide_attention(module, query, key, value, attention_mask, scaling, **_):
    """Scores, weights and their sums in float32; one rounding at the end."""
    count = module.num_key_value_groups
    key, value = (x.repeat_interleave(count, 1).float() for x in (key, value))
    scores = query.float() @ key.transpose(2, 3) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask.float()).softmax(-1)
    y = (weights @ value).to(query.dtype)
    return y.transpose(1, 2).contiguous(), weights.to(query.dtype)


def variant(name, text, patch):
    """The embedded model, changed in a way that is right."""

    def run(_):
        session = embedded_session()
        session.run(kernel=CLEAN, levels=("op",))  # the reference is captured before the change
        with patch():
            return session.run(kernel=CLEAN)

    return Variant(id=f"modules/{name}", what=text, run=run, seeds=1)


VARIANTS = (
    variant("weight_before_the_cast", "norms that round once, after the weight",
            altered(weight_before_the_cast)),
    variant("own_layer", "a layer written anew", altered(with_layer(3, own_layer))),
    variant("wide_attention", "an attention that rounds once",
            replaced("eager_attention_forward", wide_attention)),
)  # fmt: skip
