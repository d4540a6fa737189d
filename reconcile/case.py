"""A case: what to reconcile, as a TOML file. Unknown keys are errors that name the nearest one."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reconcile.contract import Contract
from reconcile.exceptions import ConfigError, nearest
from reconcile.layout import LayoutConfig, PackingConfig

_STRICT = ConfigDict(extra="forbid")

Kind = TypeVar("Kind")
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseInfo:
    """``[case]``."""

    __pydantic_config__ = _STRICT
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """``[model]``."""

    __pydantic_config__ = _STRICT
    checkpoint: Path
    """Local directory with config.json and safetensors, relative to the case file; or
    ``derived:NAME``, a checkpoint that an installed package makes on first use."""
    load_rule: str | None = None
    """What a serving engine changes in the weights when it loads them, by the name of the rule."""
    layout: LayoutConfig | None = None
    """How the weights are stored, in place of what config.json declares."""
    original: Path | None = None
    """Checkpoint of the same names before quantisation, for the error of quantising itself; a path
    or ``derived:NAME``."""
    prompts: Path | None = None
    """JSON file of prompts, relative to the case file."""
    max_tokens: int = 64
    """Prompts are cut to this length."""
    decode: int = 0
    """Tokens at the end of each prompt that are fed one at a time, with a KV cache: each is a pass
    of its own. 0: each prompt is one pass, without a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """``[task]``: questions with known answers, for the accuracy of both sides."""

    __pydantic_config__ = _STRICT
    file: Path
    """JSON file of items, relative to the case file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """``[reference]``."""

    __pydantic_config__ = _STRICT
    dtype: Literal["float64", "float32"] = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateConfig:
    """``[[candidate]]``."""

    __pydantic_config__ = _STRICT
    name: str
    kernel: str
    """Entry point, ``package.module:attr`` or ``path/to/file.py:attr``."""
    engine: str = "auto"
    """An engine's name, ``hardware``, ``emulated``, ``vendor``, or ``auto``."""
    dtype: Dtype | None = None
    """Dtype of activations and non-linear parts; default: the checkpoint's."""
    device: str = "cpu"
    modules: tuple[str, ...] = ("*",)
    """Globs over the paths of the modules that the kernel computes."""
    phases: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
    """Where the kernel is used; elsewhere plain torch computes its modules, as a router does."""
    contract: dict[str, Any] | None = None
    """Fields of the `Contract`, only where the kernel declares none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelsConfig:
    """``[levels]``."""

    __pydantic_config__ = _STRICT
    run: tuple[Literal["op", "module", "model"], ...] = ("op", "module", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """One entry of ``[limits]``: a fixed tolerance for the taps that a glob matches."""

    __pydantic_config__ = _STRICT
    atol: float
    rtol: float
    source: str
    """Why this number; mandatory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """One entry of ``[gate] allow_inconclusive``."""

    __pydantic_config__ = _STRICT
    tap: str = "*"
    """Glob over taps."""
    kernel: str = "*"
    """Glob over kernel names."""
    reason: str
    """Why it may be inconclusive; mandatory, shown in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """``[gate]``."""

    __pydantic_config__ = _STRICT
    require: tuple[str, ...] = ()
    """Kernels (``kernel`` or ``kernel@engine``) that must have run on everything they can
    implement."""
    coverage: float = 1.0
    """Share of the candidate's modules that must have been compared, in (0, 1]."""
    allow_inconclusive: tuple[Allowance, ...] = ()
    accepted: Path | None = None
    """File of accepted errors (`reconcile accept`), relative to the case file."""
    margin: float = 1.25
    """A row may have this many times its accepted error; at least 1."""


_NOT_IN_FILES = ("base", "file", "seed")
"""Fields of `Case` that no case file may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A whole case file."""

    __pydantic_config__ = _STRICT
    case: CaseInfo
    model: ModelConfig
    candidate: tuple[CandidateConfig, ...]
    reference: ReferenceConfig = ReferenceConfig()
    levels: LevelsConfig = LevelsConfig()
    task: TaskConfig | None = None
    limits: dict[str, Tolerance] = field(default_factory=dict)
    gate: GateConfig = GateConfig()
    base: Path = Path()
    """Directory of the case file; set by `load_case`."""
    file: Path | None = None
    """The case file; set by `load_case`."""
    seed: int = 0
    """Seed of the random perturbations (``--seed``)."""

    def __post_init__(self) -> None:
        """What types cannot say."""
        names = [candidate.name for candidate in self.candidate]
        if not names:
            raise ConfigError("a case needs at least one [[candidate]]")
        if len(set(names)) != len(names):
            raise ConfigError(f"candidate names must differ, got {', '.join(names)}")
        if not 0 < self.gate.coverage <= 1:
            raise ConfigError(f"gate.coverage must lie in (0, 1], got {self.gate.coverage}")
        for candidate in self.candidate:
            if not candidate.modules:
                raise ConfigError(f"candidate {candidate.name!r}: modules is empty")
        if not 1 <= self.gate.margin < float("inf"):
            raise ConfigError(f"gate.margin must be at least 1, got {self.gate.margin}")
        if not self.levels.run:
            raise ConfigError("levels.run is empty: nothing would be compared")
        if len(set(self.levels.run)) != len(self.levels.run):
            raise ConfigError(f"levels.run names a level twice: {', '.join(self.levels.run)}")
        if not all(allowance.reason.strip() for allowance in self.gate.allow_inconclusive):
            raise ConfigError("gate.allow_inconclusive: a reason is empty; say why")
        if self.model.decode < 0:
            raise ConfigError(f"model.decode must not be negative, got {self.model.decode}")
        for candidate in self.candidate:
            _check_phases(candidate, self.model.decode)
        if self.model.max_tokens < 1:
            raise ConfigError(f"model.max_tokens must be positive, got {self.model.max_tokens}")
        for glob, tolerance in self.limits.items():
            if not (0 <= tolerance.atol < float("inf") and 0 <= tolerance.rtol < 1):
                raise ConfigError(
                    f'limits."{glob}": expected atol >= 0 and 0 <= rtol < 1 (at rtol = 1 zeros '
                    f"pass), got atol={tolerance.atol}, rtol={tolerance.rtol}"
                )
            if not tolerance.source.strip():
                raise ConfigError(f'limits."{glob}": source is empty; say why this number')

    def with_candidate(self, **changes: Any) -> Case:  # noqa: ANN401
        """The case with fields of every candidate replaced (command-line overrides)."""
        return replace(self, candidate=tuple(replace(item, **changes) for item in self.candidate))


