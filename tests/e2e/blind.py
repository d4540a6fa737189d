"""A reader's trial: ``python tests/e2e/blind.py FOLDER SEED``.

Draws ten mutants that must FAIL from tests/mutants, runs each, and writes its report without any
name that could give the fault away: FOLDER/0 ... FOLDER/9. Read those, write down op, elements
and cause, and only then open FOLDER/key.json. What came of it is in docs/report.md.
"""

import importlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

from reconcile.selftest import CaseTrial, OpTrial, Seen
from reconcile.selftest.suite import default_folder, load_suite

FILES = {
    "html": "report.html",
    "json": "report.json",
    "markdown": "summary.md",
    "terminal": "terminal.txt",
}


def drawn(seed):
    """Seven faults of single linears, three of the model."""
    mutants = [m for m in load_suite(default_folder()).mutants if m.exit_code == 1 and m.op]
    chance = random.Random(seed)
    chosen = []
    for kind, count in ((OpTrial, 7), (CaseTrial, 3)):
        chosen += chance.sample([m for m in mutants if isinstance(m.trial, kind)], count)
    chance.shuffle(chosen)
    return chosen


def report_of(mutant):
    """The report of the mutant's run."""
    reports = []
    plain = Seen.of
    Seen.of = classmethod(lambda cls, report: reports.append(report) or plain(report))
    try:
        mutant.trial.run(faulty=True)
    finally:
        Seen.of = plain
    return reports[-1]


def nameless(report):
    """The report without the names of kernel and case."""
    rows = tuple(replace(row, kernel="kernel", engine="engine") for row in report.rows)
    kept = [text for text in report.notices if "kernel" not in text and "emulated" not in text]
    return replace(
        report, case="a fault", rows=rows, provenance=(), command="", notices=tuple(kept)
    )


def main(folder, seed):
    key = []
    for number, mutant in enumerate(drawn(int(seed))):
        place = Path(folder) / str(number)
        place.mkdir(parents=True, exist_ok=True)
        report = nameless(report_of(mutant))
        for name, file in FILES.items():
            text = importlib.import_module(f"reconcile_reports.{name}").render(report)
            (place / file).write_text(text, encoding="utf-8")
        causes = [getattr(cause, "name", cause) for cause in mutant.causes]
        key.append(
            {
                "number": number,
                "mutant": mutant.id,
                "patch": mutant.patch,
                "op": mutant.op,
                "causes": causes,
                "reasons": list(mutant.reasons),
            }
        )
    (Path(folder) / "key.json").write_text(json.dumps(key, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
