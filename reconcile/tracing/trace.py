"""Traces: the captured tensors of one run, in memory or as a directory of safetensors.

On disk a trace is ``manifest.json`` beside one safetensors shard per pass. Shards are written
as the tensors arrive (no second copy in memory); the manifest is written last and renamed into
place, so that a killed run leaves no manifest and therefore no trace. A tensor that several taps
saw is written once by `Trace.save`; the manifest says ``as`` which tap.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Protocol, Self
from uuid import uuid4
from weakref import finalize

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reconcile.exceptions import TraceError
from reconcile.report import Provenance
from reconcile.rounding import bit_view

SCHEMA = 1
"""Version of the manifest."""
HEADER_RESERVE = 1 << 17
"""Bytes kept free at the head of a shard for its header, which is known only at the end."""

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_ESCAPES = str.maketrans({"%": "%25", ":": "%3A", "#": "%23"})


@dataclass(frozen=True, slots=True, order=True)
class Tap:
    """A named point of a model: module path, port, and which call within one pass.

    As text, a colon, hash or percent sign inside a name is written ``%3A``, ``%23``, ``%25``.

    >>> str(Tap("model.layers.3.mlp", "out")), Tap.parse("a.b:in0#2")
    ('model.layers.3.mlp:out', Tap(module='a.b', port='in0', call=2))
    """

    module: str
    """Module path; empty for the model itself."""
    port: str
    """``in0``, ``in.name``, ``out``, ``out.1``, ``out.logits``, ``param.weight``, ..."""
    call: int = 0
    """0 for the first call of the module within the pass."""

    def __str__(self) -> str:
        """``module:port``, with ``#call`` from the second call on."""
        text = f"{self.module.translate(_ESCAPES)}:{self.port.translate(_ESCAPES)}"
        return f"{text}#{self.call}" if self.call else text

    @classmethod
    def parse(cls, text: str) -> Tap:
        """The tap that ``str`` wrote; TraceError without a port."""
        module, _, rest = text.partition(":")
        port, hashed, call = rest.partition("#")
        number = call if hashed else "0"
        if not port or ":" in port or not (number.isascii() and number.isdigit()):
            raise TraceError(f"expected a tap module:port or module:port#call, got {text!r}")
        return cls(_unescaped(module), _unescaped(port), int(number))


def _unescaped(text: str) -> str:
    return text.replace("%3A", ":").replace("%23", "#").replace("%25", "%")


