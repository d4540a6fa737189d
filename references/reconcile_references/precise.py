"""Keep float64 where a library module would drop to float32.

Transformers computes RMSNorm, RoPE and softmax in float32 whatever the model's dtype is. In a
float64 reference those islands would be its largest error. Inside `preserve_float64` a cast
from float64 to a narrower floating-point dtype keeps float64, and an integer that is cast to
float32 becomes float64; the modules' own code and semantics stay as they are. An operation that
narrows in any other way is an error, so the reference cannot lose precision unseen.
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
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


class _PreserveFloat64(TorchDispatchMode):
    """Turns narrowing casts into float64 ones and refuses any other narrowing."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator overload
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if func is _CAST and kwargs.get("dtype") in _NARROW and _is_wide(args[0]):
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        narrowed = sorted(str(dtype) for dtype in _dtypes(result) & set(_NARROW))
        if narrowed and torch.float64 in _dtypes((args, kwargs)):
            raise CheckpointError(
                f"{func} narrows float64 to {narrowed[0]}: this model cannot serve as a "
                'float64 reference; use [reference] dtype = "float32"'
            )
        return result


def _is_wide(value: object) -> bool:
    return isinstance(value, Tensor) and (
        value.dtype == torch.float64 or not value.is_floating_point()
    )


def _dtypes(tree: object) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


@contextmanager
def preserve_float64() -> Iterator[None]:
    """Context in which float64 stays float64."""
    with _PreserveFloat64():
        yield
