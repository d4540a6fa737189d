"""Finding a suite and loading its files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import reconcile
from reconcile.exceptions import ConfigError, nearest
from reconcile.selftest.schema import Mutant, Variant

PACKAGE = "reconcile_mutants"
"""Name under which the files of a suite import each other."""
SUBSETS = ("quick", "full")
QUICK_SEEDS = 2
"""Seeds of each clean variant in the subset ``quick``."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The mutants and clean variants of a folder."""

    folder: Path
    mutants: tuple[Mutant, ...]
    variants: tuple[Variant, ...]

    def select(self, subset: str, only: str) -> Suite:
        """What a subset and a glob over ids leave; ConfigError where that is nothing."""
        if subset not in SUBSETS:
            raise ConfigError(f"--subset {subset!r}: {nearest(subset, SUBSETS)}")
        mutants = [m for m in self.mutants if subset == "full" or m.quick]
        mutants = [m for m in mutants if fnmatchcase(m.id, only)]
        variants = [v for v in self.variants if fnmatchcase(v.id, only)]
        if not mutants and not variants:
            known = [m.id for m in self.mutants] + [v.id for v in self.variants]
            raise ConfigError(
                f"--only {only!r} matches nothing: "
                f"{nearest(only, known, 'a run without --only names all')}"
            )
        return Suite(self.folder, tuple(mutants), tuple(variants))


def default_folder() -> Path:
    """``tests/mutants`` of the source checkout; ConfigError for an installed package."""
    folder = Path(reconcile.__file__).resolve().parents[1] / "tests" / "mutants"
    if not folder.is_dir():
        raise ConfigError(
            f"the mutation suite is part of a source checkout and is not installed: no {folder}; "
            "clone the repository, or name a folder with --suite"
        )
    return folder


def load_suite(folder: Path) -> Suite:
    """Every ``MUTANTS`` and ``VARIANTS`` of the Python files of a folder.

    The files import each other as ``reconcile_mutants.<file>``; a folder needs no ``__init__``.
    The files of a subfolder, such as ``blind``, are a suite of their own.

    Raises:
        ConfigError: nothing is there, or two items have the same id.
    """
    open_package(default_folder() if _is_blind(folder) else folder)
    modules = [_load(file) for file in sorted(folder.glob("*.py")) if _is_part(file)]
    mutants: tuple[Mutant, ...] = _collected(modules, "MUTANTS")
    variants: tuple[Variant, ...] = _collected(modules, "VARIANTS")
    if not mutants and not variants:
        raise ConfigError(f"{folder}: no file has MUTANTS or VARIANTS: nothing would be tested")
    _require_unique([m.id for m in mutants] + [v.id for v in variants], folder)
    return Suite(folder, mutants, variants)


def open_package(folder: Path) -> None:
    """Make ``reconcile_mutants`` importable from the folder."""
    package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
    package.__path__ = [str(folder)]


def _collected(modules: Iterable[ModuleType], name: str) -> tuple[Any, ...]:
    return tuple(item for module in modules for item in getattr(module, name, ()))


def _is_part(file: Path) -> bool:
    return not file.name.startswith(("test_", "conftest", "_"))


def _load(file: Path) -> ModuleType:
    if not _is_blind(file.parent):
        return importlib.import_module(f"{PACKAGE}.{file.stem}")
    name = f"{PACKAGE}.{file.parent.name}"
    package = sys.modules.setdefault(name, ModuleType(name))
    package.__path__ = [str(file.parent)]
    return importlib.import_module(f"{name}.{file.stem}")


def _is_blind(folder: Path) -> bool:
    """Whether it is a subfolder with a suite of its own, which may use the main suite's files."""
    return folder.name.startswith("blind")


def _require_unique(ids: Iterable[str], folder: Path) -> None:
    known: set[str] = set()
    for name in ids:
        if name in known:
            raise ConfigError(f"{folder}: two items are called {name!r}")
        known.add(name)
