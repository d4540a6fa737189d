import ml_dtypes
import numpy as np
import pytest

LAST = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Code of +inf."""


def positive_values(name):
    """Finite values of the non-negative codes in order, then the power of two that follows."""
    dtype = getattr(ml_dtypes, name, None) or getattr(np, name)
    finite = np.arange(LAST[name], dtype=np.uint16).view(dtype).astype(np.float64)
    return np.append(finite, 2 * finite[-1] - finite[-2])


@pytest.fixture(scope="session")
def positive():
    """``positive("bfloat16")``: the table of that name."""
    return positive_values


@pytest.fixture(scope="session")
def exact_round():
    """``exact_round(float64 array, name)``: rounded once, ties to even, as float64.

    16-bit dtypes by a search in the table of all values (the middles are exact in float64);
    float32 by the machine's own conversion.
    """

    def round_(values, name):
        x = np.asarray(values, dtype=np.float64)
        if name == "float32":
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                return x.astype(np.float32).astype(np.float64)
        table = positive_values(name)
        size = np.minimum(np.abs(x), table[-1])
        high = np.searchsorted(table, np.nan_to_num(size))
        low = np.maximum(high - 1, 0)
        middle = (table[low] + table[high]) / 2
        up = (size > middle) | ((size == middle) & (high % 2 == 0))
        code = np.where(up, high, low)
        rounded = np.where(code == len(table) - 1, np.inf, table[code])
        return np.where(np.isnan(x), np.nan, np.copysign(rounded, x))

    return round_
