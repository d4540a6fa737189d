"""The native pass against the torch code, field by field, and against exact arithmetic."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from reconcile import native
from reconcile.exceptions import BuildError
from reconcile.numbers import fused_stats, metrics
from reconcile.numbers.fused_stats import LEVELS, Totals, exact_sum, implementation, measure
from reconcile.numbers.metrics import error_stats
from reconcile.rounding import round_to

INF, NAN = math.inf, math.nan
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = (FP64, FP32, BF16, FP16)
PAIRS = list(itertools.product(DTYPES, DTYPES))
NAMES = Totals._fields

needs_native = pytest.mark.skipif(
    native.find_cxx() is None, reason="no C++ compiler: looked for $CXX, c++, g++, clang++"
)


@pytest.fixture(autouse=True)
def one_thread():
    """The torch code needs no second thread for tensors as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def different(a, b):
    """Names of the fields that differ, with both values; NaN equals NaN, -0 differs from 0."""
    return {
        name: (getattr(a, name), getattr(b, name))
        for name in NAMES
        if repr(getattr(a, name)) != repr(getattr(b, name))
    }


def ways(candidate, reference):
    """Every way that must give the same totals."""
    return {
        f"{level}, {threads} threads": measure(
            candidate, reference, histogram=True, threads=threads, level=level
        )
        for level, threads in (*zip(LEVELS, (1, 2, 3), strict=True), ("avx512", 1), ("avx512", 2))
    }


def assert_same(candidate, reference):
    expected = metrics._torch_totals(candidate, reference, histogram=True)
    for name, found in ways(candidate, reference).items():
        assert found is not None
        assert not different(found, expected), name


# --------------------------------------------------------------------------- inputs

SHAPES = [
    (),
    (1,),
    (7,),
    (16,),
    (33,),
    (1023,),
    (1024,),
    (1025,),
    (5000,),
    (1, 20001),
    (300, 1),
    (64, 2),
    (41, 15),
    (9, 17),
    (3, 1000),
    (5, 2049),
    (2, 3, 130),
    (2, 9000),
    (3, 4096),
]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def near(shape, seed=0):
    """Values of very different size, and a candidate that is right to 1 %."""
    g = generator(seed)
    r = torch.randn(shape, generator=g, dtype=FP64)
    r = r * 10.0 ** torch.randint(-4, 4, shape, generator=g)
    return r * (1 + 1e-2 * torch.randn(shape, generator=g, dtype=FP64)), r


def plain(shape, seed=0):
    g = generator(seed)
    r = torch.randn(shape, generator=g, dtype=FP64)
    return r + 1e-3 * torch.randn(shape, generator=g, dtype=FP64), r


def quantised(shape, seed=0):
    """Few different values, so that maxima tie everywhere; half of the pairs are equal."""
    g = generator(seed)
    r = torch.randint(-2, 3, shape, generator=g).to(FP64)
    return r + torch.randint(0, 2, shape, generator=g), r


def special(shape, seed=0):
    """Any of the values that have rules of their own, on either side, everywhere."""
    values = torch.tensor(
        [
            *(0.0, -0.0, 1.0, -1.0, NAN, -NAN, INF, -INF, 65504.0, 65519.0, 65520.0, -70000.0),
            *(2.0**-14, 2.0**-24, -(2.0**-25), 2.0**-26, 2.0**-126, -(2.0**-133), 2.0**-134),
            *(2.0**-149, 2.0**-150, -(2.0**-151), 5e-324, -1e-310, 2.0**-1022, 3e38, -3.4e38),
            *(3.4028235677973366e38, 1e300, -1.7e308, 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-40),
            *(1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-50, 1 - 2.0**-9, 1 + 3 * 2.0**-8, 1e-8, -1e-5),
        ],
        dtype=FP64,
    )
    g = generator(seed)
    one, other = (values[torch.randint(0, len(values), shape, generator=g)] for _ in range(2))
    return torch.where(torch.rand(shape, generator=g) < 0.3, other, one), other


def sparse(shape, seed=0):
    """Nearly all right, with a few special values and a few zeros in the reference."""
    c, r = plain(shape, seed)
    g = generator(seed + 1)
    odd, strange = special(shape, seed + 2)
    few = torch.rand(shape, generator=g) < 0.01
    r = torch.where(torch.rand(shape, generator=g) < 0.2, 0.0, r)
    return torch.where(few, odd, c), torch.where(few, strange, r)


