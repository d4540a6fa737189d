"""Running a case again and again while its kernel is edited.

What takes long is done once: the imports, the checkpoint and the reference's trace
(`capture.reference_cache`). Every check then runs in a child process that is forked from this
one before any kernel was imported. So a check always sees the files as they are now, native code
is built and loaded anew, and a kernel that crashes or hangs ends its check and nothing else.

`Checker.check` gives events as they come: the sources of the kernel, the verdict on level ``op``,
then that on all levels of the case.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from reconcile.capture.provenance import kernel_sources
from reconcile.case import Case
from reconcile.exceptions import ReconcileError
from reconcile.gate.accepted import keys
from reconcile.kernel import FunctionKernel, Kernel
from reconcile.native import cache_directory
from reconcile.report import Report, Verdict
from reconcile.session import Session

_POLL = 0.1
"""Seconds between two looks at the child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a check found out."""

    seconds: float
    """Since the check began."""
    report: Report | None = None
    """The verdict on the levels that were run so far."""
    final: bool = False
    """Whether no more will come."""
    sources: tuple[Path, ...] = ()
    """Files that the kernels are written in."""
    built: float | None = None
    """Seconds that building native code took."""
    error: str = ""
    """Why there is no report: a source that does not compile, a bad case, a crash."""


class Checker:
    """Checks one case in child processes."""

    def __init__(self, case: Case | Path | str | None, *, only: str = "*") -> None:
        """Read the case and its checkpoint.

        Args:
            case: a case, a file, or an embedded one by name.
            only: glob that restricts the candidates' modules.

        Raises:
            ReconcileError: the case or the checkpoint cannot be read.
        """
        torch.set_num_threads(1)  # a forked child must not wait for threads that it does not have
        self.session = Session(case, reference_folder=cache_directory() / "references")
        self.only = only
        self.session.checkpoint()

    @property
    def case(self) -> Case:
        """The case as it was read."""
        return self.session.case

    def check(self, levels: tuple[str, ...] = ()) -> Iterator[Event]:
        """Run the case in a child; events end with a final one.

        Closing the iterator ends the child.

        Args:
            levels: levels to run; none: those of the case.
        """
        started = time.perf_counter()
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(self, levels, sender), daemon=True)
        child.start()
        sender.close()
        try:
            yield from _events(receiver, child, started)
        finally:
            if child.is_alive():
                child.kill()
            child.join()


def _events(receiver: Connection, child: Any, started: float) -> Iterator[Event]:  # noqa: ANN401
    """What the child sends, and why it ended where it did not say so."""
    while True:
        seconds = time.perf_counter() - started
        try:
            if not receiver.poll(_POLL):
                yield Event(seconds=seconds)  # a chance to close
                continue
            event = _decoded(receiver.recv(), seconds)
        except (EOFError, OSError):
            child.join()
            yield Event(seconds=seconds, final=True, error=_ended(child.exitcode))
            return
        yield event
        if event.final:
            return


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the check was ended by {signal.Signals(-code).name}: the kernel crashed"
    return f"the check ended with exit code {code}: the kernel ended the process"


def _decoded(message: dict[str, Any], seconds: float) -> Event:
    body = message.pop("report", None)
    report = None if body is None else Report.from_dict(json.loads(body))
    sources = tuple(map(Path, message.pop("sources", ())))
    return Event(seconds=seconds, report=report, sources=sources, **message)


# --------------------------------------------------------------------------- in the child


def _child(checker: Checker, levels: tuple[str, ...], sender: Connection) -> None:
    """Send the events of one check; nothing of it outlives the process."""
    os.setpgrp()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # the screen is the parent's
        os.dup2(silence, stream)
    try:
        for message in _messages(checker.session, checker.only, levels):
            sender.send(message)
    except ReconcileError as error:
        sender.send({"final": True, "error": str(error)})
    except Exception as error:  # noqa: BLE001 - shown on the screen, the parent lives on
        sender.send({"final": True, "error": f"internal error: {type(error).__name__}: {error}"})
    sender.close()


def _messages(session: Session, only: str, levels: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    kernels = [plan.kernel for plan in session.plans(session.case, only)]
    yield {"sources": [str(file) for kernel in kernels for file in kernel_sources(kernel)]}
    started = time.perf_counter()
    built = [_build(kernel) for kernel in kernels]
    if any(built):
        yield {"built": time.perf_counter() - started}
    wanted = levels or session.case.levels.run
    if wanted[0] == "op" and len(wanted) > 1:
        report = session.run(levels=("op",), only=only, command="reconcile watch")
        failed = report.verdict is Verdict.FAIL
        yield {"report": json.dumps(report.to_dict()), "final": failed}
        if failed:  # the funnel ends at the first level that fails: that is the one to repair
            return
    report = session.run(levels=wanted, only=only, command="reconcile watch")
    yield {"report": json.dumps(report.to_dict()), "final": True}


def _build(kernel: Kernel) -> bool:
    """Whether native code was built; what does not compile raises BuildError."""
    build = getattr(kernel, "build", None)
    if build is None or isinstance(kernel, FunctionKernel):
        return False
    for engine in kernel.engines:
        if kernel.is_supported(engine):
            build(engine)
    return True


# --------------------------------------------------------------------------- files


def watched_files(case: Case, sources: tuple[Path, ...]) -> tuple[Path, ...]:
    """Files whose change calls for another check: the kernels, the case and what it names."""
    prompts = case.model.prompts and case.base / case.model.prompts
    accepted = case.gate.accepted and case.base / case.gate.accepted
    files = (*sources, case.file, prompts, accepted)
    return tuple(dict.fromkeys(file.resolve() for file in files if file is not None))


def changed_rows(before: Report | None, after: Report) -> list[str]:
    """One line for each row whose verdict or reason is another than in ``before``."""
    if before is None:
        return []
    known = dict(zip(_keys(before), before.rows, strict=True))
    lines = []
    for name, row in zip(_keys(after), after.rows, strict=True):
        old = known.get(name)
        if old is not None and (old.verdict, old.reason) != (row.verdict, row.reason):
            reason = f" {row.reason.value}" if row.reason else ""
            lines.append(f"{old.verdict.value} -> {row.verdict.value}{reason}  {name}")
    return lines


def _keys(report: Report) -> list[str]:
    return keys([replace(row, engine="") for row in report.rows])
