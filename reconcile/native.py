"""Native sources that the machine's own compiler builds at first use.

A `NativeLibrary` is a few sources with a plain C ABI; it becomes one shared library in a cache
directory and is loaded with ctypes. The name of the cached file is a hash over everything that
decides its content, so a changed source, header, flag or compiler never meets an old build.
A build is written under a temporary name and renamed when it is complete: two processes may
build the same library at once, and a killed compiler leaves nothing that could be loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from reconcile.exceptions import BuildError
from reconcile.kernel import Support

Language = Literal["c++", "cuda"]
Command = tuple[str, ...]

FLAGS: dict[Language, tuple[str, ...]] = {
    "c++": ("-x", "c++", "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared"),
    "cuda": (
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-arch=all-major",
        "-cudart",
        "static",
        "-Xcompiler",
        "-fPIC",
        "-shared",
    ),
}
"""What every build of a language gets before the library's own flags.

``-ffp-contract=off`` and ``-fmad=false`` keep a multiplication and an addition apart, so that the
source alone decides how often a result is rounded. No ``-march``: the cache may be shared by
machines with different processors. ``-arch=all-major`` holds code for every major GPU generation
that nvcc knows and intermediate code for newer ones: a build machine without a GPU can make
it, and nothing is compiled by the driver while a kernel is timed.
"""

_CXX_NAMES = ("c++", "g++", "clang++")
_NVCC_FOLDER = "/usr/local/cuda/bin"
_NVCC_ENVIRONMENT = ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_MESSAGE_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLibrary:
    """Sources that are compiled together into one shared library with a plain C ABI."""

    name: str
    """Start of the cached file's name and of messages, e.g. ``ternary_naive``."""
    sources: tuple[Path, ...]
    """Files that are compiled, in this order."""
    headers: tuple[Path, ...] = ()
    """Files that the sources include by a relative path; they count in the cache key."""
    language: Language = "c++"
    """Which compiler builds the sources; ``c++`` also reads a ``.cu`` file as C++."""
    flags: tuple[str, ...] = ()
    """Flags after those of `FLAGS`."""

    def available(self) -> Support:
        """Whether its compiler is on this machine, and which, or where it was looked for."""
        command = _find(self.language)
        if command is None:
            return Support(False, _not_found(self.language))
        return Support(True, f"compiled by {shlex.join(command)}")

    def build(self) -> Path:
        """Path of the shared library; compiles it where the cache has none.

        Raises:
            BuildError: no compiler, a source that does not compile (with the command and the
                first lines of the compiler's message), or a cache that cannot be written.
        """
        compiler = _find(self.language)
        if compiler is None:
            raise BuildError(f"{self.name}: {_not_found(self.language)}")
        path = cache_directory() / f"{self.name}-{self._key(compiler)}.so"
        if not path.exists():
            self._compile(compiler, path)
        return path

    def load(self) -> ctypes.CDLL:
        """The library, built where needed; opened once per process.

        Raises:
            BuildError: as `build`, or where the system refuses to load the file.
        """
        return _load(self)

    def _key(self, compiler: Command) -> str:
        """Hex sha256 over the files, the compiler, the flags and the machine's architecture."""
        texts = [self.language, *FLAGS[self.language], *self.flags]
        texts += [*compiler, _version(compiler), platform.machine()]
        if self.language == "cuda":
            texts += [os.environ.get(variable, "") for variable in _NVCC_ENVIRONMENT]
        parts = [text.encode() for text in texts]
        for file in (*self.sources, *self.headers):
            parts += [file.name.encode(), _read(file, self.name)]
        return _digest(parts)

    def _compile(self, compiler: Command, path: Path) -> None:
        """Compile to a temporary name beside ``path``, then rename."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(
                prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent
            )
        except OSError as error:
            raise BuildError(
                f"{self.name}: cannot write to the cache directory {path.parent}: {error}; set "
                "RECONCILE_CACHE to a directory that can be written"
            ) from error
        os.close(descriptor)
        temporary = Path(name)
        try:
            flags = (*FLAGS[self.language], *self.flags)
            run_compiler((*compiler, *flags, "-o", name, *map(str, self.sources)), self.name)
            with temporary.open("rb") as written:  # opened now: a linker replaces its output file
                os.fsync(written.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def cache_directory() -> Path:
    """Where built libraries are kept.

    ``$RECONCILE_CACHE``, else ``$XDG_CACHE_HOME/reconcile``, else ``~/.cache/reconcile``.
    """
    if own := os.environ.get("RECONCILE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "reconcile"
    return Path.home() / ".cache" / "reconcile"


def find_cxx() -> Command | None:
    """Command of the C++ compiler, its path first, or None.

    ``$CXX`` (which may carry arguments) where it is set, then nothing else; otherwise the first
    of c++, g++, clang++ on PATH.
    """
    if own := os.environ.get("CXX"):
        return _resolve(own)
    return next(filter(None, map(_resolve, _CXX_NAMES)), None)


def find_nvcc() -> Command | None:
    """Command of the CUDA compiler, its path first, or None.

    ``$NVCC`` (which may carry arguments) where it is set, then nothing else; otherwise nvcc on
    PATH or in /usr/local/cuda/bin.
    """
    if own := os.environ.get("NVCC"):
        return _resolve(own)
    return _resolve("nvcc") or _resolve(f"{_NVCC_FOLDER}/nvcc")


def cuda_device() -> Support:
    """Whether torch can use an NVIDIA GPU here: its name, or why not."""
    if torch.version.cuda is None:
        return Support(False, f"no CUDA device: torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        return Support(
            False,
            f"no CUDA device: torch {torch.__version__} was built for CUDA {torch.version.cuda}, "
            "but torch.cuda.is_available() is false (no driver, or no GPU is visible)",
        )
    return Support(True, f"CUDA device {torch.cuda.get_device_name()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A library that this process opened."""

    name: str
    path: Path
    compiler: str
    """The first line of what the compiler says that it is."""
    flags: str
    files: tuple[Path, ...]
    """Sources and headers."""


