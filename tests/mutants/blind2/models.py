"""Faults of a model's own code, in the candidate's model object alone.

`in_candidate` changes each model that holds a kernel, when it is built. The reference, the baseline
and whatever else is built of plain torch stay as they are.
"""

import functools
import types
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from reconcile import registry
from reconcile.case import load_case
from reconcile.replay import KernelLinear
from reconcile.selftest import CaseTrial, Mutant
from reconcile.session import Session
from reconcile_references.models import TransformersCheckpoint

LAYER = "model.layers.0:out"


@contextmanager
def in_candidate(change):
    """While the block runs, ``change`` is done to every model that holds a kernel."""
    build = TransformersCheckpoint.build

    def changed(self, dtype, make_linear):
        model = build(self, dtype, make_linear)
        if any(isinstance(module, KernelLinear) for module in model.modules()):
            change(model)
        return model

    with mock.patch.object(TransformersCheckpoint, "build", changed):
        yield


@functools.cache
def session_of(case, decode):
    """A case without its required kernel; the last ``decode`` tokens are fed one by one."""
    loaded = load_case(registry.case_file(case))
    return Session(
        replace(
            loaded,
            gate=replace(loaded.gate, require=()),
            model=replace(loaded.model, decode=decode),
        )
    )


@dataclass(frozen=True, kw_only=True)
class ModelTrial(CaseTrial):
    """A `CaseTrial` of any embedded case, with decode steps where they are asked for."""

    case: str = "tiny-ternary"
    decode: int = 0

    def twin(self):
        return (self.case, self.decode, self.clean, self.levels, self.only)

    def _report(self, kernel, session=None):
        session = session or session_of(self.case, self.decode)
        return session.run(kernel=kernel, levels=self.levels, only=self.only)


def model(change, kernel="torch_dequant", **options):
    """A right kernel in a model that ``change`` makes wrong."""
    return ModelTrial(
        faulty=kernel, clean=kernel, patch=functools.partial(in_candidate, change), **options
    )


def layers(found):
    """Decoder layers, in order."""
    return found.model.layers


def before_attention(found, change, first=0):
    """Lets ``change(arguments, attention)`` edit what attention is called with, from a layer on."""
    for layer in layers(found)[first:]:

        def hook(module, args, kwargs):
            return args, change(dict(kwargs), module)

        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


# ------------------------------------------------------------------ positions


def other_theta(found):
    """RoPE of base 500000 where the model has 10000."""
    rope = found.model.rotary_emb
    dim = 2 * rope.inv_freq.numel()
    rope.inv_freq.copy_(500000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim))


def late_decode(found):
    """In decode the layers after the first count the token that layer 0 has already cached."""
    rope = found.model.rotary_emb

    def change(arguments, _):
        hidden = arguments["hidden_states"]
        if hidden.shape[1] != 1:
            return arguments
        return arguments | {"position_embeddings": rope(hidden, arguments["position_ids"] + 1)}

    before_attention(found, change, first=1)


# ------------------------------------------------------------------ attention


