"""Stored tensors as views of memory-mapped files: safetensors and GGUF; never pickle.

Nothing is read here but headers. A `Stored` holds its bytes as a read-only view of the file, which
costs no private memory until somebody copies from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reconcile.exceptions import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""torch dtype of each safetensors name."""
CODES = ("U8", "I8", "I32", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2")
"""Dtypes of codes; a matrix in one of them is a quantised weight."""
_I2_S = 36
"""GGML type of bitnet.cpp; llama.cpp has retired the number."""
CHUNK = 1 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    name: str
    dtype: str
    """safetensors' name of the dtype, or GGML's for a type that is not taken apart."""
    shape: tuple[int, ...]
    """Shape of the elements; of packed codes that of the bytes."""
    data: np.ndarray
    """Bytes, uint8 of any shape: a view of the mapped file."""
    file: Path
    declared: str = ""
    """What the container says of the layout, e.g. ``TQ2_0``."""
    logical: tuple[int, ...] | None = None
    """Logical shape that the container states for packed codes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.data.size)

    def chunks(self) -> Iterator[np.ndarray]:
        """The bytes in order, flat, `CHUNK` at a time or a row more."""
        rows = self.data.reshape(1, -1) if self.data.ndim < 2 else self.data
        if rows.shape[0] == 1:
            flat = rows.reshape(-1)
            yield from (flat[i : i + CHUNK] for i in range(0, flat.size, CHUNK))
            return
        step = max(1, CHUNK // max(1, rows[0].size))
        for start in range(0, len(rows), step):
            yield np.ascontiguousarray(rows[start : start + step]).reshape(-1)

    @property
    def byte_shape(self) -> tuple[int, int]:
        """Rows, and bytes of a row."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return rows, self.nbytes // max(1, rows)

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """A copy of some rows, uint8 [rows, bytes of a row]."""
        rows, width = self.byte_shape
        held = self.data if self.data.ndim > 1 else self.data.reshape(rows, width)
        return np.array(held[index]).reshape(-1, width)

    def tensor(self) -> Tensor:
        """A copy in private memory, in the stored dtype and shape."""
        flat = np.array(self.data, copy=True).reshape(-1)
        if self.dtype not in DTYPES:
            return torch.from_numpy(flat)
        return torch.from_numpy(flat).view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Every tensor of a checkpoint, and what its container says."""

    path: Path
    folder: Path
    """Where config.json would be."""
    tensors: Mapping[str, Stored]
    notes: tuple[str, ...] = ()
    """What is odd about the files themselves."""
    container: str = "safetensors"


def open_source(path: Path) -> Source:
    """Open a checkpoint directory, one safetensors file or one GGUF file.

    Raises:
        CheckpointError: nothing readable is there, or a file is damaged.
    """
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint directory or file, found none")
    files = sorted(path.glob("*.safetensors"))
    ggufs = sorted(path.glob("*.gguf"))
    if files and ggufs:
        raise CheckpointError(f"{path}: holds safetensors and GGUF; name one file")
    if len(ggufs) == 1:
        return _open_file(ggufs[0])
    if ggufs:
        raise CheckpointError(f"{path}: expected one GGUF file, found {len(ggufs)}; name one")
    if not files:
        raise CheckpointError(
            f"{path}: expected *.safetensors or *.gguf, found none{_pickles(path)}"
        )
    tensors: dict[str, Stored] = {}
    for file in files:
        for stored in _safetensors(file):
            if stored.name in tensors:
                other = tensors[stored.name].file.name
                raise CheckpointError(f"{path}: {stored.name} is in {other} and in {file.name}")
            tensors[stored.name] = stored
    return Source(path=path, folder=path, tensors=tensors, notes=_index_notes(path, tensors))


def _open_file(path: Path) -> Source:
    if path.suffix == ".gguf":
        held = {stored.name: stored for stored in _gguf(path)}
        return Source(path=path, folder=path.parent, tensors=held, container="GGUF")
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: expected .safetensors or .gguf; pickles are not read")
    held = {stored.name: stored for stored in _safetensors(path)}
    return Source(path=path, folder=path.parent, tensors=held)


def _pickles(path: Path) -> str:
    found = sorted(f.name for end in ("*.bin", "*.pt", "*.pth") for f in path.glob(end))
    return f"; {found[0]} is a pickle and is not read: convert it" if found else ""


def _index_notes(path: Path, tensors: Mapping[str, Stored]) -> tuple[str, ...]:
    """Where the index and its shards disagree."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return ()
    try:
        listed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return (f"{index.name}: unreadable: {error}",)
    missing = sorted(set(listed) - set(tensors))
    extra = sorted(set(tensors) - set(listed))
    moved = sorted(n for n in set(listed) & set(tensors) if tensors[n].file.name != listed[n])
    found = (("lists what no shard holds", missing), ("does not list", extra), ("misplaces", moved))
    return tuple(
        f"{index.name} {what}: {', '.join(names[:3])} ({len(names)} in all)"
        for what, names in found
        if names
    )


def _safetensors(file: Path) -> Iterator[Stored]:
    """The library checks the header; the offsets are read from it again for the views."""
    try:
        with safe_open(str(file), framework="np"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{file}: truncated or damaged safetensors: {error}") from error
    mapped = _map(file)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
        yield Stored(
            name=name,
            dtype=str(entry["dtype"]),
            shape=tuple(int(size) for size in entry["shape"]),
            data=mapped[start:end],
            file=file,
        )


def _map(file: Path) -> np.ndarray:
    if not file.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)


def _gguf(file: Path) -> Iterator[Stored]:
    """Tensors by the ``gguf`` package; the blocks of ternary types are taken apart.

    The package knows no I2_S, so that it is asked for the table of tensors only.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"{file}: reading GGUF needs the gguf package: pip install 'reconcile-numerics[gguf]'"
        ) from None

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Leaves out the package's own views, which refuse types that it does not know."""

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            self.table = [(start_offs, field) for field in fields]

    try:
        reader = Reader(file)
        table = [_gguf_entry(start, field) for start, field in reader.table]
    except (OSError, ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: truncated or damaged GGUF: {error}") from error
    mapped = _map(file)
    names = {member.value: member.name for member in gguf.GGMLQuantizationType}
    sizes = {member.name: size for member, size in gguf.GGML_QUANT_SIZES.items()}
    for name, shape, kind, start in table:
        count = int(np.prod(shape, dtype=np.int64))
        label = "I2_S" if kind == _I2_S else names.get(kind, f"type {kind}")
        if label not in sizes and label != "I2_S":
            raise CheckpointError(f"{file}: {name} is of GGML type {kind}, which is not known")
        block, size = sizes.get(label, (4, 1))
        end = start + count // block * size + (32 if label == "I2_S" else 0)
        if count % block or end > mapped.size:
            raise CheckpointError(f"{file}: {name} {list(shape)} runs beyond the end of the file")
        yield from _gguf_parts(file, name, shape, label, mapped[start:end], size)


def _gguf_entry(start: int, field: Any) -> tuple[str, tuple[int, ...], int, int]:  # noqa: ANN401
    _, name, _, dims, kind, offset = field.parts
    shape = tuple(int(size) for size in reversed(dims.tolist()))
    return str(bytes(name), encoding="utf-8"), shape, int(kind[0]), start + int(offset[0])


def _gguf_parts(
    file: Path, name: str, shape: tuple[int, ...], label: str, data: np.ndarray, size: int
) -> Iterator[Stored]:
    """One GGUF tensor as codes and, behind ``:scale``, its scales."""
    if label == "I2_S":
        count = int(np.prod(shape, dtype=np.int64))
        codes, scale = data[: count // 4], data[count // 4 : count // 4 + 4]
        whole = len(shape) == 2 and shape[1] % 4 == 0
        yield Stored(
            name=name,
            dtype="U8",
            shape=(shape[0], shape[1] // 4) if whole else (1, codes.size),
            data=codes,
            file=file,
            declared=label,
            logical=shape,
        )
        yield Stored(name=f"{name}:scale", dtype="F32", shape=(1,), data=scale, file=file)
    elif label in ("TQ1_0", "TQ2_0"):
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        blocks = data.reshape(rows, -1, size)
        codes, scales = blocks[:, :, :-2], blocks[:, :, -2:]
        yield Stored(
            name=name,
            dtype="U8",
            shape=(rows, codes.shape[1] * codes.shape[2]),
            data=codes,
            file=file,
            declared=label,
            logical=shape,
        )
        yield Stored(
            name=f"{name}:scale", dtype="F16", shape=scales.shape[:2], data=scales, file=file
        )
    else:
        yield Stored(name=name, dtype=label, shape=shape, data=data, file=file, declared=label)
