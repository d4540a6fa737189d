"""The a-priori bound, the share of it that is used, and limits without a bound."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from reconcile.contract import Contract
from reconcile.numbers.limits import (
    BASELINE_FACTORS,
    DELTA,
    accepts_zeros,
    baseline_limits,
    bound_limits,
    error_bound,
    fixed_limits,
    gamma,
    share_of_limits,
    tolerance_share,
    utilisation,
)
from reconcile.numbers.metrics import error_stats
from reconcile.report import Limits

INF, NAN = math.inf, math.nan
U = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}
NAMES = ("bfloat16", "float16", "float32")


def double(values):
    return torch.as_tensor(values, dtype=torch.float64)


# --------------------------------------------------------------------------- gamma


@pytest.mark.parametrize("name", U)
@pytest.mark.parametrize("k", [1, 2, 7, 64, 4096, 2**20])
@pytest.mark.parametrize("outputs", [1, 65536])
def test_gamma_is_the_smaller_of_the_two_formulas(name, k, outputs):
    u = U[name]
    worst = k * u / (1 - k * u) if k * u < 1 else INF
    spread = math.sqrt(2 * math.log(2 * k * outputs / DELTA))
    likely = math.exp(spread * math.sqrt(k) * u + k * u**2 / (1 - u)) - 1
    assert gamma(k, u, outputs) == pytest.approx(min(worst, likely), rel=1e-6)
    doubled = 2 * k * u / (1 - 2 * k * u) if 2 * k * u < 1 else INF
    assert gamma(k, u, outputs, truncating=True) == pytest.approx(doubled, rel=1e-12)


def test_lambda_of_the_literature():
    spread = math.sqrt(2 * math.log(2 * 4096 * 65536 / 1e-6))
    assert spread == pytest.approx(8.2, abs=0.05)
    assert gamma(4096, 2.0**-24, 65536) == pytest.approx(spread * 64 * 2.0**-24, rel=1e-3)


@pytest.mark.parametrize("truncating", [False, True])
@pytest.mark.parametrize("name", U)
def test_gamma_grows_with_the_length(name, truncating):
    found = [gamma(k, U[name], 1000, truncating=truncating) for k in range(3000)]
    assert found[0] == 0.0
    assert all(a <= b for a, b in pairwise(found))
    assert gamma(100, U[name], 10) <= gamma(100, U[name], 10**6)


# --------------------------------------------------------------------------- error_bound

SUM = Contract(output="float32")


def problem(seed, m=2, n=3, adversarial=False):
    """x [M, K], w [N, K] of bfloat16 values, float64; the adversarial ones nearly cancel."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 400))
    x, w = rng.standard_normal((m, k)), rng.standard_normal((n, k))
    if adversarial:
        x *= 2.0 ** rng.integers(-12, 12, (m, k))
        half = k // 2
        x[:, half : 2 * half], w[:, half : 2 * half] = -x[:, :half], w[:, :half]
    return tuple(double(a).bfloat16().double().numpy() for a in (x, w))


def summed(products, order, dtype=np.float32):
    """Sum over the last axis in one of several orders, rounded to ``dtype`` at each step."""
    p = products.astype(dtype)
    if order == "pairwise":
        while p.shape[-1] > 1:
            odd = p[..., -1:] if p.shape[-1] % 2 else p[..., :0]
            p = np.concatenate([p[..., 0 : p.shape[-1] - 1 : 2] + p[..., 1::2], odd], axis=-1)
        return p[..., 0]
    keys = {
        "forward": np.arange(p.shape[-1]),
        "backward": np.arange(p.shape[-1])[::-1],
        "largest first": np.argsort(-np.abs(p).sum(axis=(0, 1))),
        "smallest first": np.argsort(np.abs(p).sum(axis=(0, 1))),
        "positive first": np.argsort(-np.sign(p[0, 0]), kind="stable"),
        "lanes": np.argsort(np.arange(p.shape[-1]) % 8, kind="stable"),
    }
    total = np.zeros(p.shape[:-1], dtype)
    for index in keys[order]:
        total = (total + p[..., index]).astype(dtype)
    return total


ORDERS = (
    "forward",
    "backward",
    "largest first",
    "smallest first",
    "positive first",
    "lanes",
    "pairwise",
)


def judged(candidate, x, w, contract=SUM):
    y, size = double(x @ w.T), double(np.abs(x) @ np.abs(w).T)
    bound = error_bound(contract, y, size, x.shape[1], "float64")
    return utilisation(torch.as_tensor(candidate), y, bound)