def growing(shape, seed=0):
    """Every element is a new maximum."""
    n = math.prod(shape)
    r = torch.ones(shape, dtype=FP64)
    return r + torch.arange(n, dtype=FP64).reshape(shape), r


def wide(shape, seed=0):
    """Errors over the whole range of exponents."""
    g = generator(seed)
    r = torch.ldexp(
        torch.randn(shape, generator=g, dtype=FP64), torch.randint(-1060, 1000, shape, generator=g)
    )
    return -r, r


def equal(shape, seed=0):
    _, r = plain(shape, seed)
    return r, r


def zeros(shape, seed=0):
    c, r = equal(shape, seed)
    return c, torch.zeros_like(r)


def nothing_finite(shape, seed=0):
    return torch.full(shape, NAN, dtype=FP64), torch.full(shape, INF, dtype=FP64)


INPUTS = (
    near,
    plain,
    quantised,
    special,
    sparse,
    growing,
    wide,
    equal,
    zeros,
    nothing_finite,
)


@needs_native
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", INPUTS, ids=lambda make: make.__name__)
def test_every_way_gives_the_same(make, shape):
    for seed, (c_dtype, r_dtype) in enumerate(PAIRS):
        c, r = make(shape, seed)
        assert_same(round_to(c, c_dtype), round_to(r, r_dtype))


@needs_native
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_16_bit_codes_and_what_lies_between_them(pair):
    """A third of the 16-bit codes, with float64 references around each and around half-way."""
    c_dtype, r_dtype = pair
    codes = torch.arange(-(2**15), 2**15, 3, dtype=torch.int16)
    values = torch.cat([codes.view(BF16).to(FP64), codes.view(FP16).to(FP64)])
    halfway = (values[:-1] + values[1:]) / 2
    around = torch.cat([values, halfway, halfway * (1 + 2.0**-40), halfway * (1 - 2.0**-40)])
    c, r = round_to(around.flip(0).roll(1), c_dtype), round_to(around.flip(0), r_dtype)
    assert_same(c, r)
    assert_same(round_to(around, c_dtype), round_to(around, r_dtype))


@needs_native
@pytest.mark.parametrize("shape", [(64, 33), (1, 5000), (700, 1), (5, 7, 40), (9, 2100)], ids=str)
@pytest.mark.parametrize("make", [near, sparse, special], ids=lambda make: make.__name__)
def test_the_chunks_of_the_torch_code_change_no_bit(make, shape, monkeypatch):
    c, r = make(shape, 4)
    c = round_to(c, BF16)
    expected = measure(c, r, histogram=True)
    for rows in (1, 2, 3, 17):
        monkeypatch.setattr(metrics, "CHUNK", rows * shape[-1])
        found = metrics._torch_totals(c, r, histogram=True)
        assert not different(found, expected), rows


@needs_native
def test_only_a_histogram_that_is_asked_for_is_counted():
    c, r = near((20, 1030), 6)
    without, with_it = measure(c, r), measure(c, r, histogram=True)
    assert without.histogram == ()
    assert sum(count for _, count in with_it.histogram) == int((c != r).sum())
    assert different(without, with_it).keys() == {"histogram"}
    assert not different(metrics._torch_totals(c, r), without)
    assert error_stats(c, r, histogram=True).histogram == with_it.histogram


@needs_native
def test_the_order_of_the_rows_changes_no_sum():
    c, r = near((200, 1030), 6)
    order = torch.randperm(200, generator=generator(3))
    assert measure(c, r).sums == measure(c[order], r[order]).sums
    found = metrics._torch_totals(c[order], r[order])
    assert found.sums == measure(c, r).sums


# --------------------------------------------------------------------------- independent oracles


