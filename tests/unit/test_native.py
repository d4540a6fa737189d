"""Compile at first use: what is found, what is cached, and what a failure leaves behind."""

import ctypes
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reconcile import native
from reconcile.exceptions import BuildError, KernelError
from reconcile.native import NativeLibrary

ANSWER = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
NEEDS_CXX = pytest.mark.skipif(
    native.find_cxx() is None, reason="no C++ compiler: looked for $CXX, c++, g++, clang++"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("RECONCILE_CACHE", str(folder))
    return folder


def library(folder, *, source=ANSWER, header="#define ANSWER 42\n", **fields):
    folder.mkdir(exist_ok=True)
    (folder / "answer.cpp").write_text(source)
    (folder / "answer.h").write_text(header)
    return NativeLibrary(
        name="answer", sources=(folder / "answer.cpp",), headers=(folder / "answer.h",), **fields
    )


def program(path, text):
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def cached(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


CACHES = [
    ({"RECONCILE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
    ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/reconcile"),
    ({"HOME": "/c"}, "/c/.cache/reconcile"),
    ({"RECONCILE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/reconcile"),
]


@pytest.mark.parametrize(("environment", "expected"), CACHES)
def test_cache_directory(environment, expected, monkeypatch):
    for variable in ("RECONCILE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert native.cache_directory() == Path(expected)


# Compilers ------------------------------------------------------------------------------------

LOOKUPS = [
    # programs on PATH, $CXX, what is found
    (["c++", "g++", "clang++"], None, ["c++"]),
    (["g++", "clang++"], None, ["g++"]),
    (["clang++"], None, ["clang++"]),
    (["c++", "clang++"], "clang++ -m64", ["clang++", "-m64"]),
    (["c++"], "missing", None),
    (["c++"], "'open", None),
    (["c++"], "", ["c++"]),
    ([], None, None),
]


@pytest.mark.parametrize(("programs", "variable", "expected"), LOOKUPS)
def test_find_cxx(programs, variable, expected, tmp_path, monkeypatch):
    for name in programs:
        program(tmp_path / name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if variable is not None:
        monkeypatch.setenv("CXX", variable)
    found = native.find_cxx()
    assert found == (expected and (str(tmp_path / expected[0]), *expected[1:]))


NVCC_LOOKUPS = [
    # nvcc on PATH, nvcc in the toolkit's folder, $NVCC, what is found
    (True, True, None, "path/nvcc"),
    (False, True, None, "toolkit/nvcc"),
    (True, True, "toolkit/nvcc", "toolkit/nvcc"),
    (True, True, "missing", None),
    (False, False, None, None),
]


@pytest.mark.parametrize(("on_path", "in_toolkit", "variable", "expected"), NVCC_LOOKUPS)
def test_find_nvcc(on_path, in_toolkit, variable, expected, tmp_path, monkeypatch):
    for folder, present in (("path", on_path), ("toolkit", in_toolkit)):
        (tmp_path / folder).mkdir()
        if present:
            program(tmp_path / folder / "nvcc", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(native, "_NVCC_FOLDER", str(tmp_path / "toolkit"))
    monkeypatch.delenv("NVCC", raising=False)
    if variable is not None:
        monkeypatch.setenv("NVCC", str(tmp_path / variable))
    found = native.find_nvcc()
    assert found == (expected and (str(tmp_path / expected),))


NO_COMPILER = [
    ("c++", {}, "no C++ compiler: looked for $CXX, c++, g++, clang++"),
    (
        "c++",
        {"CXX": "icpx"},
        "no C++ compiler: looked for $CXX, c++, g++, clang++ "
        '($CXX is set to "icpx", which cannot be executed)',
    ),
    ("cuda", {}, "no CUDA compiler: looked for $NVCC, nvcc, /nowhere/nvcc"),
    (
        "cuda",
        {"NVCC": "/x/nvcc"},
        "no CUDA compiler: looked for $NVCC, nvcc, /nowhere/nvcc "
        '($NVCC is set to "/x/nvcc", which cannot be executed)',
    ),
]


@pytest.mark.parametrize(("language", "environment", "reason"), NO_COMPILER)
def test_no_compiler_is_said_and_never_worked_around(
    language, environment, reason, tmp_path, cache, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "_NVCC_FOLDER", "/nowhere")
    for variable in ("CXX", "NVCC"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    unavailable = library(tmp_path / "source", language=language)
    assert unavailable.available() == native.Support(False, reason)
    with pytest.raises(BuildError) as error:
        unavailable.load()
    assert str(error.value) == f"answer: {reason}"
    assert cached(cache) == []


CUDA_DEVICES = [
    # torch.version.cuda, torch.cuda.is_available(), ok, what the reason says
    (None, False, False, "was built without CUDA"),
    (None, True, False, "was built without CUDA"),  # a ROCm build says that CUDA is available
    ("13.0", False, False, "torch.cuda.is_available() is false"),
    ("13.0", True, True, "CUDA device Some GPU"),
]


@pytest.mark.parametrize(("version", "available", "ok", "reason"), CUDA_DEVICES)
def test_cuda_device_gives_its_reason(version, available, ok, reason, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    support = native.cuda_device()
    assert support.ok is ok
    assert reason in support.reason
    assert ok or support.reason.startswith("no CUDA device: torch ")


# Building -------------------------------------------------------------------------------------


@NEEDS_CXX
def test_build_load_and_reuse(tmp_path, cache):
    built = library(tmp_path / "source")
    assert built.available()
    path = built.build()
    assert cached(cache) == [path.name]
    assert path.name.startswith("answer-")
    written = path.stat().st_mtime_ns
    assert built.build() == path
    assert path.stat().st_mtime_ns == written
    loaded = built.load()
    assert loaded.answer() == 42
    assert built.load() is loaded


CHANGES = {
    "source": {"source": ANSWER + "// changed\n"},
    "header": {"header": "#define ANSWER 43\n"},
    "flags": {"flags": ("-DUNUSED",)},
}


@NEEDS_CXX
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_the_content_is_in_the_key(change, tmp_path, cache):
    before = library(tmp_path / "source").build()
    after = library(tmp_path / "source", **CHANGES[change]).build()
    assert before != after
    assert len(cached(cache)) == 2


@NEEDS_CXX
def test_compiler_path_and_version_are_in_the_key(tmp_path, cache, monkeypatch):
    real = " ".join(native.find_cxx())
    paths = set()
    for name, version in (("one", "1.0"), ("two", "1.0"), ("two", "2.0")):
        script = f'case "$1" in --version) echo {version};; *) exec {real} "$@";; esac'
        monkeypatch.setenv("CXX", str(program(tmp_path / name, script)))
        paths.add(library(tmp_path / "source").build())
    assert len(paths) == 3


@NEEDS_CXX
def test_architecture_is_in_the_key(tmp_path, cache, monkeypatch):
    here = library(tmp_path / "source").build()
    monkeypatch.setattr(native.platform, "machine", lambda: "other")
    assert library(tmp_path / "source").build() != here


@NEEDS_CXX
def test_broken_source_shows_command_and_message(tmp_path, cache):
    broken = library(tmp_path / "source", source="int answer() { return undeclared_name; }\n")
    with pytest.raises(BuildError) as error:
        broken.load()
    text = str(error.value)
    assert "answer: does not compile here (exit status 1)" in text
    assert f"command: {native.find_cxx()[0]} -x c++ " in text
    assert "answer.cpp:1" in text
    assert "undeclared_name" in text
    assert cached(cache) == []


def test_long_message_is_cut(tmp_path, cache, monkeypatch):
    script = 'case "$1" in --version) ;; *) seq 1000 >&2; exit 7;; esac'
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", script)))
    with pytest.raises(BuildError) as error:
        library(tmp_path / "source").build()
    lines = str(error.value).splitlines()
    assert lines[0] == "answer: does not compile here (exit status 7)"
    assert lines[2:] == [*map(str, range(1, 21)), "..."]


def test_missing_source(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", "exit 0")))
    missing = NativeLibrary(name="gone", sources=(tmp_path / "gone.cpp",))
    with pytest.raises(BuildError, match=r"gone: cannot read the source .*gone\.cpp"):
        missing.build()


def test_program_that_does_not_start(tmp_path, cache, monkeypatch):
    broken = tmp_path / "cxx"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match=r"cannot run .*cxx --version"):
        library(tmp_path / "source").build()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", "exit 0")))
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot write to the cache directory .*RECONCILE_CACHE"):
        library(tmp_path / "source").build()


def test_build_error_is_a_kernel_error():
    assert issubclass(BuildError, KernelError)


# Races and what a killed compiler leaves ------------------------------------------------------

HALF_WRITTEN = """case "$1" in --version) echo half; exit 0;; esac
while [ "$1" != -o ]; do shift; done
printf '\\177ELF half' > "$2"
{end}"""


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $$"])
def test_failed_compile_leaves_nothing(end, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("CXX", str(program(tmp_path / "cxx", HALF_WRITTEN.format(end=end))))
    with pytest.raises(BuildError):
        library(tmp_path / "source").build()
    assert cached(cache) == []


@NEEDS_CXX
def test_what_a_killed_process_leaves_is_never_loaded(tmp_path, cache, monkeypatch):
    """A process killed while it compiles leaves a temporary file, not a library."""
    script = HALF_WRITTEN.format(end="kill -9 $PPID; exit 0")
    half = program(tmp_path / "cxx", script)
    killed = run_build(library(tmp_path / "source"), {"CXX": str(half)})
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    left = cached(cache)
    assert [name.endswith(".tmp") for name in left] == [True]
    assert (cache / left[0]).read_bytes() == b"\x7fELF half"

    monkeypatch.delenv("CXX", raising=False)
    path = library(tmp_path / "source").build()
    assert path.suffix == ".so"
    assert path.name not in left
    assert ctypes.CDLL(str(path)).answer() == 42


@NEEDS_CXX
def test_file_that_is_no_library_is_an_error_with_advice(tmp_path, cache):
    damaged = library(tmp_path / "source", flags=("-DDAMAGED",))
    damaged.build().write_bytes(b"not a library")
    with pytest.raises(BuildError, match=r"cannot load .*; delete the file"):
        damaged.load()


BUILD = """
import sys, time
from pathlib import Path
from reconcile.native import NativeLibrary
folder, ready, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
library = NativeLibrary(
    name="answer", sources=(folder / "answer.cpp",), headers=(folder / "answer.h",)
)
(ready / str(time.monotonic_ns())).touch()
while len(list(ready.iterdir())) < count:
    time.sleep(0.001)
print(library.load().answer())
"""


def run_build(built, environment=None, ready=None, count=0):
    """Start a process that builds and loads; it waits until ``count`` are ready."""
    folder = built.sources[0].parent
    ready = ready or folder.parent
    command = [sys.executable, "-c", BUILD, str(folder), str(ready), str(count)]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@NEEDS_CXX
def test_processes_race_on_an_empty_cache(tmp_path, cache):
    ready = tmp_path / "ready"
    ready.mkdir()
    racing = library(tmp_path / "source")
    # Both compile: each waits in the compiler until the other has entered it too.
    entered = tmp_path / "entered"
    entered.mkdir()
    script = (
        f'case "$1" in --version) echo slow; exit 0;; esac\ntouch {entered}/$$\n'
        f"for _ in $(seq 3000); do [ $(ls {entered} | wc -l) -lt 2 ] || break; sleep 0.01; done\n"
        f'exec {" ".join(native.find_cxx())} "$@"'
    )
    slow = {"CXX": str(program(tmp_path / "cxx", script))}
    processes = [run_build(racing, slow, ready, count=2) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [output for output, _ in outputs] == ["42\n", "42\n"], outputs
    assert [process.returncode for process in processes] == [0, 0]
    assert len(list(entered.iterdir())) == 2
    assert [name.endswith(".so") for name in cached(cache)] == [True]