def attention(
    self,
    hidden_states,
    position_embeddings,
    attention_mask,
    cache=None,
    *,
    normed=True,
    tiled=False,
    rotate=qwen3.apply_rotary_pos_emb,
    **_,
):
    """Qwen3's attention as an engine would write it; right with the defaults."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (part(hidden_states).view(shape) for part in (self.q_proj, self.k_proj, self.v_proj))
    if normed:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    q, k = rotate(q, k, *position_embeddings)
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    groups = self.num_key_value_groups
    if tiled:
        k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
    else:
        k, v = qwen3.repeat_kv(k, groups), qwen3.repeat_kv(v, groups)
    scores = q @ k.transpose(2, 3) * self.scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    y = (shares @ v).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1).contiguous()
    return self.o_proj(y), shares


def own_attention(found, **options):
    """`attention` in each layer."""
    for layer in layers(found):
        written = functools.partial(attention, **options)
        layer.self_attn.forward = types.MethodType(written, layer.self_attn)


def tiled_heads(found):
    """Query head h reads key head h mod 2."""
    own_attention(found, tiled=True)


def rotate_part(q, k, cos, sin):
    """The first half of each head, with frequencies of its own width; the rest passes through."""
    half = q.shape[-1] // 2
    # every other of the d/2 frequencies theta^(-2i / d), twice: theta^(-2j / (d/2))
    cos, sin = (table[..., :half:2].repeat(1, 1, 2) for table in (cos, sin))
    turned = qwen3.apply_rotary_pos_emb(q[..., :half], k[..., :half], cos, sin)
    return tuple(
        torch.cat([part, rest[..., half:]], -1) for part, rest in zip(turned, (q, k), strict=True)
    )


def partial_rotary(found):
    """partial_rotary_factor 0.5 in a model that rotates all of each head."""
    own_attention(found, rotate=rotate_part)


def no_head_norm(found):
    """q_norm and k_norm exist and are never called."""
    own_attention(found, normed=False)


def scale_of_width(found):
    """1 / sqrt(hidden size) in place of 1 / sqrt(head size)."""
    for layer in layers(found):
        layer.self_attn.scaling = found.config.hidden_size**-0.5


def sees_next(found):
    """The causal mask's diagonal is off by one: a token sees the next one."""

    def change(arguments, _):
        mask = arguments["attention_mask"]
        if mask is None:
            return arguments
        moved = torch.cat([mask[..., :1], mask[..., :-1]], -1)
        return arguments | {"attention_mask": moved}

    before_attention(found, change)


# ------------------------------------------------------------------ layers


def normed_residual(found):
    """Attention's residual is what the norm gave, not what it got."""

    def forward(self, hidden_states, **kwargs):
        hidden = self.input_layernorm(hidden_states)
        hidden = hidden + self.self_attn(hidden_states=hidden, **kwargs)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    for layer in layers(found):
        layer.forward = types.MethodType(forward, layer)


def swapped_gate(found):
    """silu(up) * gate."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    for layer in layers(found):
        layer.mlp.forward = types.MethodType(forward, layer.mlp)


def raw_shares(found):
    """The two experts' probabilities are not made to sum to 1."""
    for layer in layers(found):
        layer.mlp.gate.norm_topk_prob = False


def next_expert(found):
    """A token goes to the expert after the chosen one."""
    for layer in layers(found):
        experts = layer.mlp.experts
        right = experts.forward

        def forward(hidden, chosen, scores, right=right, count=experts.experts):
            return right(hidden, (chosen + 1) % count, scores)

        experts.forward = forward


# ------------------------------------------------------------------ the head


def tied_head(found):
    """The head is the embedding, although the checkpoint has its own."""
    table = found.model.embed_tokens.weight
    found.lm_head.weight = nn.Parameter(table.clone(), requires_grad=False)


def soft_capped(found):
    """Logits are capped at 30 by tanh, which this architecture does not do."""
    right = found.lm_head.forward
    found.lm_head.forward = lambda hidden: 30 * torch.tanh(right(hidden) / 30)


