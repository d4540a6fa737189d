"""Kernels for the model tests: a correct one in several orders, and one fault each.

Every function has the plainest interface, f(x, weight, bias=None); `weight.name` is the module
path. The decoding is written out here, so that a fault is a change of one line.
"""

from collections import Counter

import torch

import reconcile
import reconcile.exceptions

CONTRACT = reconcile.Contract(scale_applied="after_sum", accumulator="float32", output="bfloat16")


def _ternary(weight, shifts=(0, 2, 4, 6)):
    codes = torch.stack([(weight.codes >> s) & 3 for s in shifts], -1).flatten(1)
    return torch.tensor([0.0, 1.0, -1.0, 0.0])[codes.long()]


def _scaled(accumulator, scales, x):
    return (accumulator * scales.float()).to(x.dtype)


def clean(x, weight, bias=None):
    return _scaled(x.float() @ _ternary(weight).T, weight.scales, x)


def other_order(seed):
    """Blocks of 32 along K in a random (seed 0: reversed) order, summed in float32."""

    def kernel(x, weight, bias=None):
        w = _ternary(weight)
        generator = torch.Generator().manual_seed(seed)
        k = w.shape[1]
        order = torch.arange(k - 1, -1, -1) if seed == 0 else torch.randperm(k, generator=generator)
        total = torch.zeros(*x.shape[:-1], w.shape[0])
        for block in order.split(32):
            total += x[..., block].float() @ w[:, block].T
        return _scaled(total, weight.scales, x)

    kernel.contract = CONTRACT
    return kernel


def ignores_scale_in_layer_3_down(x, weight, bias=None):
    if weight.name == "model.layers.3.mlp.down_proj":
        return (x.float() @ _ternary(weight).T).to(x.dtype)
    return clean(x, weight)


def high_bits_first(x, weight, bias=None):
    return _scaled(x.float() @ _ternary(weight, (6, 4, 2, 0)).T, weight.scales, x)


def last_column_unwritten(x, weight, bias=None):
    y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    y[..., :-1] = clean(x, weight)[..., :-1]
    return y


def nan_for_one_token(x, weight, bias=None):
    y = clean(x, weight)
    y.view(-1, y.shape[-1])[-1] = torch.nan
    return y


def changes_its_input(x, weight, bias=None):
    y = clean(x, weight)
    x.mul_(2)
    return y


def declines_one_row(x, weight, bias=None):
    if x.numel() == x.shape[-1]:
        raise NotImplementedError("M = 1")
    return clean(x, weight)


def raises_on_one_row(x, weight, bias=None):
    if x.numel() == x.shape[-1]:
        raise RuntimeError("M = 1 is broken")
    return clean(x, weight)


_CALLS = Counter()


def other_bits_every_fifth_call(x, weight, bias=None):
    """One weight only: the second layer's k_proj."""
    y = clean(x, weight)
    if weight.name == "model.layers.1.self_attn.k_proj":
        _CALLS[weight.name] += 1
        if _CALLS[weight.name] % 5 == 0:
            y.view(torch.int16).add_(1)
    return y


def returns_float32(x, weight, bias=None):
    return clean(x, weight).float()


def returns_wrong_shape(x, weight, bias=None):
    return clean(x, weight)[..., :-1]


def returns_none(x, weight, bias=None):
    return None


def raises_always(x, weight, bias=None):
    raise ValueError("bad launch configuration")


def declines_always(x, weight, bias=None):
    raise NotImplementedError("not on this machine")


def ends_the_program(x, weight, bias=None):
    raise SystemExit(0)


_LATEST = {}


def returns_an_old_row_for_one_row(x, weight, bias=None):
    if x.numel() == x.shape[-1] and weight.name in _LATEST:
        return _LATEST[weight.name][-1:].reshape(*x.shape[:-1], -1)
    y = clean(x, weight)
    _LATEST[weight.name] = y.reshape(-1, y.shape[-1]).clone()
    return y


def changes_its_scales(x, weight, bias=None):
    y = clean(x, weight)
    weight.scales.mul_(1.0001)
    return y


def rewrites_the_weight_in_prepare(x, weight, bias=None):
    return clean(x, weight)


def _rewrite(weight):
    weight.scales.fill_(1.5)
    return weight


rewrites_the_weight_in_prepare.prepare = _rewrite


