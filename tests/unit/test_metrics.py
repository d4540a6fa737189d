"""Error statistics: hand-computed cases, special values in every place and every chunking."""

import itertools
import math
from dataclasses import asdict, fields
from fractions import Fraction

import numpy as np
import pytest
import torch

from reconcile.numbers import metrics
from reconcile.numbers.metrics import ErrorStats, error_stats, nmse, worst_elements

INF, NAN = math.inf, math.nan
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def stats(candidate, reference, dtype=FP32):
    return error_stats(
        torch.tensor(candidate, dtype=dtype),
        torch.tensor(reference, dtype=torch.float64),
        histogram=True,
    )


def same_numbers(a, b):
    """Equal field by field, NaN equal to NaN."""
    return repr(a) == repr(b)


# --------------------------------------------------------------------------- by hand

HAND = stats([[1.0, 2.0, -2.0], [0.0, 4.0, 8.0]], [[1.0, 1.0, -4.0], [0.5, 4.0, 0.0]])
EXPECTED = {
    "n": 6,
    "nan_candidate": 0,
    "inf_candidate": 0,
    "nan_reference": 0,
    "inf_reference": 0,
    "nonfinite_mismatch": 0,
    "nonfinite_index": None,
    "bitwise_equal": False,
    "differing": 4,
    "max_abs": 8.0,
    "max_abs_index": (1, 2),
    "max_abs_candidate": 8.0,
    "max_abs_reference": 0.0,
    "max_rel": 1.0,  # |2-1|/1, |-2+4|/4, |0-0.5|/0.5; the element with r = 0 does not divide
    "max_rel_index": (0, 1),
    "mean_abs": (0 + 1 + 2 + 0.5 + 0 + 8) / 6,
    "rmse": math.sqrt((1 + 4 + 0.25 + 64) / 6),
    "nmse": 69.25 / (1 + 1 + 16 + 0.25 + 16),
    "worst_row_nmse": 64.25 / 16.25,
    "cosine": (1 + 2 + 8 + 16) / (math.sqrt(1 + 4 + 4 + 16 + 64) * math.sqrt(34.25)),
    # r > 0 and c above: +1; r < 0 and c above: -1; r > 0 and c below: -1; r = 0 counts nothing
    "bias": (1 - 1 - 1) / 6,
    "max_ulp": 0x41000000,  # 8.0 against 0.0
    "frac_over_1ulp": 4 / 6,
    "reference_amax": 4.0,
    "reference_constant": False,
    "histogram": ((0, 1), (1, 1), (2, 1), (4, 1)),
    "worst_rows": ((1, 64.25 / 16.25), (0, 5 / 18)),
    "worst_columns": ((2, 8.0), (1, 1.0), (0, 0.5)),
    "shape": (2, 3),
}


@pytest.mark.parametrize("name", [field.name for field in fields(ErrorStats)])
def test_by_hand(name):
    found = getattr(HAND, name)
    if isinstance(found, float):
        assert found == pytest.approx(EXPECTED[name], rel=1e-15)
    else:
        assert found == EXPECTED[name]


def test_every_field_has_an_expectation():
    assert {field.name for field in fields(ErrorStats)} == EXPECTED.keys()
    assert asdict(HAND).keys() == HAND.as_dict().keys()
    assert HAND.as_dict()["max_abs_index"] == [1, 2]
    assert HAND.nonfinite == 0


def test_only_the_reference_divides():
    x = torch.tensor([3.0, 4.0, -1.0])
    assert error_stats(2 * x, x).nmse == 1.0
    assert error_stats(x, 2 * x).nmse == 0.25
    assert error_stats(2 * x, x).max_rel == 1.0
    assert error_stats(x, 2 * x).max_rel == 0.5
    assert error_stats(2 * x, x).reference_amax == 4.0


