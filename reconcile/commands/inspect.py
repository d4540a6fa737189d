"""``reconcile inspect``: format and layout of every tensor of a checkpoint, with the evidence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile import registry
from reconcile.capture.threads import few_threads
from reconcile.commands.common import command, path_argument
from reconcile.exceptions import ConfigError
from reconcile.tracing.trace import write_atomically


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(
        commands,
        "inspect",
        _inspect,
        "format and layout of every tensor: declared, found, and where they disagree",
    )
    parser.epilog = (
        "Exit codes: 0 every layout is proved, or declared and confirmed by the bytes; 2 something "
        "is ambiguous, unexplained or contradicted; 3 bad input."
    )
    parser.add_argument("checkpoint", type=path_argument, metavar="CHECKPOINT")
    parser.add_argument("--config", type=path_argument, help="config.json or its directory")
    parser.add_argument("--twin", type=path_argument, help="the same weights, dense")
    parser.add_argument("--prompts", type=path_argument, help="JSON list of texts or token ids")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write every number")
    parser.add_argument(
        "--write-toml", type=path_argument, metavar="FILE", help="write a case for reconcile run"
    )
    parser.add_argument(
        "--write-doc", type=path_argument, metavar="FILE", help="write the format page"
    )


def _inspect(options: argparse.Namespace) -> int:
    with few_threads(0):
        found = registry.inspector().inspect(
            options.checkpoint, config=options.config, twin=options.twin, prompts=options.prompts
        )
    print(found.text(), end="")
    if options.json:
        _write(options.json, found.json())
    if options.write_doc:
        _write(options.write_doc, found.page())
    if options.write_toml:
        _write(options.write_toml, found.toml(options.write_toml))
    return found.exit_code


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    print(f"written: {path}")
