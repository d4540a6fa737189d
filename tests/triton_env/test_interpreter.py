"""The repaired interpreter against torch, operation by operation, and what it refuses."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from reconcile.exceptions import KernelError
from reconcile_kernels.aiter_bf16 import interpreter

SIZE = 1024


@triton.jit
def elementwise(a, b, y, z, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    u, v = tl.load(a + at), tl.load(b + at)
    if OP == "add":
        r = u + v
    elif OP == "sub":
        r = u - v
    elif OP == "mul":
        r = u * v
    elif OP == "max":
        r = tl.maximum(u, v)
    elif OP == "neg":
        r = -u
    elif OP == "abs":
        r = tl.abs(u)
    else:
        r = tl.where(u < v, u, v)
    tl.store(y + at, r)
    tl.store(z + at, tl.load(z + at).to(tl.bfloat16).to(tl.float32))


@triton.jit
def product(a, b, y, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(y + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


@pytest.fixture(scope="module", autouse=True)
def _repaired():
    interpreter.repair()


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, generator=generator).bfloat16() for _ in range(2))
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, -3e38]
    a[: len(special)] = torch.tensor(special)
    return a, b


EXPECTED = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": torch.fmax,
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "less": lambda a, b: torch.where(a < b, a, b),
}


@pytest.mark.parametrize("op", EXPECTED)
def test_arithmetic_has_torchs_bits(operands, op):
    a, b = operands
    y = torch.empty(SIZE).bfloat16()
    wide = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    z = wide.clone()
    elementwise[(1,)](a, b, y, z, OP=op, SIZE=SIZE)
    assert torch.equal(z, wide.bfloat16().float())
    expected = EXPECTED[op](a, b)
    same = (y == expected) | (y.isnan() & expected.isnan())
    assert bool(same.all()), (a[~same], b[~same], y[~same], expected[~same])


def test_a_dot_multiplies_values():
    """Small integers: the sum is exact."""
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(-8, 9, (32, 32), generator=generator).bfloat16() for _ in range(2))
    y = torch.empty(32, 32)
    product[(1,)](a, b, y, N=32)
    assert torch.equal(y, a.float() @ b.float())


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_rounding_of_every_upper_half(low):
    """All 65536 upper halves with the lower halves at which rounding turns, against torch."""
    bits = (np.arange(65536, dtype=np.uint32) << 16) | np.uint32(low)
    values = bits.view(np.float32)
    ours = torch.from_numpy(interpreter.to_bfloat16_bits(values).view(np.int16))
    theirs = torch.from_numpy(values.copy()).bfloat16()
    same = (ours == theirs.view(torch.int16)) | theirs.isnan()
    assert bool(same.all())
    assert bool(ours.view(torch.bfloat16)[theirs.isnan()].isnan().all())


def test_widening_is_exact():
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    wide = torch.from_numpy(interpreter.to_float32(bits))
    theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
    assert bool(((wide == theirs) | (wide.isnan() & theirs.isnan())).all())


UNREPAIRED = """
import torch, triton, triton.language as tl
@triton.jit
def add(a, b, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(a + at) + tl.load(b + at))
a = torch.ones(16).bfloat16(); y = torch.empty(16).bfloat16()
add[(1,)](a, a, y, SIZE=16)
print(bool((y == 2).all()))
"""


def test_without_the_repair_it_is_wrong(tmp_path):
    """Else the patch could go: 1 + 1 is not 2 in this version's own bfloat16."""
    file = tmp_path / "unrepaired.py"
    file.write_text(UNREPAIRED)
    ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert "True" not in ran.stdout


def test_an_unknown_version_is_refused():
    with mock.patch("importlib.metadata.version", return_value="3.99.0"):
        support = interpreter.is_supported()
        assert not support
        assert "3.99.0" in support.reason
        with pytest.raises(KernelError, match="was not read"):
            interpreter.repair()


def test_without_the_variable_it_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "without TRITON_INTERPRET=1" in interpreter.is_supported().reason


def test_the_note_is_in_the_reason():
    assert "multiplies bit patterns" in interpreter.is_supported().reason
