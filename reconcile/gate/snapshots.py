"""Failing calls that are kept: input, weight and output of an op, to be run again later.

A snapshot is one safetensors file: the tensors of the call, and in its header what is needed to
make the call again (kernel, engine, contract, format). Nothing overwrites one; they are listed
and removed by hand (``reconcile snapshots``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reconcile import registry
from reconcile.capture.plan import Plan
from reconcile.checking.linear import check_linear
from reconcile.contract import Contract
from reconcile.exceptions import ConfigError, KernelError
from reconcile.grouped import GroupedWeight
from reconcile.linears import DenseWeight
from reconcile.replay import Prepared
from reconcile.report import Level, Report, Row, Verdict
from reconcile.rounding import bitwise_equal
from reconcile.tracing.trace import Tap, Trace
from reconcile.weight import QuantizedWeight

SCHEMA = "reconcile-snapshot-1"
MOST = 8
"""Snapshots of one run; the first failing calls, one for each op."""
LARGEST = 256 << 20
"""Bytes of the snapshots of one run."""

_CONTRACT = TypeAdapter(Contract)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a call is, besides its tensors."""

    tap: str
    check: str
    pass_: str
    kernel: str
    """As the case names it."""
    base: str
    """Directory that a kernel's file path starts from."""
    engine: str
    dtype: str
    """Of the activations."""
    contract: dict[str, Any]
    format: str
    """Name of the registered format; empty for a dense weight."""
    block: tuple[int, int] | None
    shape: tuple[int, int]
    """Logical (N, K)."""
    text: str
    """What the failing row said."""
    created: str = ""
    """UTC time of the run."""


_FACTS = TypeAdapter(Facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One call: its tensors and what it is."""

    facts: Facts
    x: Tensor
    """[M, K], what the kernel got."""
    y: Tensor
    """[M, N], what it gave."""
    weight: QuantizedWeight | DenseWeight

    def tensors(self) -> dict[str, Tensor]:
        """By the names in the file."""
        found = {"x": self.x, "y": self.y}
        if isinstance(self.weight, QuantizedWeight):
            found |= {"codes": self.weight.codes, "scales": self.weight.scales}
        else:
            found["weight"] = self.weight.tensor
        if self.weight.bias is not None:
            found["bias"] = self.weight.bias
        return found

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


@dataclass(slots=True)
class Album:
    """The snapshots of one run, and how many there was no room for."""

    kept: list[Snapshot] = field(default_factory=list)
    left_out: int = 0
    of_other_kinds: int = 0
    """Failing ops of which no snapshot can be made."""

    def add(self, snapshot: Snapshot | None) -> None:
        """Keep one, if it is there and there is room."""
        if snapshot is None:
            self.of_other_kinds += 1
            return
        size = snapshot.size + sum(other.size for other in self.kept)
        if len(self.kept) >= MOST or size > LARGEST:
            self.left_out += 1
        else:
            self.kept.append(snapshot)

    def notices(self) -> tuple[str, ...]:
        """What a report says about them."""
        said = []
        if self.left_out:
            room = f"at most {MOST}, {LARGEST >> 20} MiB"
            said.append(f"{self.left_out} failing calls are not kept: {room}")
        if self.of_other_kinds:
            what = "batched, without an output, or of a format without a name"
            said.append(f"{self.of_other_kinds} failing ops are not kept: {what}")
        return tuple(said)


def failing_calls(
    plan: Plan, reference: Trace, candidate: Trace, rows: Sequence[Row]
) -> Iterator[Snapshot | None]:
    """The first failing call of each op: input, weight and output; None where it cannot be kept."""
    seen: set[str] = set()
    for row in rows:
        module = Tap.parse(row.tap).module
        failed = row.level is Level.OP and row.verdict is Verdict.FAIL
        if failed and module not in seen and module in plan.checkpoint.weights:
            seen.add(module)
            yield _call(plan, reference, candidate, row, module)


def _call(plan: Plan, reference: Trace, candidate: Trace, row: Row, module: str) -> Snapshot | None:
    weight = plan.checkpoint.weights[module]
    if plan.engine is None or isinstance(weight, GroupedWeight) or not _is_named(weight):
        return None
    kind = "chained" if row.check == "chained" else "isolated"
    ours = candidate.select(kind).get(row.pass_)
    inputs = ours if kind == "chained" else reference.select(kind).get(row.pass_)
    x_tap, y_tap = str(Tap(module, "in0")), str(Tap(module, "out"))
    if ours is None or inputs is None or x_tap not in inputs.tensors or y_tap not in ours.tensors:
        return None
    x, y = inputs.tensors[x_tap], ours.tensors[y_tap]
    return Snapshot(
        facts=_facts(plan, row, weight, plan.engine.name),
        x=x.reshape(-1, x.shape[-1]).to(plan.dtype).clone(),
        y=y.reshape(-1, y.shape[-1]).clone(),
        weight=weight,
    )


def _is_named(weight: QuantizedWeight | DenseWeight) -> bool:
    """Whether the weight's format can be found again by its name."""
    if isinstance(weight, DenseWeight):
        return True
    known = registry.formats().get(weight.format.name)
    return known is not None and replace(known, block=weight.format.block) == weight.format


def _facts(plan: Plan, row: Row, weight: QuantizedWeight | DenseWeight, engine: str) -> Facts:
    form = weight.format if isinstance(weight, QuantizedWeight) else None
    return Facts(
        tap=row.tap,
        check=row.check,
        pass_=row.pass_,
        kernel=plan.config.kernel,
        base=str(plan.case.base),
        engine=engine,
        dtype=str(plan.dtype).removeprefix("torch."),
        contract=_CONTRACT.dump_python(plan.arithmetic, mode="json"),
        format=form.name if form else "",
        block=form.block if form else None,
        shape=weight.shape,
        text=row.text,
    )


# --------------------------------------------------------------------------- files


def save(snapshots: Sequence[Snapshot], directory: Path, created: str = "") -> list[Path]:
    """Write each to a file of its own that was not there before.

    Raises:
        ConfigError: the directory cannot be written.
    """
    return [_save(item, directory, created) for item in snapshots]


def _save(snapshot: Snapshot, directory: Path, created: str) -> Path:
    facts = _FACTS.dump_python(replace(snapshot.facts, created=created), mode="json")
    metadata = {"schema": SCHEMA, "facts": json.dumps(facts)}
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.tensors().items()}
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", snapshot.facts.tap).strip(".-") or "op"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = _reserve(directory, stem)
        partial = path.with_name(f".{path.name}.part")
        try:
            save_file(tensors, partial, metadata=metadata)
            partial.replace(path)
        except BaseException:  # a full disk, Ctrl-C: no half of a file stays behind
            for file in (partial, path):
                file.unlink(missing_ok=True)
            raise
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write a snapshot to {directory}: {error}") from error
    return path


