"""How a fault is run: through `check_linear`, through a case, or as a canary of the gate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from reconcile import registry
from reconcile.case import Case, load_case
from reconcile.checking.batched import check_batched_linear
from reconcile.checking.linear import check_linear
from reconcile.contract import Contract
from reconcile.exceptions import ReconcileError
from reconcile.kernel import Kernel
from reconcile.report import ExitCode, Report
from reconcile.selftest.schema import Seen, Trial
from reconcile.session import Session
from reconcile.weight import QuantizedWeight

Patch = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which something of the harness or of a library is replaced."""


_TWINS: dict[Hashable, Seen] = {}


def clean_twin(trial: Trial) -> Seen:
    """What is seen of the clean twin; trials that share one run it once."""
    key: Hashable = trial.twin() if isinstance(trial, OpTrial | CaseTrial) else None
    if key is None:
        return trial.run(faulty=False)
    if key not in _TWINS:
        _TWINS[key] = trial.run(faulty=False)
    return _TWINS[key]


def seen(run: Callable[[], Report]) -> Seen:
    """What is seen of a run; refusals and crashes have the exit codes of the command line."""
    try:
        return Seen.of(run())
    except ReconcileError as error:
        return Seen(exit_code=ExitCode.BAD_INPUT, text=str(error))
    except Exception as error:  # noqa: BLE001 - a patched harness may raise anything
        return Seen(exit_code=ExitCode.INTERNAL, text=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTrial:
    """A kernel by itself."""

    faulty: Kernel | Callable[..., Tensor]
    clean: Kernel | Callable[..., Tensor]
    weight: Callable[[], QuantizedWeight | Tensor]
    contract: Contract | None = None
    judged_by: Callable[[Any], Any] | None = None
    """For a faulty reference: what it makes of the weight; the kernel then is ``clean``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `check_linear`, e.g. ``bias`` or ``batch_sizes``."""
    patch: Patch = nullcontext
    """What is replaced while the faulty kernel runs."""

    def run(self, *, faulty: bool) -> Seen:
        """``check_linear`` of the faulty kernel or of its clean twin."""
        weight = self.weight()
        if faulty and self.judged_by is not None:
            weight = self.judged_by(weight)
        kernel = self.faulty if faulty else self.clean
        with self.patch() if faulty else nullcontext():
            return seen(
                lambda: check_linear(kernel, weight, contract=self.contract, **self.options)
            )

    def twin(self) -> Hashable:
        """Equal for trials whose clean twins are the same run."""
        made = self.weight
        if not isinstance(made, functools.partial) or made.keywords or callable(made.args[-1]):
            return None
        options = [
            (name, tuple(value.shape) if isinstance(value, Tensor) else repr(value))
            for name, value in sorted(self.options.items())
        ]
        return (id(self.clean), made.args, repr(self.contract), tuple(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedTrial:
    """A batched kernel by itself."""

    faulty: Callable[..., Tensor]
    clean: Callable[..., Tensor]
    weight: Callable[[], Tensor]
    contract: Contract | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `check_batched_linear`."""

    def run(self, *, faulty: bool) -> Seen:
        """``check_batched_linear`` of the faulty kernel or of its clean twin."""
        kernel = self.faulty if faulty else self.clean
        return seen(
            lambda: check_batched_linear(
                kernel, self.weight(), contract=self.contract, **self.options
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTrial:
    """A kernel in the embedded model; the reference is captured once, and without any patch."""

    faulty: str
    """Kernel, as a case names it."""
    clean: str
    levels: tuple[str, ...] | None = None
    """Levels to run; None: all."""
    only: str = "*"
    patch: Patch = nullcontext
    """What is replaced while the faulty candidate is captured and judged."""
    fresh: bool = False
    """The patch also holds while the checkpoint is read and the reference captured."""
    change: Callable[[Case], Case] | None = None
    """What is other than in the embedded case, e.g. the candidate's dtype; not with ``fresh``."""

    def run(self, *, faulty: bool) -> Seen:
        """The case with the faulty kernel or with its clean twin."""
        if faulty and self.fresh:
            with self.patch():
                return seen(lambda: self._report(self.faulty, _embedded()))
        if not faulty:
            return seen(lambda: self._report(self.clean))
        if self.patch is nullcontext:
            return seen(lambda: self._report(self.faulty))
        clean = seen(lambda: self._report(self.clean))  # captures the reference, unpatched
        if clean.exit_code != ExitCode.PASS:
            return replace(clean, exit_code=ExitCode.INTERNAL)
        with self.patch():
            return seen(lambda: self._report(self.faulty))

    def twin(self) -> Hashable:
        """Equal for trials whose clean twins are the same run."""
        return (self.clean, self.levels, self.only, self.change)

    def _report(self, kernel: str, session: Session | None = None) -> Report:
        session = session or (embedded_session() if self.change is None else _other(self.change))
        return session.run(kernel=kernel, levels=self.levels, only=self.only)


def _embedded() -> Session:
    """The embedded case without its required kernel."""
    case = load_case(registry.embedded_case())
    return Session(replace(case, gate=replace(case.gate, require=())))


embedded_session = functools.cache(_embedded)
"""The same, loaded once per process."""


@functools.cache
def _other(change: Callable[[Case], Case]) -> Session:
    """The embedded case, changed; loaded once per process."""
    return Session(change(embedded_session().case))


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryTrial:
    """A known answer that the harness must give, with and without a fault in the harness.

    The answer of the canary itself is what is judged: ``right`` without the fault; with it,
    anything else is a detection, and is reported as exit code 1.
    """

    canary: Callable[[], Report]
    right: tuple[int, str]
    """Exit code and reason that the canary must give; the reason may be empty."""
    patch: Patch

    def run(self, *, faulty: bool) -> Seen:
        """FAIL where the canary does not sing as it should."""
        with self.patch() if faulty else nullcontext():
            found = seen(self.canary)
        as_it_should = (found.exit_code, found.reason) == self.right
        return replace(found, exit_code=ExitCode.PASS if as_it_should else ExitCode.FAIL)