def changes_its_input_in_the_model_only(x, weight, bias=None):
    import sys

    y = clean(x, weight)
    if sys._getframe(2).f_code.co_name == "forward":
        x.mul_(1.5)
    return y


_SHARED = {}


def shares_a_workspace(x, weight, bias=None):
    """One output buffer per shape: v_proj overwrites what k_proj returned."""
    y = clean(x, weight)
    return _SHARED.setdefault(tuple(y.shape), torch.zeros_like(y)).copy_(y)


def not_built_here(x, weight, bias=None):
    raise reconcile.exceptions.BuildError("no such compiler")


def drops_last_k(x, weight, bias=None):
    return _scaled(x[..., :-1].float() @ _ternary(weight)[:, :-1].T, weight.scales, x)


def scale_in_float16(x, weight, bias=None):
    return _scaled(x.float() @ _ternary(weight).T, weight.scales.half(), x)


def all_scales_one_percent_up(x, weight, bias=None):
    return _scaled(x.float() @ _ternary(weight).T, weight.scales * 1.01, x)


def bfloat16_accumulator(x, weight, bias=None):
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.bfloat16)
    w = _ternary(weight)
    for start in range(0, w.shape[1], 8):
        block = x[..., start : start + 8].float() @ w[:, start : start + 8].T
        total = (total.float() + block).to(torch.bfloat16)
    return _scaled(total.float(), weight.scales, x)


_BEFORE = ["", ""]


def wrong_right_after_up_proj(x, weight, bias=None):
    """Layer 2's down_proj on many rows, right after one call of its up_proj, as in a model."""
    y = clean(x, weight)
    many = x.numel() > x.shape[-1]
    up = [name == "model.layers.2.mlp.up_proj" for name in _BEFORE]
    if many and up == [False, True] and weight.name == "model.layers.2.mlp.down_proj":
        y = y * 1.5
    _BEFORE[:] = _BEFORE[1], weight.name if many else ""
    return y


def coarse_in_layer_2_down(x, weight, bias=None):
    """Inside the bound of bfloat16 partial sums, and far from what plain torch gives."""
    y = clean(x, weight).float()
    if weight.name == "model.layers.2.mlp.down_proj":
        signs = 1 - 2.0 * (torch.arange(y.shape[-1]) % 2)
        y = y * (1 + 2.0**-4 * signs)
    return y.to(x.dtype)


coarse_in_layer_2_down.contract = reconcile.Contract(
    scale_applied="after_sum", split_k=16, partials="bfloat16", output="bfloat16"
)


for _name in (
    "clean",
    "wrong_right_after_up_proj",
    "ignores_scale_in_layer_3_down",
    "high_bits_first",
    "last_column_unwritten",
    "nan_for_one_token",
    "changes_its_input",
    "declines_one_row",
    "raises_on_one_row",
    "other_bits_every_fifth_call",
    "ends_the_program",
    "returns_an_old_row_for_one_row",
    "changes_its_scales",
    "rewrites_the_weight_in_prepare",
    "changes_its_input_in_the_model_only",
    "not_built_here",
    "shares_a_workspace",
    "returns_float32",
    "returns_wrong_shape",
    "returns_none",
    "raises_always",
    "declines_always",
    "drops_last_k",
    "scale_in_float16",
    "all_scales_one_percent_up",
    "bfloat16_accumulator",
):
    globals()[_name].contract = CONTRACT

for _seed in range(20):
    globals()[f"order_{_seed}"] = other_order(_seed)


def undeclared(x, weight, bias=None):
    """No contract: plain torch in the activations' dtype, judged against the baseline."""
    return torch.nn.functional.linear(x, weight.dequantize(torch.float64).to(x.dtype))


def undeclared_without_scale(x, weight, bias=None):
    return (x.float() @ _ternary(weight).T).to(x.dtype)


class Protocol:
    """The fullest interface, with a name of its own."""

    name = "my.kernel"
    contract = CONTRACT
    engines = (reconcile.Engine("python"),)
    formats = ("ternary_k_interleaved",)

    def is_supported(self, engine):
        return reconcile.Support(True, "anywhere")

    def can_implement(self, spec):
        return reconcile.Support(True, "anything")

    def prepare(self, weight, engine):
        return weight

    def apply(self, x, prepared, bias=None):
        return clean(x, prepared)


protocol = Protocol()
