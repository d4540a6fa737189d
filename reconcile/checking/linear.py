"""One linear kernel by itself: all probes and bounds of level ``op``.

Needs torch alone, no transformers; made for other people's test suites:

    reconcile.check_linear(my_kernel, weight, contract=reconcile.Contract()).raise_for_verdict()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain

import torch
from torch import Tensor

from reconcile.capture.provenance import environment
from reconcile.capture.threads import few_threads
from reconcile.checking.probe_judge import judge_probe
from reconcile.checking.probes import (
    AnyWeight,
    Probe,
    code_tables,
    edges,
    impulses,
    integers,
    layouts,
    nan_scales,
    random_rows,
    specials,
)
from reconcile.contract import DTYPES, Contract
from reconcile.diagnosis.attach import Failed, with_diagnoses
from reconcile.diagnosis.linear import Failure
from reconcile.exceptions import ConfigError, KernelError, nearest
from reconcile.exits import exits_refused
from reconcile.grouped import format_name
from reconcile.judging.examine import digest
from reconcile.judging.gallery import Gallery
from reconcile.judging.judge import Finding, worst_of
from reconcile.judging.suspect import suspicions
from reconcile.kernel import Engine, FunctionKernel, Kernel, LinearSpec, choose_engine, routes
from reconcile.linears import DenseWeight, ReferenceLinear
from reconcile.replay import Call, Prepared, repeated
from reconcile.report import Coverage, Level, Provenance, Reason, Report, Row, Verdict
from reconcile.rounding import bitwise_equal
from reconcile.settings import own_arithmetic
from reconcile.weight import QuantizedWeight

EARLIER = 4
"""Calls on one weight that are kept, to know an output that comes again."""
EARLIER_ROWS = 64
"""First and last rows of each that are kept."""
PROBES = ("impulse", "code_table", "integer", "edge", "special", "layout", "bound", "batch")
"""Names of the probes, in the order in which they run."""


@exits_refused()
@own_arithmetic()
def check_linear(
    kernel: Kernel | Callable[..., Tensor],
    weight: QuantizedWeight | Tensor,
    *,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    contract: Contract | None = None,
    batch_sizes: Iterable[int] = (1, 4, 5, 64),
    probes: str | Iterable[str] = "all",
    repeats: int = 3,
    seed: int = 0,
    engine: str = "auto",
    dtype: torch.dtype | str | None = None,
    diagnose: bool = True,
) -> Report:
    """Check a kernel y = x W^T (+ b) against its contract.

    Args:
        kernel: a function ``f(x, weight, bias=None)`` or an object with the `Kernel` protocol.
        weight: a `QuantizedWeight`, or a floating-point tensor [N, K] that the function gets as
            it is.
        x: activations [..., K] to check besides the generated ones.
        bias: [N]; with a `QuantizedWeight` it takes the place of the weight's own. Without any,
            no bias is checked, which the notices say.
        contract: the promised arithmetic; default: the kernel's own, else ``Contract()`` with
            the activations' dtype as output.
        batch_sizes: numbers of rows of the random activations.
        probes: ``all`` or names out of `PROBES`.
        repeats: calls on one input whose bits must agree.
        seed: seed of everything random.
        engine: engine of a kernel that has several.
        dtype: dtype of the activations; default: that of ``x``, of a float weight, or bfloat16.
        diagnose: whether to fit what may explain failing rows, which calls the kernel again.

    Returns:
        A report of level ``op``: a row for each call with a known answer. Shapes of made-up
        weights that the kernel declines are named in the notices.

    Raises:
        ConfigError: an unknown probe, or arguments that do not fit together.
        KernelError: an unknown engine.
    """
    started = time.perf_counter()
    sizes = _sizes(batch_sizes)
    if type(seed) is not int:
        raise ConfigError(f"seed: expected an integer, got {seed!r}")
    subject = _subject(kernel, weight, x, bias, contract, engine, dtype, repeats)
    with few_threads(subject.weight.shape[0] * subject.weight.shape[1]), torch.no_grad():
        rows, notices = _rows(subject, _chosen(probes), sizes, x, int(seed) % 2**31, diagnose)
    return Report(
        case=f"check_linear {subject.kernel.name}",
        rows=tuple(rows),
        coverage=Coverage(expected=1, compared=int(any(row.limits for row in rows))),
        command="reconcile.check_linear",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
        notices=tuple(notices),
        provenance=(_provenance(subject, seed),),
    )


def _provenance(subject: _Subject, seed: int) -> Provenance:
    """Of the kernel: the reference is this package's own arithmetic on the given weight."""
    weight = subject.weight
    stored = [weight.tensor] if isinstance(weight, DenseWeight) else [weight.codes, weight.scales]
    named = weight.name or f"weight {list(weight.shape)}"
    return environment(
        subject.kernel.name,
        str(subject.dtype).removeprefix("torch."),
        "reconcile.check_linear",
        subject.kernel,
        model=named,
        checkpoint_sha256=" ".join(digest(tensor) for tensor in stored),
        seeds={"check_linear": seed},
    )