def oracle(c, r):
    """Some of the statistics in exact rational arithmetic, element by element."""
    rounded = round_to(r, c.dtype)
    pairs = [
        (i, Fraction(a), Fraction(b))
        for i, (a, b, q) in enumerate(
            zip(
                c.to(FP64).flatten().tolist(),
                r.to(FP64).flatten().tolist(),
                rounded.to(FP64).flatten().tolist(),
                strict=True,
            )
        )
        if math.isfinite(a) and math.isfinite(q)
    ]
    histogram = {}
    for _, a, b in pairs:
        if a != b:
            exponent = math.frexp(float(abs(a - b)))[1]
            histogram[exponent] = histogram.get(exponent, 0) + 1
    return {
        "finite": len(pairs),
        "max_abs": max((float(abs(a - b)) for _, a, b in pairs), default=0.0),
        "max_abs_place": min(((-abs(a - b), i) for i, a, b in pairs), default=(None, None))[1],
        "max_rel": max((float(abs(a - b) / abs(b)) for _, a, b in pairs if b), default=0.0),
        "sums": [
            float(sum((term(a, b) for _, a, b in pairs), Fraction(0)))
            for term in (
                lambda a, b: abs(a - b),
                lambda a, b: (a - b) ** 2,
                lambda a, b: b * b,
                lambda a, b: a * a,
                lambda a, b: a * b,
            )
        ],
        "histogram": tuple(sorted(histogram.items())),
    }


@needs_native
@pytest.mark.parametrize("make", [plain, quantised, sparse], ids=lambda make: make.__name__)
@pytest.mark.parametrize("pair", [(FP32, FP32), (BF16, FP32), (FP16, FP16), (FP32, BF16)], ids=str)
def test_against_exact_arithmetic(make, pair):
    c, r = make((3, 1100), 5)
    c, r = c.clamp(-1e4, 1e4).to(pair[0]), r.clamp(-1e4, 1e4).to(pair[1])
    expected = oracle(c, r)
    for found in ways(c, r).values():
        assert found.finite == expected["finite"]
        assert found.max_abs == expected["max_abs"]
        assert found.max_abs_place == expected["max_abs_place"]
        assert found.max_rel == pytest.approx(expected["max_rel"], rel=1e-15)
        assert found.sums[:4] == pytest.approx(expected["sums"][:4], rel=2e-15)
        assert found.sums[4] == pytest.approx(expected["sums"][4], abs=1e-14 * found.sums[2])
        assert found.histogram == expected["histogram"]


@needs_native
def test_sums_against_long_double():
    c, r = plain((8, 100_000))
    c, r = c.to(FP32), r.to(FP32)
    exact = np.longdouble(c.numpy()) - np.longdouble(r.numpy())
    found = measure(c, r)
    assert found.sums[0] == pytest.approx(float(np.abs(exact).sum()), rel=1e-15)
    assert found.sums[1] == pytest.approx(float((exact * exact).sum()), rel=1e-15)


