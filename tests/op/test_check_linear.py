"""`check_linear`: clean kernels pass, faults fail and are named, in every format."""

import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

import reconcile
from reconcile import Contract, registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.report import Reason, Verdict
from reconcile.weight import QuantizedWeight

OF_OTHER_ENGINES = {
    f"ternary_{name}"
    for name in ["bytes", "i2_s_arm", "i2_s_rows", "i2_s_x86", "int8", "ms_gpu", "tq1_0", "tq2_0"]
}
"""They differ from the ternary formats that have kernels here in where their codes lie, only."""
FORMATS = [
    pytest.param(name, marks=pytest.mark.slow) if name in OF_OTHER_ENGINES else name
    for name in sorted(registry.formats())
]
SEEDS = 5
check = partial(reconcile.check_linear, diagnose=False)
"""Verdicts are tested here; what explains a failure, in test_diagnosis.py."""
SHAPE = (192, 256)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weight_of(name, shape=SHAPE, seed=0):
    """A random weight of a registered format, through the public constructor."""
    form = registry.formats()[name]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(seedling, shape, torch.Generator().manual_seed(seed))
    return QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)


def decoded(weight, dtype=torch.float32):
    return weight.dequantize(torch.float64).to(dtype)


def plain(x, weight, bias=None):
    """Weight in float32, float32 sums, one rounding."""
    y = x.float() @ decoded(weight).T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def rounded_weight(x, weight, bias=None):
    return (x.float() @ decoded(weight).bfloat16().float().T).to(x.dtype)


def split_k_bf16_partials(x, weight, bias=None):
    w = decoded(weight)
    half = w.shape[1] // 2
    parts = [
        (x[..., s].float() @ w[:, s].T).bfloat16().float()
        for s in (slice(0, half), slice(half, None))
    ]
    return (parts[0] + parts[1]).to(x.dtype)


def truncating_accumulator(x, weight, bias=None):
    """Blocks of 32 in float64, the running sum cut to float32 toward zero."""
    w = decoded(weight, torch.float64)
    total = torch.zeros(*x.shape[:-1], w.shape[0], dtype=torch.float64)
    for start in range(0, w.shape[1], 32):
        block = slice(start, start + 32)
        total = total + x[..., block].double() @ w[:, block].T
        near = total.float()
        away = near.double().abs() > total.abs()
        total = (near.view(torch.int32) - away.int()).view(torch.float32).double()
    return total.to(torch.float32).to(x.dtype)


PLAIN = Contract()
CLEAN = [
    ("plain", plain, PLAIN),
    ("rounded weight", rounded_weight, Contract(weight_rounding="bfloat16")),
    ("split-K", split_k_bf16_partials, Contract(split_k=2, partials="bfloat16")),
    ("truncating", truncating_accumulator, Contract(accumulator_rounding="rtz")),
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("kernel", "contract"), [c[1:] for c in CLEAN], ids=[c[0] for c in CLEAN])
def test_a_clean_kernel_passes_under_its_contract(form, kernel, contract):
    for seed in range(SEEDS):
        weight = weight_of(form, seed=seed)
        report = check(kernel, weight, contract=contract, seed=seed)
        assert report.exit_code == 0, report.explain()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("kernel", "contract"), [c[1:] for c in CLEAN], ids=[c[0] for c in CLEAN])
def test_a_clean_kernel_passes_on_forty_seeds(form, kernel, contract):
    for seed in range(100, 140):
        weight = weight_of(form, seed=seed)
        report = check(kernel, weight, contract=contract, seed=seed)
        assert report.exit_code == 0, report.explain()


def int8_activations(x, weight, bias=None):
    """W8A8: integer sums are exact; the two scales enter afterwards."""
    wide = x.reshape(-1, x.shape[-1]).float()
    amax = wide.abs().amax(-1, keepdim=True).clamp_min(1e-7)
    codes = torch.round(wide * (torch.full_like(amax, 127) / amax)).clamp(-128, 127)
    sums = codes.double() @ weight.format.decode(weight.unpacked()).T
    y = (sums.float() * (amax / torch.full_like(amax, 127)) * weight.scales).to(x.dtype)
    return y.reshape(*x.shape[:-1], -1)


def fp8_activations(x, weight, bias=None):
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = (amax / torch.full_like(amax, 448)).clamp_min(1 / (448 * 512))
    codes = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return ((codes @ decoded(weight).T) * scale).to(x.dtype)