def _sizes(batch_sizes: object) -> tuple[int, ...]:
    sizes = tuple(batch_sizes) if isinstance(batch_sizes, Iterable) else (batch_sizes,)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"batch_sizes: expected positive numbers of rows, got {batch_sizes!r}")
    return sizes


def _rows(
    subject: _Subject,
    chosen: tuple[str, ...],
    sizes: tuple[int, ...],
    x: Tensor | None,
    seed: int,
    diagnose: bool,
) -> tuple[list[Row], list[str]]:
    """Rows and notices: of every probe, or why the reference is not fit to judge."""
    rows: list[Row] = []
    notices = list(routes(subject.kernel, [subject.spec(subject.weight)], subject.engine))
    if found := suspicions(subject.weight):
        finding = Finding({}, reason=Reason.REFERENCE_SUSPECT, text="; ".join(found))
        rows.append(replace(subject.row("decode", (), finding), level=Level.WEIGHT))
    else:
        failed: list[Failed | None] = []
        for probe in _probes(subject, chosen, sizes, x, seed):
            row, failure = _run(subject, probe)
            if row is None:
                notices.append(f"declined: {probe.name} {list(probe.weight.shape)}: {probe.sees}")
                continue
            rows.append(row)
            failed.append(failure)
            if probe.name == "impulse" and "100%" not in probe.sees and probe.amplitude == 1:
                notices.append(f"sampled: impulse M={row.shape[0]}: {probe.sees}")
        if diagnose:
            rows, left_out = with_diagnoses(rows, _with_sizes(rows, failed))
            notices += left_out
        if "batch" in chosen:
            rows.append(_batch(subject, seed))
    if subject.weight.bias is None:
        notices.append("not checked: bias (none was given; give bias=, or a weight that has one)")
    return rows, notices


