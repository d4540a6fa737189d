"""One call of a kernel under guard: what it returned, and what it did besides."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.exceptions import BuildError
from reconcile.fallback import watching
from reconcile.grouped import (
    GroupedWeight,
    StoredWeight,
    group_count,
    to_kernel,
    to_module,
)
from reconcile.kernel import Engine, Kernel
from reconcile.linears import DenseWeight, reference_withheld
from reconcile.report import Reason
from reconcile.rounding import bit_view, bitwise_equal
from reconcile.settings import settings_kept
from reconcile.tracing.trace import visit_tensors


class KernelFailureError(Exception):
    """A kernel call inside a model that gave no usable output; ends that pass."""

    def __init__(self, module: str, call: Call) -> None:
        super().__init__(f"{module}: {call.text}")
        self.module = module
        self.call = call


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Outcome of a guarded call: an output, or the reason why there is none.

    ``reason`` may come with an output: a kernel that changed its input still returned one.
    """

    output: Tensor | None
    reason: Reason | None = None
    text: str = ""
    others: tuple[Tensor, ...] = ()
    """Outputs of further calls on the same input that have other bits, where that is allowed;
    they are judged as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A kernel ready to compute one layer."""

    name: str
    """Module path."""
    kernel: Kernel
    engine: Engine
    prepared: Any
    bias: Tensor | None
    n: int
    k: int
    output: torch.dtype
    groups: int | None = None
    """G of a batched linear, whose x is [G, M, K]; None: a plain one."""

    @classmethod
    def of(
        cls, kernel: Kernel, engine: Engine, weight: StoredWeight, output: torch.dtype
    ) -> Prepared:
        """Let the kernel repack a copy of the weight; a dense one is given as its tensor.

        A batched linear of dense groups is given as one tensor [G, N, K].

        The kernel never gets the tensors that the reference decodes, so that it cannot change
        what it is judged by, nor what the next kernel gets.

        Raises:
            WeightChangedError: ``prepare`` wrote into the weight that it was given.
            SettingsChangedError: ``prepare`` changed a setting of the process.
        """
        own, given = _own_copy(weight)
        with settings_kept() as changed:
            prepared = kernel.prepare(given, engine)
        if changed:
            raise SettingsChangedError(changed[0])
        if not all(map(bitwise_equal, tensors_of(own), tensors_of(weight))):
            raise WeightChangedError
        return cls(
            name=weight.name,
            kernel=kernel,
            engine=engine,
            prepared=prepared,
            bias=own.bias,
            n=weight.shape[0],
            k=weight.shape[1],
            output=output,
            groups=group_count(weight),
        )

    @classmethod
    def attempt(
        cls, kernel: Kernel, engine: Engine, weight: StoredWeight, output: torch.dtype
    ) -> Prepared | Call:
        """`of`, or why the kernel could not prepare the weight."""
        try:
            return cls.of(kernel, engine, weight, output)
        except WeightChangedError:
            text = "prepare changed the weight that it was given"
            return Call(output=None, reason=Reason.INPUT_MUTATED, text=text)
        except SettingsChangedError as error:
            return Call(output=None, reason=Reason.INPUT_MUTATED, text=f"prepare {error}")
        except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
            return failed_call(error, "in prepare")

    def call(self, x: Tensor, *, poison: bool = True) -> Call:
        """Apply the kernel to a copy of x [..., K] and check what it did.

        Memory that torch allocates meanwhile is filled with NaN if ``poison``, so that an
        element the kernel does not write shows. The output is copied, so that a kernel which
        returns its own workspace cannot change it later.
        """
        given = _copy(x)
        before = tensors_of(self.prepared, self.bias)
        kept = [tensor.clone() for tensor in before]
        try:
            with (
                settings_kept() as changed,
                watching(self.kernel) as watch,
                reference_withheld(),
                poisoned_memory() if poison else _plain_memory(x, self.n),
            ):
                y = self.kernel.apply(given, self.prepared, self.bias)
        except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
            return failed_call(error, f"on x {list(x.shape)}")
        if changed:
            return Call(output=None, reason=Reason.INPUT_MUTATED, text=changed[0])
        call = self.check_output(x, y)
        if call.output is None:
            return call
        if not bitwise_equal(given, x):
            places = int((bit_view(given) != bit_view(x)).sum())
            text = f"changed {places} of {x.numel()} elements of its input"
            return Call(output=call.output, reason=Reason.INPUT_MUTATED, text=text)
        if not all(map(bitwise_equal, before, kept)):
            text = "changed its prepared weight or its bias"
            return Call(output=call.output, reason=Reason.INPUT_MUTATED, text=text)
        if fallback := watch.fallback:
            return Call(output=call.output, reason=Reason.FELL_BACK, text=fallback)
        return call

    def owning(self, call: Call, x: Tensor, deterministic: bool = True) -> Call:
        """The call for x, or the reason if a later call changes what it had returned."""
        assert call.output is not None
        try:
            first = self.kernel.apply(_copy(x), self.prepared, self.bias)
            kept = first.detach().clone()
            self.kernel.apply(-x, self.prepared, self.bias)
        except BaseException as error:  # noqa: BLE001 - a kernel may raise anything
            return failed_call(error, f"on x {list(x.shape)}, called again")
        if not bitwise_equal(first.detach(), kept):
            text = "a later call changed an output that had been returned: a workspace is shared"
            return Call(output=call.output, reason=Reason.UNSTABLE, text=text)
        return _compared(call, kept) if deterministic else call

    def check_output(self, x: Tensor, y: object) -> Call:
        """A copy of y where it is a tensor of the promised shape and dtype, else the reason."""
        expected = (*x.shape[:-1], self.n)
        if not isinstance(y, Tensor):
            return Call(
                output=None,
                reason=Reason.DTYPE,
                text=f"expected a tensor {list(expected)}, got {type(y).__name__}",
            )
        if type(y) is not Tensor:
            text = f"expected a torch.Tensor, got {type(y).__name__}, a subclass of it"
            return Call(output=None, reason=Reason.DTYPE, text=text)
        if y.layout != torch.strided or y.is_meta:
            text = f"expected a dense tensor with values, got {y.layout} on {y.device}"
            return Call(output=None, reason=Reason.DTYPE, text=text)
        if tuple(y.shape) != expected:
            return Call(
                output=None,
                reason=Reason.SHAPE,
                text=f"expected y {list(expected)} for x {list(x.shape)}, got {list(y.shape)}",
            )
        if y.dtype != self.output:
            return Call(
                output=None, reason=Reason.DTYPE, text=f"expected {self.output}, got {y.dtype}"
            )
        return Call(output=y.detach().clone())