@pytest.mark.parametrize("adversarial", [False, True], ids=["random", "cancelling"])
@pytest.mark.parametrize("start", range(0, 150, 50))
def test_correct_sums_stay_inside(start, adversarial):
    largest = 0.0
    for seed in range(start, start + 50):
        x, w = problem(seed, adversarial=adversarial)
        products = x[:, None, :] * w[None, :, :]  # exact in float32: 8 bits by 8 bits
        for order in ORDERS:
            largest = max(largest, judged(summed(products, order), x, w).value)
    assert 0 < largest <= 1


@pytest.mark.parametrize("k", [50, 1000])
def test_the_worst_case_of_a_truncating_sum_stays_inside(k):
    # 1, then terms each just below a spacing: all of each is lost
    term = np.float32(2.0**-23 - 2.0**-40)
    x = np.concatenate([[1.0], np.full(k - 1, float(term))])[None, :]
    w = np.ones((1, k))
    contract = Contract(output="float32", accumulator_rounding="rtz")
    found = judged(np.array([[1.0]], dtype=np.float32), x, w, contract)
    assert 0.4 < found.value <= 1
    assert judged(np.array([[1.0]], dtype=np.float32), x, w).value > 1  # if rne was promised


def bfloat16(a):
    return double(a).bfloat16().double().numpy()


FAULTS = {
    "last K element dropped": lambda x, w: x[:, :-1] @ w[:, :-1].T,
    "one K element doubled": lambda x, w: x @ w.T + x[:, :1] @ w[:, :1].T,
    "+1 % scale": lambda x, w: 1.01 * (x @ w.T),
    "fp16 scale": lambda x, w: (x @ w.T) * float(np.float16(0.0123)) / 0.0123,
    "output zeroed": lambda x, w: np.zeros((len(x), len(w))),
    "shuffled rows": lambda x, w: (x @ w.T)[::-1].copy(),
    "x2": lambda x, w: 2 * (x @ w.T),
    "x0.5": lambda x, w: 0.5 * (x @ w.T),
    "constant": lambda x, w: np.full((len(x), len(w)), (x @ w.T).mean()),
    "sum of absolutes": lambda x, w: np.abs(x) @ np.abs(w).T,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_exceed_the_bound(fault):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, w = (bfloat16(rng.standard_normal((8, 256))) for _ in range(2))
        for output in ("float32", "bfloat16"):
            candidate = double(FAULTS[fault](x, w)).to(getattr(torch, output))
            if fault == "fp16 scale" and output == "bfloat16":
                continue  # 2^-12 is invisible behind bfloat16's 2^-9
            assert not judged(candidate, x, w, Contract(output=output)).value <= 1


def test_a_bfloat16_accumulator_exceeds_the_bound():
    x, w = (bfloat16(np.random.default_rng(0).standard_normal((4, 256))) for _ in range(2))
    total = np.zeros((4, 4))
    for index in range(256):
        total = bfloat16(total + x[:, None, index] * w[None, :, index])
    found = judged(double(total).bfloat16(), x, w, Contract(output="bfloat16"))
    assert found.value > 1
    allowed = Contract(output="bfloat16", accumulator="bfloat16")
    assert judged(double(total).bfloat16(), x, w, allowed).value <= 1


@pytest.mark.parametrize(
    ("change", "larger"),
    [
        ({"accumulator": "float16"}, True),
        ({"accumulator_rounding": "rtz"}, True),
        ({"split_k": 4, "partials": "bfloat16"}, True),
        ({"scale_applied": "after_block"}, True),
        ({"epilogue": ("scale", "round")}, False),
        ({"accumulator": "float64"}, False),
    ],
    ids=str,
)
def test_what_a_contract_allows_moves_the_bound(change, larger):
    y, size = double([[1.0, -2.0]]), double([[3.0, 4.0]])
    plain = error_bound(Contract(), y, size, 64, "float64")
    other = error_bound(Contract(**change), y, size, 64, "float64")
    assert bool((other > plain).all()) == larger
    assert bool((other < plain).all()) == (not larger)
    assert "K=64" in bound_limits(Contract(**change), 64).source


def test_flushed_subnormals_and_cancelling_blocks():
    zero, one = double([[0.0]]), double([[1.0]])
    flushed = error_bound(Contract(flush_subnormals=True), zero, zero, 64, "float64")
    assert flushed >= 65 * 2.0**-126
    # the product with the scale is rounded per block, and the blocks may cancel in y
    blocks = error_bound(Contract(scale_applied="after_block"), zero, one, 2, "float64")
    whole = error_bound(Contract(scale_applied="after_sum"), zero, one, 2, "float64")
    assert blocks - whole >= 1.99 * 2.0**-24


def test_the_reference_s_own_error_is_part_of_the_bound():
    y, size = double([[1.0]]), double([[2.0]])
    assert error_bound(SUM, y, size, 64, "float32") > error_bound(SUM, y, size, 64, "float64")


# --------------------------------------------------------------------------- utilisation


def accepts(exact_round, c, y, bound, name):
    low, high = exact_round([y - bound, y + bound], name)
    return low <= c <= high


def candidates(name, positive, rng):
    """Triples (c, y, E): near each other over the whole range of the dtype."""
    top = 2.0**128 if name != "float16" else 65536.0
    tiny = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[name]
    step = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}[name]
    scales = [1.0, 30.0, -7.0, top * (1 - step / 2), -top * 0.999, 4 * tiny, -2.5 * tiny, tiny]
    for scale in scales:
        for _ in range(12):
            y = scale * (1 + 0.4 * step * rng.standard_normal())
            c = scale * (1 + 3 * step * rng.standard_normal())
            yield c, y, abs(scale) * step * float(rng.uniform(0.1, 3))
        yield scale, scale, abs(scale) * step
        yield scale * (1 + step), scale, abs(scale) * step
        yield 0.0, scale, abs(scale)
        yield -0.0, scale, abs(scale) * step
        yield -scale, scale, abs(scale) * 3
        yield INF, scale, abs(scale) * step
        yield -INF, scale, abs(scale) * step
        yield INF, scale, top * 2
    yield 0.0, 0.0, tiny
    yield tiny, 0.0, tiny
    yield tiny, tiny / 2, tiny  # a tie that goes to 0
    yield 0.0, tiny / 2, tiny
    yield INF, 2 * top, 1.0
    yield top * (1 - step / 2), 2 * top, top


