"""What several commands share: their parsers, the case they name, the progress bar."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reconcile import registry
from reconcile.capture.plan import Progress
from reconcile.case import Case, load_case
from reconcile.session import override


def command(
    commands: Any,  # noqa: ANN401 - argparse's private type
    name: str,
    handler: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    """A parser of one command, with what every command has."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks"
    )
    parser.set_defaults(handler=handler)
    return parser


def config_help() -> str:
    """What CONFIG may be: a file, or the name of an embedded case where there is no such file."""
    return (
        "case file (TOML); a name that is no file is looked up among the embedded cases: "
        f"{', '.join(registry.case_names())}"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Options that put something in place of the case's own."""
    parser.add_argument(
        "--kernel",
        help="kernel in place of the case's own: path/to/file.py:FUNCTION, package.module:ATTR, or "
        "a name out of `reconcile kernels`",
    )
    parser.add_argument("--engine", help="engine, or hardware | emulated | vendor | auto")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only modules that match")


def add_choices(parser: argparse.ArgumentParser) -> None:
    """What else may be put in place of the case's own where a case is judged."""
    parser.add_argument("--level", help="levels to run, e.g. op,module,model")
    parser.add_argument("--seed", type=seed_argument, help="seed of the random perturbations")


def path_argument(text: str) -> Path:
    """A path of an option; an empty one is a mistake, not the working directory."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("expected a path")
    return Path(text)


def seed_argument(text: str) -> int:
    """A seed that torch's generators take."""
    if not text.isdigit() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError("expected a number in [0, 2^31)")
    return int(text)


def words(text: str) -> list[str]:
    """Parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def chosen_case(options: argparse.Namespace) -> Case:
    """The case that the options name, with their overrides."""
    return override(
        load_case(registry.case_file(options.config)),
        kernel=options.kernel,
        engine=options.engine,
        levels=words(options.level) if getattr(options, "level", None) is not None else None,
        seed=getattr(options, "seed", None),
    )


class progress_bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, case: Case) -> None:
        self._bar = tqdm(
            disable=not sys.stderr.isatty() or "CI" in os.environ,
            desc=case.case.name,
            unit="pass",
            leave=False,
        )

    def __enter__(self) -> Progress:
        """Give the function that is told what comes next."""
        return self._step

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._bar.close()

    def _step(self, what: str) -> None:
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update()
