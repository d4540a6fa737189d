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
    ignored: tuple[str, ...]
    """Modules that stay dense (``modules_to_not_convert``)."""

    def is_quantized(self, module: str) -> bool:
        """Whether the linear at this path is stored in the format.

        An entry of ``ignored`` names a module by its whole path, by its last components, or a
        parent of it.
        """
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
    index = path / INDEX
    if not index.exists():
        return _read_shards(path, [SINGLE])
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{index}: expected a weight_map of tensor name to shard file")
    tensors = _read_shards(path, sorted(set(listed.values())))
    missing, extra = sorted(set(listed) - set(tensors)), sorted(set(tensors) - set(listed))
    if missing or extra:
        raise CheckpointError(
            f"{index}: the shards do not hold what the index lists; {names('missing', missing)}; "
            f"{names('not listed', extra)}"
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
    ``autobitlinear`` multiplies.
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
        name = _bitnet_format(str(declared.get("linear_class", "bitlinear")), where)
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
    return Scheme(known[name], tuple(declared.get("modules_to_not_convert") or ()))


def _bitnet_format(linear_class: str, where: Path) -> str:
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


def _read_shards(path: Path, shards: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        file = path / shard
        if file.parent != path:
            raise CheckpointError(f"{path / INDEX}: a shard must lie beside it, got {shard!r}")
        for name, tensor in _read_safetensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: {name} is in two shards")
            tensors[name] = tensor
    return tensors


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    if not file.exists():
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