@pytest.mark.parametrize("name", NAMES)
def test_utilisation_is_the_least_accepted_multiple(name, positive, exact_round):
    seen = set()
    for c, y, bound in candidates(name, positive, np.random.default_rng(0)):
        c = float(exact_round([c], name)[0])
        candidate = torch.tensor([c], dtype=getattr(torch, name))
        t = utilisation(candidate, double([y]), double([bound])).value
        assert t >= 0, (c, y, bound)
        if t == INF:
            assert not accepts(exact_round, c, y, 1e290, name)
            continue
        beyond = (t * (1 + 1e-6) + 1e-6) * bound
        assert accepts(exact_round, c, y, beyond, name), (c, y, bound, t)
        if t > 0:
            below = t * (1 - 1e-6) * bound
            assert not accepts(exact_round, c, y, below, name), (c, y, bound, t)
        seen.add("zero" if t == 0 else "inside" if t <= 1 else "outside")
    assert seen == {"zero", "inside", "outside"}


def used(c, y, bound, name="bfloat16"):
    return utilisation(torch.tensor(c, dtype=getattr(torch, name)), double(y), double(bound))


@pytest.mark.parametrize(
    ("c", "y", "bound", "value", "over"),
    [
        ([1.0], [1.0], [0.0], 0.0, 0),
        ([1.0], [1 + 2.0**-9], [0.0], 0.0, 0),
        ([1 + 2.0**-7], [1 + 2.0**-8], [0.0], INF, 1),  # the tie goes to 1
        ([1 + 2.0**-7], [1 + 2.0**-8], [1e-9], 0.0, 0),  # as little as you like decides it
        ([1 + 2.0**-7], [1.0], [2.0**-8], 1.0, 0),
        ([1 + 2.0**-6], [1.0], [2.0**-8], 3.0, 1),
        ([2.0], [1.0], [0.0], INF, 1),
        ([NAN], [1.0], [1.0], NAN, 1),
        ([NAN], [NAN], [1.0], 0.0, 0),
        ([1.0], [NAN], [1.0], NAN, 1),
        ([INF], [INF], [1.0], 0.0, 0),
        ([-INF], [INF], [1.0], INF, 1),
        ([INF], [1.0], [1.0], 2.0**128, 1),
        ([3.0, NAN, 9.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0], NAN, 2),
        ([3.0, 5.0, 9.0], [3.0, 3.0, 3.0], [1.0, 1.0, INF], 2 - 2.0**-6, 1),
    ],
)
def test_utilisation_by_hand(c, y, bound, value, over):
    found = used(c, y, bound)
    if math.isnan(value):
        assert math.isnan(found.value)
    else:
        assert found.value == pytest.approx(value, rel=0.005)
    assert found.over == over


