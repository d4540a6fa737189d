"""A model's library as its source files say, whatever was replaced in this process.

An engine that patches a library patches it for the reference, too, from then on. What the
reference computed before is kept; a mistake must be tried on the library as it was then.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

OURS = ("torch", "reconcile", "reconcile_references", "builtins", "__main__")
"""Packages whose modules are not looked at."""


@contextmanager
def pristine(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Undo, while the block runs, what replaced functions and methods of the model's library.

    Gives the paths of what was replaced. A module without a source file stays as it is.
    """
    undone = []
    with ExitStack() as stack:
        for name in sorted({type(module).__module__ for module in model.modules()}):
            live, fresh = sys.modules.get(name), _again(name)
            if live is None or fresh is None:
                continue
            for holder, attribute, right in _replaced(live, fresh):
                stack.callback(setattr, holder, attribute, getattr(holder, attribute))
                setattr(holder, attribute, right)
                undone.append(f"{name.rpartition('.')[2]}.{attribute}")
        yield tuple(undone)


def _again(name: str) -> ModuleType | None:
    """The module, run anew from its file and known to nobody else."""
    if name.partition(".")[0] in OURS:
        return None
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None or not spec.has_location:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception:  # noqa: BLE001 - a module that cannot run twice is left alone
        return None
    return module


def _replaced(live: ModuleType, fresh: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Holder, attribute and right value of each function that is not what the source says."""
    for name, right in vars(fresh).items():
        here = vars(live).get(name)
        if isinstance(right, FunctionType) and not _same(here, right):
            yield live, name, right
        if isinstance(right, type) and isinstance(here, type) and right.__module__ == live.__name__:
            for method, function in vars(right).items():
                plain = isinstance(function, FunctionType)
                if plain and not _same(vars(here).get(method), function):
                    yield here, method, function


def _same(here: object, right: FunctionType) -> bool:
    if here is right:
        return True
    if not isinstance(here, FunctionType):
        return False
    return bool(inspect.unwrap(here).__code__ == inspect.unwrap(right).__code__)
