"""The emulator of tile instructions: oracle, golden vectors, and what processors refuse."""

import ctypes
import faulthandler
import importlib.resources
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from reconcile.exceptions import KernelError
from reconcile.native import NativeLibrary
from reconcile_kernels.amx_fp8 import emulator, features
from reconcile_kernels.amx_fp8.emulator import emulated_tiles, executed
from reconcile_kernels.amx_fp8.instructions import tdpbf16ps

PROGRAMS = NativeLibrary(
    name="tile_programs",
    sources=(Path(__file__).with_name("tile_programs.cpp"),),
    flags=("-O1", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)
SUPPORT = emulator.supported()
pytestmark = pytest.mark.skipif(not SUPPORT, reason=SUPPORT.reason)


def config(rows=16, columns=16, pairs=16, **changes):
    """64 bytes of a configuration for sums 0, a 1 and b 2; ``changes``: byte number to value."""
    bytes_ = np.zeros(64, np.uint8)
    bytes_[0] = 1
    for tile, (height, width) in enumerate(
        ((rows, 4 * columns), (rows, 4 * pairs), (pairs, 4 * columns))
    ):
        bytes_[16 + 2 * tile], bytes_[48 + tile] = width, height
    for place, value in changes.items():
        bytes_[int(place.removeprefix("byte"))] = value
    return bytes_


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def multiply(c, a, b):
    """c + a b by the emulated instruction; bits of bfloat16 [M, 2P] and [P, 2N], float32 [M, N]."""
    c = c.copy()
    wanted, stored = config(*c.shape, b.shape[0]), np.zeros(64, np.uint8)
    call = PROGRAMS.load().tile_multiply
    call(
        pointer(wanted),
        pointer(a),
        ctypes.c_int64(a.strides[0]),
        pointer(b),
        ctypes.c_int64(b.strides[0]),
        pointer(c),
        ctypes.c_int64(c.strides[0]),
        pointer(stored),
    )
    assert (stored == wanted).all()
    return c


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def same(got, wanted):
    both_nan = np.isnan(got) & np.isnan(wanted)
    return bool(((got.view(np.uint32) == wanted.view(np.uint32)) | both_nan).all())


@pytest.fixture(scope="module")
def vectors():
    folder = importlib.resources.files("reconcile_fixtures") / "vectors"
    with importlib.resources.as_file(folder / "08_dot_bf16.safetensors") as path:
        return load_file(path)


def test_golden_tiles(vectors):
    names = sorted({name.rsplit(".", 1)[0] for name in vectors if name.startswith("tdp.")})
    assert len(names) == 6
    with emulated_tiles():
        for name in names:
            a, b = vectors[f"{name}.a_bf16"], vectors[f"{name}.b_bf16"]
            c, wanted = (vectors[f"{name}.{x}_f32bits"].view(np.float32) for x in ("c", "out"))
            assert same(multiply(c, a, b), wanted), name


@pytest.mark.parametrize("seed", range(4))
def test_random_tiles_are_the_oracle(seed):
    """Any bits in any shape: subnormals, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    with emulated_tiles():
        for _ in range(60):
            rows, columns, pairs = (int(n) for n in rng.integers(1, 17, 3))
            shapes = ((rows, 2 * pairs), (pairs, 2 * columns))
            a, b = (rng.integers(0, 1 << 16, shape).astype(np.uint16) for shape in shapes)
            c = rng.integers(0, 1 << 32, (rows, columns)).astype(np.uint32).view(np.float32)
            if rng.integers(2):  # exponents near each other, so that additions round
                a, b = (side & 0x81FF | 0x3E00 for side in (a, b))
                c = rng.standard_normal((rows, columns)).astype(np.float32)
            assert same(multiply(c, a, b), tdpbf16ps(c, widen(a), widen(b)))


def test_every_form_of_address():
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 4096).astype(np.uint8)
    out = np.full(8192, 0xAA, np.uint8)
    with emulated_tiles():
        copies = PROGRAMS.load().tile_copies(pointer(source), pointer(out))
    tiles = out[: copies * 1024].reshape(copies, 1024)
    assert (tiles[:5] == source[:1024]).all()
    assert not tiles[5].any()
    stored = out[6144 : 6144 + 128].reshape(2, 64)
    assert (stored[0] == stored[1]).all()
    assert stored[0][0] == 1
    assert (stored[0][48:56] == 16).all()
    assert (out[6144 + 128 :] == 0xAA).all()


def test_what_ran_is_counted(vectors):
    before = executed()
    test_every_form_of_address()
    test_golden_tiles(vectors)
    ran = {kind: count - before[kind] for kind, count in executed().items()}
    assert ran == {
        "ldtilecfg": 7,
        "sttilecfg": 8,
        "tilerelease": 7,
        "tilezero": 1,
        "tileload": 5 + 18,
        "tilestore": 6 + 6,
        "tdpbf16ps": 6,
    }


def test_threads_have_tiles_of_their_own():
    rng = np.random.default_rng(1)
    failures = []

    def work(seed):
        own = np.random.default_rng(seed)
        a, b = (own.integers(0, 1 << 16, (16, 32)).astype(np.uint16) & 0xBFFF for _ in range(2))
        c = own.standard_normal((16, 16)).astype(np.float32)
        wanted = tdpbf16ps(c, widen(a), widen(b))
        with emulated_tiles():
            for _ in range(200):
                if not same(multiply(c, a, b), wanted):
                    failures.append(seed)

    threads = [threading.Thread(target=work, args=(int(s),)) for s in rng.integers(0, 99, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# What ends a process, in a child ----------------------------------------------------------------

CHILD = """
import ctypes, sys
emulator, programs = map(ctypes.CDLL, sys.argv[1:3])
{before}
assert {install} == 0
{middle}
{call}
print("went on")
"""


def child(call, install="emulator.tile_emulator_install()", before="", middle=""):
    text = CHILD.format(call=call, install=install, before=before, middle=middle)
    libraries = [str(emulator.LIBRARY.build()), str(PROGRAMS.build())]
    return subprocess.run(
        [sys.executable, "-c", text, *libraries], capture_output=True, text=True, check=False
    )


def with_config(name, **changes):
    return f"programs.{name}(bytes({config(**changes).tolist()}))"


MULTIPLY = (
    "m = ctypes.create_string_buffer(4096); p = ctypes.addressof(m); "
    "programs.tile_multiply(bytes({config}), ctypes.c_void_p(p), ctypes.c_int64(64), "
    "ctypes.c_void_p(p), ctypes.c_int64(64), ctypes.c_void_p(p), ctypes.c_int64(64), "
    "ctypes.c_void_p(p + 2048))"
)
REFUSED = [
    ("tile_before_config", "programs.tile_before_config()", signal.SIGILL, "before LDTILECFG"),
    ("int8", with_config("tile_int8"), signal.SIGILL, ""),
    ("one tile twice", with_config("tile_twice"), signal.SIGILL, "named twice"),
    ("ud2", "programs.no_instruction()", signal.SIGILL, ""),
    ("palette 2", with_config("tile_twice", byte0=2), signal.SIGSEGV, "palette"),
    ("reserved", with_config("tile_twice", byte7=1), signal.SIGSEGV, "reserved"),
    ("17 rows", with_config("tile_twice", byte48=17), signal.SIGSEGV, "16 rows"),
    ("65 bytes", with_config("tile_twice", byte16=65), signal.SIGSEGV, "64 bytes"),
    ("256 bytes", with_config("tile_twice", byte17=1), signal.SIGSEGV, "64 bytes"),
    ("rows alone", with_config("tile_twice", byte51=4), signal.SIGSEGV, "rows without bytes"),
    ("tile 8", with_config("tile_twice", byte56=4), signal.SIGSEGV, "above 7"),
    ("tile 15", with_config("tile_twice", byte63=1), signal.SIGSEGV, "above 7"),
    (
        "palette 0 leaves no tiles",
        MULTIPLY.format(config=[0] * 64),
        signal.SIGILL,
        "before LDTILECFG",
    ),
    (
        "a tile without shape",
        MULTIPLY.format(config=config(byte49=0, byte18=0).tolist()),
        signal.SIGILL,
        "without a shape",
    ),
    (
        "rows differ",
        MULTIPLY.format(config=config(byte49=15).tolist()),
        signal.SIGILL,
        "differ in rows",
    ),
    (
        "columns differ",
        MULTIPLY.format(config=config(byte20=60).tolist()),
        signal.SIGILL,
        "differ in columns",
    ),
    (
        "pairs differ",
        MULTIPLY.format(config=config(byte18=60).tolist()),
        signal.SIGILL,
        "number of pairs",
    ),
    (
        "half a pair",
        MULTIPLY.format(config=config(byte18=62).tolist()),
        signal.SIGILL,
        "multiple of 4",
    ),
    (
        "start_row",
        MULTIPLY.format(config=config(byte1=3).tolist()),
        None,
        "",
    ),
]


@pytest.mark.parametrize(
    ("call", "number", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_a_processor_refuses_ends_the_process_as_there(call, number, says):
    done = child(call)
    assert done.returncode == (0 if number is None else -number), done.stderr
    assert says in done.stderr
    assert ("tile emulator: " in done.stderr) == bool(says)


def test_a_python_handler_below_gets_what_is_not_ours():
    """Chained: the handler that was there first is called, and may end the process its way."""
    before = (
        "import signal\n"
        "HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)\n"
        "def leave(number):\n"
        "    sys.stderr.write('mine %d' % number); sys.stderr.flush(); import os; os._exit(7)\n"
        "kept = HANDLER(leave)\n"
        "ctypes.CDLL(None).signal(4, kept)\n"
    )
    done = child("programs.no_instruction()", before=before)
    assert (done.returncode, done.stderr) == (7, "mine 4")
    done = child("programs.tile_before_config()", before=before)
    assert done.returncode == 7
    assert done.stderr.endswith("mine 4")


def test_tiles_are_undefined_again_afterwards():
    done = child(
        "programs.tile_before_config()", middle="assert emulator.tile_emulator_remove() == 0"
    )
    assert done.returncode == -signal.SIGILL
    assert done.stderr == ""


def test_a_handler_that_came_later_is_not_taken_away():
    middle = (
        "import faulthandler; faulthandler.enable()\n"
        "assert emulator.tile_emulator_remove() == 1\n"
        "faulthandler.disable()\n"
        "assert emulator.tile_emulator_remove() == 0"
    )
    assert child("pass", middle=middle).returncode == 0


def test_the_handler_before_is_back_afterwards():
    """pytest enables faulthandler, which handles SIGILL in C."""
    assert faulthandler.is_enabled()
    with emulated_tiles(), emulated_tiles():
        pass
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    found = library.signal(signal.SIGILL, None)
    library.signal(signal.SIGILL, found)
    assert found not in (None, 0, 1)


def test_nothing_is_installed_where_amx_is_real(monkeypatch):
    monkeypatch.setattr(features, "_bits", lambda: (True,) * 10)
    monkeypatch.setattr(features, "amx", lambda: features.Support(True, "AMX with BF16"))
    assert not emulator.supported()
    assert "AMX is real here" in emulator.supported().reason

    class Native:
        def tile_emulator_install(self):
            return 1

    monkeypatch.setattr(emulator, "_library", Native)
    with pytest.raises(KernelError, match="AMX is real here"), emulated_tiles():
        raise AssertionError
    assert emulator._USERS._count == 0
