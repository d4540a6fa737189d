"""Faults written in plain torch are named, in several formats; what fits nothing is said so."""

import pytest
import torch
from linears_by_hand import (
    BLOCK,
    CHANNEL,
    MX,
    TENSOR,
    TERNARY,
    diagnosed,
    e4m3,
    kernel,
    linear,
    parts,
    said,
    scales_of,
    ternary,
    weight_for,
    weight_of,
)

import reconcile
from reconcile import Contract, registry
from reconcile.diagnosis.families import linear_hypotheses
from reconcile.diagnosis.hypothesis import Hypothesis
from reconcile.report import Reason, Verdict


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed(t, place, value):
    t = t.clone()
    t[place] = value
    return t


def times(place, factor):
    def change(v, s):
        w = v * s
        w[place] *= factor
        return w

    return kernel(change)


def only(shape, change, otherwise=lambda v, s: v * s):
    """The fault only on weights of this shape."""

    def fault(v, s):
        return (change if tuple(v.shape) == shape else otherwise)(v, s)

    return kernel(fault)


def code(number, value):
    def fault(x, weight, bias=None):
        v, s = parts(weight)
        return linear(x, torch.where(weight.codes.view(v.shape) == number, value, v) * s, bias)

    return fault


def rows(permutation):
    return kernel(lambda v, s: (v * s)[permutation(v.shape[0])])


def columns(permutation):
    return kernel(lambda v, s: v[:, permutation(v.shape[1])] * s)


def truncated(y, dtype):
    """float64 cut off to a 16-bit dtype toward zero."""
    near = y.to(torch.float32).to(dtype)
    over = near.double().abs() > y.abs()
    return torch.where(over, torch.nextafter(near, torch.zeros_like(near)), near)


def truncating(x, weight, bias=None):
    v, s = parts(weight)
    return truncated(x.double() @ (v * s).T, x.dtype)


def accumulating(dtype, block):
    def fault(x, weight, bias=None):
        v, s = parts(weight)
        w = (v * s).float()
        total = torch.zeros(*x.shape[:-1], w.shape[0])
        for start in range(0, w.shape[1], block):
            part = x[..., start : start + block].float() @ w[:, start : start + block].T
            total = (total + part).to(dtype).float()
        return total.to(x.dtype)

    return fault


def split(count, dtype, keep=None):
    def fault(x, weight, bias=None):
        v, s = parts(weight)
        w = (v * s).double()
        pieces = torch.arange(w.shape[1]).chunk(count)
        kept = pieces if keep is None else [pieces[i] for i in keep if i < len(pieces)]
        partial = [(x[..., p].double() @ w[:, p].T).to(dtype).float() for p in kept]
        return sum(partial).to(x.dtype)

    return fault


def bias_times(factor):
    def fault(x, weight, bias=None):
        v, s = parts(weight)
        return linear(x, v * s, None if bias is None else factor * bias)

    return fault


def bias_after(x, weight, bias=None):
    v, s = parts(weight)
    y = linear(x, v * s)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def through_half(x, weight, bias=None):
    v, s = parts(weight)
    return (x.double() @ (v * s).T).half().to(x.dtype)


def int8_activations(x, weight, bias=None):
    v, s = parts(weight)
    wide = x.float()
    step = wide.abs().amax(-1, keepdim=True).clamp_min(1e-7) / 127
    return linear((wide / step).round().clamp(-127, 127).double() * step.double(), v * s).to(x)


def fp8_activations(x, weight, bias=None):
    v, s = parts(weight)
    return linear(x.float().to(torch.float8_e4m3fn).double(), v * s).to(x)


def scale_of_zeros(x, weight, bias=None):
    """0 / 0 in the rows that are zero."""
    wide = x.double()
    size = wide.abs().amax(-1, keepdim=True)
    v, s = parts(weight)
    return linear(torch.where(size == 0, torch.nan, wide), v * s, bias).to(x.dtype)


def m_tail(x, weight, bias=None):
    y = kernel(lambda v, s: v * s)(x, weight, bias)
    flat = y.view(-1, y.shape[-1])
    whole = len(flat) // 16 * 16
    if whole:
        flat[whole:] = 0
    return y


def ignores_strides(x, weight, bias=None):
    flat = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return kernel(lambda v, s: v * s)(flat.clone(), weight, bias)


