"""The batched bfloat16 GEMM on the CPU: golden vectors, layouts, tiles by M, probes, counts."""

import dataclasses
import json
from importlib.resources import files

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import reconcile
from reconcile.exceptions import KernelError
from reconcile.kernel import LinearSpec, choose_engine
from reconcile.numbers.criteria import beside
from reconcile.registry import kernel
from reconcile_kernels.aiter_bf16 import BATCHED_GEMM, BatchedGemm, source
from reconcile_kernels.aiter_bf16 import torch_language as tl
from reconcile_kernels.aiter_bf16.batched import (
    AITER,
    AITER_INTERPRETER,
    TRITON,
    TRITON_INTERPRETER,
    TRITON_ON_CPU,
    UPSTREAM,
)
from reconcile_kernels.aiter_bf16.config import BY_ROWS, Config, config_for, contract

VECTORS = load_file(
    str(files("reconcile_fixtures") / "vectors" / "10_batched_gemm_bf16.safetensors")
)
UPSTREAM_SHAPES = [(1, 4, 128, 32), (8, 8, 128, 64), (37, 4, 192, 32), (128, 2, 128, 16)]
"""(T, G, D, R) of SGLang's test of the route."""


def bf16(name):
    return torch.from_numpy(VECTORS[name].view(np.int16)).view(torch.bfloat16)


def run(x, w, bias=None):
    return BATCHED_GEMM.run(x, w, bias, TRITON_ON_CPU)


def operands(t, g, d, r, seed=0):
    """o [T, G, D] as the model has it, and wo_a [G, R, D]."""
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(t, g, d, generator=generator).bfloat16()
    return o, torch.randn(g, r, d, generator=generator).bfloat16()


def within_bound(y, exact, size, k):
    """(K + 1) u S before the one rounding, which moves the result by half an ulp at most."""
    slack = (k + 1) * 2.0**-24 * size
    return bool(((y.double() - exact).abs() <= slack + 2.0**-8 * (exact.abs() + slack)).all())


@pytest.mark.parametrize("name", ["t1", "t8", "t37", "bias", "ints", "cancel"])
def test_golden_vectors(name):
    """Within the bound of the exact result; where sums are exact, the exact bits."""
    x, w = bf16(f"{name}.x_bf16"), bf16(f"{name}.w_bf16")
    bias = bf16(f"{name}.bias_bf16")[:, 0] if name == "bias" else None
    y = run(x, w, bias).contiguous()
    exact = torch.from_numpy(VECTORS[f"{name}.y_f64"])
    size = torch.from_numpy(VECTORS[f"{name}.abs_f64"])
    expected = bf16(f"{name}.y_bf16")
    if name == "ints":
        assert torch.equal(y, expected)
    assert within_bound(y, exact, size, x.shape[-1])
    assert int((y != expected).sum()) <= expected.numel() // 100