MUTANTS = (
    Mutant(
        id="blind2/rope_theta",
        area="modules",
        source="lyogavin/airllm#369, meta-pytorch/gpt-fast#179: rope_theta of another model",
        patch="RoPE's base is 500000, not 10000",
        trial=model(other_theta),
        op="model.layers.0.self_attn:out.0",
        causes=("rope_theta", "rope_base", "rope_frequencies", "rope_frequency"),
    ),
    Mutant(
        id="blind2/partial_rotary",
        area="modules",
        source="AI-Hypercomputer/maxtext#4616, pie-project/pie#603: partial_rotary_factor",
        patch="only half of each head is rotated, the model rotates all of it",
        trial=model(partial_rotary),
        op=LAYER,
        causes=("partial_rotary", "rope_partial", "rotary_dim", "rope_frequencies"),
    ),
    Mutant(
        id="blind2/decode_position",
        area="modules",
        source="fla-org/flash-linear-attention#766: upper layers see past_len + 1 in decode",
        patch="in decode every layer but the first rotates one position too far",
        trial=model(late_decode, decode=3),
        op="model.layers.1:out",
        causes=("decode_position", "rope_position", "cache_position", "position_offset"),
    ),
    Mutant(
        id="blind2/gqa_tiled",
        area="modules",
        source="onnx/onnx#7274: key heads are tiled, not repeated",
        patch="query head h reads key head h mod 2 in place of h div 3",
        trial=model(tiled_heads),
        op=LAYER,
        causes=("gqa_tiling",),
    ),
    Mutant(
        id="blind2/head_norms_not_called",
        area="modules",
        source="Cerebras/modelzoo#85: q_norm and k_norm are made and never called",
        patch="queries and keys are not normed",
        trial=model(no_head_norm),
        op=LAYER,
        causes=("qk_norm_missing", "qk_norm", "norm_missing", "head_norm_missing"),
    ),
    Mutant(
        id="blind2/attention_scale",
        area="modules",
        source="Graylab/DL4Proteins-notebooks#12, karpathy/ng-video-lecture#6",
        patch="scores are scaled by 1 / sqrt(hidden size)",
        trial=model(scale_of_width),
        op=LAYER,
        causes=("attention_scale", "attention_scaling", "softmax_scale"),
    ),
    Mutant(
        id="blind2/mask_diagonal",
        area="modules",
        source="RVC-Boss/GPT-SoVITS#965: the mask's diagonal is 1 in place of 0",
        patch="a token attends to the next one",
        trial=model(sees_next),
        op=LAYER,
        causes=("mask",),
    ),
    Mutant(
        id="blind2/residual_of_norm",
        area="modules",
        source="lbcb-sci/RiNALMo#9: the norm's output is the residual of attention",
        patch="the residual of attention is taken after the norm",
        trial=model(normed_residual),
        op=LAYER,
        causes=("residual_source", "residual_after_norm", "residual_missing"),
    ),
    Mutant(
        id="blind2/gate_and_up",
        area="modules",
        source="ml-explore/mlx-lm#767: silu(x) * gate in place of silu(gate) * x",
        patch="gate and up change places",
        trial=model(swapped_gate),
        op=LAYER,
        causes=("gate_up_swapped", "gate_up_order", "gate_up"),
    ),
    Mutant(
        id="blind2/head_tied",
        area="modules",
        source="huggingface/transformers#48238: a separate lm_head is tied to the embedding",
        patch="the head's weight is the embedding's",
        trial=model(tied_head),
        op="lm_head:out",
        causes=("tied_head", "head_tied", "tied_embedding", "head_weight"),
    ),
    Mutant(
        id="blind2/logits_capped",
        area="modules",
        source="sgl-project/sglang#33915: a soft cap is silently there or not there",
        patch="logits are capped at 30 by tanh",
        trial=model(soft_capped),
        op="lm_head:out",
        causes=("softcap", "soft_cap", "logit_softcap"),
    ),
    Mutant(
        id="blind2/shares_not_normalised",
        area="modules",
        source="pytorch/torchtitan#1448, sgl-project/sglang#35160: norm_topk_prob is ignored",
        patch="the chosen experts' probabilities do not sum to 1",
        trial=model(raw_shares, "mxfp8_npu", case="tiny-mxfp8-moe"),
        op=LAYER,
        causes=("norm_topk_prob", "routing_normalisation", "router_normalisation", "expert_shares"),
    ),
    Mutant(
        id="blind2/expert_off_by_one",
        area="modules",
        source="sgl-project/sgl-kernel-xpu#295, vllm-project/vllm#52639: wrong expert ids",
        patch="a token is computed by the expert after the chosen one",
        trial=model(next_expert, "mxfp8_npu", case="tiny-mxfp8-moe"),
        op=LAYER,
        causes=("expert_order", "expert_permutation", "expert_shift"),
    ),
)
