"""The numbers of rows for which a kernel fails."""

import pytest
import torch

from reconcile import check_linear
from reconcile.diagnosis.by_rows import regime

SIZES = (1, 4, 5, 64)
TABLE = [
    ("up to 32", lambda m: m <= 32, "<= 32", "only calls of M <= 32 rows fail"),
    ("one row", lambda m: m == 1, "<= 1", "only calls of 1 row fail"),
    ("from 17", lambda m: m >= 17, ">= 17", "only calls of M >= 17 rows fail"),
    ("a tail of 4", lambda m: m % 4, "not a multiple of 4",
     "only calls of M rows fail where M is no multiple of 4"),
    ("a tail of 4, of many rows", lambda m: m % 4 and m > 4, "5",
     "calls of M = 5 rows fail, of M = 1, 4, 64 pass"),
    ("four", lambda m: m == 4, "4", "calls of M = 4 rows fail, of M = 1, 5, 64 pass"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "fails", "m", "text"), TABLE, ids=[row[0] for row in TABLE])
def test_regimes(what, fails, m, text):
    failing = [size for size in SIZES if fails(size)]
    passing = [size for size in SIZES if not fails(size)]
    found = regime(failing, passing, lambda size: bool(fails(size)))
    assert (found.m, found.text) == (m, text)


@pytest.mark.parametrize(
    ("failing", "passing", "fails"),
    [
        ([1, 4], [], lambda m: True),
        ([64], [1, 4], lambda m: True),  # its rows fail at every size: it is not the size
        ([64], [1, 4], lambda m: False),  # it does not fail again
        ([64], [1, 4], lambda m: None),
    ],
)
def test_nothing_is_said_where_it_is_not_the_size(failing, passing, fails):
    assert regime(failing, passing, fails) is None


def test_without_time_both_ends_are_said():
    known = {4: True, 64: False}
    found = regime([4], [64], known.get)
    assert (found.m, found.text) == ("<= 4", "only calls of M <= 4 rows fail; M >= 64 passes")


def half_of_k(most):
    """Up to ``most`` rows the second half of K is left out."""

    def kernel(x, weight, bias=None):
        wide = x.float()
        if len(x.reshape(-1, x.shape[-1])) <= most:
            wide = torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, wide, 0)
        return (wide @ weight.float().T).to(x.dtype)

    return kernel


@pytest.mark.parametrize(("most", "m"), [(20, "<= 20"), (1, "<= 1"), (10_000, None)])
def test_a_kernel_that_is_wrong_for_few_rows(most, m):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    report = check_linear(half_of_k(most), weight, probes=("integer", "bound"))
    best = next(row.diagnosis[0] for row in report.rows if row.diagnosis)

    assert best.parameters.get("m") == m
    assert ("rows fail" in best.text or "row fail" in best.text) == (m is not None)