@dataclass(frozen=True, slots=True)
class _Subject:
    """The kernel under test with everything that is the same for all probes."""

    kernel: Kernel
    engine: Engine | None
    not_run: str
    weight: AnyWeight
    contract: Contract
    dtype: torch.dtype
    repeats: int
    latest: list[tuple[AnyWeight, Prepared | Call, ReferenceLinear]]
    """The weight under test and the last made-up one, each prepared and decoded once."""
    gallery: Gallery
    """Chooses the rows whose tensors are looked at closely."""
    earlier: list[tuple[AnyWeight, Tensor, Tensor]] = field(default_factory=list)
    """The last calls on the weight under test and on the latest made-up one: weight, rows [M, K]
    and outputs [M, N]."""

    def remember(self, weight: AnyWeight, x: Tensor, y: Tensor) -> None:
        """Keep a call, so that an output that comes again can be known."""
        own = [item for item in self.earlier if item[0] is self.weight]
        mine = [item for item in self.earlier if item[0] is weight and weight is not self.weight]
        (own if weight is self.weight else mine).append(
            (weight, _ends(x.reshape(-1, x.shape[-1])), _ends(y))
        )
        self.earlier[:] = own[-EARLIER:] + mine[-EARLIER:]

    def ready(self, weight: AnyWeight) -> tuple[Prepared | Call, ReferenceLinear]:
        """The prepared kernel, and the reference, for a weight."""
        for known, prepared, reference in self.latest:
            if known is weight:
                return prepared, reference
        prepared = self._prepare(weight)
        reference = ReferenceLinear(weight, self.contract, torch.float64)
        del self.latest[1:]
        self.latest.append((weight, prepared, reference))
        return prepared, reference

    def _prepare(self, weight: AnyWeight) -> Prepared | Call:
        if self.engine is None:
            return Call(output=None, reason=Reason.NOT_RUN, text=self.not_run)
        support = self.kernel.can_implement(self.spec(weight))
        if not support:
            return Call(output=None, reason=Reason.NOT_RUN, text=support.reason)
        return Prepared.attempt(self.kernel, self.engine, weight, self.contract.output_dtype)

    def spec(self, weight: AnyWeight) -> LinearSpec:
        """What the kernel is asked to implement."""
        return LinearSpec(
            n=weight.shape[0],
            k=weight.shape[1],
            format=format_name(weight),
            bias=weight.bias is not None,
            activation_dtype=self.dtype,
        )

    def row(
        self,
        check: str,
        shape: tuple[int, ...],
        finding: Finding,
        weight: AnyWeight | None = None,
    ) -> Row:
        """A row; ``weight`` is the made-up one of a probe that has its own."""
        engine, tap = self.engine, f"{self.weight.name or 'linear'}:out"
        judged = self.weight if weight is None else weight
        block = judged.format.block if isinstance(judged, QuantizedWeight) else None
        finding = self.gallery.look(Level.OP, tap, check, finding, block)
        return Row(
            level=Level.OP,
            tap=tap,
            check=check,
            shape=shape,
            kernel=self.kernel.name,
            engine=engine.name if engine else "",
            implementation=engine.implementation if engine else "",
            execution=engine.execution if engine else "",
            fidelity=engine.fidelity if engine else "",
            verdict=Verdict.PASS if finding.reason is None else finding.reason.verdict,
            reason=finding.reason,
            text=finding.text,
            stats={name: value for name, value in finding.stats.items() if name != "shape"},
            limits=finding.limits,
            utilisation=finding.utilisation,
            digest=digest(finding.pair.candidate) if finding.pair else "",
            evidence=finding.evidence,
        )


def _ends(rows: Tensor) -> Tensor:
    if len(rows) <= 2 * EARLIER_ROWS:
        return rows
    return torch.cat([rows[:EARLIER_ROWS], rows[-EARLIER_ROWS:]])


def _subject(
    kernel: Kernel | Callable[..., Tensor],
    weight: QuantizedWeight | Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    contract: Contract | None,
    engine: str,
    dtype: torch.dtype | str | None,
    repeats: int,
) -> _Subject:
    subject = kernel if isinstance(kernel, Kernel) else _function(kernel)
    if type(repeats) is not int or repeats < 1:
        raise ConfigError(f"repeats: expected at least 1, got {repeats!r}")
    expected: tuple[tuple[str, object, object], ...] = (
        ("engine", engine, str),
        ("bias", bias, Tensor | None),
    )
    for what, given, kind in expected:
        if not isinstance(given, kind):  # type: ignore[arg-type]
            raise ConfigError(f"{what}: expected {kind}, got {type(given).__name__}")
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r}: {nearest(dtype, DTYPES)}")
        dtype = DTYPES[dtype]
    if not isinstance(weight, QuantizedWeight | Tensor):
        raise ConfigError(
            f"weight: expected a QuantizedWeight or a tensor, got {type(weight).__name__}"
        )
    if isinstance(weight, Tensor):
        if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
            raise ConfigError(
                f"expected a float weight [N, K], got {weight.dtype} {list(weight.shape)}"
            )
        dtype = dtype or (x.dtype if x is not None else weight.dtype)
        judged: AnyWeight = DenseWeight(tensor=weight, bias=bias)
    else:
        dtype = dtype or (x.dtype if x is not None else torch.bfloat16)
        judged = weight if bias is None else replace(weight, bias=bias)
    if dtype not in DTYPES.values():
        raise ConfigError(f"activations of {dtype}: expected one of {', '.join(DTYPES)}")
    if x is not None:
        _check_x(x, judged, dtype)
    if judged.bias is not None and (
        tuple(judged.bias.shape) != judged.shape[:1] or not judged.bias.is_floating_point()
    ):
        raise ConfigError(
            f"bias: expected a float [{judged.shape[0]}], got {judged.bias.dtype} "
            f"{list(judged.bias.shape)}"
        )
    promised: object = contract or subject.contract
    if promised is None:
        promised = Contract(output=str(dtype).removeprefix("torch."))
    if not isinstance(promised, Contract):
        raise ConfigError(f"contract: expected a reconcile.Contract, got {promised!r:.80}")
    chosen, note = choose_engine(subject, engine)
    return _Subject(subject, chosen, note, judged, promised, dtype, repeats, [], Gallery())


