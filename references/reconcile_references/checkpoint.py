"""Checkpoint files: safetensors and config.json, checked; never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from reconcile.exceptions import CheckpointError
from reconcile.layout import LayoutConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(path: Path) -> dict[str, Any]:
    """The content of ``config.json``."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a local checkpoint directory, found none")
    return _read_json(path / "config.json")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory, from one file or from the shards of its index.

    Raises:
        CheckpointError: no safetensors, a shard that is missing or truncated, or an index that
            does not list exactly what its shards hold.
    """
    index, single = path / INDEX, path / SINGLE
    if not index.exists():
        return _read_safetensors(single)
    if single.exists():
        raise CheckpointError(f"{path}: expected {SINGLE} or {INDEX}, found both; remove one")
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise CheckpointError(f"{index}: expected a weight_map of tensor name to shard file")
    tensors: dict[str, Tensor] = {}
    found: set[tuple[str, str]] = set()
    for shard in sorted(set(listed.values())):
        held = _read_safetensors(_beside(index, shard))
        tensors |= held
        found |= {(name, shard) for name in held}
    missing, extra = set(listed.items()) - found, found - set(listed.items())
    if missing or extra:
        raise CheckpointError(
            f"{index}: the shards do not hold what the index lists; "
            f"{names('missing', map(_placed, missing))}; {names('not listed', map(_placed, extra))}"
        )
    return tensors


def checkpoint_hash(path: Path, rule: str | None = None, layout: LayoutConfig | None = None) -> str:
    """sha256 over the names and bytes of every file that says what the weights are.

    ``rule``, a load rule that changes them, and ``layout``, which says how to read them, count as
    well.
    """
    digest = hashlib.sha256(b"" if rule is None else f"load rule {rule}".encode())
    if layout is not None:
        digest.update(repr(replace(layout, config=None)).encode())
    folder = layout.config if layout and layout.config else path
    declared = [folder / "config.json", *path.glob("hf_quant_config.json")]
    for file in sorted([*declared, *path.glob("*.safetensors"), *path.glob("*.gguf")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def names(label: str, items: Iterable[str], limit: int = 5) -> str:
    """``label: a, b, ... (n in all)`` for an error message.

    >>> names("missing", ["b", "a"])
    'missing (2): a, b'
    >>> names("unused", [])
    'unused: none'
    """
    ordered = sorted(items)
    if not ordered:
        return f"{label}: none"
    more = ", ..." if len(ordered) > limit else ""
    return f"{label} ({len(ordered)}): {', '.join(ordered[:limit])}{more}"


def _beside(index: Path, shard: str) -> Path:
    """The file of a shard, which lies in the directory of the index."""
    if shard != Path(shard).name:
        raise CheckpointError(f"{index}: a shard must lie beside it, got {shard!r}")
    return index.parent / shard


def _placed(entry: tuple[str, str]) -> str:
    return f"{entry[0]} in {entry[1]}"


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        pickles = sorted(item.name for item in file.parent.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle and is not read: convert it" if pickles else ""
        raise CheckpointError(f"{file}: expected a safetensors file, found none{hint}")
    try:
        with ExitStack() as stack:
            opened = stack.enter_context(safe_open(str(file), framework="pt"))
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: truncated or damaged safetensors: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: not found") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return body
