"""Linears written out from the definitions, to plant faults in, and what is said of them."""

import torch

import reconcile
from reconcile import registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.report import Verdict
from reconcile.weight import QuantizedWeight

SHAPE = (192, 256)
TERNARY = "ternary_k_interleaved"
BLOCK = "fp8_e4m3_block"
CHANNEL = "fp8_e4m3_channel"
TENSOR = "fp8_e4m3_tensor"
MX = "mxfp8_e4m3"


def weight_of(name, shape=SHAPE, seed=0, bias=False):
    form = registry.formats()[name]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    generator = torch.Generator().manual_seed(seed)
    made = random_weight(seedling, shape, generator)
    added = torch.randn(shape[0], generator=generator) * 4 if bias else None
    return QuantizedWeight.from_tensors(
        made.codes, made.scales, format=form, shape=shape, bias=added
    )


def dense(shape=SHAPE, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ------------------------------------------------- decoding, written out from the definitions


def e4m3(codes, bias=7):
    """float64 values of E4M3 codes; the all-ones code is NaN."""
    c = codes.long()
    sign, e, m = 1 - 2.0 * (c >> 7), c >> 3 & 15, (c & 7).double()
    normal = (1 + m / 8) * 2.0 ** (e - bias).double()
    value = sign * torch.where(e == 0, m / 8 * 2.0 ** (1 - bias), normal)
    return torch.where(c & 127 == 127, torch.nan, value)


def ternary(weight, table=(0.0, 1.0, -1.0, 0.0), shifts=(0, 2, 4, 6)):
    codes = torch.stack([(weight.codes >> s) & 3 for s in shifts], -1).flatten(1)
    return torch.tensor(table, dtype=torch.float64)[codes.long()]


def scales_of(weight):
    """What multiplies each value, float64 [N, K]."""
    n, k = weight.shape
    s = weight.scales
    s = 2.0 ** (s.double() - 127) if weight.format.scale_encoding == "e8m0" else s.double()
    if weight.format.block:
        a, b = weight.format.block
        return s.repeat_interleave(a, 0)[:n].repeat_interleave(b, 1)[:, :k]
    return (s if len(s) == 1 else s[:, None]).expand(n, k)


def parts(weight):
    """Values before the scale, and the scale."""
    if isinstance(weight, torch.Tensor):
        return weight.double(), torch.ones(weight.shape, dtype=torch.float64)
    values = ternary(weight) if len(weight.format.table) == 4 else e4m3(weight.codes)
    return values, scales_of(weight)


def linear(x, w, bias=None):
    y = x.double() @ w.T
    return (y if bias is None else y + bias.double()).float().to(x.dtype)


def kernel(change):
    """A kernel from a change of (values, scales) to the effective weight."""

    def fault(x, weight, bias=None):
        return linear(x, change(*parts(weight)), bias)

    return fault


def weight_for(kind):
    if kind == "dense":
        return dense()
    if kind == "square":
        return dense((192, 192))
    if kind == "biased":
        return weight_of(TERNARY, bias=True)
    return weight_of(kind, (256, 256)) if kind == BLOCK else weight_of(kind)


def diagnosed(fault, weight, **options):
    report = reconcile.check_linear(fault, weight, repeats=1, **options)
    failing = [row for row in report.rows if row.verdict is Verdict.FAIL]
    assert failing, report.explain()
    return failing


def said(row):
    return [(d.role, d.name, d.explains, d.text) for d in row.diagnosis]