def repeated(
    prepared: Prepared | Call,
    x: Tensor,
    repeats: int,
    deterministic: bool,
) -> Call:
    """The first of several calls, with the reason if the calls disagree.

    Memory is poisoned in the first call only: an element that is NaN there and something else
    in another call was never written.
    """
    if isinstance(prepared, Call):
        return prepared
    first = prepared.call(x, poison=True)
    if first.output is None or first.reason is not None:
        return first
    for _ in range(repeats - 1):
        again = prepared.call(x, poison=False)
        if again.output is None:
            return again
        if again.reason is not None:
            return again
        if bitwise_equal(first.output, again.output):
            continue
        compared = _compared(first, again.output)
        if deterministic or compared.reason is Reason.UNWRITTEN:
            return compared
        first = replace(first, others=(*first.others, again.output))
    return first


def _compared(first: Call, again: Tensor) -> Call:
    """The first call, or the reason if a second one on the same input has other bits."""
    assert first.output is not None
    if bitwise_equal(first.output, again):
        return first
    unwritten = first.output.isnan() & ~again.isnan()
    if bool(unwritten.any()):
        return Call(output=first.output, reason=Reason.UNWRITTEN, text=_places(unwritten))
    differing = bit_view(first.output) != bit_view(again)
    text = f"two calls on the same input differ: {_places(differing)}"
    return Call(output=first.output, reason=Reason.UNSTABLE, text=text)


def _places(mask: Tensor) -> str:
    """Counts, the first place, and the columns where they are few.

    >>> _places(torch.tensor([[False, True], [False, True]]))
    '2 of 4 elements, first at [0, 1], in column 1 only'
    """
    first = mask.nonzero()[0].tolist()
    text = f"{int(mask.sum())} of {mask.numel()} elements, first at {first}"
    columns = mask.reshape(-1, mask.shape[-1]).any(0).nonzero().flatten().tolist()
    if len(columns) == 1 and mask.shape[-1] > 1:
        text += f", in column {columns[0]} only"
    return text