@pytest.mark.parametrize(
    ("error", "power", "expected"), [(0, 0, 0), (1, 0, INF), (2, 4, 0.5), (0, 3, 0)]
)
def test_nmse_of_zeros(error, power, expected):
    assert nmse(float(error), float(power)) == expected
    c, r = torch.tensor([math.sqrt(error)]), torch.tensor([0.0])
    if not power:
        assert error_stats(c, r).nmse == expected
        assert error_stats(c, r).worst_row_nmse == expected


def test_zero_against_zero():
    found = stats([[0.0, -0.0]], [[0.0, 0.0]])
    assert (found.nmse, found.max_abs, found.max_rel, found.bias, found.max_ulp) == (0, 0, 0, 0, 0)
    assert math.isnan(found.cosine)
    assert found.max_rel_index is None
    assert not found.bitwise_equal
    assert found.differing == 0
    assert found.reference_constant


def test_an_unwritten_zero_is_not_masked():
    found = stats([5.0, 0, 0, 7], [5.0, 3, 4, 7])
    assert (found.max_abs, found.max_abs_index) == (4.0, (2,))


# --------------------------------------------------------------------------- refused input


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (torch.zeros(3, 1), torch.zeros(1, 3)),
        (torch.zeros(1), torch.zeros(3)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.zeros(()), torch.zeros(1)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(0), torch.tensor([1.1])),
        (torch.zeros(2, 0), torch.zeros(2, 0)),
        (torch.tensor([50000]), torch.tensor([49984.0], dtype=FP16)),
        (torch.tensor([1.0]), torch.tensor([1])),
        (torch.tensor([1]), torch.tensor([1])),
        (torch.tensor([True]), torch.tensor([1.0])),
        (torch.tensor([1j]), torch.tensor([1.0])),
        (torch.ones(1).to(torch.float8_e4m3fn), torch.ones(1)),
    ],
    ids=str,
)
def test_refused(candidate, reference):
    with pytest.raises(ValueError, match=r"shapes differ|nothing to compare|expected a candidate"):
        error_stats(candidate, reference)


# --------------------------------------------------------------------------- non-finite values

SPECIAL = (1.0, 0.0, NAN, INF, -INF)


@pytest.mark.parametrize(("c", "r"), list(itertools.product(SPECIAL, SPECIAL)))
@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("rows", [1, 2, 12])
def test_special_values_everywhere(c, r, place, rows, monkeypatch):
    candidate, reference = [2.0] * 12, [2.0] * 12
    candidate[place], reference[place] = c, r
    monkeypatch.setattr(metrics, "CHUNK", 3 * rows)
    shape = (4, 3)
    found = error_stats(
        torch.tensor(candidate).reshape(shape), torch.tensor(reference).reshape(shape)
    )
    assert found.nan_candidate == (c != c)
    assert found.nan_reference == (r != r)
    assert found.inf_candidate == (abs(c) == INF)
    assert found.inf_reference == (abs(r) == INF)
    finite = math.isfinite(c) and math.isfinite(r)
    agree = c == r or (c != c and r != r)
    assert found.nonfinite_mismatch == (not finite and not agree)
    index = divmod(place, 3)
    assert found.nonfinite_index == (None if finite or agree else index)
    assert found.max_abs == (abs(c - r) if finite else 0.0)
    assert found.differing == (not agree)
    assert found.rmse == pytest.approx(abs(c - r) / math.sqrt(12) if finite else 0.0)
    assert math.isfinite(found.nmse)


def test_left_out_elements_do_not_dilute_the_means():
    found = stats([3.0, NAN, NAN, NAN], [1.0, NAN, NAN, NAN])
    assert (found.mean_abs, found.rmse, found.frac_over_1ulp, found.bias) == (2, 2, 1, 1)


def test_the_first_finite_pair_is_named_even_if_equal():
    found = stats([NAN, 2.0], [NAN, 2.0])
    assert (found.max_abs, found.max_abs_index, found.max_abs_candidate) == (0.0, (1,), 2.0)
    found = stats([NAN, INF], [NAN, INF])
    assert (found.max_abs, found.max_abs_index) == (0.0, None)
    assert math.isnan(found.max_abs_candidate)
    assert found.reference_constant


