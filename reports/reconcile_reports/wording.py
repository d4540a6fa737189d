"""Text from data: what every renderer prints is made printable here.

Names and messages in a report come from checkpoints, kernels and files. `visible` leaves no
character in them that a terminal, an XML parser or a reader's eye could take for something else.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_HIDDEN = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories that are spelt out: controls, marks of direction, lone surrogates, ..."""


def visible(text: str) -> str:
    r"""``text`` with characters that cannot be seen spelt out; newlines and tabs stay.

    What it returns is legal in UTF-8 and in XML 1.0.

    >>> visible("a\x00b\x1b[31m\u202ec\ud800\r\n")
    'a\\x00b\\x1b[31m\\u202ec\\ud800\n'
    """
    return "".join(map(_visible_character, text.replace("\r\n", "\n")))


def _visible_character(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: str) -> str:
    r"""``visible`` with every run of white space as one space.

    >>> one_line(" first\n\n  second\t")
    'first second'
    """
    return " ".join(visible(text).split())


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters, ``...`` where something was left out.

    >>> cut("0123456789", 10), cut("0123456789", 9)
    ('0123456789', '012345...')
    """
    return text if len(text) <= width else text[: max(width - 3, 0)] + "..."


def real(value: object) -> float | None:
    """``value`` as a float if it is a number, else None.

    >>> real(3), real(True), real("3"), real(None)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def number(value: object) -> str:
    """A number in three significant digits; integers in full; ``-`` for None.

    What is not 1 is never rounded to 1: a utilisation of 1.0004 is over its limit.

    >>> number(3.14159e-5), number(0.5), number(128), number(float("nan")), number(None)
    ('3.14e-05', '0.5', '128', 'NaN', '-')
    >>> number(1.00042), number(1.0)
    ('1.0004', '1')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_beside(value, 1.0)
    return one_line(value if isinstance(value, str) else json.dumps(_spelt(value)))


def number_beside(value: object, other: object) -> str:
    """`number` with as many digits as tell ``value`` from ``other``.

    >>> number_beside(0.25001, 0.25), number_beside(0.25, 0.25001), number_beside(0.25, 0.25)
    ('0.25001', '0.25', '0.25')
    """
    if not isinstance(value, float):
        return number(value)
    if math.isnan(value):
        return "NaN"
    than = real(other)
    precisions = range(3, 18) if than is not None and value != than else range(3, 4)
    texts = (f"{value:.{digits}g}" for digits in precisions)
    return next((text for text in texts if than is None or float(text) != than), f"{value:.3g}")


def numbers(values: Sequence[int], most: int = 12) -> str:
    """Ascending integers in a list; of a long one the beginning, the end and how many they are.

    >>> numbers([1, 12, 37]), numbers(range(1, 65), most=4)
    ('1, 12, 37', '1, 2, 3, ... 64 (64 numbers)')
    """
    if len(values) <= most:
        return ", ".join(map(str, values))
    first = ", ".join(map(str, values[: most - 1]))
    return f"{first}, ... {values[-1]} ({len(values)} numbers)"


def _spelt(value: Any) -> Any:  # noqa: ANN401
    """``value`` with its floats as `number` prints them."""
    if isinstance(value, dict):
        return {str(key): _spelt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelt(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.3g}")
    return value if isinstance(value, int | str) or value is None else str(value)


def percent(share: float) -> str:
    """A share as a percentage; never 100 % where something is missing.

    >>> percent(1.0), percent(0.9999), percent(0.57), percent(0.0)
    ('100 %', '99.9 %', '57 %', '0 %')
    """
    if not math.isfinite(share):
        return number(share)
    rounded = round(share * 100, 1)
    return f"{99.9 if rounded == 100 and share < 1 else rounded:g} %"


def shape(dimensions: Iterable[int]) -> str:
    """Dimensions as ``4x128x64``; ``-`` for none.

    >>> shape((4, 128, 64)), shape(())
    ('4x128x64', '-')
    """
    return "x".join(map(str, dimensions)) or "-"


def plural(count: int, noun: str) -> str:
    """``count`` and the noun.

    >>> plural(1, "row"), plural(0, "row")
    ('1 row', '0 rows')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def layer(tap: str) -> str | None:
    """Number of the layer in a module path.

    >>> layer("model.layers.12.mlp:out"), layer("lm_head:out")
    ('12', None)
    """
    found = re.search(r"\.(\d+)[.:]", tap)
    return found.group(1) if found else None