@pytest.mark.parametrize(("t", "g", "d", "r"), UPSTREAM_SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_upstream_shapes_round_once(t, g, d, r, biased):
    """At most a percent of elements differ from the exact result rounded once, by one ulp."""
    o, w = operands(t, g, d, r)
    bias = operands(1, g, r, 1)[0][0] if biased else None
    y = run(o.transpose(0, 1), w, bias)
    exact = torch.einsum("tgd,grd->gtr", o.double(), w.double())
    exact = exact if bias is None else exact + bias.double()[:, None]
    stats = reconcile.error_stats(y, exact)
    assert stats.max_ulp <= 1
    assert stats.differing <= y.numel() / 100


def test_memory_beside_the_output_is_left_alone():
    """Strided outputs: a view of every second row and column of a larger buffer."""
    o, w = operands(5, 3, 64, 16)
    buffer = torch.full((3, 10, 32), torch.nan).bfloat16()
    y = buffer[:, ::2, ::2]
    module = source.in_torch()
    for config in (Config(16, 16, 64), Config(16, 16, 16, splits=4)):
        buffer.fill_(torch.nan)
        module.run(o.transpose(0, 1), w, None, y, config)
        assert torch.equal(y, run(o.transpose(0, 1), w))
        assert int(buffer.isnan().sum()) == buffer.numel() - y.numel()


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "k first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "padded": lambda x: torch.nn.functional.pad(x, (2, 3), value=torch.nan)[..., 2:-3],
    "every second": lambda x: torch.stack([x, x * torch.nan], 2).flatten(1, 2)[:, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("of_x", LAYOUTS)
@pytest.mark.parametrize("of_w", LAYOUTS)
def test_strides_of_inputs_are_free(of_x, of_w):
    o, w = operands(5, 3, 64, 16)
    x, w = LAYOUTS[of_x](o.transpose(0, 1)), LAYOUTS[of_w](w)
    assert torch.equal(run(x, w), run(x.contiguous(), w.contiguous()))


def test_the_output_lies_as_the_model_wants_it():
    o, w = operands(5, 3, 64, 16)
    y = run(o.transpose(0, 1), w)
    assert y.shape == (3, 5, 16)
    assert y.transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("m", [1, 8, 16, 17, 32, 64, 65, 128, 129, 256, 1024, 1025, 5000])
def test_tiles_by_rows_and_what_the_contract_says(m):
    """Split over K exactly where the contract declares it; partial sums stay float32."""
    promised = contract().at(m)
    config = config_for(m)
    assert promised.split_k == config.splits
    assert promised.partials == "float32"
    assert config.splits_of(4096) == (4 if 64 < m <= 128 else 1)


@pytest.mark.parametrize("k", [1, 16, 127, 128, 129, 320, 512, 513, 4096])
@pytest.mark.parametrize("config", [config for _, config in BY_ROWS])
def test_splits_cover_k_once(k, config):
    length, count = config.split_k(k), config.splits_of(k)
    assert 1 <= count <= config.splits
    assert (count - 1) * length < k <= count * length
    assert length % config.block_k == 0


@pytest.mark.parametrize("m", [1, 8, 16, 17, 32, 37, 64, 65, 128, 129, 257, 1025])
def test_probes_pass_for_every_regime_of_m(m):
    """Reduced sizes with the model's proportions, D = 4 R, on the engine that is always here."""
    _, w = operands(1, 8, 128, 32)
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(TRITON_ON_CPU),
        w,
        groups=[0, 7],
        batch_sizes=[m],
        probes=["integer", "bound", "special"],
        repeats=1,
    )
    assert report.exit_code == 0, report.explain()
    assert {row.check for row in report.rows} == {"integer", "bound", "special", "layout"}


def test_all_probes_pass_with_a_bias():
    _, w = operands(1, 3, 96, 48)
    bias = operands(1, 3, 48, 1)[0][0]
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(TRITON_ON_CPU), w, bias=bias, groups=[1], repeats=2
    )
    assert report.exit_code == 0, report.explain()


def test_a_launch_is_counted():
    gemm = BatchedGemm()
    o, w = operands(2, 3, 16, 16)
    for count in (1, 2):
        gemm.run(o.transpose(0, 1), w, None, TRITON_ON_CPU)
        assert gemm.launches == count


def test_no_rows_give_an_empty_result():
    _, w = operands(1, 3, 16, 16)
    assert run(torch.empty(3, 0, 16).bfloat16(), w).shape == (3, 0, 16)


@pytest.mark.parametrize(
    ("x", "w", "bias"),
    [
        ((3, 2, 16), (3, 8, 17), None),
        ((3, 2, 16), (4, 8, 16), None),
        ((2, 16), (3, 8, 16), None),
        ((3, 2, 16), (3, 8, 16), (3, 1, 8)),
        ((3, 2, 16), (3, 8, 16), (8,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x, w, bias):
    given = [None if shape is None else torch.ones(shape).bfloat16() for shape in (x, w, bias)]
    with pytest.raises(KernelError, match="expected"):
        run(*given)


def test_another_dtype_is_declined():
    with pytest.raises(NotImplementedError, match="bfloat16"):
        run(torch.ones(1, 1, 16), torch.ones(1, 1, 16))


SPEC = LinearSpec(
    n=32, k=128, format="bfloat16", bias=False, activation_dtype=torch.bfloat16, groups=8
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"groups": None}, "is a batched kernel"),
        ({"format": "mxfp8_e4m3"}, "not mxfp8_e4m3"),
        ({"activation_dtype": torch.float16}, "by float16"),
    ],
)
def test_what_it_can_implement(changes, reason):
    support = BATCHED_GEMM.can_implement(dataclasses.replace(SPEC, **changes))
    assert bool(support) == (not reason)
    assert reason in support.reason


@pytest.mark.parametrize("engine", [AITER, TRITON, TRITON_INTERPRETER, AITER_INTERPRETER])
def test_an_engine_that_does_not_run_here_says_why(engine):
    """Wherever this runs: either it runs, or the reason is given and preparing is refused."""
    support = BATCHED_GEMM.is_supported(engine)
    assert support.reason
    if not support:
        with pytest.raises(KernelError, match=engine.name):
            BATCHED_GEMM.prepare(torch.ones(1, 16, 16).bfloat16(), engine)


def test_engines_are_labelled():
    labels = {e.name: (e.implementation, e.execution, e.fidelity) for e in BATCHED_GEMM.engines}
    assert labels == {
        "aiter": ("vendor", "hardware", "semantic"),
        "triton": ("ours", "hardware", "semantic"),
        "triton-interpreter": ("ours", "emulated", "semantic"),
        "aiter-interpreter": ("vendor", "emulated", "semantic"),
        "triton-on-cpu": ("ours", "emulated", "semantic"),
    }
    assert choose_engine(BATCHED_GEMM, "emulated")[0] is not None