@needs_native
@pytest.mark.parametrize("seed", range(40))
def test_the_exact_sum(seed):
    g = generator(seed)
    n = 1 + 700 * seed
    exponents = torch.randint(-1074, 900 if seed % 2 else -1000, (n,), generator=g)
    x = torch.ldexp(torch.randn(n, generator=g, dtype=FP64), exponents)
    x = torch.cat([x, -x[: n // 2]]) if seed % 3 else x.abs()
    assert exact_sum(x) == math.fsum(x.tolist())
    assert exact_sum(x[torch.randperm(len(x), generator=g)]) == math.fsum(x.tolist())


@needs_native
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([5e-324], 5e-324),
        ([-5e-324, -5e-324], -1e-323),
        ([2.0**-1022, -5e-324], 2.0**-1022 - 5e-324),
        ([1.0, 2.0**-53], 1.0),
        ([1.0, 2.0**-53, 5e-324], 1 + 2.0**-52),
        ([1 + 2.0**-52, 2.0**-53], 1 + 2.0**-51),
        ([-1.0, -(2.0**-53), -5e-324], -1 - 2.0**-52),
        ([1e308, 1e308, -1e308], 1e308),
        ([1.7976931348623157e308, 2.0**969], 1.7976931348623157e308),
        ([1.7976931348623157e308, 2.0**970], INF),
        ([-1e308, -1e308], -INF),
        ([INF, 1.0], INF),
        ([-INF, 1e308, 1e308], -INF),
        ([INF, -INF], NAN),
        ([NAN, 1.0], NAN),
    ],
    ids=str,
)
def test_the_exact_sum_at_the_edges(values, expected):
    for found in (exact_sum(torch.tensor(values, dtype=FP64)), metrics._sum(values)):
        assert repr(abs(found) if found == 0 else found) == repr(expected)


@needs_native
def test_the_exact_sum_of_very_many():
    x = torch.full((1 << 17,), 1.7976931348623157e308, dtype=FP64)
    x[1::2] *= -1
    x[0] = 3.0
    assert exact_sum(x) == -1.7976931348623157e308
    assert exact_sum(torch.full((1 << 17,), -(1 - 2.0**-53), dtype=FP64)) == -(2.0**17) + 2.0**-36


# --------------------------------------------------------------------------- layouts, fallback


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_rows_that_are_split_over_threads(threads):
    for shape in ((1, 10_000), (2, 9000), (3, 2100), (5, 1025)):
        c, r = plain(shape)
        expected = metrics._torch_totals(c, r)
        assert not different(measure(c, r, threads=threads), expected), shape


@needs_native
def test_a_pair_large_enough_for_several_threads():
    c, r = sparse((700, 1500))
    c = c.to(FP32)
    assert c.nbytes + r.nbytes > fused_stats.THREADS_FROM_BYTES
    torch.set_num_threads(3)
    assert not different(measure(c, r), metrics._torch_totals(c, r))


@needs_native
def test_layouts():
    c, r = plain((12, 10))
    expected = measure(c, r)
    wide_c = torch.zeros(12, 20, dtype=FP64)
    wide_c[:, ::2] = c
    for candidate, reference in (
        (c.t().contiguous().t(), r),
        (wide_c[:, ::2], r.t().contiguous().t()),
        (c.requires_grad_(), r),
    ):
        assert not different(measure(candidate, reference), expected)
    imaginary = torch.complex(torch.zeros(12, 10, dtype=FP64), -c.detach()).conj().imag
    assert imaginary.is_neg()
    assert not different(measure(imaginary, r), expected)
    row = torch.ones(1, 10)
    assert measure(row.expand(12, 10), torch.ones(12, 10)).bitwise_equal


@needs_native
def test_subnormals_count_where_torch_flushes_them():
    c, r = torch.tensor([3e-45, 1.0]), torch.tensor([1.4e-45, 1.0])
    expected = measure(c, r)
    assert expected.max_ulp == 1
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert not different(measure(c, r), expected)
    finally:
        torch.set_flush_denormal(False)


@needs_native
def test_the_bits_of_a_nan():
    quiet, other = (
        torch.tensor([bits], dtype=torch.int32).view(FP32) for bits in (0x7FC00000, 0x7FC00001)
    )
    assert measure(quiet, quiet).bitwise_equal
    assert not measure(quiet, other).bitwise_equal
    assert measure(quiet.to(BF16), other.to(FP64)).bitwise_equal
    assert_same(quiet, other)
    assert_same(quiet.to(BF16), other)


def test_other_dtypes_and_devices_take_the_torch_code():
    x = torch.ones(2, 3)
    assert measure(x, x.to(torch.float8_e4m3fn)) is None
    assert measure(x.to("meta"), x) is None
    assert measure(x.to_sparse(), x) is None
    assert error_stats(x, x.to(torch.float8_e4m3fn)).bitwise_equal


@needs_native
def test_the_implementation_is_named():
    assert implementation() in [f"native {level}" for level in LEVELS]


@pytest.fixture
def forgotten():
    """No library is remembered, before and after."""
    fused_stats._load.cache_clear()
    native._load.cache_clear()
    yield
    fused_stats._load.cache_clear()
    native._load.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/nowhere/c++", r"no C\+\+ compiler"), ("/bin/false", "does not compile|exit status")],
)
def test_without_a_working_compiler(compiler, reason, monkeypatch, tmp_path, forgotten):
    c, r = sparse((30, 50))
    c = c.to(BF16)
    expected = error_stats(c, r)
    fused_stats._load.cache_clear()
    native._load.cache_clear()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path))
    assert measure(c, r) is None
    assert implementation().startswith("torch (")
    assert repr(error_stats(c, r)) == repr(expected)
    with pytest.raises(BuildError, match=reason):
        exact_sum(r)
