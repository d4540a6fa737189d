"""As much of Triton's language as `kernel.py` speaks, executed by torch on the CPU.

With it the kernel's source runs, program by program, where Triton is not installed. It computes
with the same bits as a correct Triton would: bfloat16 is bfloat16, a dot of bfloat16 tiles is
summed in float32, and a conversion rounds to nearest even. What it cannot show is the order of
additions inside one dot, which is the hardware's own, and anything about speed.

Pointers are tensors; an address is an index into their storage. An access outside of the storage
is an error, also where hardware would read something.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

float32 = torch.float32
bfloat16 = torch.bfloat16
float16 = torch.float16
int64 = torch.int64
constexpr = int
"""Compile-time arguments are plain integers here."""

_PROGRAM: list[tuple[int, ...]] = []
"""Place in the grid of the program that runs."""


@dataclass(frozen=True, slots=True)
class PointerType:
    """What a pointer points at, as Triton spells it."""

    element_ty: torch.dtype


@dataclass(frozen=True, slots=True)
class Pointer:
    """Addresses in one tensor's storage, in elements."""

    storage: Tensor
    """All elements of the storage, one-dimensional."""
    offset: Any
    """int, or int64 tensor of addresses."""

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        """The address of the tensor's first element."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        # detached: what the kernel writes is no operation of autograd
        tensor = tensor.detach()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())

    def __add__(self, other: Any) -> Pointer:  # noqa: ANN401
        """Further on by so many elements."""
        return Pointer(self.storage, self.offset + other)

    @property
    def dtype(self) -> PointerType:
        """``dtype.element_ty`` is the elements' dtype."""
        return PointerType(self.storage.dtype)


class Program:
    """A jitted function: ``f[grid](...)`` runs it once for every place in the grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """A launch over the grid."""

        def launch(*arguments: Any, **constants: Any) -> None:  # noqa: ANN401
            given = [Pointer.to(a) if isinstance(a, Tensor) else a for a in arguments]
            for place in itertools.product(*map(range, grid)):
                _PROGRAM.append(place)
                try:
                    self._function(*given, **constants)
                finally:
                    _PROGRAM.pop()

        return launch


def jit(function: Callable[..., None]) -> Program:
    """Triton's decorator."""
    return Program(function)


def program_id(axis: int) -> int:
    """Place of the running program."""
    return _PROGRAM[-1][axis]


def arange(start: int, end: int) -> Tensor:
    """Start ... end - 1; as in Triton the length is a power of two."""
    length = end - start
    if length < 1 or length & (length - 1):
        raise ValueError(f"arange: expected a length that is a power of two, got {length}")
    return torch.arange(start, end)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tile of zeros."""
    return torch.zeros(shape, dtype=dtype)


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def minimum(a: int, b: int) -> int:
    """The smaller of two scalars."""
    return min(a, b)


def load(pointer: Pointer, mask: Tensor, other: float) -> Tensor:
    """The elements at the addresses; ``other`` where the mask is false."""
    offset, mask = _broadcast(pointer.offset, mask)
    safe = _checked(pointer, offset, mask)
    values = pointer.storage.take(safe)
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    """Write where the mask is true; the value is converted to the pointer's dtype."""
    offset, mask, value = _broadcast(pointer.offset, mask, value)
    _checked(pointer, offset, mask)
    pointer.storage[offset[mask]] = value[mask].to(pointer.storage.dtype)


def _broadcast(*tensors: Tensor) -> tuple[Tensor, ...]:
    same: tuple[Tensor, ...] = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
    return same


def _checked(pointer: Pointer, offset: Tensor, mask: Tensor) -> Tensor:
    """Addresses, 0 where masked; IndexError for one outside of the storage."""
    safe = torch.where(mask, offset, 0)
    if bool((safe < 0).any()) or bool((safe >= pointer.storage.numel()).any()):
        raise IndexError(
            f"address {int(safe.max())} is outside of a storage of {pointer.storage.numel()}"
        )
    return safe


def dot(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """Acc + a b, products and sums in float32."""
    return torch.addmm(acc, a.float(), b.float())
