"""What is installed: formats, kernels, model sources, reporters and cases, by entry point.

Anyone can add one from their own package; the engine imports none of them by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from reconcile.contract import Contract
from reconcile.diff import Difference
from reconcile.exceptions import ConfigError, KernelError, nearest
from reconcile.inspection import Inspector
from reconcile.kernel import FunctionKernel, Kernel
from reconcile.model import ModelSource
from reconcile.report import Report
from reconcile.weight import Format

_EXPECTED = "package.module:attr or path/to/file.py:attr"
"""How a kernel is named that is not registered."""


@cache
def _group(kind: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"reconcile.{kind}"):
        if point.name in found and found[point.name].value != point.value:
            raise ConfigError(
                f"two packages register {kind} {point.name!r}: {found[point.name].value} and "
                f"{point.value}"
            )
        found[point.name] = point
    return found


def _load(kind: str, name: str) -> Any:  # noqa: ANN401
    group = _group(kind)
    if name not in group:
        raise ConfigError(f"unknown {kind.removesuffix('s')} {name!r}: {nearest(name, group)}")
    return group[name].load()


@cache
def formats() -> dict[str, Format]:
    """Every registered number format by name."""
    return {name: cast(Format, point.load()) for name, point in sorted(_group("formats").items())}


def hypotheses() -> list[Any]:
    """Hypotheses about failing linears that other packages register, by name."""
    return [point.load() for _, point in sorted(_group("hypotheses").items())]


def packages() -> set[str]:
    """Top-level packages whose code a reference runs: this one, and those of formats and models."""
    points = [*_group("formats").values(), *_group("models").values()]
    return {"reconcile", *(point.value.partition(":")[0].partition(".")[0] for point in points)}


def kernel_names() -> list[str]:
    """Names of the registered kernels."""
    return sorted(_group("kernels"))


def kernel(spec: str, base: Path | None = None) -> Kernel:
    """The kernel that a case names.

    Args:
        spec: a registered name, ``package.module:attr``, or ``path/to/file.py:attr``.
        base: directory that a relative file path starts from (default: the working directory).

    Raises:
        KernelError: not registered, not found, fails to import, or is no kernel.
    """
    if spec in _group("kernels"):
        try:
            return cast(Kernel, _group("kernels")[spec].load())
        except (Exception, SystemExit) as error:
            raise _not_imported(_group("kernels")[spec].value, error) from error
    check_kernel_name(spec, base)
    place, _, attribute = spec.rpartition(":")
    module = _file_module(place, base) if place.endswith(".py") else _named_module(place)
    try:
        found = getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise KernelError(f"{place} has no {attribute!r}: {nearest(attribute, public)}") from None
    return as_kernel(found, spec)


def check_kernel_name(spec: str, base: Path | None = None) -> None:
    """KernelError for a file without a function, or a path that can hold no kernel.

    Args:
        spec: as in `kernel`.
        base: directory that a relative path starts from (default: the working directory).
    """
    if spec in _group("kernels"):
        return
    place, attribute = spec.rpartition(":")[::2] if ":" in spec else (spec, "")
    if not place:
        raise KernelError(f"{spec!r} names no kernel: expected {_EXPECTED}")
    if place.endswith(".py") and not attribute:
        raise KernelError(f"{spec} names no function: give {place}:FUNCTION")
    _check_place((base or Path.cwd()) / place, place, attribute or "FUNCTION")
    if not attribute:
        raise KernelError(
            f"unknown kernel {spec!r}: "
            f"{nearest(spec, _group('kernels'), '`reconcile kernels` lists all')}; or give "
            f"{_EXPECTED}"
        )


def _check_place(path: Path, place: str, attribute: str) -> None:
    """KernelError for a path that cannot hold a kernel: a folder, no Python, or not there."""
    if path.is_dir() and not _importable(place):
        files = sorted(file.name for file in path.glob("*.py"))
        has = f"it has {', '.join(files[:5])}" if files else "it has none"
        raise KernelError(
            f"{path} is a folder: expected a Python file in it, {path / 'FILE.py'}:{attribute} "
            f"({has}), or package.module:{attribute}"
        )
    if not path.is_file() and ("/" in place or place.endswith(".py")):
        raise KernelError(f"{path}: no such file; expected path/to/file.py:{attribute}")
    if path.is_file() and path.suffix != ".py":
        raise KernelError(
            f"{path} is no Python file: expected path/to/file.py:{attribute}; a kernel in another "
            "language is called by a function there"
        )


def _importable(name: str) -> bool:
    """Whether a module of that name has a file; a folder alone is a namespace, which has none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None


