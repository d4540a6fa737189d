"""What the command asks of this package; registered as ``reconcile.inspectors``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from reconcile_references.inspection.case_file import as_toml
from reconcile_references.inspection.page import as_page
from reconcile_references.inspection.record import as_record
from reconcile_references.inspection.run import Inspection, inspect
from reconcile_references.inspection.text import as_text


@dataclass(frozen=True, slots=True)
class Inspected:
    """A finished inspection; satisfies `reconcile.inspection.Inspected`."""

    found: Inspection

    @property
    def exit_code(self) -> int:
        """0: all explained; 2: not all."""
        return self.found.exit_code

    def text(self) -> str:
        """For a terminal."""
        return as_text(self.found)

    def json(self) -> str:
        """Every number, one JSON object."""
        return json.dumps(as_record(self.found), indent=2)

    def toml(self, place: Path) -> str:
        """A case file for `reconcile run`, to lie at ``place``."""
        return as_toml(self.found, place)

    def page(self) -> str:
        """The format page, Markdown."""
        return as_page(self.found)


class CheckpointInspector:
    """Satisfies `reconcile.inspection.Inspector`."""

    def inspect(
        self,
        path: Path,
        *,
        config: Path | None = None,
        twin: Path | None = None,
        prompts: Path | None = None,
    ) -> Inspected:
        """See `run.inspect`."""
        return Inspected(inspect(path, config=config, twin=twin, prompts=prompts))
