"""Rounding and code order against exact tables, exhaustively where the dtype has 16 bits."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from reconcile.rounding import bit_view, bitwise_equal, code_order, neighbours, round_to

SIXTEEN = ("bfloat16", "float16")
INTS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}
INF, NAN = math.inf, math.nan


def dtype_of(name):
    return getattr(torch, name)


def all_codes(name):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype_of(name))


def assert_same(found, expected):
    """Equal by value and sign of zero; NaN equals NaN."""
    found, expected = found.double().numpy(), np.asarray(expected, dtype=np.float64)
    wrong = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
    wrong |= (expected == 0) & (np.signbit(found) != np.signbit(expected))
    assert not wrong.any(), (found[wrong][:5], expected[wrong][:5])


# value, bfloat16, float16: by hand. 2^-8 is half an ulp of bf16 at 1, 2^-11 of fp16.
HAND = [
    (1 + 2.0**-8, 1.0, 1 + 2.0**-8),
    (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7, 1 + 2.0**-8),
    (1 + 2.0**-8 - 2.0**-40, 1.0, 1 + 2.0**-8),
    (1 + 3 * 2.0**-8, 1 + 2.0**-6, 1 + 3 * 2.0**-8),
    (1 + 3 * 2.0**-8 - 2.0**-50, 1 + 2.0**-7, 1 + 3 * 2.0**-8),
    (-(1 + 2.0**-8 + 2.0**-52), -(1 + 2.0**-7), -(1 + 2.0**-8)),
    (1 + 2.0**-11 + 2.0**-45, 1.0, 1 + 2.0**-10),
    (1 + 2.0**-11, 1.0, 1.0),
    (65519.999999999, 65536.0, 65504.0),
    (65520.0, 65536.0, INF),
    (-65520.0, -65536.0, -INF),
    (70000.0, 70144.0, INF),
    (2.0**-24, 2.0**-24, 2.0**-24),
    (2.0**-25, 2.0**-25, 0.0),
    (2.0**-25 * (1 + 2.0**-50), 2.0**-25, 2.0**-24),
    (-(2.0**-26), -(2.0**-26), -0.0),
    (2.0**-134, 0.0, 0.0),
    (2.0**-134 * (1 + 2.0**-40), 2.0**-133, 0.0),
    (3 * 2.0**-134, 2.0**-132, 0.0),
    (5e-324, 0.0, 0.0),
    (-5e-324, -0.0, -0.0),
    (0.0, 0.0, 0.0),
    (-0.0, -0.0, -0.0),
    (1e39, INF, INF),
    (-1e300, -INF, -INF),
    (3.3895313892515355e38, 3.3895313892515355e38, INF),
    (math.ldexp(511, 119), INF, INF),
    (math.nextafter(math.ldexp(511, 119), 0), 3.3895313892515355e38, INF),
    (INF, INF, INF),
    (-INF, -INF, -INF),
    (NAN, NAN, NAN),
]


@pytest.mark.parametrize(("value", "bf16", "fp16"), HAND, ids=lambda v: f"{v:.17g}")
def test_by_hand(value, bf16, fp16):
    x = torch.tensor([value], dtype=torch.float64)
    assert_same(round_to(x, torch.bfloat16), [bf16])
    assert_same(round_to(x, torch.float16), [fp16])


def test_the_plain_conversion_rounds_twice():
    x = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert x.to(torch.bfloat16).item() == 1.0  # why round_to exists


@pytest.mark.parametrize("name", SIXTEEN)
@pytest.mark.parametrize("sign", [1, -1])
def test_every_middle_and_what_lies_beside_it(name, sign, positive, exact_round):
    table = positive(name)
    middles = (table[1:] + table[:-1]) / 2
    points = [table, middles]
    for gap in (2.0**-52, 2.0**-40, 2.0**-30, 2.0**-24, 2.0**-23):
        points += [middles * (1 + gap), middles * (1 - gap)]
    points += [np.nextafter(middles, 0), np.nextafter(middles, np.inf)]
    values = sign * np.concatenate(points)
    assert_same(round_to(torch.from_numpy(values), dtype_of(name)), exact_round(values, name))


@pytest.mark.parametrize("name", [*SIXTEEN, "float32"])
def test_random_bit_patterns(name, exact_round):
    bits = np.random.default_rng(0).integers(-(2**63), 2**63, 200_000)
    values = bits.view(np.float64)
    near = np.random.default_rng(1).standard_normal(200_000) * 10.0 ** (
        np.arange(200_000) % 90 - 45
    )
    for x in (values, near):
        assert_same(round_to(torch.from_numpy(x), dtype_of(name)), exact_round(x, name))


@pytest.mark.parametrize("name", [*SIXTEEN, "float32"])
def test_no_representable_value_is_nearer(name):
    rng = np.random.default_rng(2)
    values = (rng.standard_normal(300) * 2.0 ** rng.integers(-20, 15, 300)).tolist()
    rounded = round_to(torch.tensor(values, dtype=torch.float64), dtype_of(name))
    for value, near in zip(values, rounded, strict=True):
        error = abs(Fraction(near.item()) - Fraction(value))
        for other in (near.view(INTS[name]) + step for step in (-1, 1)):
            there = other.to(INTS[name]).view(dtype_of(name)).item()
            if math.isfinite(there):
                assert error <= abs(Fraction(there) - Fraction(value))


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "float64"])
def test_representable_values_stay(source):
    x = torch.tensor([1.5, -0.0, INF, -INF, NAN, 2.0**-14], dtype=dtype_of(source))
    for name in (*SIXTEEN, "float32", "float64"):
        assert_same(round_to(x, dtype_of(name)), x.double().numpy())


def test_layout_does_not_matter():
    x = torch.randn(6, 8, dtype=torch.float64)
    for view in (x.t(), x[::2], x[:, ::3], x[:1].expand(5, 8), x[0, 0]):
        assert torch.equal(
            round_to(view, torch.bfloat16), round_to(view.contiguous().clone(), torch.bfloat16)
        )
    assert round_to(x[:0], torch.float16).shape == (0, 8)


@pytest.mark.parametrize("name", SIXTEEN)
def test_code_order_follows_the_values(name):
    codes = all_codes(name)
    codes = codes[~codes.isnan()]
    values = codes.double().numpy()
    order = code_order(codes).numpy()
    by_value = np.argsort(values, kind="stable")
    steps = np.diff(order[by_value])
    rises = np.diff(values[by_value]) > 0
    assert (steps[rises] == 1).all()
    assert (steps[~rises] == 0).all()  # only -0 and +0 share a place
    assert (~rises).sum() == 1
    assert (order[values == 0] == 0).all()


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_code_order_of_wider_dtypes(name):
    numbers = np.array([-np.inf, -1e30, -1.0, -1e-310, -0.0, 0.0, 1e-310, 1.0, 1.5, 1e30, np.inf])
    values = numbers.astype(name)
    order = code_order(torch.from_numpy(values)).numpy()
    assert (np.diff(order)[np.diff(values) > 0] > 0).all()
    one = torch.tensor([1.0], dtype=dtype_of(name))
    above = torch.from_numpy(np.nextafter(one.numpy(), one.numpy() * 2))
    assert (code_order(above) - code_order(one)).item() == 1


@pytest.mark.parametrize("name", SIXTEEN)
def test_neighbours_of_every_code(name, positive):
    table = positive(name)
    table = np.concatenate([-table[:0:-1], table])  # -2^emax ... 0 ... 2^emax
    codes = all_codes(name)
    below, above = (side.numpy() for side in neighbours(codes))
    values = codes.double().numpy()
    values = np.where(np.isinf(values), np.copysign(table[-1], values), values)
    place = np.searchsorted(table, np.nan_to_num(values))
    nan = np.isnan(values)
    assert (np.isnan(below) == nan).all()
    assert (np.isnan(above) == nan).all()
    lower, upper = np.maximum(place - 1, 0), np.minimum(place + 1, len(table) - 1)
    assert (below[~nan] == table[lower][~nan]).all()
    assert (above[~nan] == table[upper][~nan]).all()


@pytest.mark.parametrize(
    ("value", "below", "above"),
    [
        (1.0, 1 - 2.0**-24, 1 + 2.0**-23),
        (0.0, -(2.0**-149), 2.0**-149),
        (-0.0, -(2.0**-149), 2.0**-149),
        (2.0**-149, 0.0, 2.0**-148),
        (2.0**128 - 2.0**104, 2.0**128 - 2.0**105, 2.0**128),
        (INF, 2.0**128 - 2.0**104, 2.0**128),
        (-INF, -(2.0**128), -(2.0**128 - 2.0**104)),
    ],
)
def test_neighbours_in_float32(value, below, above):
    found = neighbours(torch.tensor([value], dtype=torch.float32))
    assert [side.item() for side in found] == [below, above]


def from_bits(bits, dtype):
    return torch.tensor(bits, dtype=torch.int16).view(dtype)


GRID = torch.arange(12.0).reshape(3, 4)
EQUAL = {
    "same": (GRID, GRID.clone(), True),
    "transposed layout": (GRID, GRID.t().contiguous().t(), True),
    "every other": (GRID[:, ::2], GRID[:, ::2].contiguous(), True),
    "expanded": (GRID[:1].expand(3, 4), GRID[:1].repeat(3, 1), True),
    "one bit": (GRID, torch.from_numpy(np.nextafter(GRID.numpy(), 99)), False),
    "-0 and +0": (torch.tensor([0.0]), torch.tensor([-0.0]), False),
    "same NaN": (from_bits([0x7FC1], torch.bfloat16), from_bits([0x7FC1], torch.bfloat16), True),
    "other NaN": (from_bits([0x7FC1], torch.bfloat16), from_bits([0x7FC0], torch.bfloat16), False),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), False),
    "fp16 and bf16": (torch.zeros(2).half(), torch.zeros(2).bfloat16(), False),
    "int and float bits": (torch.zeros(2, dtype=torch.int32), torch.zeros(2), False),
    "shapes": (torch.zeros(2, 1), torch.zeros(1, 2), False),
    "broadcastable": (torch.zeros(1), torch.zeros(3), False),
    "0-d": (torch.tensor(1.0), torch.tensor(1.0), True),
    "0-d and 1-d": (torch.tensor(1.0), torch.tensor([1.0]), False),
    "empty": (torch.zeros(0, 3), torch.zeros(0, 3), True),
    "empty shapes": (torch.zeros(0, 3), torch.zeros(3, 0), False),
    "float8": (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn), True),
    "bool": (torch.tensor([True]), torch.tensor([False]), False),
    "int64": (torch.tensor([2**53 + 1]), torch.tensor([2**53]), False),
    "complex": (torch.tensor([0j]), torch.tensor([complex(0.0, -0.0)]), False),
    "complex conjugate": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
}


@pytest.mark.parametrize("case", EQUAL)
def test_bitwise_equal(case):
    a, b, expected = EQUAL[case]
    assert bitwise_equal(a, b) is expected
    assert bitwise_equal(b, a) is expected


def test_bit_view_shows_the_stored_bits():
    x = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert bit_view(x).tolist() == [0x3F80, -0x4000]
    assert bit_view(torch.ones(1).to(torch.float8_e4m3fn)).tolist() == [0x38]
    assert bit_view(torch.tensor([True, False])).tolist() == [True, False]
    assert ml_dtypes.bfloat16(1.0).tobytes() == bit_view(x)[:1].numpy().tobytes()