def as_kernel(found: object, name: str) -> Kernel:
    """An object with the Kernel protocol as it is, a function wrapped; else KernelError."""
    if isinstance(found, Kernel) and not isinstance(found, type):
        return _checked(found, name)
    if callable(found) and not isinstance(found, type):
        return _checked(FunctionKernel(name, found), name)
    raise KernelError(
        f"{name}: expected a function f(x, weight, bias=None) or an object with the Kernel "
        f"protocol, got {type(found).__name__}"
    )


def _checked(found: Kernel, name: str) -> Kernel:
    if found.contract is not None and not isinstance(found.contract, Contract):
        raise KernelError(
            f"{name}: contract must be a reconcile.Contract, got {found.contract!r:.80}"
        )
    return found


def _named_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_imported(name, error) from error


def _not_imported(place: object, error: BaseException) -> KernelError:
    file = Path(f"{str(place).replace('.', '/')}.py")
    hint = f"; for the file {file} give {file}:ATTR" if file.is_file() else ""
    return KernelError(f"cannot import {place}: {type(error).__name__}: {error}{hint}")


def _file_module(place: str, base: Path | None) -> ModuleType:
    path = ((base or Path.cwd()) / place).resolve()
    if not path.is_file():
        raise KernelError(f"{path}: no such file")
    name = f"_reconcile_kernel_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_imported(path, error) from error
    return module


def model_source(name: str = "transformers") -> ModelSource:
    """The registered reader of checkpoints."""
    return cast(ModelSource, _load("models", name)())


def inspector(name: str = "checkpoint") -> Inspector:
    """The registered inspector of checkpoints."""
    return cast(Inspector, _load("inspectors", name)())


def reporter(name: str) -> tuple[Callable[[Report], str], str | None]:
    """A renderer and the name of the file that it writes (None: only for the terminal)."""
    render = cast(Callable[[Report], str], _load("reporters", name))
    return render, cast("str | None", sys.modules[render.__module__].FILENAME)


def case_names() -> list[str]:
    """Names of the embedded cases."""
    return sorted(_group("cases"))


def diff_reporter(name: str) -> tuple[Callable[[Difference], str], str | None]:
    """A renderer of two reports side by side, and the name of its file (None: the terminal)."""
    render = cast("Callable[[Difference], str]", _load("diff_reporters", name))
    return render, cast("str | None", sys.modules[render.__module__].FILENAME)


def embedded_case(name: str | None = None) -> Path:
    """The file of an embedded case; None: of the one that runs when none is named.

    Raises:
        ConfigError: an unknown name, or no case is embedded.
    """
    if name is None:
        defaults = _group("default_case")
        if not defaults:
            raise ConfigError("no case is embedded in this installation: name a case file")
        name = next(iter(defaults))
    return _package_folder("cases", name) / "cases" / f"{name}.toml"


def case_file(name: Path | str | None) -> Path:
    """The file of a case given by path or, where there is no such file, by an embedded name.

    Raises:
        ConfigError: neither; a name without a suffix or folder is taken for an embedded one.
    """
    if name is None:
        return embedded_case()
    path = Path(name)
    if path.is_dir() and str(name) not in _group("cases"):
        raise ConfigError(_case_in_folder(path))
    if path.is_file() or (
        str(name) not in _group("cases") and (path.suffix or len(path.parts) > 1)
    ):
        return path
    if str(name) not in _group("cases"):
        raise ConfigError(
            f"{name}: no such file, and no embedded case: {nearest(str(name), case_names())}"
        )
    return embedded_case(str(name))


def _case_in_folder(folder: Path) -> str:
    """What to do where a folder was given for a case."""
    said = f"{folder} is a folder: expected a case file (TOML)"
    if cases := sorted(folder.glob("*.toml")):
        return f"{said}; it has {', '.join(str(case) for case in cases[:5])}"
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")):
        return (
            f"{said}; it holds a checkpoint, for which `reconcile inspect {folder} "
            "--write-toml my-case.toml` writes one"
        )
    return f"{said}, or an embedded case: {', '.join(case_names())}"


DERIVED = "derived:"
"""Start of a checkpoint's name that an installed package makes on first use."""


def checkpoint(place: Path, base: Path) -> Path:
    """Directory of the checkpoint that a case names: a path from ``base``, or ``derived:NAME``.

    Raises:
        ConfigError: an unknown derived checkpoint.
        ReconcileError: whatever making it raises.
    """
    text = str(place)
    if not text.startswith(DERIVED):
        return base / place
    return cast(Callable[[], Path], _load("checkpoints", text.removeprefix(DERIVED)))()


def _package_folder(kind: str, name: str) -> Path:
    return Path(_load(kind, name).__file__).parent
