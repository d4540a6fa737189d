"""A candidate of a case, resolved: checkpoint, kernel, engine, contract and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from reconcile import registry
from reconcile.capture.steps import Step, steps
from reconcile.case import CandidateConfig, Case, parse_contract
from reconcile.contract import DTYPES, Contract
from reconcile.exceptions import ConfigError, nearest
from reconcile.grouped import format_name, group_count, numel
from reconcile.judging.task import Task, read_task
from reconcile.kernel import Engine, Kernel, LinearSpec, Support, choose_engine, routes
from reconcile.model import Checkpoint
from reconcile.plan_record import PlanRecord

Progress = Callable[[str], None]
"""Called once per unit of work with what is being done."""

DEFAULT_PROMPTS = (
    "The rounding of a sum depends on the order in which its terms are added.",
    "def dot(x, w):\n    return sum(a * b for a, b in zip(x, w, strict=True))\n",
    "In 1985 a standard for binary floating-point arithmetic was published.",
    "1 + 1 = 2; 2 + 2 = 4; 3 + 3 = 6; 4 + 4 = 8; 5 + 5 = 10; 6 + 6 =",
)
"""Texts that stand in where a case names no prompts; the checkpoint's tokenizer encodes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the two captures of one candidate need."""

    case: Case
    config: CandidateConfig
    checkpoint: Checkpoint
    kernel: Kernel
    engine: Engine | None
    notes: tuple[str, ...]
    not_run: str
    contract: Contract | None
    dtype: torch.dtype
    reference_dtype: torch.dtype
    modules: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    task: Task | None = None

    @property
    def asked(self) -> Task | None:
        """The task, where the levels that are run put it to both sides."""
        return self.task if "model" in self.case.levels.run else None

    @property
    def arithmetic(self) -> Contract:
        """The declared contract, or one that declares no rounding of the weight."""
        return self.contract or Contract(output=_name(self.dtype))

    @property
    def parts(self) -> tuple[str, ...]:
        """Modules that are compared isolated: layers, final norm, head."""
        structure = self.checkpoint.structure
        return (*structure.layers, *(m for m in (structure.norm, structure.head) if m))

    @property
    def routes(self) -> tuple[str, ...]:
        """What a kernel that chooses among others chose for the layers."""
        return routes(self.kernel, map(self.spec, self.modules), self.engine)

    @property
    def size(self) -> int:
        """Number of quantised weights."""
        return sum(map(numel, self.checkpoint.weights.values()))

    @property
    def groups(self) -> dict[str, int]:
        """G of the modules that are batched linears."""
        found = {name: group_count(self.checkpoint.weights[name]) for name in self.modules}
        return {name: count for name, count in found.items() if count is not None}

    def steps(self, ids: tuple[int, ...]) -> tuple[Step, ...]:
        """The calls of the model over one prompt."""
        return steps(ids, self.case.model.decode)

    def runs_in(self, phase: str) -> bool:
        """Whether the kernel is used in passes of this phase."""
        return not phase or phase in self.config.phases

    def spec(self, module: str) -> LinearSpec:
        """What the kernel is asked to implement at ``module``."""
        weight = self.checkpoint.weights[module]
        return LinearSpec(
            n=weight.shape[0],
            k=weight.shape[1],
            format=format_name(weight),
            bias=weight.bias is not None,
            activation_dtype=self.dtype,
            groups=group_count(weight),
            module=module,
            activation_scheme=self.checkpoint.activation,
        )

    def can_implement(self, module: str) -> Support:
        """Whether the kernel accepts the layer, by its own word and by its format.

        Its own word comes first: it may know why a format is not read.
        """
        formats, spec = self.kernel.formats, self.spec(module)
        try:
            own = self.kernel.can_implement(spec)
        except Exception as error:  # noqa: BLE001 - a user's kernel may raise anything
            own = Support(False, f"can_implement raised {type(error).__name__}: {error}")
        if own and formats is not None and spec.format not in formats:
            return Support(False, f"reads {', '.join(formats)}, not {spec.format}")
        return own

    def record(self) -> PlanRecord:
        """The part that traces keep."""
        return PlanRecord(
            case=self.case.case.name,
            candidate=self.config.name,
            kernel=self.config.kernel,
            engine=self.engine,
            not_run=self.not_run,
            contract=self.contract,
            dtype=_name(self.dtype),
            reference_dtype=_name(self.reference_dtype),
            modules=self.modules,
            groups=self.groups,
            phases=self.config.phases,
            criteria=tuple(getattr(self.kernel, "criteria", ())),
            layers=self.checkpoint.structure.layers,
            parts=self.parts,
            levels=self.case.levels.run,
            task="" if self.asked is None else self.asked.identity,
            limits=self.case.limits,
            gate=self.case.gate,
            model_modules=len(self.checkpoint.weights),
        )


