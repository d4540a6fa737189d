"""Activation quantisers against independent implementations."""

from importlib.resources import files

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reconcile.activation import QUANTISERS, mxfp8, per_token_fp8, per_token_int8
from reconcile.checking.probes import random_weight, synthetic
from reconcile.contract import Contract
from reconcile.linears import BaselineLinear, ReferenceLinear, operand
from reconcile.registry import formats
from reconcile_references.precise import preserve_float64

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _x(dtype, seed=0, shape=(37, 96)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(
        2 * torch.randn(shape[0], 1, generator=generator)
    )
    x[3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_int8_against_numpy(dtype, seed):
    x = _x(dtype, seed)
    wide = x.float().numpy()
    amax = np.maximum(np.abs(wide).max(-1, keepdims=True), np.float32(1e-7))
    codes = np.clip(np.rint(wide * (np.float32(127) / amax)), -128, 127)
    expected = codes.astype(np.float64) * (amax / np.float32(127)).astype(np.float64)
    assert np.array_equal(per_token_int8(x).numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(5))
def test_fp8_against_ml_dtypes(dtype, seed):
    x = _x(dtype, seed)
    wide = x.float().numpy()
    scale = np.maximum(
        np.abs(wide).max(-1, keepdims=True) / np.float32(448), np.float32(1 / (448 * 512))
    )
    codes = np.clip(wide / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    expected = codes.astype(np.float64) * scale.astype(np.float64)
    assert np.array_equal(per_token_fp8(x).numpy(), expected)


def test_mxfp8_against_the_vectors():
    """Groups of 32 by torchao's FLOOR rule, edge cases and random rows."""
    data = load_file(str(files("reconcile_fixtures") / "vectors" / "03_mxfp8.safetensors"))
    checked = 0
    for name, x in (
        ("rows32", data["rows32.x_f32bits"].view(torch.float32)),
        ("rand32", data["rand32.x_f32bits"].view(torch.float32)),
        ("rows", data["rows.x_bf16"].view(torch.int16).view(torch.bfloat16)),
    ):
        scale = data[f"{name}.floor.scale"].reshape(x.shape[0], -1)
        codes = data[f"{name}.floor.codes"].reshape(x.shape)
        values = codes.view(torch.float8_e4m3fn).double()
        exponents = scale.to(torch.int32) - 127
        factors = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)
        expected = values * factors.repeat_interleave(32, -1)
        legal = (scale != 255).all(-1) & x.isfinite().all(-1)
        assert torch.equal(mxfp8(x[legal]), expected[legal])
        assert bool(mxfp8(x[~x.isfinite().all(-1)]).isnan().all())
        checked += int(legal.sum())
    assert checked > 50


@pytest.mark.parametrize("k", [1, 31, 33, 70])
def test_mxfp8_tail_is_a_group_of_its_own(k):
    x = _x(torch.float32, shape=(5, k))
    whole = k // 32 * 32
    assert torch.equal(mxfp8(x)[:, whole:], mxfp8(x[:, whole:]))


@pytest.mark.parametrize("name", sorted(QUANTISERS))
def test_a_row_that_is_not_finite_is_nan_and_no_other(name):
    x = _x(torch.bfloat16)
    x[5, 7], x[9, 1] = torch.nan, torch.inf
    values = QUANTISERS[name](x)
    assert values.isnan().all(-1).nonzero().flatten().tolist() == [5, 9]
    assert bool((values[3] == 0).all())


@pytest.mark.parametrize("name", sorted(QUANTISERS))
def test_the_reference_and_the_baseline_apply_it(name):
    form = formats()["fp8_e4m3_channel"]
    like = synthetic(form, torch.zeros(64, 96), torch.ones(64))
    weight = random_weight(like, (64, 96), torch.Generator().manual_seed(0))
    x = _x(torch.bfloat16)
    contract = Contract(activation=name)
    exact = QUANTISERS[name](x) @ weight.dequantize().T
    assert torch.equal(ReferenceLinear(weight, contract, torch.float64)(x), exact)
    plain = BaselineLinear(weight, torch.bfloat16, contract)(x)
    error = (plain.double() - exact).square().sum() / exact.square().sum()
    unquantised = (x.double() @ weight.dequantize().T - exact).square().sum()
    assert error < 5e-5
    assert unquantised > 0


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_mode_that_keeps_float64_does_not_change_the_declared_arithmetic(name):
    """The free run of a reference: its float64 islands are not the quantiser's."""
    contract = Contract(activation=name)
    for x in (_x(torch.float32).double() * (1 + 2.0**-30), _x(torch.bfloat16).double()):
        expected = QUANTISERS[name](x)
        with preserve_float64():
            assert torch.equal(operand(x, contract), expected)