def column_major(x, weight, bias=None):
    y = kernel(lambda v, s: v * s)(x, weight, bias)
    flat = y.view(-1, y.shape[-1])
    return flat.T.contiguous().view(flat.shape).view(y.shape)


def row_up(x, weight, bias=None):
    y = kernel(lambda v, s: v * s)(x, weight, bias)
    return y.view(-1, y.shape[-1]).roll(1, 0).view(y.shape)


def flushing(x, weight, bias=None):
    v, s = parts(weight)
    wide = x.double()
    return linear(torch.where(wide.abs() < 2.0**-126, 0.0, wide), v * s, bias).to(x)


def saturating(x, weight, bias=None):
    v, s = parts(weight)
    big = torch.finfo(x.dtype).max
    return (x.double() @ (v * s).T).clamp(-big, big).to(x.dtype)


def transposing(x, weight, bias=None):
    v, s = parts(weight)
    w = v * s
    return linear(x, w.T if w.shape[0] == w.shape[1] else w, bias)


def unwritten(x, weight, bias=None):
    y = torch.empty(*x.shape[:-1], parts(weight)[0].shape[0], dtype=x.dtype)
    y[..., :-3] = kernel(lambda v, s: v * s)(x, weight, bias)[..., :-3]
    return y


def bits_high_first(x, weight, bias=None):
    return linear(x, ternary(weight, shifts=(6, 4, 2, 0)) * scales_of(weight), bias)


def sign_extended(x, weight, bias=None):
    return linear(x, ternary(weight, (0.0, 1.0, -2.0, -1.0)) * scales_of(weight), bias)


def from_minus_one(x, weight, bias=None):
    return linear(x, ternary(weight, (-1.0, 0.0, 1.0, 2.0)) * scales_of(weight), bias)


def planar(x, weight, bias=None):
    codes = torch.cat([(weight.codes >> s) & 3 for s in (0, 2, 4, 6)], 1)
    w = torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=torch.float64)[codes.long()]
    return linear(x, w * scales_of(weight), bias)


def fnuz(x, weight, bias=None):
    w = weight.codes.view(torch.float8_e4m3fnuz).double()
    return linear(x, w * scales_of(weight), bias)


def e8m0_as_number(x, weight, bias=None):
    s = weight.scales.double().repeat_interleave(32, 1)[:, : weight.shape[1]]
    return linear(x, e4m3(weight.codes) * s, bias)


def scale_cast(dtype):
    return kernel(lambda v, s: v * s.float().to(dtype).double())