def make_plan(case: Case, config: CandidateConfig, checkpoint: Checkpoint, only: str = "*") -> Plan:
    """Resolve one candidate.

    Args:
        case: the whole case.
        config: the candidate.
        checkpoint: the checkpoint of ``case.model``.
        only: glob that further restricts the candidate's modules (``--only``).

    Raises:
        ConfigError, KernelError: a kernel, engine, contract, prompt or glob that does not fit.
    """
    kernel = registry.kernel(config.kernel, case.base)
    dtype = DTYPES[config.dtype or _checked_dtype(checkpoint.dtype)]
    reference_dtype = DTYPES[case.reference.dtype]
    if torch.finfo(dtype).bits >= torch.finfo(reference_dtype).bits:
        raise ConfigError(
            f"candidate {config.name!r} computes in {_name(dtype)}: a reference in "
            f"{case.reference.dtype} is no wider and cannot judge it; use a narrower candidate "
            'or [reference] dtype = "float64"'
        )
    engine, note = choose_engine(kernel, config.engine)
    if config.device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"candidate.device {config.device!r}: expected cpu, cuda or cuda:N")
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"candidate.device {config.device!r}: torch sees no CUDA device here")
    plan = Plan(
        case=case,
        config=config,
        checkpoint=checkpoint,
        kernel=kernel,
        engine=engine,
        notes=(*checkpoint.notes, note) if engine else checkpoint.notes,
        not_run="" if engine else note,
        contract=_contract(kernel, config),
        dtype=dtype,
        reference_dtype=reference_dtype,
        modules=_modules(checkpoint, config, only),
        prompts=_prompts(case, checkpoint),
        task=_task(case, checkpoint),
    )
    return replace(plan, notes=(*plan.notes, *_routing(checkpoint), *plan.routes))


def _routing(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What is done about a mixture of experts, for the reader."""
    if not checkpoint.structure.routers:
        return ()
    return (
        "a router's choice of experts is compared as a set; the model goes on with the experts "
        "that the reference chose",
    )


def _contract(kernel: Kernel, config: CandidateConfig) -> Contract | None:
    if config.contract is None:
        return kernel.contract
    if kernel.contract is not None:
        raise ConfigError(
            f"candidate {config.name!r}: {kernel.name} declares its own contract; remove the "
            "contract from the case"
        )
    return parse_contract(config.contract)


def _checked_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ConfigError(f"candidate.dtype is missing and the checkpoint's {name} is none of it")
    return name


def _modules(checkpoint: Checkpoint, config: CandidateConfig, only: str) -> tuple[str, ...]:
    known = list(checkpoint.weights)
    for glob in (*config.modules, only):
        if not any(fnmatchcase(name, glob) for name in known):
            raise ConfigError(
                f"no module with a weight to judge matches {glob!r}: "
                f"{nearest(glob, known, '`reconcile run CASE --list` prints all')}"
            )
    modules = tuple(
        name
        for name in known
        if any(fnmatchcase(name, glob) for glob in config.modules) and fnmatchcase(name, only)
    )
    if not modules:
        raise ConfigError(f"no module matches both {config.modules} and {only!r}")
    return modules


def _prompts(case: Case, checkpoint: Checkpoint) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt, cut to ``max_tokens``; no prompt may be empty."""
    where = "the default prompts"
    entries: list[Any] = list(DEFAULT_PROMPTS)
    if case.model.prompts is not None:
        file = case.base / case.model.prompts
        where = str(file)
        entries = _read_prompts(file)
    ids = [tuple(_tokens(entry, checkpoint, where))[: case.model.max_tokens] for entry in entries]
    if not ids or not all(ids):
        raise ConfigError(f"{where}: expected prompts of at least one token, got an empty one")
    largest = max(max(tokens) for tokens in ids)
    if largest >= checkpoint.vocab_size:
        raise ConfigError(
            f"{where}: token id {largest} is outside the vocabulary of {checkpoint.vocab_size}"
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: two prompts are equal after {case.model.max_tokens} tokens")
    if decode := case.model.decode:
        _check_decode(ids, decode, where)
    return tuple(ids)


def _check_decode(ids: list[tuple[int, ...]], decode: int, where: str) -> None:
    """ConfigError unless every prompt has a prefill, and no pass of one is also another's."""
    if short := [len(tokens) for tokens in ids if len(tokens) <= decode]:
        raise ConfigError(
            f"{where}: a prompt of {short[0]} tokens leaves no prefill before decode = {decode}"
        )
    keys = [step.key for tokens in ids for step in steps(tokens, decode)]
    if len(set(keys)) != len(keys):
        raise ConfigError(
            f"{where}: two prompts begin with the same tokens, so that passes of them are the "
            f"same at decode = {decode}; make them differ before their last {decode} tokens"
        )


def _task(case: Case, checkpoint: Checkpoint) -> Task | None:
    if case.task is None:
        return None
    return read_task(case.base / case.task.file, checkpoint.vocab_size)


def _read_prompts(file: Path) -> list[Any]:
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such prompts file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: unreadable: {error}") from error
    entries = body.get("prompts") if isinstance(body, dict) else body
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: expected a list of texts or of token-id lists")
    return entries


def _tokens(entry: object, checkpoint: Checkpoint, where: str) -> list[int]:
    if isinstance(entry, dict):
        entry = entry.get("tokens", entry.get("text"))
    if isinstance(entry, str):
        return checkpoint.tokens(entry)
    if isinstance(entry, list) and all(type(token) is int and token >= 0 for token in entry):
        return entry
    raise ConfigError(f"{where}: expected a text or a list of token ids, got {entry!r:.80}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
