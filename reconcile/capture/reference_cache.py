"""Reference traces kept on disk, under a key of everything that they depend on.

The key holds the hash of the checkpoint's files, the token ids, the options of the case that the
reference sees, the contract, the source of every installed package of formats, models and of this
engine, the versions of what computes, and the settings that decide about bits. So a trace is found
only where a fresh one would be equal, and nothing is ever invalidated: another key is another
folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from functools import cache
from pathlib import Path

from reconcile import registry
from reconcile.capture.plan import Plan
from reconcile.capture.provenance import processor, settings, versions
from reconcile.exceptions import TraceError
from reconcile.plan_record import record_to_facts
from reconcile.tracing.trace import Trace

_OF_CANDIDATE = ("candidate", "kernel", "engine", "not_run", "levels", "limits", "gate")
"""Parts of a plan that only the candidate and the gate see."""
_SOURCES = (".py", ".cpp", ".h", ".cu")


def reference_key(plan: Plan) -> str:
    """Hex sha256 of everything that the reference's trace of ``plan`` depends on."""
    record = record_to_facts(plan.record())
    parts = {
        "plan": {name: value for name, value in record.items() if name not in _OF_CANDIDATE},
        "checkpoint": plan.checkpoint.sha256,
        "prompts": plan.prompts,
        "model": repr(plan.case.model),
        "seed": plan.case.seed,
        "sources": {name: _source_hash(name) for name in sorted(registry.packages())},
        "versions": versions(),
        "settings": settings(),
        "processor": processor(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def load(folder: Path, plan: Plan) -> Trace | None:
    """The kept trace of ``plan``; None where there is none, or it is damaged."""
    try:
        return Trace.load(folder / reference_key(plan))
    except TraceError:
        return None


def save(folder: Path, plan: Plan, trace: Trace) -> None:
    """Keep a trace; where two processes keep the same one, the first stays."""
    place = folder / reference_key(plan)
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    trace.save(partial)
    try:
        partial.rename(place)
    except OSError:  # there is one by now
        shutil.rmtree(partial, ignore_errors=True)


@cache
def _source_hash(package: str) -> str:
    """Over the names and bytes of a package's sources."""
    found = importlib.util.find_spec(package)
    digest = hashlib.sha256()
    for root in (found.submodule_search_locations or ()) if found else ():
        for file in sorted(Path(root).rglob("*")):
            if file.suffix in _SOURCES:
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
