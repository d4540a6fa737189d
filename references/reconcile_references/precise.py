"""Keep float64 where a library module would drop to float32.

Transformers computes RMSNorm, RoPE and softmax in float32 whatever the model's dtype is. In a
float64 reference those islands would be its largest error. Inside `preserve_float64` a cast
from float64 to a narrower floating-point dtype keeps float64, and an integer that is cast to
float32, or a tensor that is made from nothing with dtype float32 (the frequencies of RoPE),
becomes float64; the modules' own code and semantics stay as they are. An operation that narrows
in any other way is an error, so the reference cannot lose precision unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reconcile.exceptions import CheckpointError

_CAST = torch.ops.aten._to_copy.default
_ISLANDS = {torch.float32, torch.bfloat16, torch.float16}
"""Dtypes in which a library computes for speed, not for its meaning."""
_NARROW = {*_ISLANDS, torch.float8_e4m3fn, torch.float8_e5m2}


class _PreserveFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns casts to and new tensors of a narrow dtype into float64, refuses other narrowing."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator overload
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        given = _dtypes(args)
        made = not given or (func is _CAST and not given & _NARROW)
        if made and kwargs.get("dtype") in _ISLANDS:
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        narrowed = sorted(str(dtype) for dtype in _dtypes(result) & _NARROW)
        if narrowed and torch.float64 in given:
            raise CheckpointError(
                f"{func} narrows float64 to {narrowed[0]}: this model cannot serve as a "
                'float64 reference; use [reference] dtype = "float32"'
            )
        return result


def _dtypes(tree: object) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


@contextmanager
def preserve_float64() -> Iterator[None]:
    """Context in which float64 stays float64.

    >>> with preserve_float64():
    ...     torch.ones(1, dtype=torch.float64).float().dtype
    torch.float64
    """
    with _PreserveFloat64():  # type: ignore[no-untyped-call]
        yield