def _check_phases(candidate: CandidateConfig, decode: int) -> None:
    """ConfigError for phases that do not exist in the case."""
    if not candidate.phases:
        raise ConfigError(f"candidate {candidate.name!r}: phases is empty; name prefill or decode")
    if set(candidate.phases) != {"prefill", "decode"} and not decode:
        raise ConfigError(
            f"candidate {candidate.name!r}: phases = {list(candidate.phases)} needs [model] "
            "decode: without it a prompt is one pass and the two are not told apart"
        )


_CASE: TypeAdapter[Case] = TypeAdapter(Case)


def load_case(path: Path | str) -> Case:
    """Read a case from ``reconcile.toml`` or from ``[tool.reconcile]`` of a pyproject.

    Raises:
        ConfigError: not found, no TOML, an unknown key (with the nearest known one), a wrong
            type, or a value out of range.
    """
    file = Path(path)
    try:
        body = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such case file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: unreadable: {error}") from error
    if file.name == "pyproject.toml":
        tool = body.get("tool")
        found = tool.get("reconcile") if isinstance(tool, dict) else None
        body = found if isinstance(found, dict) else {}
        if not body:
            raise ConfigError(f"{file}: has no [tool.reconcile]")
    for reserved in _NOT_IN_FILES:
        if reserved in body:
            raise ConfigError(
                f"{file}: unknown key {reserved!r}: {nearest(reserved, _keys(Case, ()))}"
            )
    try:
        case = _strictly(_CASE, body)
    except ValidationError as error:
        raise ConfigError(f"{file}: {_explain(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return replace(case, base=file.resolve().parent, file=file)


def _strictly(adapter: TypeAdapter[Kind], body: dict[str, Any]) -> Kind:
    """Validate without coercion: "8" and true are no integers, but a TOML list is a tuple."""
    return adapter.validate_json(json.dumps(body, default=str), strict=True)


def parse_contract(fields: dict[str, Any]) -> Contract:
    """The `Contract` that a case declares; ConfigError for an unknown field or value."""
    try:
        strict = _strictly(_CONTRACT, fields)
    except ValidationError as error:
        raise ConfigError(f"contract: {_explain(error, Contract)}") from None
    # a `Contract` like any other: two are equal only if their classes are
    return Contract(**{name: getattr(strict, name) for name in Contract.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class _StrictContract(Contract):
    __pydantic_config__ = _STRICT


_CONTRACT: TypeAdapter[Contract] = TypeAdapter(_StrictContract)
_TABLES: dict[tuple[str, ...], type] = {
    (): Case,
    ("case",): CaseInfo,
    ("model",): ModelConfig,
    ("model", "layout"): LayoutConfig,
    ("model", "layout", "packing"): PackingConfig,
    ("task",): TaskConfig,
    ("reference",): ReferenceConfig,
    ("candidate",): CandidateConfig,
    ("levels",): LevelsConfig,
    ("gate",): GateConfig,
    ("gate", "allow_inconclusive"): Allowance,
}


def _keys(root: type, table: tuple[str, ...]) -> list[str]:
    """Known keys of a table of the case file, or of the contract alone."""
    kind = root
    if root is Case:
        kind = _TABLES.get(table, Tolerance if table[:1] == ("limits",) else Case)
    return [name for name in kind.__dataclass_fields__ if name not in _NOT_IN_FILES]  # type: ignore[attr-defined]


def _explain(error: ValidationError, root: type = Case) -> str:
    """The first finding of a validation, in the words of the file; unknown keys come first."""
    unknown = ("unexpected_keyword_argument", "extra_forbidden")
    found = sorted(error.errors(), key=lambda item: item["type"] not in unknown)[0]
    place = [str(part) for part in found["loc"]]
    where = ".".join(place) or "the file"
    if found["type"] in unknown:
        table = tuple(part for part in place[:-1] if not part.isdigit())
        return f"unknown key {where}: {nearest(place[-1], _keys(root, table))}"
    if "missing" in found["type"]:
        return f"{where} is missing"
    if "error" in found.get("ctx", {}):  # a check of ours says it in its own words
        return str(found["ctx"]["error"])
    expected = "expected a list" if found["type"] == "tuple_type" else found["msg"]
    return f"{where}: {expected}, got {found.get('input')!r}"