@pytest.mark.parametrize(
    ("reference", "candidate", "mismatch"),
    [
        (70000.0, INF, 0),
        (-70000.0, -INF, 0),
        (70000.0, -INF, 1),
        (70000.0, 65504.0, 1),
        (65519.0, 65504.0, 0),
        (65519.0, INF, 1),
    ],
)
def test_fp16_overflow_is_legal_where_the_reference_rounds_to_it(reference, candidate, mismatch):
    found = stats([1.0, candidate], [1.0, reference], FP16)
    assert found.nonfinite_mismatch == mismatch
    assert found.inf_reference == (abs(reference) > 65520)
    assert found.bitwise_equal == (not mismatch)


# --------------------------------------------------------------------------- chunks and layouts


def noisy(shape, dtype=BF16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(shape, generator=generator, dtype=FP64) * 10.0 ** torch.randint(
        -6, 6, shape, generator=generator
    )
    c = (r * (1 + 1e-2 * torch.randn(shape, generator=generator, dtype=FP64))).to(dtype)
    return c, r


@pytest.mark.parametrize("shape", [(64, 33), (1, 5000), (700, 1), (5, 7, 40), (3000,), (16, 40000)])
@pytest.mark.parametrize("special", [False, True])
def test_the_size_of_the_chunks_changes_no_bit(shape, special, monkeypatch):
    c, r = noisy(shape)
    if special:
        c.view(-1)[[0, 7, c.numel() // 2, -1]] = torch.tensor([NAN, INF, NAN, -INF], dtype=BF16)
        r.view(-1)[[7, 9]] = torch.tensor([INF, NAN], dtype=FP64)
    whole = error_stats(c, r, histogram=True)
    for rows in (1, 2, 3, 17):
        monkeypatch.setattr(metrics, "CHUNK", rows * shape[-1])
        assert same_numbers(error_stats(c, r, histogram=True), whole), rows
    assert (whole.nan_candidate > 0) == special


def test_the_order_of_the_rows_changes_no_sum(monkeypatch):
    c, r = noisy((200, 16))
    monkeypatch.setattr(metrics, "CHUNK", 16 * 7)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3))
    one, other = (error_stats(*pair, histogram=True) for pair in ((c, r), (c[order], r[order])))
    for name in ("mean_abs", "rmse", "nmse", "worst_row_nmse", "cosine", "bias", "max_ulp"):
        assert getattr(one, name) == getattr(other, name)
    assert one.histogram == other.histogram


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_changes_no_bit(threads):
    c, r = noisy((3, 100_000))
    before = torch.get_num_threads()
    expected = error_stats(c, r)
    torch.set_num_threads(threads)
    try:
        assert same_numbers(error_stats(c, r), expected)
    finally:
        torch.set_num_threads(before)


def test_sums_against_exact_arithmetic():
    c, r = noisy((40, 13))
    found = error_stats(c, r)
    pairs = [
        (Fraction(a), Fraction(b))
        for a, b in zip(c.double().flatten().tolist(), r.flatten().tolist(), strict=True)
    ]
    error = sum((a - b) ** 2 for a, b in pairs)
    power = sum(b * b for _, b in pairs)
    assert found.nmse == pytest.approx(float(error / power), rel=1e-14)
    size = sum(abs(a - b) for a, b in pairs)
    assert found.mean_abs == pytest.approx(float(size / 520), rel=1e-14)
    assert found.rmse == pytest.approx(math.sqrt(error / 520), rel=1e-14)
    assert found.max_abs == float(max(abs(a - b) for a, b in pairs))


def test_non_contiguous_inputs():
    c, r = noisy((12, 10))
    expected = error_stats(c, r)
    assert same_numbers(error_stats(c.t().contiguous().t(), r), expected)
    assert same_numbers(error_stats(c, r.t().contiguous().t()), expected)
    wide = torch.zeros(12, 20, dtype=BF16)
    wide[:, ::2] = c
    assert same_numbers(error_stats(wide[:, ::2], r), expected)
    row = torch.ones(1, 10)
    assert error_stats(row.expand(12, 10), torch.ones(12, 10)).bitwise_equal


def test_gradients_and_0d():
    found = error_stats(torch.tensor(3.0, requires_grad=True), torch.tensor(1.0))
    assert (found.max_abs, found.max_abs_index, found.shape, found.n) == (2.0, (), (), 1)


# --------------------------------------------------------------------------- places


def test_place_and_values_of_the_maxima_in_many_dimensions(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 5)
    r = torch.ones(2, 3, 5)
    c = r.clone()
    c[1, 2, 3] = -6.5
    found = error_stats(c, r)
    assert (found.max_abs, found.max_abs_index) == (7.5, (1, 2, 3))
    assert (found.max_abs_candidate, found.max_abs_reference) == (-6.5, 1.0)
    assert (found.max_rel, found.max_rel_index) == (7.5, (1, 2, 3))


def test_the_first_of_equal_maxima(monkeypatch):
    for chunk in (4, 1000):
        monkeypatch.setattr(metrics, "CHUNK", chunk)
        found = error_stats(torch.full((8, 4), 2.0), torch.ones(8, 4))
        assert found.max_abs_index == found.max_rel_index == (0, 0)
        assert [row for row, _ in found.worst_rows] == [0, 1, 2, 3, 4]
        assert [column for column, _ in found.worst_columns] == [0, 1, 2, 3]


def test_worst_rows_and_columns(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 30)
    r = torch.ones(20, 10)
    c = r.clone()
    for rank, (row, column) in enumerate([(3, 1), (19, 9), (0, 0), (7, 4), (8, 8), (9, 5)]):
        c[row, column] += 2.0 ** (6 - rank)
    found = error_stats(c, r)
    assert [row for row, _ in found.worst_rows] == [3, 19, 0, 7, 8]
    assert found.worst_rows[0][1] == found.worst_row_nmse == 64.0**2 / 10
    assert [column for column, _ in found.worst_columns] == [1, 9, 0, 4, 8]
    assert [value for _, value in found.worst_columns] == [64, 32, 16, 8, 4]


def test_a_row_without_power_but_with_error_is_the_worst():
    found = stats([[1.0, 1.0], [1e-9, 0.0]], [[1.0, 2.0], [0.0, 0.0]])
    assert found.worst_row_nmse == INF
    assert found.worst_rows == ((1, INF), (0, 0.2))
    assert found.nmse == pytest.approx(0.2)


def test_histogram_bins_are_right_at_powers_of_two():
    below = float(np.nextafter(np.float32(8), np.float32(0)))
    found = stats([8.0, below, 1.0, 2.0**-130, 0.0], [0.0] * 5)
    assert found.histogram == ((-129, 1), (1, 1), (3, 1), (4, 1))


def test_reference_constant():
    assert stats([1.0, 2.0], [3.0, 3.0]).reference_constant
    assert stats([1.0], [3.0]).reference_constant
    assert not stats([3.0, 3.0], [1.0, 2.0]).reference_constant


# --------------------------------------------------------------------------- ulps and bias


@pytest.mark.parametrize(
    ("candidate", "reference", "dtype", "ulps"),
    [
        (1.0, 1.0 + 2.0**-7, BF16, 1),
        (1.0, 1.0 + 2.0**-8, BF16, 0),
        (2.0**-133, -(2.0**-133), BF16, 2),
        (-0.0, 2.0**-133, BF16, 1),
        (-0.0, 0.0, BF16, 0),
        (0.0, 2.0**-134, BF16, 0),
        (2.0**-24, -(2.0**-24), FP16, 2),
        (65504.0, -65504.0, FP16, 2 * 0x7BFF),
        (3.0, -3.0, FP32, 2 * 0x40400000),
        (2.0**-149, -(2.0**-149), FP32, 2),
        (1.0, math.nextafter(1.0, 2), FP64, 1),
        (1e300, math.nextafter(1e300, 0), FP64, 1),
        (5e-324, -5e-324, FP64, 2),
        (-1.5, 1.5, FP64, 2 * 0x3FF8000000000000),
        (1.7976931348623157e308, -1.7976931348623157e308, FP64, 2 * 0x7FEFFFFFFFFFFFFF),
    ],
)
def test_ulps(candidate, reference, dtype, ulps):
    found = stats([1.0, candidate], [1.0, reference], dtype)
    assert found.max_ulp == ulps
    assert found.frac_over_1ulp == (ulps > 1) / 2
    assert stats([reference], [candidate], dtype).max_ulp == ulps or dtype is not FP64


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_bias_of_right_and_truncating_stores(dtype):
    generator = torch.Generator().manual_seed(5)
    r = torch.randn(200, 50, generator=generator, dtype=FP64)
    bits = {BF16: 7, FP16: 10, FP32: 23}[dtype]
    step = torch.pow(2.0, torch.floor(torch.log2(r.abs())) - bits)
    truncated = (torch.trunc(r / step) * step).to(dtype)
    away = (torch.sign(r) * torch.ceil(r.abs() / step) * step).to(dtype)
    nearest = (torch.round(r / step) * step).to(dtype)
    assert error_stats(nearest, r).bias == 0.0
    assert error_stats(truncated, r).bias == pytest.approx(-0.5, abs=0.02)
    assert error_stats(away, r).bias == pytest.approx(0.5, abs=0.02)
    assert error_stats((1.01 * r).to(dtype), r).bias > 0.5


# --------------------------------------------------------------------------- no overflow


def test_large_values_of_narrow_dtypes():
    found = error_stats(torch.tensor([2e38, 3e38]), torch.tensor([2e38, 3e38]))
    assert (found.cosine, found.nmse) == (1.0, 0.0)
    found = error_stats(torch.tensor([-3e38]), torch.tensor([3e38]))
    assert found.max_abs == pytest.approx(6e38)
    assert (found.nmse, found.cosine) == (4.0, -1.0)
    found = error_stats(torch.tensor([60000.0], dtype=FP16), torch.tensor([-60000.0], dtype=FP16))
    assert (found.max_abs, found.nmse) == (120000.0, 4.0)


@pytest.mark.parametrize(
    "x",
    [torch.full((4096,), 20.0, dtype=FP16), torch.arange(84.0), torch.full((3,), 1e-38)],
    ids=["fp16 sum overflows", "rounds above 1", "tiny"],
)
def test_cosine_is_clamped(x):
    assert error_stats(x, x).cosine <= 1.0
    assert error_stats(x, x).cosine == pytest.approx(1.0)
    assert error_stats(-x, x).cosine >= -1.0


def test_float64_overflow_raises_nothing():
    big = torch.full((3, 2), 1.7e308, dtype=FP64)
    found = error_stats(-big, big)
    assert found.max_abs == found.rmse == INF
    assert not found.nmse <= 1e300


def test_bf16_step_at_thirty_is_not_an_error_of_more_than_one_ulp():
    r = torch.linspace(16, 31.9, 1000, dtype=FP64)
    found = error_stats(r.to(BF16), r)
    assert found.max_abs == pytest.approx(0.0625, rel=0.1)
    assert found.max_ulp == 0


# --------------------------------------------------------------------------- worst elements


def test_worst_elements():
    c = torch.tensor([[1.0, NAN, INF], [3.0, 0.0, 5.0]])
    r = torch.tensor([[1.0, 2.0, INF], [1.0, 0.5, 5.0]])
    found = worst_elements(c, r)
    assert [row[0] for row in found] == [[0, 1], [1, 0], [1, 1]]
    assert found[1][1:] == [3.0, 1.0, 2.0]
    assert math.isnan(found[0][3])
    assert worst_elements(c, r, 1) == found[:1] or len(worst_elements(c, r, 1)) == 1


def test_a_legal_infinity_is_no_worst_element():
    c = torch.tensor([INF, 2.0], dtype=FP16)
    r = torch.tensor([70000.0, 1.0], dtype=FP64)
    assert [row[0] for row in worst_elements(c, r)] == [[1]]
