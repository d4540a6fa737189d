"""Batched and grouped linears: each group by all the probes of `check_linear`, among the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reconcile.checking.linear import check_linear
from reconcile.contract import Contract
from reconcile.diagnosis.between_groups import explain_groups, explain_one
from reconcile.diagnosis.engine import NONE_FITS
from reconcile.exceptions import ConfigError
from reconcile.grouped import GroupedReference, GroupedWeight, flat_rows
from reconcile.judging.judge import Finding, judge_bound
from reconcile.kernel import PYTHON
from reconcile.linears import DenseWeight
from reconcile.replay import failed_call
from reconcile.report import Coverage, Diagnosis, Level, Reason, Report, Row, Verdict
from reconcile.rounding import bitwise_equal

ROWS = 5
"""Rows of each group in the call on a strided x."""
MOST = 4
"""Groups that are checked by default: all up to this number, else spread over them."""


def check_batched_linear(
    kernel: Callable[..., Tensor],
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    groups: Iterable[int] | None = None,
    **options: Any,  # noqa: ANN401
) -> Report:
    """Check Y[g] = X[g] W[g]^T (+ b[g]) group by group.

    While one group is probed the others carry random activations and their own weights (in a
    probe that makes up a weight, random ones), so that a group that reads its neighbour's memory
    shows.

    Args:
        kernel: ``f(x, weight, bias=None)`` for x [G, M, K], weight [G, N, K], bias [G, N],
            giving [G, M, N].
        weight: floating-point [G, N, K].
        bias: [G, N] or None.
        groups: groups to probe; default: all of up to 4, else 4 of them including the first and
            the last, which the notices say.
        options: those of `check_linear`.

    Raises:
        ConfigError: as `check_linear`, or a shape or group that does not fit.
    """
    started = time.perf_counter()
    given: tuple[object, ...] = (weight, *(() if bias is None else (bias,)))
    if not all(isinstance(tensor, Tensor) for tensor in given):
        raise ConfigError("expected weight and bias as tensors")
    if weight.dim() != 3 or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:2])):
        raise ConfigError(
            f"expected weight [G, N, K] and bias [G, N], got {list(weight.shape)} and "
            f"{None if bias is None else list(bias.shape)}"
        )
    count = weight.shape[0]
    if not isinstance(groups, Iterable | None):
        raise ConfigError(f"groups: expected numbers of groups, got {groups!r}")
    chosen = _spread(count) if groups is None else tuple(groups)
    if not chosen or not all(type(group) is int and 0 <= group < count for group in chosen):
        raise ConfigError(f"groups: expected some of 0 ... {count - 1}, got {list(chosen)}")
    rows: list[Row] = []
    notices = [f"probed groups {list(chosen)} of {count}"]
    for group in chosen:
        shown: list[str] = []
        report = check_linear(
            _one_group(kernel, weight, bias, group, chosen, shown),
            weight[group],
            bias=None if bias is None else bias[group],
            **options,
        )
        named = [_named(row, shown) for row in report.rows]
        rows += [replace(row, tap=f"linear.{group}:out") for row in named]
        notices += report.notices
    compared = len({row.tap for row in rows if row.stats})
    layout = _layout(kernel, weight, bias, options)
    failing = [row for row in rows if row.verdict is Verdict.FAIL]
    if layout.diagnosis:  # what is between the groups explains what is seen of one of them
        rows = [layout, *(_blocked(row, layout.tap) for row in rows)]
    else:
        rows = _of_other_groups(rows, kernel, weight, bias, options)
        rows.append(_blocked(layout, failing[0].tap) if failing else layout)
    return Report(
        case=f"check_batched_linear {getattr(kernel, '__name__', type(kernel).__name__)}",
        rows=tuple(rows),
        coverage=Coverage(expected=len(chosen), compared=compared),
        command="reconcile.check_batched_linear",
        created=report.created,
        seconds=round(time.perf_counter() - started, 3),
        notices=tuple(dict.fromkeys(notices)),
    )


def _named(row: Row, shown: Sequence[str]) -> Row:
    """The row with the diagnosis of outputs of other groups that nobody wrote."""
    if row.reason is not Reason.RAISED or not any(text in row.text for text in shown):
        return row
    text = "they are finite where memory that nobody wrote holds 1, and NaN where it holds NaN"
    return replace(row, diagnosis=(Diagnosis(name="unwritten", explains=1.0, text=text),))


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what torch leaves uninitialised with 1."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if "empty" in str(func) and isinstance(made, Tensor):
            made.fill_(1)
        return made


def _shows_unwritten(kernel: Callable[..., Tensor], given: list[Tensor], groups: list[int]) -> bool:
    """Whether outputs that are not finite become so if uninitialised memory holds 1."""
    try:
        with _Ones():  # type: ignore[no-untyped-call]
            y = kernel(*(operand.clone() for operand in given))
    except Exception:  # noqa: BLE001 - the kernel is what is judged
        return False
    return all(bool(y[group].isfinite().all()) for group in groups)


def _blocked(row: Row, cause: str) -> Row:
    """A failure that another explains is not a second one."""
    if row.verdict is not Verdict.FAIL:
        return row
    text = f"explained by {cause}; {row.text}"
    return replace(row, verdict=Verdict.INCONCLUSIVE, reason=Reason.BLOCKED, text=text)


def _layout(
    kernel: Callable[..., Tensor], weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Row:
    """All groups at once on x as a view of memory [M, G, K], as a model that transposes has it."""
    groups, n, k = weight.shape
    contract = options.get("contract") or getattr(kernel, "contract", None)
    promised: Contract = contract or Contract(output=str(weight.dtype).removeprefix("torch."))
    x, given = _strided(weight, bias, options)
    diagnosis: tuple[Diagnosis, ...] = ()
    try:
        y: Any = kernel(*given)
        finding = _judge_layout(y, x, weight, bias, promised)
        if finding.reason is Reason.OVER_LIMIT:
            diagnosis = explain_groups(y, x, weight, bias)
    except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
        call = failed_call(error, f"on a strided x {list(given[0].shape)}")
        finding = Finding({}, reason=call.reason or Reason.RAISED, text=call.text)
    stats = {name: value for name, value in finding.stats.items() if name != "shape"}
    return Row(
        level=Level.OP,
        tap="linear:out",
        check="layout",
        shape=(groups, ROWS, n, k),
        kernel=getattr(kernel, "__name__", type(kernel).__name__),
        engine=PYTHON.name,
        implementation=PYTHON.implementation,
        execution=PYTHON.execution,
        fidelity=PYTHON.fidelity,
        verdict=Verdict.PASS if finding.reason is None else finding.reason.verdict,
        reason=finding.reason,
        text=finding.text,
        stats=stats | ({"sees": "x as a view of [M, G, K]"} if stats else {}),
        limits=finding.limits,
        utilisation=finding.utilisation,
        diagnosis=diagnosis,
    )


def _of_other_groups(
    rows: list[Row],
    kernel: Callable[..., Tensor],
    weight: Tensor,
    bias: Tensor | None,
    options: dict[str, Any],
) -> list[Row]:
    """The rows; a group that nothing in it explains, with what it has of another group."""
    unexplained = {
        int(row.tap.removeprefix("linear.").removesuffix(":out"))
        for row in rows
        if row.verdict is Verdict.FAIL and row.diagnosis and row.diagnosis[0].name == NONE_FITS
    }
    if not unexplained:
        return rows
    x, given = _strided(weight, bias, options)
    try:
        y: Any = kernel(*given)
        found = {g: explain_one(y, x, weight, bias, g) for g in unexplained}
    except Exception:  # noqa: BLE001 - a kernel may raise anything; its rows stand as they are
        return rows
    by_tap = {f"linear.{g}:out": diagnosis for g, diagnosis in found.items() if diagnosis}
    return [
        replace(row, diagnosis=by_tap[row.tap])
        if row.tap in by_tap and row.diagnosis and row.diagnosis[0].name == NONE_FITS
        else row
        for row in rows
    ]


def _strided(
    weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Random x [M, G, K] and the operands of a call on its view [G, M, K]."""
    groups, _, k = weight.shape
    generator = torch.Generator().manual_seed(int(options.get("seed", 0)))
    x = torch.randn(ROWS, groups, k, generator=generator).to(weight.dtype)
    given = [x.clone().transpose(0, 1), weight.clone(), *([] if bias is None else [bias.clone()])]
    return x, given


