"""Triton's interpreter, repaired for bfloat16.

The interpreter (TRITON_INTERPRET=1) keeps bfloat16 as raw 16-bit integers and then computes with
those integers: a dot multiplies bit patterns, arithmetic and comparisons act on them, and a
conversion from float32 cuts instead of rounding. `repair` widens bfloat16 operands to float32,
which is exact, computes there, and rounds results once, to nearest even, as the hardware does.

It is a patch of somebody else's class, so it only touches versions whose code was read
(`KNOWN_VERSIONS`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from reconcile.exceptions import KernelError
from reconcile.kernel import Support

KNOWN_VERSIONS = ("3.9.0",)
"""Versions of Triton whose interpreter was read, and is tested, with this patch."""
NOTE = (
    "Triton's interpreter is patched: its own bfloat16 multiplies bit patterns and truncates; "
    "operands are widened to float32 and results rounded once to nearest even"
)
"""What the report says about it."""
_VARIABLE = "TRITON_INTERPRET"
_UNARY = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil")
_NAMED = (
    "create_maximumf", "create_minimumf", "create_maxnumf", "create_minnumf", "create_clampf",
    "create_fma", "create_precise_divf", "create_precise_sqrt",
    *(f"create_{name}" for name in _UNARY),
)  # fmt: skip
"""Arithmetic builders, beside those that begin with ``create_f``."""
_NOT_ARITHMETIC = ("create_fp_", "create_fence")
"""Conversions and barriers, which begin with ``create_f`` too."""


def is_supported() -> Support:
    """Whether the repaired interpreter can run here, and why (not)."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Support(False, "triton is not installed; `make triton` makes an environment with it")
    if version not in KNOWN_VERSIONS:
        return Support(
            False,
            f"triton {version}: its interpreter's bfloat16 was not read; known: "
            f"{', '.join(KNOWN_VERSIONS)}",
        )
    if "triton" in sys.modules and os.environ.get(_VARIABLE) != "1":
        return Support(
            False, f"triton was imported without {_VARIABLE}=1; set it before the program starts"
        )
    return Support(True, f"triton {version} interpreted on the CPU; {NOTE}")


def repair(*, assume: bool = True) -> None:
    """Switch the interpreter on and patch it; once is enough.

    Args:
        assume: whether ``tl.assume`` is checked. aiter's kernel assumes a positive bias stride also
            where there is no bias, which the interpreter takes for a failed assertion and hardware
            takes for a hint about a value that is not used.

    Raises:
        KernelError: it does not run here.
    """
    if not (support := is_supported()):
        raise KernelError(support.reason)
    os.environ[_VARIABLE] = "1"
    triton: Any = importlib.import_module("triton.runtime.interpreter")
    builder = triton.InterpreterBuilder
    if not assume:
        builder.create_assume = lambda _self, _condition: None
    if getattr(builder, "reconcile_repaired", False):
        return
    patch = _Patch(triton, importlib.import_module("triton.language"))
    builder.create_dot = patch.dot(builder.create_dot)
    builder.cast_impl = patch.cast(builder.cast_impl)
    for name in _arithmetic(builder):
        setattr(builder, name, patch.arithmetic(getattr(builder, name)))
    builder.reconcile_repaired = True


def _arithmetic(builder: Any) -> list[str]:  # noqa: ANN401
    names = [
        name
        for name in dir(builder)
        if name in _NAMED or (name.startswith("create_f") and not name.startswith(_NOT_ARITHMETIC))
    ]
    return [name for name in names if callable(getattr(builder, name))]


class _Patch:
    """The replaced operations of one interpreter."""

    def __init__(self, interpreter: Any, language: Any) -> None:  # noqa: ANN401
        self._handle = interpreter.TensorHandle
        self._float32 = language.float32
        self._bfloat16 = language.bfloat16

    def dot(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Products of values, not of bit patterns."""

        def create_dot(builder: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:  # noqa: ANN401
            with np.errstate(all="ignore"):  # overflow to infinity is a result, not a warning
                return original(builder, self._wide(a), self._wide(b), acc, *rest)

        return create_dot

    def cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """float32 to bfloat16 rounds to nearest even."""

        def cast_impl(builder: Any, source: Any, dtype: Any) -> Any:  # noqa: ANN401
            if source.dtype.scalar == self._float32 and dtype.scalar == self._bfloat16:
                return self._narrow(source.data)
            return original(builder, source, dtype)

        return cast_impl

    def arithmetic(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Operands widened, a float32 result rounded once."""

        def create(builder: Any, *arguments: Any) -> Any:  # noqa: ANN401
            narrow = any(map(self._is_bfloat16, arguments))
            with np.errstate(all="ignore"):
                result = original(builder, *map(self._wide, arguments))
            if narrow and result.dtype.scalar == self._float32:
                return self._narrow(result.data)
            return result

        return create

    def _is_handle(self, value: object) -> bool:
        return isinstance(value, self._handle)

    def _is_bfloat16(self, value: Any) -> bool:  # noqa: ANN401
        return self._is_handle(value) and value.dtype.scalar == self._bfloat16

    def _wide(self, value: Any) -> Any:  # noqa: ANN401
        if not self._is_bfloat16(value):
            return value
        return self._handle(to_float32(value.data), self._float32)

    def _narrow(self, values: Any) -> Any:  # noqa: ANN401
        return self._handle(to_bfloat16_bits(values), self._bfloat16)


def to_float32(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """The values of bfloat16 bit patterns, exactly; any shape.

    >>> to_float32(np.array([0x3F80, 0xC000], np.uint16)).tolist()
    [1.0, -2.0]
    """
    wide = np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(np.shape(bits))


def to_bfloat16_bits(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Bit patterns of float32 values rounded to nearest even; a NaN stays one, and is quiet.

    >>> [hex(b) for b in to_bfloat16_bits(np.float32([1.00390625, 1.01171875, np.inf]))]
    ['0x3f80', '0x3f82', '0x7f80']
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(nan, quiet, rounded).reshape(np.shape(values))