def _check_x(x: object, weight: AnyWeight, dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1 or x.numel() == 0:
        raise ConfigError("x: expected a tensor [..., K] with at least one row")
    if x.shape[-1] != weight.shape[1] or x.dtype != dtype:
        raise ConfigError(
            f"x {x.dtype} {list(x.shape)} does not fit activations of {dtype} for a weight "
            f"{list(weight.shape)}"
        )


def _function(kernel: object) -> Kernel:
    if not callable(kernel) or isinstance(kernel, type):
        raise KernelError(f"expected a function or a Kernel, got {type(kernel).__name__}")
    return FunctionKernel(getattr(kernel, "__name__", type(kernel).__name__), kernel)


def _chosen(probes: object) -> tuple[str, ...]:
    if not isinstance(probes, Iterable):
        raise ConfigError(f"probes: expected 'all' or names, got {probes!r}")
    names = PROBES if probes == "all" else (probes,) if isinstance(probes, str) else tuple(probes)
    for name in names:
        if name not in PROBES:
            raise ConfigError(f"unknown probe {name!r}: {nearest(str(name), PROBES)}")
    if not names:
        raise ConfigError("no probe is named: nothing would be checked")
    return names


def _probes(
    subject: _Subject, chosen: tuple[str, ...], sizes: tuple[int, ...], x: Tensor | None, seed: int
) -> Iterator[Probe]:
    weight, contract, dtype = subject.weight, subject.contract, subject.dtype

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed * len(PROBES) + PROBES.index(name))

    made: dict[str, Callable[[torch.Generator], Iterator[Probe]]] = {
        "impulse": lambda g: impulses(weight, contract, dtype, g),
        "code_table": lambda g: chain(code_tables(weight, dtype, g), nan_scales(weight, dtype, g)),
        "integer": lambda g: integers(weight, contract, dtype, g),
        "edge": lambda g: edges(weight, contract, dtype, g),
        "special": lambda g: specials(weight, contract, dtype, g),
        "layout": lambda g: layouts(weight, dtype, g),
        "bound": lambda g: random_rows(weight, sizes, dtype, g),
    }
    yield from chain.from_iterable(
        make(generator(name)) for name, make in made.items() if name in chosen
    )
    if x is not None:
        yield Probe(name="bound", sees="the given activations", weight=weight, x=x)


# --------------------------------------------------------------------------- judging