class KernelLinear(nn.Module):
    """A kernel in a model, in place of a linear. It never falls back to other code unseen."""

    def __init__(self, prepared: Prepared, elsewhere: nn.Module | None = None) -> None:
        """``elsewhere`` computes while `used` is False: the phases that a route leaves alone."""
        super().__init__()
        self._prepared = prepared
        self._elsewhere = elsewhere
        self.used = True
        self.calls = 0
        """Calls in which the kernel itself computed the result."""
        self.mutation = ""
        """What a call changed that was not its own; empty: nothing since `forget`."""
        self.fallback = ""
        """Why the result of a call is not the kernel's; empty: each was, since `forget`."""

    def forget(self) -> None:
        """Begin to note anew what calls do besides computing."""
        self.mutation = self.fallback = ""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N], of a batched linear [..., G, K] to [..., G, N].

        x is passed as it is, not as a copy: what the kernel does to it happens to the model. A
        kernel that gives no usable output raises KernelFailureError.
        """
        if not self.used and self._elsewhere is not None:
            y: Tensor = self._elsewhere(x)
            return y
        prepared = self._prepared
        given = to_kernel(x, prepared.groups)
        kept = given.clone()
        with settings_kept() as left, watching(prepared.kernel) as watch, poisoned_memory():
            try:
                y = prepared.kernel.apply(given, prepared.prepared, prepared.bias)
            except BaseException as error:
                call = failed_call(error, f"on x {list(given.shape)}")
                raise KernelFailureError(prepared.name, call) from error
        call = prepared.check_output(kept, y)
        if call.output is None or not isinstance(y, Tensor):
            raise KernelFailureError(prepared.name, call)
        if not bitwise_equal(given, kept):
            left.append("changed its input")
        self.mutation = self.mutation or "".join(f"{text} in the model run" for text in left[:1])
        self.fallback = self.fallback or watch.fallback
        self.calls += not watch.fallback
        # not the copy: a workspace that the next call overwrites must show
        return to_module(y, x.shape[:-2], prepared.groups)


class WeightChangedError(Exception):
    """A kernel's ``prepare`` wrote into the weight that it was given."""


class SettingsChangedError(Exception):
    """A kernel's ``prepare`` changed a setting of the process, e.g. torch's default dtype."""


def failed_call(error: BaseException, where: str) -> Call:
    """The outcome of a call that raised.

    NotImplementedError declines, and a source that does not compile here does not run here: both
    say nothing about the kernel's numbers. Anything else, SystemExit among it, is the kernel's
    fault; only an interrupt by the user goes through.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise too
        text = "its message cannot be shown"
    name = type(error).__name__
    if isinstance(error, NotImplementedError):
        return Call(output=None, reason=Reason.NOT_RUN, text=f"declined {where}: {text or name}")
    if isinstance(error, BuildError):
        return Call(output=None, reason=Reason.NOT_RUN, text=f"not built here: {text}")
    return Call(output=None, reason=Reason.RAISED, text=f"raised {name} {where}: {text}")


def _own_copy(weight: StoredWeight) -> tuple[StoredWeight, StoredWeight | Tensor]:
    """The weight over tensors of its own, and the form in which a kernel gets it."""
    if isinstance(weight, GroupedWeight):
        return _own_groups(weight)
    bias = None if weight.bias is None else weight.bias.clone()
    if isinstance(weight, DenseWeight):
        dense = replace(weight, tensor=weight.tensor.clone(), bias=bias)
        return dense, dense.tensor
    own = replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone(), bias=bias)
    return own, own


def _own_groups(weight: GroupedWeight) -> tuple[GroupedWeight, GroupedWeight | Tensor]:
    """The same of a batched weight: dense groups are views of the one tensor that is given."""
    copies = [_own_copy(group)[0] for group in weight.groups]
    dense = [copy for copy in copies if isinstance(copy, DenseWeight)]
    if not dense:
        own = replace(weight, groups=tuple(copies))  # type: ignore[arg-type]
        return own, own
    stacked = torch.stack([copy.tensor for copy in dense])
    views = [replace(copy, tensor=part) for copy, part in zip(dense, stacked, strict=True)]
    return replace(weight, groups=tuple(views)), stacked


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that torch leaves uninitialised with NaN (integers: their maximum).

    This is torch's own deterministic fill, so it reaches allocations in C++ too. Recycled
    memory would otherwise often hold the right old value.
    """
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = fill
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def _plain_memory(x: Tensor, n: int) -> Iterator[None]:
    """Recycled memory that held a finite pattern, which no right output equals."""
    rows = x.numel() // max(1, x.shape[-1])
    for dtype in {x.dtype, torch.float32}:
        torch.full((rows, n), -7.75, dtype=dtype, device=x.device)
    yield


def tensors_of(*values: object) -> list[Tensor]:
    """Every tensor in the values, also among the attributes of plain objects."""
    found: list[Tensor] = []
    for value in values:
        attributes = getattr(value, "__dict__", {})
        for place in (value, attributes):
            visit_tensors(place, "", lambda _, tensor: found.append(tensor.detach()))
    return found


def _copy(x: Tensor) -> Tensor:
    """A copy of x with its strides and with whatever lies between its elements."""
    if x.is_contiguous():
        return x.clone()
    storage = x.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())