def boundary(length):
    def fault(x, weight, bias=None):
        n, k = weight.shape
        index = (torch.arange(n) // length).clamp(max=weight.scales.shape[0] - 1)
        s = weight.scales[index].double().repeat_interleave(128, 1)[:, :k]
        return linear(x, e4m3(weight.codes) * s, bias)

    return fault


def swap(i, j):
    def permutation(size):
        p = torch.arange(size)
        if size > max(i, j):
            p[i], p[j] = j, i
        return p

    return permutation


def halves(size):
    return torch.arange(size).view(-1, 2).T.flatten() if size % 2 == 0 else torch.arange(size)


def heads(size):
    p = torch.arange(size)
    return p.view(-1, 32).flip(0).flatten() if size % 32 == 0 else p


def pairs(size):
    return torch.arange(size) ^ 1 if size % 2 == 0 else torch.arange(size)


FAULTS = [
    # scale
    ("scale missing", BLOCK, kernel(lambda v, s: v), "scale_missing"),
    ("scale missing", TERNARY, kernel(lambda v, s: v), "scale_missing"),
    ("scale missing", MX, kernel(lambda v, s: v), "scale_missing"),
    ("scale inverted", CHANNEL, kernel(lambda v, s: v / s), "scale_inverted"),
    ("scale squared", TENSOR, kernel(lambda v, s: v * s * s), "scale_squared"),
    ("one percent up", BLOCK, kernel(lambda v, s: v * s * 1.01), "constant_ratio"),
    ("three times", "dense", kernel(lambda v, s: v * 3), "constant_ratio"),
    ("one row", TERNARY, times((7, slice(None)), 1.5), "row_ratio"),
    ("some rows", "dense", times((slice(3, 9), slice(None)), 0.7), "row_ratio"),
    ("columns", CHANNEL, times((slice(None), [3, 77, 140]), 1.2), "column_ratio"),
    ("K range", TERNARY, times((slice(None), slice(40, 90)), 0.5), "k_range_ratio"),
    ("a block", BLOCK, times((slice(0, 128), slice(128, 256)), 1.1), "block_ratio"),
    ("a rectangle", "dense", times((slice(20, 60), slice(64, 128)), 1.1), "block_ratio"),
    ("half scales", TERNARY, scale_cast(torch.float16), "scale_low_precision"),
    ("bf16 scales", CHANNEL, scale_cast(torch.bfloat16), "scale_low_precision"),
    (
        "power of two",
        BLOCK,
        kernel(lambda v, s: v * 2.0 ** s.log2().floor()),
        "scale_mantissa_dropped",
    ),
    (
        "power of two above",
        BLOCK,
        kernel(lambda v, s: v * 2.0 ** s.log2().ceil()),
        "scale_mantissa_dropped",
    ),
    (
        "nearest power of two",
        CHANNEL,
        kernel(lambda v, s: v * 2.0 ** s.log2().round()),
        "scale_mantissa_dropped",
    ),
    (
        "second of each two",
        MX,
        kernel(lambda v, s: v * s[:, torch.arange(v.shape[1]) // 64 * 64 + 32]),
        "scale_reused",
    ),
    ("scales from behind", CHANNEL, kernel(lambda v, s: v * s.flip(0)), "scale_reused"),
    ("first scale", CHANNEL, kernel(lambda v, s: v * s[0, 0]), "scale_reused"),
    ("first K block", BLOCK, kernel(lambda v, s: v * s[:, :1]), "scale_reused"),
    ("transposed grid", BLOCK, only((256, 256), lambda v, s: v * s.T), "scale_axis"),
    (
        "last K block",
        BLOCK,
        kernel(lambda v, s: v * torch.cat([s[:, :128], torch.ones_like(s[:, 128:])], 1)),
        "last_block_scale_dropped",
    ),
    ("E8M0 + 1", MX, times((5, slice(32, 64)), 2.0), "scale_exponent_bias"),
    # codes
    ("fnuz", TENSOR, fnuz, "fn_fnuz"),
    ("bias 8", BLOCK, kernel(lambda v, s: v * s / 2), "exponent_bias"),
    ("no sign", CHANNEL, kernel(lambda v, s: v.abs() * s), "sign"),
    ("ternary sign", TERNARY, kernel(lambda v, s: -v * s), "sign"),
    (
        "no subnormals",
        BLOCK,
        kernel(lambda v, s: torch.where(v.abs() < 2**-6, 0, v) * s),
        "subnormals",
    ),
    ("one code", BLOCK, code(0x35, 1.25), "code_table"),
    ("sign extended", TERNARY, sign_extended, "ternary_table"),
    ("from minus one", TERNARY, from_minus_one, "ternary_table"),
    ("byte as number", MX, e8m0_as_number, "bytes_as_numbers"),
    (
        "zero point of a K range",
        TERNARY,
        kernel(lambda v, s: (v + 0.5 * (torch.arange(v.shape[1]) // 64 == 2)) * s),
        "zero_point",
    ),
    (
        "zero point of some rows",
        CHANNEL,
        kernel(lambda v, s: (v - 1.0 * (torch.arange(len(v))[:, None] % 7 == 3)) * s),
        "zero_point",
    ),
    ("zero point", CHANNEL, kernel(lambda v, s: (v + 0.25) * s), "zero_point"),
    # layout
    ("transposed", "square", transposing, "transposed"),
    ("two rows", TERNARY, rows(swap(4, 9)), "row_permutation"),
    ("two columns", "dense", columns(swap(4, 9)), "column_permutation"),
    ("high first", TERNARY, bits_high_first, "bit_order"),
    ("planar", TERNARY, planar, "interleaved_planar"),
    ("interleaved rows", "dense", rows(halves), "interleaved_planar"),
    ("heads", "dense", rows(heads), "head_order"),
    ("pairs", "dense", rows(pairs), "pair_order"),
    ("roll", "dense", rows(lambda n: torch.arange(n).roll(1)), "shifted_rows"),
    ("boundary 112", BLOCK, boundary(112), "block_boundary"),
    (
        "groups of 64",
        MX,
        kernel(lambda v, s: v * s[:, torch.arange(v.shape[1]) // 64 * 32]),
        "group_size",
    ),
    ("column major", "dense", column_major, "strided_output"),
    ("strides", "dense", ignores_strides, "strided_input"),
    ("row up", "dense", row_up, "shifted_rows"),
    # extent
    (
        "last k",
        TERNARY,
        kernel(lambda v, s: torch.cat([(v * s)[:, :-1], 0 * v[:, -1:]], 1)),
        "k_tail_dropped",
    ),
    (
        "last n",
        "dense",
        kernel(lambda v, s: torch.cat([(v * s)[:-4], 0 * v[-4:]])),
        "n_tail_dropped",
    ),
    ("k twice", BLOCK, times((slice(None), 17), 2.0), "k_term_doubled"),
    ("M tail", "dense", m_tail, "m_tail_dropped"),
    ("unwritten", "dense", unwritten, "unwritten"),
    # rounding
    ("truncating", BLOCK, truncating, "truncating_store"),
    ("truncating", TERNARY, truncating, "truncating_store"),
    ("through half", TERNARY, through_half, "double_rounding"),
    ("bf16 accumulator", TERNARY, accumulating(torch.bfloat16, 8), "narrow_accumulator"),
    ("bf16 accumulator", BLOCK, accumulating(torch.bfloat16, 128), "narrow_accumulator"),
    ("fp16 accumulator", "dense", accumulating(torch.float16, 16), "narrow_accumulator"),
    ("bf16 partials", BLOCK, split(4, torch.bfloat16), "narrow_partials"),
    ("a split lost", "dense", split(4, torch.float64, (0, 2, 3)), "split_missing"),
    ("bf16 weight", BLOCK, kernel(lambda v, s: (v * s).bfloat16().double()), "weight_rounding"),
    (
        "e4m3 weight",
        "dense",
        kernel(lambda v, s: v.float().to(torch.float8_e4m3fn).double()),
        "weight_rounding",
    ),
    ("int8 activations", TERNARY, int8_activations, "activation_quantised"),
    ("fp8 activations", "dense", fp8_activations, "activation_quantised"),
    ("0 / 0", CHANNEL, scale_of_zeros, "activation_scale"),
    ("saturates", "dense", saturating, "saturation"),
    # offset
    ("no bias", "biased", bias_times(0), "bias_missing"),
    ("bias twice", "biased", bias_times(2), "bias_doubled"),
    ("bias halved", "biased", bias_times(0.5), "bias_scaled"),
    ("bias after", "biased", bias_after, "bias_after_rounding"),
]


SLOW = {
    ("bf16 accumulator", TERNARY),
    ("bf16 accumulator", BLOCK),
    ("int8 activations", TERNARY),
    ("truncating", BLOCK),
    ("scale missing", TERNARY),
    ("scale missing", MX),
    ("some rows", "dense"),
    ("bf16 scales", CHANNEL),
    ("ternary sign", TERNARY),
    ("one percent up", BLOCK),
    ("from minus one", TERNARY),
    ("a rectangle", "dense"),
    ("interleaved rows", "dense"),
    ("nearest power of two", CHANNEL),
    ("scales from behind", CHANNEL),
    ("e4m3 weight", "dense"),
    ("power of two", BLOCK),
    ("first K block", BLOCK),
    ("roll", "dense"),
    ("zero point", CHANNEL),
    ("zero point of some rows", CHANNEL),
}
"""Long ones whose family has another, shorter one."""


@pytest.mark.parametrize(
    ("what", "kind", "fault", "name"),
    [pytest.param(*f, marks=[pytest.mark.slow] * (f[:2] in SLOW)) for f in FAULTS],
    ids=[f"{f[0]}, {f[1]}" for f in FAULTS],
)
def test_a_fault_is_named(what, kind, fault, name):
    probes = ("impulse", "special", "layout", "bound")
    rows = diagnosed(fault, weight_for(kind), probes=probes, batch_sizes=(1, 33))
    best = rows[0].diagnosis[0]

    assert best.name == name, [(d.role, d.name, d.explains, d.text) for d in rows[0].diagnosis]
    assert best.explains >= 0.9
    assert best.text


def test_the_block_and_the_value_are_solved_for():
    weight = weight_of(BLOCK, (256, 256))
    fault = only((256, 256), lambda v, s: v * s * place_ratio((0, 1), 1.0837))
    best = diagnosed(fault, weight, probes=("impulse",))[0].diagnosis[0]
    assert best.parameters["blocks"] == [[0, 1]]
    assert best.parameters["ratios"] == [pytest.approx(1.0837, rel=5e-4)]

    best = diagnosed(code(0x35, 1.25), weight, probes=("impulse",))[0].diagnosis[0]
    assert (best.parameters["codes"], best.parameters["values"]) == ([0x35], [1.25])


def place_ratio(block, ratio):
    factor = torch.ones(256, 256, dtype=torch.float64)
    n, k = block
    factor[128 * n : 128 * n + 128, 128 * k : 128 * k + 128] = ratio
    return factor


def test_two_faults_are_both_named():
    def both(x, weight, bias=None):
        v, s = parts(weight)
        v = torch.where(weight.codes == 0x35, 1.25, v)
        s = s.clone()
        s[:128, 128:] = 1
        return linear(x, v * s, bias)

    row = diagnosed(both, weight_of(BLOCK, (256, 256)), probes=("impulse",))[0]
    cause, also = row.diagnosis[:2]

    assert (cause.role, cause.name) == ("cause", "scale_missing"), said(row)
    assert cause.parameters["blocks"] == [[0, 1]]
    assert (also.role, also.name, also.parameters["codes"]) == ("also", "code_table", [0x35])


def test_a_fault_of_the_weight_and_one_of_the_bias_are_both_named():
    def both(x, weight, bias=None):
        v, s = parts(weight)
        w = v * s
        w[11] *= 1.5
        return linear(x, w)

    row = diagnosed(both, weight_of(TERNARY, bias=True), probes=("bound",), batch_sizes=(16,))[0]
    assert {d.name for d in row.diagnosis if d.role != "runner_up"} == {
        "row_ratio",
        "bias_missing",
    }, said(row)


RANDOM = [
    ("noise on the weight", lambda w, g: w + 0.3 * w.std() * torch.randn(w.shape, generator=g)),
    ("scattered", lambda w, g: torch.where(torch.rand(w.shape, generator=g) < 0.02, -3 * w, w)),
    ("another weight", lambda w, g: w.std() * torch.randn(w.shape, generator=g).double()),
    ("shuffled", lambda w, g: w.flatten()[torch.randperm(w.numel(), generator=g)].view(w.shape)),
]


@pytest.mark.parametrize(
    "kind", [TERNARY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (BLOCK, "dense"))]
)
@pytest.mark.parametrize(("what", "corrupt"), RANDOM, ids=[r[0] for r in RANDOM])
def test_random_corruption_fits_nothing(kind, what, corrupt):
    def fault(x, weight, bias=None):
        v, s = parts(weight)
        return linear(x, corrupt(v * s, torch.Generator().manual_seed(3)), bias)

    row = diagnosed(fault, weight_for(kind), probes=("impulse",))[0]
    assert row.diagnosis[0].name == "none_fits", said(row)
    assert row.diagnosis[0].explains < 0.9


def test_noise_on_the_outputs_fits_nothing():
    def fault(x, weight, bias=None):
        v, s = parts(weight)
        y = linear(x, v * s, bias)
        generator = torch.Generator().manual_seed(int(x.float().abs().sum() * 100) % 2**31)
        return (y.float() * (1 + 0.05 * torch.randn(y.shape, generator=generator))).to(y.dtype)

    row = diagnosed(fault, weight_of(TERNARY), probes=("bound",), batch_sizes=(33,))[0]
    assert row.diagnosis[0].name == "none_fits", said(row)


def test_what_cannot_be_told_apart_is_said_so():
    row = diagnosed(kernel(lambda v, s: 2 * v * s), weight_of(MX), probes=("impulse",))[0]
    assert row.diagnosis[0].name == "exponent_bias"
    assert "scale_exponent_bias: nothing here tells them apart" in row.diagnosis[0].text


def test_a_pass_has_no_diagnosis_and_reads_nothing(monkeypatch):
    monkeypatch.setattr("reconcile.diagnosis.attach.diagnose_failure", None)
    report = reconcile.check_linear(kernel(lambda v, s: v * s), weight_of(TERNARY))
    assert report.exit_code == 0, report.explain()
    assert not any(row.diagnosis for row in report.rows)


def test_a_fault_of_a_hypothesis_is_a_note_and_changes_nothing(monkeypatch):
    def broken(evidence, base):
        raise ZeroDivisionError("mine")
        yield

    wrong = Hypothesis(names=("broken",), fit=broken)
    known = linear_hypotheses()
    monkeypatch.setattr("reconcile.diagnosis.linear.linear_hypotheses", lambda: (wrong, *known))
    row = diagnosed(fnuz, weight_of(TENSOR), probes=("impulse",))[0]
    assert row.diagnosis[0].name == "fn_fnuz"
    assert "broken: ZeroDivisionError: mine" in row.diagnosis[0].text


def test_a_fault_of_the_engine_is_a_note_and_changes_nothing(monkeypatch):
    def broken():
        raise KeyError("gone")

    monkeypatch.setattr("reconcile.diagnosis.linear.linear_hypotheses", broken)
    row = diagnosed(fnuz, weight_of(TENSOR), probes=("impulse",))[0]
    assert row.verdict is Verdict.FAIL
    assert row.diagnosis[0].name == "not_diagnosed"
    assert "KeyError: 'gone'" in row.diagnosis[0].text


def test_a_kernel_that_fails_while_it_is_diagnosed():
    """The diagnosis calls the kernel again, which may raise then."""

    def fault(x, weight, bias=None):
        if len(x) != 8:
            raise SystemExit(3)
        return linear(x, parts(weight)[0], bias)

    row = diagnosed(fault, weight_of(TENSOR), probes=("bound",), batch_sizes=(8,))[0]
    assert row.diagnosis[0].name != "not_diagnosed"


def test_a_group_of_a_batched_linear_is_diagnosed():
    def fault(x, weight, bias=None):
        y = x.float() @ weight.float().transpose(1, 2)
        y[2, :, -1] = 0
        return y.to(x.dtype)

    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    report = reconcile.check_batched_linear(fault, weight, probes=("bound",), repeats=1)
    failing = list(report.failures())
    assert {row.tap for row in failing} == {"linear.2:out"}
    assert failing[0].diagnosis[0].name == "n_tail_dropped"


def test_memory_that_nobody_wrote_is_named_whatever_group_is_probed():
    """The partial sums of one group are added to memory that was never written."""

    def fault(x, weight, bias=None):
        partial = torch.empty(x.shape[0], x.shape[1], weight.shape[1])
        partial[1:] = 0
        return (partial + x.float() @ weight.float().transpose(1, 2)).to(x.dtype)

    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    report = reconcile.check_batched_linear(fault, weight, probes=("bound",), groups=(1,))
    first = report.rows[report.first_divergence.row]
    assert (first.tap, first.reason) == ("linear.1:out", Reason.RAISED)
    assert said(first)[0][:3] == ("cause", "unwritten", 1.0)


def test_what_only_poison_shows_is_named():
    """Three elements of a corner, which no row, column or tail describes."""

    def fault(x, weight, bias=None):
        y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
        right = linear(x, weight_for("dense").double())
        y.flatten()[: right.numel() - 3] = right.flatten()[: right.numel() - 3]
        return y

    report = reconcile.check_linear(fault, weight_for("dense"), probes=("bound",), batch_sizes=(8,))
    row = report.rows[report.first_divergence.row]
    assert row.reason is Reason.UNWRITTEN
    assert said(row)[0][:3] == ("cause", "unwritten", 1.0)


def test_a_small_lean_inside_the_bound_is_named():
    """A truncating store under a contract whose bound hides it element by element."""
    loose = Contract(split_k=8, partials="bfloat16")
    rows = diagnosed(truncating, weight_of(TERNARY, (256, 256)), contract=loose, probes=("bound",))
    assert rows[0].reason is Reason.BIAS
    assert rows[0].diagnosis[0].name == "truncating_store", said(rows[0])


def test_every_misreading_of_every_format_has_a_known_name():
    known = {name for hypothesis in linear_hypotheses() for name in hypothesis.names}
    for form in registry.formats().values():
        for misreading in form.misreadings:
            assert (misreading.cause or misreading.name) in known, (form.name, misreading.name)