def test_where_it_is_largest():
    c, y = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3, dtype=torch.float64)
    c[1, 2] = 2.0
    assert utilisation(c, y, torch.full_like(y, 0.1)).index == (1, 2)
    c[0, 1] = NAN
    assert utilisation(c, y, torch.full_like(y, 0.1)).index == (0, 1)


def test_overflow_to_infinity_is_legal_where_the_bound_reaches_it():
    half_way = 65520.0
    assert used([INF], [65504.0], [16.0], "float16").value == 1.0
    assert used([INF], [half_way], [0.0], "float16").value == 0.0
    assert used([INF], [65504.0], [15.9], "float16").value > 1
    assert used([65504.0], [half_way + 8], [8.0], "float16").value == 1.0


@pytest.mark.parametrize(
    ("y", "bound", "vacuous"),
    [
        ([1.0, 0.5], [1.0, 0.5], True),
        ([1.0, 0.5], [1.0, 0.4], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1.0], [0.0, 0.1], False),
        ([1e-50], [0.0], True),  # rounds to zero
        ([NAN], [1.0], False),
        ([1e30], [INF], True),
    ],
)
def test_vacuous_is_what_zeros_would_pass(y, bound, vacuous):
    assert (used([1.0] * len(y), y, bound).zeros_over == 0) is vacuous
    zeros = used([0.0] * len(y), y, bound)
    assert (zeros.value <= 1) == vacuous


# --------------------------------------------------------------------------- shares


def limits(**bounds):
    return Limits(kind="fixed", source="test", bounds=bounds)


@pytest.mark.parametrize(
    ("value", "bound", "share"),
    [
        (1.0, 2.0, 0.5),
        (2.0, 2.0, 1.0),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, INF),
        (NAN, 1.0, NAN),
        (NAN, 0.0, NAN),
        (0.0, NAN, NAN),
        (1.0, NAN, NAN),
        (NAN, INF, NAN),
        (INF, 1.0, INF),
        (INF, 0.0, INF),
        (5.0, INF, 0.0),
        (INF, INF, 1.0),
        (math.nextafter(1.0, 2), 1.0, 1 + 2.0**-52),
        (math.nextafter(2.0, 0), 2.0, 1 - 2.0**-53),
    ],
)
def test_share(value, bound, share):
    found, name = share_of_limits({"nmse": value}, limits(nmse=bound))
    assert found == share or (math.isnan(found) and math.isnan(share))
    assert (found <= 1) == (value <= bound)
    assert name == "nmse"


def test_share_accepts_exactly_what_the_bound_accepts():
    rng = np.random.default_rng(0)
    for bound in (10.0 ** rng.uniform(-300, 300, 500)).tolist():
        for value in (math.nextafter(bound, 0), bound, math.nextafter(bound, INF)):
            share, _ = share_of_limits({"x": value}, limits(x=bound))
            assert (share <= 1) == (value <= bound)


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])
def test_nan_wins_and_else_the_largest(order):
    stats = {"a": 0.5, "b": NAN, "c": 7.0, "ungated": NAN}
    assert share_of_limits(stats, limits(**dict.fromkeys(order, 1.0)))[1] == "b"
    assert share_of_limits(stats | {"b": 0.1}, limits(**dict.fromkeys(order, 1.0))) == (7.0, "c")


def test_a_gated_statistic_that_is_missing_is_an_error():
    with pytest.raises(KeyError):
        share_of_limits({}, limits(nmse=1.0))


@pytest.mark.parametrize(
    ("c", "r", "atol", "rtol", "share"),
    [
        ([1.1], [1.0], 0.0, 0.095, 0.1 / 0.095),
        ([1.0], [1.1], 0.0, 0.095, 0.1 / (0.095 * 1.1)),
        ([2.0, 100.0], [1.0, 101.0], 0.5, 0.01, 1 / 0.51),
        ([0.0], [0.0], 0.0, 0.1, 0.0),
        ([1e-9], [0.0], 0.0, 0.1, INF),
        ([1e-9], [0.0], 1e-9, 0.1, 1.0),
        ([NAN, 0.0], [NAN, 0.0], 1.0, 1.0, NAN),
        ([0.0, NAN], [0.0, 1.0], 1.0, 1.0, NAN),
        ([0.0, 1.0], [0.0, NAN], 1.0, 1.0, NAN),
        ([INF], [INF], 0.0, 0.0, 0.0),
        ([INF], [1.0], 1.0, 1.0, INF),
        ([INF], [-INF], 1.0, 1.0, NAN),
        ([1.0], [INF], 1.0, 1.0, NAN),
        ([1.0], [1.0], 0.0, 0.0, 0.0),
    ],
)
def test_tolerance_share(c, r, atol, rtol, share):
    found = tolerance_share(double(c), double(r), atol, rtol)
    assert found == pytest.approx(share, rel=1e-12, nan_ok=True)
    assert math.isnan(found) == math.isnan(share)


