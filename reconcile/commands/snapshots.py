"""``reconcile snapshots``: failing calls that were kept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile.commands.common import command
from reconcile.exceptions import ConfigError
from reconcile.gate.snapshots import Facts, read_facts
from reconcile.report import ExitCode


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "snapshots", _snapshots, "list kept failing calls, or remove some")
    parser.add_argument(
        "places",
        type=Path,
        nargs="*",
        metavar="PLACE",
        help="run directories or files (default: all of .reconcile/runs)",
    )
    parser.add_argument("--remove", action="store_true", help="remove what PLACE names")


def _snapshots(options: argparse.Namespace) -> int:
    if options.remove and not options.places:
        raise ConfigError("--remove needs the run directories or files to remove")
    files = _files(options.places or [Path(".reconcile") / "runs"])
    for file in files:
        print(f"{file.stat().st_size / 1024:8.0f} KiB  {file}  {_said(read_facts(file))}")
        if options.remove:
            file.unlink()
    total = f"{len(files)} snapshots"
    print(f"{total} removed" if options.remove else total)
    return ExitCode.PASS


def _files(places: list[Path]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        if not place.exists() and place != Path(".reconcile") / "runs":
            raise ConfigError(f"{place}: no such run directory or snapshot")
        found += [place] if place.is_file() else sorted(place.rglob("snapshots/*.safetensors"))
    return found


def _said(facts: Facts) -> str:
    return f"{facts.tap} {facts.check}, {facts.kernel} on {facts.engine}, {facts.created}"
