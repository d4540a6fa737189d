"""Checkpoint files: safetensors and config.json, checked; never pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from reconcile.exceptions import CheckpointError, nearest
from reconcile.registry import formats
from reconcile.weight import Format

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The declared quantisation of a checkpoint."""

    format: Format
    ignored: tuple[str, ...] | None
    """Modules that stay dense (``modules_to_not_convert``); None: the output head alone."""
    scales_bias: bool = False
    """Whether the scale multiplies the bias also (`AutoBitLinear`)."""

    def is_quantized(self, module: str, head: str | None) -> bool:
        """Whether the linear at this path is stored in the format.

        An entry of ``ignored`` names a module by its whole path, by its last components, or a
        parent of it. ``head`` is the path of the output head.
        """
        if self.ignored is None:
            return module != head
        return not any(
            module == entry or module.startswith(f"{entry}.") or module.endswith(f".{entry}")
            for entry in self.ignored
        )


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


def checkpoint_hash(path: Path) -> str:
    """sha256 over the names and bytes of config.json and every safetensors file."""
    digest = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def read_scheme(config: dict[str, Any], where: Path) -> Scheme:
    """The quantisation that ``config.json`` declares; it is never inferred from tensors.

    ``quant_method`` ``ternary``: ``format`` names a registered format. ``bitnet`` (Hugging
    Face): ``linear_class`` ``bitlinear`` (the default there) divides by the stored scale,
    ``autobitlinear`` multiplies. Without ``modules_to_not_convert`` the output head stays dense,
    as in transformers; with it, only what it lists does.
    """
    declared = config.get("quantization_config")
    if not isinstance(declared, dict):
        raise CheckpointError(
            f"{where / 'config.json'}: no quantization_config: nothing here is quantised, so "
            "there is no kernel to reconcile"
        )
    method = declared.get("quant_method")
    if method == "ternary":
        name = str(declared.get("format"))
    elif method == "bitnet":
        name = _bitnet_format(declared, where)
    else:
        raise CheckpointError(
            f"{where / 'config.json'}: quant_method {method!r} is not supported: "
            f"{nearest(str(method), ['ternary', 'bitnet'])}"
        )
    known = formats()
    if name not in known:
        raise CheckpointError(
            f"{where / 'config.json'}: unknown format {name!r}: {nearest(name, known)}"
        )
    ignored = declared.get("modules_to_not_convert")
    if ignored is not None and not (
        isinstance(ignored, list) and all(isinstance(entry, str) and entry for entry in ignored)
    ):
        raise CheckpointError(
            f"{where / 'config.json'}: modules_to_not_convert: expected a list of module names, "
            f"got {ignored!r}"
        )
    return Scheme(
        known[name],
        None if ignored is None else tuple(ignored),
        scales_bias=method == "bitnet" and known[name].scale_convention == "multiply",
    )


def _bitnet_format(declared: dict[str, Any], where: Path) -> str:
    if declared.get("quantization_mode", "offline") != "offline":
        raise CheckpointError(
            f"{where / 'config.json'}: quantization_mode {declared['quantization_mode']!r}: its "
            "weights are not stored in ternary; expected offline"
        )
    linear_class = str(declared.get("linear_class", "bitlinear"))
    by_class = {"bitlinear": "ternary_hf_divide", "autobitlinear": "ternary_hf"}
    if linear_class not in by_class:
        raise CheckpointError(
            f"{where / 'config.json'}: linear_class {linear_class!r}: "
            f"{nearest(linear_class, by_class)}"
        )
    return by_class[linear_class]


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