@dataclass(slots=True)
class Pass:
    """One forward pass, identified by the fingerprint of its inputs, never by its number."""

    key: str
    """Fingerprint of the inputs."""
    kind: str
    """``chained`` (free run), ``isolated`` (fed the reference's inputs), ..."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Captured tensors by tap, in firing order."""
    strides: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Strides that the captured tensors had in the model."""
    meta: dict[str, Any] = field(default_factory=dict)
    """JSON facts about the pass."""


@dataclass(slots=True)
class Trace:
    """The passes of one run and where they come from."""

    provenance: Provenance | None = None
    passes: list[Pass] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON facts about the run: modules, limits' inputs, ..."""

    def select(self, kind: str) -> dict[str, Pass]:
        """Passes of one kind by key; TraceError where two share a key."""
        found: dict[str, Pass] = {}
        for item in self.passes:
            if item.kind == kind:
                if item.key in found:
                    raise TraceError(f"two {kind} passes have the same inputs ({item.key})")
                found[item.key] = item
        return found

    def save(self, directory: Path | str) -> None:
        """Write the trace to ``directory``, which must not hold one already."""
        with TraceWriter(directory) as writer:
            for item in self.passes:
                writer.begin(item.key, item.kind)
                first = _first_of_each(item.tensors)
                for tap, tensor in item.tensors.items():
                    if first.get(tap, tap) == tap:
                        writer.put(tap, tensor, item.strides.get(tap))
                    else:
                        writer.put_again(tap, first[tap], item.strides.get(tap, tensor.stride()))
                writer.end(item.meta)
            writer.finish(self.provenance, self.facts)

    @classmethod
    def load(cls, directory: Path | str) -> Trace:
        """Read a trace; tensors are read from disk when they are asked for.

        Raises:
            TraceError: no manifest, another schema, or a shard that is missing or truncated.
        """
        root = Path(directory)
        manifest = _read_manifest(root)
        try:
            passes = [_load_pass(root, entry, manifest.get("id")) for entry in manifest["passes"]]
            provenance = manifest["provenance"]
            return cls(
                provenance=None if provenance is None else _provenance(provenance),
                passes=passes,
                facts=manifest["facts"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{root / 'manifest.json'}: incomplete manifest: {error}") from error


def _first_of_each(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By tap, the first tap that holds the very same tensor; of a trace on disk nothing is known.

    (There each look at a tap makes a tensor of its own.)
    """
    first: dict[int, str] = {}
    known = tensors if isinstance(tensors, dict) else {}
    return {tap: first.setdefault(id(tensor), tap) for tap, tensor in known.items()}


class Store(Protocol):
    """Where a recording puts its passes: `TraceMemory` or `TraceWriter`."""

    def begin(self, key: str, kind: str) -> None:
        """Open a pass."""

    def put(self, tap: str, tensor: Tensor, stride: tuple[int, ...] | None = None) -> None:
        """Copy one tensor into the open pass."""

    def end(self, meta: dict[str, Any] | None = None) -> None:
        """Close the pass."""


class _Arena:
    """Memory for copies, cut from blocks that serve again once no tensor lies in them.

    Fresh pages cost several times what the copy into them does. Each tensor still has a storage
    of its own, no longer than itself.
    """

    BLOCK = 8 << 20
    """Bytes; a larger tensor gets a multiple."""
    KEPT = 512 << 20
    """Bytes of free blocks that are kept at most."""
    _free: ClassVar[defaultdict[int, list[np.ndarray[Any, Any]]]] = defaultdict(list)

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._raw = torch.from_numpy(self._block)
        self._used = 0

    def take(self, source: Tensor) -> _Copy:
        """Copy the tensor."""
        size = source.numel() * source.element_size()
        start = -(-self._used // 64) * 64
        if start + size > self._block.nbytes:
            self._block, start = self._lease(-(-size // self.BLOCK) * self.BLOCK), 0
            self._raw = torch.from_numpy(self._block)
        self._used = start + size
        copy = _Copy(self._block, self._raw, start, size, source.dtype, source.shape)
        copy.view().copy_(source)
        copy.sample = copy.sampled()
        return copy

    @classmethod
    def _lease(cls, size: int) -> np.ndarray[Any, Any]:
        free = cls._free[size]
        block = free.pop() if free else np.empty(size, np.uint8)
        lease = block.view()  # an object whose end tells that no tensor needs the block
        finalize(lease, cls._release, block).atexit = False
        return lease

    @classmethod
    def _release(cls, block: np.ndarray[Any, Any]) -> None:
        kept = sum(size * len(blocks) for size, blocks in cls._free.items())
        if kept + block.nbytes <= cls.KEPT:
            cls._free[block.nbytes].append(block)


@dataclass(slots=True, eq=False)
class _Copy:
    """One copied tensor in a block; a tensor object is made of it only when the pass ends.

    (Small objects that outlive a layer would lie between the model's own large buffers and keep
    the allocator from using those again.)
    """

    block: np.ndarray[Any, Any]
    raw: Tensor
    """The block as a tensor."""
    start: int
    size: int
    dtype: torch.dtype
    shape: torch.Size
    sample: bytes = b""

    SAMPLES: ClassVar[int] = 32

    def view(self) -> Tensor:
        """A passing view of the copy."""
        raw = self.raw[self.start : self.start + self.size]
        return raw.view(self.dtype).view(self.shape)

    def tensor(self) -> Tensor:
        """The copy as a tensor with a storage of its own."""
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        count = self.size // self.dtype.itemsize
        flat = torch.frombuffer(self.block, dtype=self.dtype, count=count, offset=self.start)
        return flat.view(self.shape)

    def sampled(self) -> bytes:
        """Bits of some elements."""
        words = self.block[self.start : self.start + self.size]
        words = words.view(np.uint32) if self.size % 4 == 0 else words
        return words[:: max(1, len(words) // self.SAMPLES)].tobytes()


class TraceMemory:
    """Keeps copies in memory.

    A tensor that several taps see (the input of q, k and v; a norm's output that is the next
    layer's input) is copied once, after a comparison of all its bits with the copy: an address
    alone proves nothing, because kernels write in place. Each copy is sampled when it is taken
    and again in `verify`, so that a copy which somebody rewrote is found.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self._arena = _Arena()
        self._tensors: dict[str, _Copy] = {}
        self._strides: dict[str, tuple[int, ...]] = {}
        self._open: tuple[str, str] | None = None
        self._copies: dict[tuple[Any, ...], _Copy] = {}
        self._taken: list[tuple[str, _Copy]] = []

    def begin(self, key: str, kind: str) -> None:
        """Open a pass; one that was left open (the model raised) is dropped."""
        self._open = (key, kind)
        self._tensors, self._strides, self._copies = {}, {}, {}

    def put(self, tap: str, tensor: Tensor, stride: tuple[int, ...] | None = None) -> None:
        """Copy ``tensor`` to the CPU, or share the equal copy that another tap has."""
        if self._open is None or tap in self._tensors:
            raise TraceError(f"{tap}: recorded twice in one pass, or outside one")
        source = tensor.detach().resolve_conj().resolve_neg()
        place = (source.data_ptr(), source.shape, source.stride(), source.dtype, source.device)
        copy = self._copies.get(place)
        if copy is None or not _same_bits(copy.view(), source):
            copy = self._copies[place] = self._arena.take(source)
            self._taken.append((tap, copy))
        self._tensors[tap] = copy
        self._strides[tap] = tuple(tensor.stride()) if stride is None else stride

    def end(self, meta: dict[str, Any] | None = None) -> None:
        """Append the pass to the trace."""
        if self._open is None:
            raise TraceError("no pass is open")
        made = {id(copy): copy.tensor() for copy in self._tensors.values()}
        tensors = {tap: made[id(copy)] for tap, copy in self._tensors.items()}
        self.trace.passes.append(Pass(*self._open, tensors, self._strides, meta or {}))
        self._open = None
        self._tensors, self._copies = {}, {}

    def verify(self) -> tuple[str, ...]:
        """Taps whose sampled bits are no longer those that were captured."""
        return tuple(tap for tap, copy in self._taken if copy.sampled() != copy.sample)


def _same_bits(copy: Tensor, source: Tensor) -> bool:
    return source.device == copy.device and torch.equal(bit_view(copy), bit_view(source))


class TraceWriter:
    """Writes passes to a directory as their tensors arrive.

    As a context manager it removes what it wrote unless `finish` was reached.
    """

    def __init__(self, directory: Path | str) -> None:
        self.root = Path(directory)
        if (self.root / "manifest.json").exists():
            raise TraceError(f"{self.root} already holds a trace; give another directory")
        self._made = not self.root.exists()
        self._finished = False
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"cannot write a trace to {self.root}: {error}") from error
        for stale in self.root.glob(".pass-*.part"):  # of a capture that was killed
            stale.unlink()
        self._id = uuid4().hex
        self._entries: list[dict[str, Any]] = []
        self._shard: _ShardWriter | None = None
        self._taps: list[dict[str, Any]] = []
        self._open: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove what was left unfinished: an open shard, and all of them without a manifest."""
        if self._shard is not None:
            self._shard.discard()
        if self._finished:
            return
        for entry in self._entries:
            (self.root / entry["shard"]).unlink(missing_ok=True)
        if self._made and not any(self.root.iterdir()):
            self.root.rmdir()

    def begin(self, key: str, kind: str) -> None:
        """Open the shard of a pass; one that was left open is removed."""
        if self._shard is not None:
            self._shard.discard()
        path = self.root / f"pass-{len(self._entries):04d}.safetensors"
        self._shard = _ShardWriter(path, self._id)
        self._taps = []
        self._open = (key, kind)

    def put(self, tap: str, tensor: Tensor, stride: tuple[int, ...] | None = None) -> None:
        """Append one tensor to the shard."""
        if self._shard is None:
            raise TraceError("no pass is open")
        self._shard.put(tap, tensor)
        self._taps.append(
            {"tap": tap, "stride": list(tensor.stride() if stride is None else stride)}
        )

    def put_again(self, tap: str, first: str, stride: tuple[int, ...]) -> None:
        """A further tap of what is written already as ``first``."""
        self._taps.append({"tap": tap, "stride": list(stride), "as": first})

    def end(self, meta: dict[str, Any] | None = None) -> None:
        """Finish the shard."""
        if self._shard is None or self._open is None:
            raise TraceError("no pass is open")
        self._shard.finish()
        key, kind = self._open
        self._entries.append(
            {
                "key": key,
                "kind": kind,
                "shard": self._shard.path.name,
                "meta": meta or {},
                "taps": self._taps,
            }
        )
        self._shard = None

    def finish(self, provenance: Provenance | None, facts: Mapping[str, Any]) -> None:
        """Write the manifest: from here on the trace exists."""
        body = {
            "schema": SCHEMA,
            "id": self._id,
            "provenance": None if provenance is None else asdict(provenance),
            "facts": dict(facts),
            "passes": self._entries,
        }
        write_atomically(self.root / "manifest.json", json.dumps(body, indent=1) + "\n")
        self._finished = True


class _ShardWriter:
    """One safetensors file written front to back, its header last."""

    def __init__(self, path: Path, trace: str) -> None:
        """``trace``: identity of the trace that the shard is a part of."""
        self.path = path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: IO[bytes] = self._partial.open("wb", buffering=0)
        self._file.seek(HEADER_RESERVE)
        self._offset = 0
        self._header: dict[str, Any] = {"__metadata__": {"trace": trace}}

    def put(self, name: str, tensor: Tensor) -> None:
        """Append the tensor's bytes; TraceError for a dtype that safetensors lacks."""
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise TraceError(f"{name}: safetensors cannot store {tensor.dtype}")
        if name in self._header:
            raise TraceError(f"{name}: recorded twice in one pass")
        self._align(max(1, tensor.element_size()))
        host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
        self._append(name, _SAFETENSORS_NAMES[tensor.dtype], list(tensor.shape), data)

    def _append(self, name: str, dtype: str, shape: list[int], data: memoryview) -> None:
        stop = self._offset + data.nbytes
        while data.nbytes:  # an unbuffered write may take only a part
            data = data[self._file.write(data) :]
        self._header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [self._offset, stop],
        }
        self._offset = stop

    def _align(self, size: int) -> None:
        """Fill up to a multiple of ``size`` with a named filler: the format allows no holes."""
        missing = -self._offset % size
        if missing:
            filler = memoryview(bytes(missing))
            self._append(f"__filler.{len(self._header)}", "U8", [missing], filler)

    def finish(self) -> None:
        """Write the header and rename into place."""
        header = json.dumps(self._header, separators=(",", ":")).encode()
        if 8 + len(header) > HEADER_RESERVE:
            self._grow(-(-(8 + len(header)) // HEADER_RESERVE) * HEADER_RESERVE)
        start = self._file.tell() - self._offset
        self._file.seek(0)
        self._file.write((start - 8).to_bytes(8, "little") + header.ljust(start - 8))
        self._file.close()
        self._partial.replace(self.path)

    def _grow(self, reserve: int) -> None:
        """Copy the data to behind a longer head (a pass with very many taps)."""
        longer = self._partial.with_suffix(".longer")
        with self._partial.open("rb") as source, longer.open("wb") as target:
            source.seek(HEADER_RESERVE)
            target.seek(reserve)
            while block := source.read(1 << 24):
                target.write(block)
        self._file.close()
        longer.replace(self._partial)
        self._file = self._partial.open("r+b", buffering=0)
        self._file.seek(0, os.SEEK_END)

    def discard(self) -> None:
        """Remove the unfinished file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class _LazyTensors(Mapping[str, Tensor]):
    """The tensors of one shard, read from the mapped file when asked for."""

    def __init__(self, path: Path, taps: Mapping[str, str], trace: str | None) -> None:
        """``taps``: by tap, the name under which the shard holds it; ``trace``: whose shard."""
        self._path = path
        self._taps = dict(taps)
        self._shard = self._opened()
        found = (self._shard.metadata() or {}).get("trace")
        if found != trace:
            raise TraceError(f"{path}: the shard of another capture than its manifest's")
        missing = sorted(set(self._taps.values()) - set(self._shard.keys()))
        if missing:
            raise TraceError(f"{path}: the manifest names tensors that it lacks: {missing[:5]}")

    def _opened(self) -> Any:  # noqa: ANN401 - safetensors ships no types
        try:
            return safe_open(str(self._path), framework="pt")
        except (OSError, ValueError, SafetensorError) as error:
            raise TraceError(f"{self._path}: missing, truncated or damaged: {error}") from error

    def __getitem__(self, tap: str) -> Tensor:
        tensor: Tensor = self._shard.get_tensor(self._taps[tap])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to a temporary name beside ``path`` and rename it into place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:  # a full disk, Ctrl-C: no half of a file stays behind
        partial.unlink(missing_ok=True)
        raise


def _read_manifest(root: Path) -> dict[str, Any]:
    path = root / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(
            f"{root}: no manifest.json: not a trace, or the capture did not finish"
        ) from None
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: unreadable: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise TraceError(f"{path}: expected a trace manifest of schema {SCHEMA}")
    return manifest


def _load_pass(root: Path, entry: dict[str, Any], trace: str | None) -> Pass:
    name = entry["shard"]
    if Path(name).name != name:
        raise TraceError(f"{root / 'manifest.json'}: a shard must lie beside it, got {name!r}")
    taps = {item["tap"]: item.get("as", item["tap"]) for item in entry["taps"]}
    return Pass(
        key=entry["key"],
        kind=entry["kind"],
        tensors=_LazyTensors(root / name, taps, trace),
        strides={item["tap"]: tuple(item["stride"]) for item in entry["taps"]},
        meta=entry["meta"],
    )


def _provenance(fields: dict[str, Any]) -> Provenance:
    return Provenance(**(fields | {"notes": tuple(fields.get("notes", ()))}))


Visitor = Callable[[str, Tensor], None]
"""Called with a port and the tensor found there."""


def visit_tensors(value: object, port: str, visit: Visitor) -> None:
    """Call ``visit`` for every tensor in nested tuples, lists, mappings and dataclasses.

    Ports of nested places are joined by dots: ``out.1``, ``out.logits``,
    ``in.position_embeddings.0``. Anything else is passed over.
    """
    if isinstance(value, Tensor):
        visit(port, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            visit_tensors(item, f"{port}.{key}", visit)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            visit_tensors(item, f"{port}.{index}", visit)
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            visit_tensors(getattr(value, name, None), f"{port}.{name}", visit)