def test_it_is_registered():
    assert kernel("aiter_bf16.batched_gemm") is BATCHED_GEMM
    assert kernel("aiter_bf16.wo_a").launches == BATCHED_GEMM.launches


# ------------------------------------------------------------------ upstream's criterion


def test_upstreams_criterion_accepts_only_equal_bits():
    """One ulp of bfloat16 is at least 2^-8 of the value: sixteen times the criterion, or more."""
    values = torch.arange(1, 2, 2**-7).bfloat16()
    neighbours = (values.view(torch.int16) + 1).view(torch.bfloat16)
    least = min(
        UPSTREAM.value(neighbours[i : i + 1], values[i : i + 1]) for i in range(len(values))
    )
    assert least == pytest.approx(2.0**-8, rel=1e-2)
    assert least > 7 * UPSTREAM.limit
    assert UPSTREAM.value(values, values) == 0


def test_upstreams_criterion_is_shown_beside_the_bound():
    exact = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    candidate = exact.bfloat16()
    candidate[0, 1] = 2.015625
    stats = dataclasses.asdict(reconcile.error_stats(candidate, exact))
    shown, text = beside(stats, True, candidate, exact, UPSTREAM)
    assert shown["max rel err <= 5e-4"] == pytest.approx(2**-7, rel=1e-3)
    assert shown["max rel err <= 5e-4 met"] is False
    assert "inside the bound, misses max rel err <= 5e-4 (0.00781)" in text
    assert "1 of 3 elements differ" in text
    assert "1 ulp" in text
    assert UPSTREAM.limits().kind == "fixed"
    assert beside(stats, False, candidate, exact, UPSTREAM)[1] == ""


def test_nan_does_not_meet_the_criterion():
    exact = torch.ones(1, 2, dtype=torch.float64)
    candidate = torch.tensor([[1.0, torch.nan]]).bfloat16()
    shown, _ = beside({}, False, candidate, exact, UPSTREAM)
    assert shown["max rel err <= 5e-4 met"] is False
    json.dumps(str(shown))


# ------------------------------------------------------------------ the language


@pytest.mark.parametrize("length", [0, 3, 12])
def test_a_tile_is_a_power_of_two(length):
    with pytest.raises(ValueError, match="power of two"):
        tl.arange(0, length)


def test_an_address_outside_of_the_storage_is_an_error():
    pointer = tl.Pointer.to(torch.ones(8)[2:6])
    inside = torch.tensor([True, True])
    assert tl.load(pointer + torch.tensor([0, 5]), inside, 0.0).tolist() == [1.0, 1.0]
    for bad in (-3, 6):
        with pytest.raises(IndexError, match="outside of a storage of 8"):
            tl.load(pointer + torch.tensor([0, bad]), inside, 0.0)
        with pytest.raises(IndexError, match="outside of a storage of 8"):
            tl.store(pointer + torch.tensor([0, bad]), torch.ones(2), inside)
    masked = torch.tensor([True, False])
    assert tl.load(pointer + torch.tensor([0, 99]), masked, 7.0).tolist() == [1.0, 7.0]


@pytest.mark.slow
@pytest.mark.parametrize("t", [1, 8, 37, 128])
def test_real_size(t):
    """G = 8, D = 4096, R = 1024. Where sums cancel an ulp is small, and their error is not."""
    o, w = operands(t, 8, 4096, 1024)
    y = run(o.transpose(0, 1), w)
    exact = torch.einsum("tgd,grd->gtr", o.double(), w.double())
    size = torch.einsum("tgd,grd->gtr", o.double().abs(), w.double().abs())
    assert within_bound(y, exact, size, 4096)
    stats = reconcile.error_stats(y, exact)
    assert stats.differing <= y.numel() / 1000
    # upstream's criterion refuses all of these, which are right
    assert (UPSTREAM.value(y, exact) <= UPSTREAM.limit) == (stats.differing == 0)


@pytest.mark.slow
@pytest.mark.parametrize("t", [8, 128])
def test_real_size_in_the_harness(t):
    """One group of eight is probed, all of them are called once."""
    _, w = operands(1, 8, 4096, 1024)
    report = reconcile.check_batched_linear(
        BATCHED_GEMM.as_function(TRITON_ON_CPU),
        w,
        groups=[5],
        batch_sizes=[t],
        probes=["bound"],
        repeats=1,
    )
    assert report.exit_code == 0, report.explain()
    assert {(row.check, row.shape) for row in report.rows} == {
        ("bound", (t, 1024, 4096)),
        ("layout", (8, 5, 1024, 4096)),
    }