def test_a_legal_fp16_infinity_is_within_every_tolerance():
    c = torch.tensor([INF, 1.0], dtype=torch.float16)
    assert tolerance_share(c, double([70000.0, 1.0]), 1e-3, 1e-3) == 0.0
    assert tolerance_share(c, double([60000.0, 1.0]), 1e-3, 1e-3) == INF


# --------------------------------------------------------------------------- null candidates

NULLS = {
    "zeros": torch.zeros_like,
    "constant": lambda r: torch.full_like(r, float(r.mean())),
    "shuffled": lambda r: r.flatten()[torch.randperm(r.numel())].reshape(r.shape),
    "x2": lambda r: 2 * r,
    "x0.5": lambda r: 0.5 * r,
}


@pytest.mark.parametrize("null", NULLS)
def test_null_candidates_exceed_calibrated_and_fixed_limits(null):
    torch.manual_seed(0)
    r = torch.randn(16, 32, dtype=torch.float64)
    names = ("max_abs", "nmse", "worst_row_nmse")
    baseline = error_stats(r.bfloat16(), r).as_dict()
    gate = baseline_limits(baseline, names, "bfloat16", "test")
    found = error_stats(NULLS[null](r).bfloat16(), r)
    share, _ = share_of_limits(found.as_dict(), gate)
    assert share > 1
    assert share_of_limits(error_stats(r.bfloat16(), r).as_dict(), gate)[0] <= 1
    assert not accepts_zeros(found, gate)
    assert tolerance_share(NULLS[null](r), r, 1e-2, 1e-2) > 1
    assert gate.bounds["nmse"] == BASELINE_FACTORS["nmse"] * baseline["nmse"]


@pytest.mark.parametrize(
    ("reference", "bounds", "accepted"),
    [
        ([0.5, -0.1], {"max_abs": 0.5}, True),
        ([0.5, -0.1], {"max_abs": 0.49}, False),
        ([0.5, -0.1], {"max_abs": 0.6, "nmse": 0.9}, False),
        ([0.5, -0.1], {"max_abs": 0.6, "nmse": 1.0}, True),
        ([0.5, -0.1], {"worst_row_nmse": NAN}, False),
        ([0.0, 0.0], {"max_abs": 0.0}, True),
        ([0.5, -0.1], {"tolerance_share": 1.0}, False),
    ],
)
def test_accepts_zeros(reference, bounds, accepted):
    stats = error_stats(double(reference), double(reference))
    assert accepts_zeros(stats, limits(**bounds)) == accepted


def test_limits_say_where_they_come_from():
    assert "atol=0.01" in fixed_limits(0.01, 0.0, "because").source
    with pytest.raises(ValueError, match="source"):
        Limits(kind="fixed", source="", bounds={"a": 1.0})


def test_a_noise_floor_is_rarely_exceeded_by_a_further_run():
    """Log-normal noise: 24 runs set the limit, 2,000 further ones stay below it."""
    from reconcile.numbers.limits import floor_limits

    generator = torch.Generator().manual_seed(0)
    exceeded = 0
    for _ in range(50):
        noise = torch.exp(0.4 * torch.randn(64, generator=generator, dtype=torch.float64)).tolist()
        limits = floor_limits([{"nmse": v} for v in noise[:24]], ["nmse"], "seeds 0-7")
        exceeded += sum(value > limits.bounds["nmse"] for value in noise[24:])
        assert limits.bounds["nmse"] < 100 * max(noise[:24])
    assert exceeded == 0
    assert limits.kind == "floor"
    assert "24 runs, seeds 0-7" in limits.source


def test_a_noise_floor_needs_runs():
    from reconcile.numbers.limits import floor_limits

    with pytest.raises(ValueError, match="needs 8 runs, got 3"):
        floor_limits([{"nmse": 1.0}] * 3, ["nmse"], "x")


def test_a_ratchet_accepts_what_was_accepted_and_no_more():
    from reconcile.numbers.limits import ratchet_limits, share_of_limits

    limits = ratchet_limits({"max_abs": 0.5, "nmse": 0.1}, ["max_abs"], "run 7")
    assert limits.kind == "ratchet"
    assert share_of_limits({"max_abs": 0.5}, limits)[0] == 1.0
    assert share_of_limits({"max_abs": 0.50001}, limits)[0] > 1.0