def _judge_layout(
    y: object, x: Tensor, weight: Tensor, bias: Tensor | None, contract: Contract
) -> Finding:
    count, n, k = weight.shape
    if not isinstance(y, Tensor) or tuple(y.shape) != (count, len(x), n):
        got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
        text = f"expected y {[count, len(x), n]} for a strided x, got {got}"
        return Finding({}, reason=Reason.SHAPE, text=text)
    groups = [
        DenseWeight(tensor=weight[g], bias=None if bias is None else bias[g]) for g in range(count)
    ]
    exact = GroupedReference(GroupedWeight(groups=tuple(groups)), contract, torch.float64)
    candidate = flat_rows(y.transpose(0, 1), count)
    return judge_bound(
        candidate,
        flat_rows(exact(x), count),
        flat_rows(exact.magnitude(x), count),
        k,
        contract.at(len(x)),
        "float64",
    )


def _spread(count: int) -> tuple[int, ...]:
    if count <= MOST:
        return tuple(range(count))
    return tuple(sorted({round(i * (count - 1) / (MOST - 1)) for i in range(MOST)}))


def _one_group(
    kernel: Callable[..., Tensor],
    weight: Tensor,
    bias: Tensor | None,
    group: int,
    chosen: tuple[int, ...],
    shown: list[str],
) -> Callable[..., Tensor]:
    """The batched kernel as a plain one whose operands stand in place ``group``.

    What it does to the other groups is raised: it must leave their operands alone and keep their
    outputs finite whatever the probed group holds; ``shown`` gets the texts of those that are of
    memory that nobody wrote. An output that is not finite although all
    operands are is left to the probes of its own group, where that is among the ``chosen``.
    """
    count = weight.shape[0]
    unwritten: set[int] = set()
    others = torch.arange(count) != group

    def plain(x: Tensor, own: Tensor, own_bias: Tensor | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(group)
        rows = x.reshape(-1, x.shape[-1])
        known = own.shape == weight.shape[1:]
        operands = [
            torch.randn(count, *rows.shape, generator=generator).to(x.dtype),
            weight if known else torch.randn(count, *own.shape, generator=generator).to(own.dtype),
        ]
        mine = [rows, own]
        if own_bias is not None:
            drawn = torch.randn(count, own.shape[0], generator=generator).to(own_bias.dtype)
            operands.append(bias if known and bias is not None else drawn)
            mine.append(own_bias)
        given = [operand.clone() for operand in operands]
        for operand, part in zip(given, mine, strict=True):
            operand[group] = part
        kept = [operand.clone() for operand in given]
        y: Any = kernel(*given)
        for operand, before, part in zip(given, kept, mine, strict=True):
            if not bitwise_equal(operand[others], before[others]):
                raise RuntimeError("the kernel changed an operand of another group")
            part.copy_(operand[group])  # what it changed of this group is seen by the caller
        x.copy_(rows.view_as(x))
        if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[0] != count:
            return y  # type: ignore[no-any-return]
        spoilt = [g for g in range(count) if g != group and not bool(y[g].isfinite().all())]
        spread = not all(bool(part.isfinite().all()) for part in mine)
        if not spread and not bool(y[group].isfinite().all()):
            return y[group].reshape(*x.shape[:-1], y.shape[-1])  # its own fault says it
        if not spread and set(spoilt) <= set(chosen):
            unwritten.update(spoilt)
        elif strange := sorted(set(spoilt) - unwritten):
            text = f"outputs of other groups, whose operands are finite, are not: groups {strange}"
            if _shows_unwritten(kernel, kept, strange):
                shown.append(text)
            raise RuntimeError(text)
        return y[group].reshape(*x.shape[:-1], y.shape[-1])

    plain.__name__ = getattr(kernel, "__name__", type(kernel).__name__)
    if (contract := getattr(kernel, "contract", None)) is not None:
        plain.contract = contract  # type: ignore[attr-defined]
    return plain
