"""The emulated grid: what works on it, and that it finds what a GPU would not say."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from reconcile import native
from reconcile.native import NativeLibrary
from reconcile_kernels.ternary_cuda import variant_ops

FOLDER = Path(variant_ops.__file__).parent
IN = np.arange(64, dtype=np.float32)
pytestmark = pytest.mark.skipif(
    native.find_cxx() is None, reason="no C++ compiler: looked for $CXX, c++, g++, clang++"
)


def library(*flags):
    return NativeLibrary(
        name="grid_faults",
        sources=(Path(__file__).with_name("grid_faults.cu"),),
        headers=(FOLDER / "grid.h", FOLDER / "emulator.h"),
        flags=("-O1", f"-I{FOLDER}", *flags),
    ).load()


@pytest.fixture(scope="module", params=[(), ("-DRECONCILE_UCONTEXT",)], ids=["own", "ucontext"])
def run(request):
    """Output and error text of a kernel of grid_faults.cu; both ways to switch stacks."""
    loaded = library(*request.param)
    loaded.error_text.restype = ctypes.c_char_p

    def call(name, blocks=2):
        data = np.zeros(80, dtype=np.float32)
        start = -data.ctypes.data % 16 // 4
        given, out = data[start : start + 64], np.full(64, -1, dtype=np.float32)
        given[:] = IN
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (given, out)]
        status = loaded.run(name.encode(), *pointers, blocks)
        return out, loaded.error_text(status).decode() if status else ""

    return call


RIGHT = {
    "reverse": IN[::-1],
    "sum": np.full(64, IN.sum()),
    "groups": np.repeat(IN.reshape(8, 8).sum(1), 8),
    "within_warp": IN.reshape(32, 2)[:, ::-1].flatten(),
    "aligned": IN,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels(run, name):
    out, error = run(name)
    assert error == ""
    assert np.array_equal(out, RIGHT[name])


FAULTS = {
    "across_warps": "shared kept[31] is read without a barrier after the write of thread 31",
    "read_too_early": "shared kept[0] is read without a barrier after the write of thread 0 in "
    "thread (1, 0, 0) of block (0, 0, 0)",
    "written_too_early": "shared kept[1] is written without a barrier after the read of thread 0",
    "written_twice": "shared kept[0] is written without a barrier after the write of thread 0",
    "never_written": "shared kept[0] is read before it was written in thread (0, 0, 0)",
    "beyond_shared": "shared kept[63] is out of bounds: it has 63 elements in thread (63, 0, 0)",
    "too_much_shared": "shared memory of 53248 bytes, a block has 49152",
    "some_return": "barrier divergence in block (0, 0, 0): 60 of 64 threads wait in line",
    "two_barriers": "waits in line",
    "barrier_and_shuffle": "barrier divergence in block (0, 0, 0): 32 of 64 threads wait in line",
    "lanes_missing": "a warp collective that not all lanes reach in block (0, 0, 0)",
    "partial_mask": "a shuffle with a partial mask is not supplied",
    "load_beyond": "load out of bounds: elements 64 to 64 of 64 in thread (63, 0, 0)",
    "load_before": "load out of bounds: elements -1 to -1 of 64 in thread (0, 0, 0)",
    "store_beyond": "store out of bounds: elements 64 to 64 of 64 in thread (32, 0, 0)",
    "vector_beyond": "vector load out of bounds: elements 64 to 67 of 64 in thread (63, 0, 0)",
    "misaligned": "misaligned vector load of 16 bytes at element 1 in thread (1, 0, 0)",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_errors(run, name):
    _, error = run(name)
    assert FAULTS[name] in error


def test_an_error_does_not_outlive_its_launch(run):
    assert run("misaligned")[1]
    out, error = run("reverse", blocks=1)
    assert error == ""
    assert np.array_equal(out, IN[::-1])