def _run(subject: _Subject, probe: Probe) -> tuple[Row | None, Failed | None]:
    """The row of one probe, None where the kernel declines a made-up weight; and its failure."""
    m, (n, k) = probe.x.numel() // probe.x.shape[-1], probe.weight.shape
    prepared, reference = subject.ready(probe.weight)
    contract = subject.contract.at(m)
    call = repeated(prepared, probe.x, subject.repeats, contract.deterministic)
    if probe.name == "bound" and isinstance(prepared, Prepared) and _is_right(call):
        call = prepared.owning(call, probe.x, contract.deterministic)
    if call.reason in (Reason.NOT_RUN, Reason.FELL_BACK) and probe.synthetic:
        return None, None
    if call.output is None:
        finding = Finding({}, reason=call.reason or Reason.RAISED, text=call.text)
        return subject.row(probe.name, (m, n, k), finding), None
    candidates = [output.reshape(m, n) for output in (call.output, *call.others)]
    findings = [judge_probe(reference, probe, output, contract) for output in candidates]
    place = worst_of(findings)
    candidate, finding = candidates[place], findings[place]
    earlier = tuple((x, y) for made, x, y in subject.earlier if made is probe.weight)
    subject.remember(probe.weight, probe.x, candidate)
    if call.reason is not None:
        finding = replace(finding, reason=call.reason, text=call.text)
    stats = finding.stats | {"sees": probe.sees}
    row = subject.row(probe.name, (m, n, k), replace(finding, stats=stats), probe.weight)
    return row, None if row.reason is None else _failure(subject, probe, candidate, earlier)


def _is_right(call: Call) -> bool:
    """Whether there is an output and nothing against it so far."""
    return call.output is not None and call.reason is None


def _failure(
    subject: _Subject, probe: Probe, y: Tensor, earlier: tuple[tuple[Tensor, Tensor], ...]
) -> Failed:
    """What a diagnosis needs; failures on the weight under test in one regime are alike."""
    m = probe.x.numel() // probe.x.shape[-1]
    made = (probe.name, probe.weight.shape, probe.sees) if probe.synthetic else ()
    apart = (probe.name, probe.layout) if probe.name in ("special", "layout") else ()
    regime = subject.contract.at(m)
    failure = Failure(
        weight=probe.weight,
        contract=subject.contract,
        x=probe.x,
        y=y,
        prepare=lambda weight: subject.ready(weight)[0],
        impulse=probe.columns is not None,
        others=earlier,
    )
    return Failed(failure, (made, apart, regime), (made, (), regime) if apart else None)


def _with_sizes(rows: list[Row], failed: list[Failed | None]) -> list[Failed | None]:
    """The failures with the numbers of rows for which random activations fail, and pass."""
    sizes = {verdict: set[int]() for verdict in Verdict}
    for row in rows:
        if row.check == "bound":
            sizes[row.verdict].add(row.shape[0])
    failing = tuple(sizes[Verdict.FAIL])
    passing = tuple(sizes[Verdict.PASS] - sizes[Verdict.FAIL])
    return [
        None
        if item is None
        else replace(item, failure=replace(item.failure, failing=failing, passing=passing))
        for item in failed
    ]


def _batch(subject: _Subject, seed: int) -> Row:
    """Whether a row has the same bits alone and inside a batch: a property, unless promised."""
    n, k = subject.weight.shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(33, k, generator=generator, dtype=torch.float64).to(subject.dtype)
    prepared, _ = subject.ready(subject.weight)
    calls = [repeated(prepared, rows, 1, deterministic=True) for rows in (x, x[7:8])]
    if isinstance(prepared, Prepared) and _is_right(calls[0]):
        calls[0] = prepared.owning(calls[0], x, subject.contract.at(33).deterministic)
    for call in calls:
        if call.output is None or call.reason is not None:
            finding = Finding({}, reason=call.reason or Reason.RAISED, text=call.text)
            return subject.row("batch", (33, n, k), finding)
    whole, alone = (call.output for call in calls)
    assert whole is not None
    assert alone is not None
    same = bitwise_equal(whole[7:8], alone)
    stats = {"batch_invariant": same, "n": n, "sees": "row 7 of 33 alone and inside"}
    finding = Finding(stats)
    if not same and subject.contract.at(1).batch_invariant:
        text = "the contract promises batch invariance; row 7 alone has other bits than inside"
        finding = Finding(stats, reason=Reason.UNSTABLE, text=text)
    return subject.row("batch", (33, n, k), finding)