QUANTISED = [
    ("int8", int8_activations, "ternary_k_interleaved", "per_token_int8"),
    ("fp8", fp8_activations, "fp8_e4m3_block", "per_token_fp8"),
]


@pytest.mark.parametrize(
    ("kernel", "form", "activation"), [q[1:] for q in QUANTISED], ids=[q[0] for q in QUANTISED]
)
def test_declared_activation_quantisation(kernel, form, activation):
    contract = Contract(activation=activation, scale_applied="after_sum")
    for seed in range(SEEDS):
        weight = weight_of(form, seed=seed)
        report = check(kernel, weight, contract=contract, seed=seed)
        assert report.exit_code == 0, report.explain()
    undeclared = Contract(scale_applied="after_sum")
    assert check(kernel, weight, contract=undeclared).exit_code == 1
    assert check(plain, weight, contract=contract).exit_code == 1


WRONG = [
    ("rounded weight", rounded_weight, PLAIN),
    ("split-K", split_k_bf16_partials, PLAIN),
    ("plain under rounded", plain, Contract(weight_rounding="bfloat16")),
]


@pytest.mark.parametrize(("kernel", "contract"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_contract_is_found(kernel, contract):
    report = check(kernel, weight_of("fp8_e4m3_block"), contract=contract)
    assert report.exit_code == 1
    assert max(row.utilisation or 0 for row in report.rows) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_float_weight_and_other_outputs(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 320, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator)

    def kernel(x, w, bias):
        return (x.double() @ w.double().T + bias.double()).to(torch.float32).to(x.dtype)

    name = str(dtype).removeprefix("torch.")
    report = check(kernel, weight, bias=bias, contract=Contract(output=name))
    assert report.exit_code == 0, report.explain()
    dropped = check(
        lambda x, w, b: functional.linear(x.double(), w.double()).to(x.dtype),
        weight,
        bias=bias,
        contract=Contract(output=name),
    )
    assert dropped.exit_code == 1


# ------------------------------------------------------------------ faults


def drops_last_k(x, weight, bias=None):
    return (x[..., :-1].float() @ decoded(weight)[:, :-1].T).to(x.dtype)


def all_scales_one_percent_up(x, weight, bias=None):
    return (x.float() @ (decoded(weight) * 1.01).T).to(x.dtype)


def truncating_store(x, weight, bias=None):
    y = x.float() @ decoded(weight).T
    return (y.view(torch.int32) & ~0xFFFF).view(torch.float32).to(x.dtype)


def bfloat16_accumulator(x, weight, bias=None):
    w = decoded(weight)
    total = torch.zeros(*x.shape[:-1], w.shape[0], dtype=torch.bfloat16)
    for start in range(0, w.shape[1], 16):
        block = slice(start, start + 16)
        total = (total.float() + x[..., block].float() @ w[:, block].T).to(torch.bfloat16)
    return total


def scale_in_float16(x, weight, bias=None):
    scales = weight.scales.half().float()
    return plain(x, replace(weight, scales=scales))


def one_e8m0_off_by_one(x, weight, bias=None):
    scales = weight.scales.clone()
    scales.view(-1)[7] += 1
    return plain(x, replace(weight, scales=scales))


def one_block_ten_percent_up(x, weight, bias=None):
    scales = weight.scales.clone()
    scales.view(-1)[1] *= 1.1
    return plain(x, replace(weight, scales=scales))


def subnormals_as_normals(x, weight, bias=None):
    table = torch.tensor(weight.format.table)
    for code in (*range(1, 8), *range(0x81, 0x88)):
        mantissa = 1 + (code & 7) / 8
        table[code] = math.copysign(mantissa * 2.0**-7, 1 - 2 * (code >> 7))
    form = weight.format
    w = table[weight.unpacked().long()] * form.spread(
        form.scale_values(weight.scales).float(), weight.shape
    )
    return (x.float() @ w.T).to(x.dtype)


def ties_away_from_zero(x, weight, bias=None):
    y = x.float() @ decoded(weight).T
    return ((y.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32).to(x.dtype)


def store_through_float16(x, weight, bias=None):
    return plain(x.float(), weight).half().to(x.dtype)


def loses_nan(x, weight, bias=None):
    return plain(torch.nan_to_num(x, nan=0.0), weight)


def wrong_for_one_row(x, weight, bias=None):
    y = plain(x, weight)
    return y * 2 if x.shape[0] == 1 else y


def wrong_behind_row_32(x, weight, bias=None):
    y = plain(x, weight)
    y[32:] = y[31:-1] if y.shape[0] > 32 else y[32:]
    return y


def reads_padding(x, weight, bias=None):
    if x.stride(0) > 2 * x.shape[-1]:
        x = x.as_strided(x.shape, (x.shape[-1], 1), x.storage_offset())
    return plain(x.contiguous(), weight)


def another_result_each_time(x, weight, bias=None, _calls=[0]):  # noqa: B006
    _calls[0] += 1
    y = plain(x, weight)
    y.view(-1)[0] *= 1 + 2.0**-6 * (_calls[0] % 2)
    return y


def negates_infinity(x, weight, bias=None):
    y = plain(x, weight)
    return torch.where(y.isinf(), -y, y)


def infinity_is_nan(x, weight, bias=None):
    y = plain(x, weight)
    return torch.where(y.isinf(), torch.nan, y)


def wrong_in_three_dimensions(x, weight, bias=None):
    y = plain(x, weight)
    return y * 0 if x.dim() == 3 else y


FAULTS = [
    *((f"{f.__name__} {form}", f, form) for f in (
        drops_last_k, all_scales_one_percent_up, truncating_store, bfloat16_accumulator,
        ties_away_from_zero, store_through_float16,
        loses_nan, wrong_for_one_row, wrong_behind_row_32, reads_padding,
        another_result_each_time, negates_infinity, infinity_is_nan, wrong_in_three_dimensions,
    ) for form in ("ternary_k_interleaved", "fp8_e4m3_block", "mxfp8_e4m3")),
    ("scale_in_float16", scale_in_float16, "ternary_k_interleaved"),
    ("one_e8m0_off_by_one", one_e8m0_off_by_one, "mxfp8_e4m3"),
    ("one_block_ten_percent_up", one_block_ten_percent_up, "fp8_e4m3_block"),
    ("subnormals_as_normals", subnormals_as_normals, "fp8_e4m3_tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "form"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_fails(kernel, form):
    report = check(kernel, weight_of(form), contract=PLAIN)
    assert report.exit_code == 1, report.explain()


NULLS = [
    ("zeros", lambda y, x: torch.zeros_like(y)),
    ("constant", lambda y, x: torch.full_like(y, 0.5)),
    ("shuffled", lambda y, x: y.roll(1, -1)),
    ("doubled", lambda y, x: y * 2),
    ("halved", lambda y, x: y / 2),
    ("rows swapped", lambda y, x: y.flip(0)),
]


@pytest.mark.parametrize("change", [n[1] for n in NULLS], ids=[n[0] for n in NULLS])
@pytest.mark.parametrize("form", ["ternary_hf", "fp8_e4m3_channel", "mxfp8_e4m3"])
def test_a_null_candidate_fails_every_probe_that_counts(change, form):
    report = check(lambda x, w, b=None: change(plain(x, w), x), weight_of(form), contract=PLAIN)
    failing = {row.check for row in report.failures()}
    assert {"impulse", "code_table", "integer", "edge", "bound"} <= failing


@pytest.mark.parametrize("block", range(4))
def test_every_wrong_code_is_named(block):
    """One of the 256 codes decodes as its neighbour; the code must be named."""
    weight = weight_of("fp8_e4m3_block", (256, 256))
    missed = []
    for code in range(64 * block, 64 * block + 64):
        table = torch.tensor(weight.format.table)
        right = float(table[code])
        table[code] = (
            480.0 if math.isnan(right) else right + (2.0**-6 if right == 0 else right / 16)
        )

        def kernel(x, w, bias=None, table=table):
            form = w.format
            scales = form.spread(form.scale_values(w.scales).float(), w.shape)
            return (x.float() @ (table[w.unpacked().long()] * scales).T).to(x.dtype)

        report = check(kernel, weight, contract=PLAIN, probes="code_table", repeats=1)
        if not any(f"0x{code:02X}" in row.text for row in report.failures()):
            missed.append(f"0x{code:02X}: {report.explain(2)}")
    assert not missed


def test_a_block_boundary_at_112_is_named():
    weight = weight_of("fp8_e4m3_block", (448, 256))

    def kernel(x, w, bias=None):
        rows = -(-w.shape[0] // w.scales.shape[0])
        scales = w.scales.repeat_interleave(rows, 0)[: w.shape[0]].repeat_interleave(128, 1)
        values = w.format.decode(w.unpacked(), torch.float32) * scales[:, : w.shape[1]]
        return (x.float() @ values.T).to(x.dtype)

    report = check(kernel, weight, contract=PLAIN, probes="impulse")
    assert report.exit_code == 1
    first = next(report.failures())
    assert "n = 112, 224, 336" in first.text
    assert "n = 128, 256, 384" in first.text


def test_a_reference_without_its_scale_is_suspect():
    weight = weight_of("fp8_e4m3_block")
    missing = replace(weight, scales=torch.ones_like(weight.scales))
    report = check(plain, missing, contract=PLAIN)
    assert report.exit_code == 2
    assert {row.reason for row in report.rows} == {Reason.REFERENCE_SUSPECT}

    float_weight = weight.format.decode(weight.unpacked(), torch.float32)
    float_weight[0, 0] = 448.0
    report = check(functional.linear, float_weight)
    assert report.exit_code == 2


def test_tiny_outputs_do_not_pass_by_emptiness():
    weight = weight_of("fp8_e4m3_block")
    tiny = replace(weight, scales=weight.scales * 1e-7)
    assert check(plain, tiny, contract=PLAIN).exit_code == 0
    report = check(lambda x, w, b=None: plain(x, w) * 0, tiny, contract=PLAIN, probes=("bound",))
    assert report.exit_code == 1


def test_no_output_is_never_a_pass():
    def declines(x, weight, bias=None):
        raise NotImplementedError("nothing")

    assert check(declines, weight_of("ternary_hf")).exit_code == 2
    assert check(lambda x, w: None, weight_of("ternary_hf")).exit_code == 1


@pytest.mark.parametrize("weight", [None, [[1.0]], torch.ones(0, 4), torch.ones(4, 4).int()])
def test_bad_weights(weight):
    with pytest.raises(reconcile.ReconcileError):
        check(plain, weight)


def test_a_prepare_that_rewrites_the_weight_is_found_and_changes_nothing():
    weight = weight_of("fp8_e4m3_channel")
    before = weight.scales.clone()

    def kernel(x, prepared, bias=None):
        return plain(x, prepared)

    def prepare(given):
        given.scales.fill_(1.5)
        return given

    kernel.prepare = prepare
    report = check(kernel, weight, contract=PLAIN)
    assert {row.reason for row in report.failures()} == {Reason.INPUT_MUTATED}
    assert torch.equal(weight.scales, before)


def test_a_property_alone_is_no_pass():
    weight = weight_of("ternary_hf")
    report = check(lambda x, w: x[..., :1].expand(-1, 192) * 0, weight, probes="batch")
    assert report.exit_code == 2


@pytest.mark.parametrize("shape", [(1, 4), (1, 64), (2, 8), (64, 4)])
def test_small_weights(shape):
    weight = weight_of("ternary_k_interleaved", shape)
    report = check(plain, weight, contract=PLAIN)
    assert report.exit_code == 0, report.explain()


def test_a_contract_that_changes_with_m():
    def kernel(x, weight, bias=None):
        return (plain if x.numel() // x.shape[-1] <= 4 else rounded_weight)(x, weight)

    contract = Contract(weight_rounding="bfloat16", by_batch=((4, PLAIN),))
    weight = weight_of("fp8_e4m3_tensor")
    assert check(kernel, weight, contract=contract).exit_code == 0
    swapped = Contract(by_batch=((4, Contract(weight_rounding="bfloat16")),))
    assert check(kernel, weight, contract=swapped).exit_code == 1


def test_a_truncating_store_passes_where_it_is_declared():
    weight = weight_of("fp8_e4m3_tensor")
    contract = Contract(output_rounding="rtz")
    assert check(truncating_store, weight, contract=contract).exit_code == 0
    assert check(plain, weight, contract=contract).exit_code == 1


def test_sampling_of_a_large_weight_is_stated(monkeypatch):
    monkeypatch.setattr("reconcile.checking.probes.BUDGET", 192 * 256 * 16)
    report = check(plain, weight_of("fp8_e4m3_block"), contract=PLAIN)
    assert report.exit_code == 0
    assert any("sampled: impulse" in notice and "6% of K" in notice for notice in report.notices)


def test_the_registered_kernel_by_itself():
    kernel = registry.kernel("ternary_cuda.naive")
    report = check(kernel, weight_of("ternary_k_interleaved", (96, 192)))
    assert report.exit_code == 0, report.explain()
    assert {row.execution for row in report.rows} == {"emulated"}
    assert {row.engine for row in report.rows} == {"cuda-on-cpu"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"probes": "impulses"}, reconcile.ReconcileError),
        ({"probes": ()}, reconcile.ReconcileError),
        ({"repeats": 0}, reconcile.ReconcileError),
        ({"x": torch.ones(2, 3)}, reconcile.ReconcileError),
        ({"engine": "cuda"}, reconcile.ReconcileError),
        ({"dtype": torch.int8}, reconcile.ReconcileError),
        ({"dtype": "bfloat61"}, reconcile.ReconcileError),
        ({"batch_sizes": (0,)}, reconcile.ReconcileError),
        ({"batch_sizes": 5.0}, reconcile.ReconcileError),
        ({"batch_sizes": ()}, reconcile.ReconcileError),
        ({"x": torch.ones(0, 256)}, reconcile.ReconcileError),
        ({"x": torch.ones(2, 256), "dtype": torch.bfloat16}, reconcile.ReconcileError),
        ({"bias": torch.ones(3)}, reconcile.ReconcileError),
        ({"bias": torch.ones(192).int()}, reconcile.ReconcileError),
        ({"contract": "float32"}, reconcile.ReconcileError),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error):
        check(plain, weight_of("ternary_hf"), **arguments)


def test_it_needs_no_transformers():
    code = (
        "import sys, torch, reconcile\n"
        "f = torch.nn.functional.linear\n"
        "r = reconcile.check_linear(f, torch.randn(64, 64), probes=('bound',))\n"
        "print(r.verdict.value, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["PASS", "False"], done.stderr


def test_raise_for_verdict_reads_like_the_report():
    report = check(drops_last_k, weight_of("ternary_hf"), contract=PLAIN)
    with pytest.raises(AssertionError, match="only at k = 255"):
        report.raise_for_verdict()
    assert report.verdict is Verdict.FAIL


@pytest.mark.parametrize("form", ["fp8_e4m3_tensor", "fp8_e5m2_tensor", "ternary_hf_divide"])
@pytest.mark.parametrize("seed", range(3))
def test_float32_outputs_that_lean_with_their_scale_are_right(form, seed):
    weight = weight_of(form, (129, 132), seed)
    report = check(
        lambda x, w, b=None: x.float() @ decoded(w).T,
        weight,
        contract=Contract(output="float32"),
        dtype="float32",
        seed=seed,
    )
    assert report.exit_code == 0, report.explain()


@pytest.mark.parametrize("seed", range(5))
def test_declared_int8_with_a_bias_is_right(seed):
    bias = torch.randn(130, generator=torch.Generator().manual_seed(seed))

    def kernel(x, w, b):
        return (int8_activations(x.float(), w) + b).to(x.dtype)

    report = check(
        kernel,
        weight_of("ternary_k_interleaved", (130, 136), seed),
        bias=bias,
        contract=Contract(activation="per_token_int8", scale_applied="after_sum"),
    )
    assert report.exit_code == 0, report.explain()


def shares_a_workspace(x, weight, bias=None, _kept={}):  # noqa: B006
    place = _kept.setdefault((*x.shape[:-1], weight.shape[0]), torch.zeros(1))
    y = plain(x, weight)
    if place.shape != y.shape:
        _kept[(*x.shape[:-1], weight.shape[0])] = place = torch.zeros_like(y)
    return place.copy_(y)


def flushes_subnormals(x, weight, bias=None):
    return plain(torch.where(x.abs() < 2.0**-126, 0.0, x), weight, bias)


def wrong_behind_row_64(x, weight, bias=None):
    y = plain(x, weight, bias)
    return torch.cat([y[:64], y[64:] * 1.5]) if x.dim() == 2 else y


@pytest.mark.parametrize("kernel", [shares_a_workspace, flushes_subnormals, wrong_behind_row_64])
def test_more_faults_fail_with_a_bias_too(kernel):
    weight = weight_of("fp8_e4m3_block")
    bias = None if kernel is shares_a_workspace else torch.randn(192)
    report = check(kernel, weight, bias=bias, contract=PLAIN)
    assert report.exit_code == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"scale_applied": "after"},
        {"accumulator_rounding": "truncate"},
        {"split_k": 2.5},
        {"split_k": "2"},
        {"activation": "int8"},
        {"output": None},
        {"by_batch": ((4, "x"),)},
        {"by_batch": {4: PLAIN}},
        {"epilogue": "round"},
    ],
)
def test_a_contract_that_is_none_is_refused(fields):
    with pytest.raises(reconcile.ReconcileError):
        Contract(**fields)


@pytest.mark.parametrize("bias", [None, torch.ones(8)])
def test_a_bias_that_was_not_checked_is_said(bias):
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    report = reconcile.check_linear(functional.linear, weight, bias=bias, probes="integer")
    said = "not checked: bias (none was given; give bias=, or a weight that has one)"
    assert report.verdict is Verdict.PASS
    assert (said in report.explain()) is (bias is None)
    shown = " ".join(registry.reporter("terminal")[0](report).split())
    assert ("not checked bias (none was given;" in shown) is (bias is None)


def _float_kernel(x, weight, bias=None):
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _rows_of(x):
    return x.numel() // x.shape[-1]


WRONG_SOMEWHERE = {
    **{f"M = {m}": lambda x, w, m=m: _rows_of(x) == m for m in (6, *range(7, 16), 24, 48, 257)},
    **{f"K = {k}": lambda x, w, k=k: w.shape[1] == k for k in (136, 144, 160, 192)},
    **{f"N = {n}": lambda x, w, n=n: w.shape[0] == n for n in (136, 144, 160)},
    "batch of 3": lambda x, w: x.dim() == 4 and x.shape[0] == 3,
    "view in 3 dimensions": lambda x, w: x.dim() == 3 and not x.is_contiguous(),
}


@pytest.mark.parametrize("where", WRONG_SOMEWHERE)
def test_a_kernel_that_is_wrong_for_one_size_fails(where):
    def kernel(x, weight, bias=None):
        y = _float_kernel(x, weight)
        return y * 1.5 if WRONG_SOMEWHERE[where](x, weight) else y

    weight = torch.randn(40, 72).bfloat16()
    report = reconcile.check_linear(
        kernel, weight, probes=["edge", "layout"], diagnose=False, repeats=1
    )
    assert report.exit_code == 1


def test_a_workspace_that_only_many_rows_share_fails():
    kept = {}

    def kernel(x, weight, bias=None):
        y = _float_kernel(x, weight)
        many = _rows_of(x) >= 64
        return kept.setdefault(y.shape, torch.empty_like(y)).copy_(y) if many else y

    report = reconcile.check_linear(kernel, torch.randn(40, 72).bfloat16(), probes=["bound"])
    assert report.exit_code == 1
    assert "a workspace is shared" in report.explain()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e-30, 1e30, 1e34])
@pytest.mark.parametrize("form", ["fp8_e4m3_channel", "fp8_e4m3_block"])
def test_a_right_kernel_is_never_called_wrong_at_extreme_scales(form, scale, dtype):
    """Products that underflow are off by half a subnormal; sums that overflow are infinite."""
    form = registry.formats()[form]
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (64, 128), generator=generator)
    codes = torch.where(codes & 127 == 127, 0, codes)
    sizes = torch.rand(form.scale_shape((64, 128)), generator=generator) + 0.5
    weight = synthetic(form, codes, (sizes * scale).float())

    def kernel(x, weight, bias=None):
        scales = form.spread(weight.scales, weight.shape)
        values = form.decode(weight.unpacked(), torch.float32) * scales
        return (x.float() @ values.T).to(x.dtype)

    contract = Contract(scale_applied="before", output=dtype)
    report = reconcile.check_linear(kernel, weight, contract=contract, dtype=dtype, diagnose=False)
    assert list(report.failures()) == []


@pytest.mark.parametrize("shape", [(300, 2), (1, 1), (64, 1), (2, 3)])
@pytest.mark.parametrize("size", [1.0, 1e-38, 1e-40, 1e36])
def test_a_right_float32_kernel_is_never_called_wrong(shape, size):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size
    contract = Contract(output="float32")
    report = reconcile.check_linear(
        lambda x, w, b=None: x @ w.T, weight, contract=contract, diagnose=False
    )
    assert list(report.failures()) == []


def test_a_float16_infinity_that_the_bound_reaches_is_right():
    """65519.99 rounds to 65504, the next but one float32 to infinity."""
    weight = torch.tensor([[65504.0, 16 - 2.0**-7]]).half().repeat(8, 1)
    weight[:4] = 1
    x = torch.tensor([[1.0, 1.0]]).half()

    def kernel(x, weight, bias=None):
        y = x.float() @ weight.float().T
        return (y * (1 + 2.0**-23)).half()

    contract = Contract(output="float16")
    options = {"probes": ["bound"], "batch_sizes": (4,), "diagnose": False}
    report = reconcile.check_linear(kernel, weight, x=x, contract=contract, **options)
    assert list(report.failures()) == []
