"""The run directory: where a report is written and read."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from reconcile import registry
from reconcile.commands.common import path_argument, words
from reconcile.exceptions import ConfigError, nearest
from reconcile.gate import snapshots
from reconcile.gate.snapshots import Album
from reconcile.report import Report
from reconcile.tracing.trace import write_atomically

FORMATS = ("html", "json", "junit", "markdown")
"""What a run directory holds by default."""


def add_output(parser: argparse.ArgumentParser) -> None:
    """Options of a command that writes a run directory."""
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="DIR",
        help="run directory (default .reconcile/runs/...); a report of an earlier run goes first",
    )
    parser.add_argument("--format", default=",".join(FORMATS), help="html,json,junit,markdown")


def check_output(options: argparse.Namespace) -> None:
    """ConfigError for formats or a place that nothing can be written to: said before the work."""
    chosen_formats(options.format)
    place = options.out or Path(".reconcile") / "runs"
    there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError(f"cannot write to {place}: {there} is a file; give --out DIR")
    if not os.access(there, os.W_OK):
        raise ConfigError(f"cannot write to {place}: {there} is not writable; give --out DIR")


def forget(directory: Path) -> None:
    """Take away the report of an earlier run in ``directory``, the one that gates read first.

    A page of that run beside the report of this one would tell another verdict, and a run that
    does not end would leave the old one to be read as its own. Kept failing calls stay.
    """
    if not _holds_a_run(directory):
        return
    for name in ("json", *(name for name in FORMATS if name != "json")):
        if (filename := registry.reporter(name)[1]) is not None:
            (directory / filename).unlink(missing_ok=True)


def _holds_a_run(directory: Path) -> bool:
    """Whether its ``report.json`` is ours: files of other tools are not touched."""
    try:
        body = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and {"schema", "verdict", "rows"} <= body.keys()


def chosen_formats(text: str) -> tuple[str, ...]:
    """Names of renderers out of `FORMATS`; others are bad input."""
    chosen = tuple(words(text))
    for part in chosen:
        if part not in FORMATS:
            raise ConfigError(f"--format {part!r}: {nearest(part, FORMATS)}")
    return chosen


def finish(report: Report, options: argparse.Namespace, album: Album | None = None) -> int:
    """Write the run directory, print the verdict, return the exit code."""
    directory = options.out or run_directory(report.case)
    forget(directory)
    if album is not None:
        snapshots.save(album.kept, directory / "snapshots", report.created)
    written = write_report(report, directory, chosen_formats(options.format))
    if options.out is None:
        _point_latest(directory)
    render, _ = registry.reporter("terminal")
    main_file = next((path for path in written if path.suffix == ".html"), directory)
    print(f"{render(report).rstrip()}\nreport: {main_file}", flush=True)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _tell_github(report)
    return report.exit_code


def _tell_github(report: Report) -> None:
    """Annotations, and the summary of the step."""
    print(registry.reporter("github")[0](report), end="", flush=True)
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(registry.reporter("markdown")[0](report))


def run_directory(case: str) -> Path:
    """A new directory under ``.reconcile/runs``, named by time and case."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", case).strip(".-") or "case"
    root = Path(".reconcile") / "runs"
    for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
        directory = root / f"{stamp}-{safe}{suffix}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write {directory}: {error}; give --out DIR") from error
        return directory
    raise ConfigError(f"{root} has too many runs of this second; give --out DIR")


def _point_latest(directory: Path) -> None:
    latest = directory.parent.parent / "latest"
    partial = latest.with_name(f".latest.{os.getpid()}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(directory.relative_to(latest.parent))
    partial.replace(latest)


def write_report(report: Report, directory: Path, formats: Sequence[str]) -> list[Path]:
    """Render to files; ``report.json`` is always written, and last."""
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in [*(f for f in formats if f != "json"), "json"]:
            render, filename = registry.reporter(name)
            if filename is not None:
                path = directory / filename
                write_atomically(path, render(report))
                written.append(path)
    except OSError as error:
        raise ConfigError(f"cannot write the report to {directory}: {error}") from error
    return written


def load_report(run_path: Path) -> Report:
    """The report of a run directory or of a ``report.json``."""
    path = run_path if run_path.is_file() else run_path / "report.json"
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such report; give a run directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: unreadable, cut off or no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: expected a report, got {type(body).__name__}")
    try:
        return Report.from_dict(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: not a report of this version of reconcile: {_first(error)}; read it with the "
            "version that wrote it, or run again"
        ) from error


def _first(error: Exception) -> str:
    """One line about a report that does not fit; of several findings the first."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