def _reserve(directory: Path, stem: str) -> Path:
    """A new, empty file, so that two runs cannot take the same name."""
    number = 1
    while True:
        path = directory / f"{stem}{'' if number == 1 else f'-{number}'}.safetensors"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            number += 1
        else:
            return path


def load(path: Path) -> Snapshot:
    """Read what `save` wrote.

    Raises:
        ConfigError: missing, damaged, or not a snapshot.
        FormatError: the weight does not fit its declared format.
    """
    facts, tensors = _read(path)
    try:
        if facts.format:
            weight: QuantizedWeight | DenseWeight = QuantizedWeight.from_tensors(
                tensors["codes"],
                tensors["scales"],
                format=facts.format,
                block=facts.block,
                shape=facts.shape,
                bias=tensors.get("bias"),
                name=Tap.parse(facts.tap).module,
            )
        else:
            weight = DenseWeight(
                tensor=tensors["weight"],
                bias=tensors.get("bias"),
                name=Tap.parse(facts.tap).module,
            )
        return Snapshot(facts=facts, x=tensors["x"], y=tensors["y"], weight=weight)
    except KeyError as error:
        raise ConfigError(f"{path}: lacks the tensor {error}") from error


def read_facts(path: Path) -> Facts:
    """What a snapshot is, without its tensors."""
    return _read(path, with_tensors=False)[0]


def _read(path: Path, with_tensors: bool = True) -> tuple[Facts, dict[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys() if with_tensors else ()
            tensors = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such snapshot") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a snapshot: {error}") from error
    if metadata.get("schema") != SCHEMA:
        raise ConfigError(f"{path}: not a snapshot: expected the schema {SCHEMA}")
    try:
        return _FACTS.validate_json(metadata.get("facts", "")), tensors
    except ValidationError as error:
        raise ConfigError(f"{path}: damaged: {error.errors()[0]['msg']}") from error


# --------------------------------------------------------------------------- running one again


def run_again(snapshot: Snapshot) -> tuple[Report, bool]:
    """The kernel of a snapshot, as it is now, on the kept input and weight.

    Returns:
        the report of `check_linear` on the kept input alone, and whether the kernel still gives
        the bits that were kept.

    Raises:
        KernelError: the kernel or its engine is not here.
    """
    facts = snapshot.facts
    kernel = registry.kernel(facts.kernel, Path(facts.base))
    engine = next((item for item in kernel.engines if item.name == facts.engine), None)
    if engine is None:
        names = ", ".join(item.name for item in kernel.engines)
        raise KernelError(f"{facts.kernel} has no engine {facts.engine!r} any more: {names}")
    weight = snapshot.weight
    dense = isinstance(weight, DenseWeight)
    report = check_linear(
        kernel,
        weight.tensor if isinstance(weight, DenseWeight) else weight,
        x=snapshot.x,
        bias=weight.bias if dense else None,
        contract=_CONTRACT.validate_python(facts.contract),
        batch_sizes=(len(snapshot.x),),
        probes=("bound",),
        engine=facts.engine,
        dtype=facts.dtype,
    )
    prepared = Prepared.attempt(kernel, engine, weight, snapshot.y.dtype)
    with torch.no_grad():
        call = prepared.call(snapshot.x) if isinstance(prepared, Prepared) else prepared
    same = call.output is not None and bitwise_equal(call.output, snapshot.y)
    return report, same
