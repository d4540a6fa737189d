"""The interface of a checkpoint inspector; entry point group ``reconcile.inspectors``."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Inspected(Protocol):
    """What was found about a checkpoint."""

    @property
    def exit_code(self) -> int:
        """0: everything is explained; 2: something is ambiguous or unexplained."""

    def text(self) -> str:
        """For a terminal."""

    def json(self) -> str:
        """Every number, one JSON object."""

    def toml(self, place: Path) -> str:
        """A case file for `reconcile run`, to lie at ``place``."""

    def page(self) -> str:
        """The page that documents the format, Markdown."""


class Inspector(Protocol):
    """Reads checkpoints that nobody has documented."""

    def inspect(
        self,
        path: Path,
        *,
        config: Path | None = None,
        twin: Path | None = None,
        prompts: Path | None = None,
    ) -> Inspected:
        """Find the layout of every tensor; ReconcileError for what cannot be read."""