_LOADED: dict[NativeLibrary, Loaded] = {}


def loaded() -> tuple[Loaded, ...]:
    """Every library that this process has opened, in order."""
    return tuple(_LOADED.values())


@functools.cache
def _load(library: NativeLibrary) -> ctypes.CDLL:
    path = library.build()
    compiler = _find(library.language)
    _LOADED[library] = Loaded(
        name=library.name,
        path=path,
        compiler=_version(compiler).splitlines()[0] if compiler else "",
        flags=shlex.join((*FLAGS[library.language], *library.flags)),
        files=(*library.sources, *library.headers),
    )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{library.name}: cannot load {path}: {error}; delete the file, or set "
            "RECONCILE_CACHE to a directory from which programs may run"
        ) from error


def _find(language: Language) -> Command | None:
    return find_cxx() if language == "c++" else find_nvcc()


def _not_found(language: Language) -> str:
    """Why there is no compiler: where it was looked for."""
    if language == "c++":
        variable, text = "CXX", f"no C++ compiler: looked for $CXX, {', '.join(_CXX_NAMES)}"
    else:
        variable, text = "NVCC", f"no CUDA compiler: looked for $NVCC, nvcc, {_NVCC_FOLDER}/nvcc"
    if own := os.environ.get(variable):
        text += f' (${variable} is set to "{own}", which cannot be executed)'
    return text


def _resolve(text: str) -> Command | None:
    """A command line with its program as an absolute path; None where there is no program."""
    try:
        words = shlex.split(text)
    except ValueError:  # an open quotation
        return None
    program = shutil.which(words[0]) if words else None
    return None if program is None else (str(Path(program).absolute()), *words[1:])


def _version(compiler: Command) -> str:
    """What the compiler says that it is."""
    return run_compiler((*compiler, "--version"), "compiler").stdout


def run_compiler(command: Command, name: str) -> subprocess.CompletedProcess[str]:
    """What ``command`` printed; BuildError with its first error lines where it fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, check=False
        )
    except OSError as error:
        raise BuildError(f"{name}: cannot run {shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).splitlines()
        shown = [*lines[:_MESSAGE_LINES], "..."] if len(lines) > _MESSAGE_LINES else lines
        raise BuildError(
            f"{name}: does not compile here (exit status {done.returncode})\n"
            f"command: {shlex.join(command)}\n" + "\n".join(shown)
        )
    return done


def _read(file: Path, name: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BuildError(f"{name}: cannot read the source {file}: {error}") from error


def _digest(parts: Iterable[bytes]) -> str:
    """Hex sha256 over parts, each preceded by its length so that none runs into the next."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
