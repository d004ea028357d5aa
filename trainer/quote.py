"""Quotes values in messages, those that are long shortened."""

from __future__ import annotations

import math
import re
from typing import Any

MOST = 200  # characters of a value
# A quoted text, whose quotation marks stand at its ends where an apostrophe stands within a word; or a word.
_LONG = re.compile(rf"(?<!\w)'[^']{{{MOST},}}'(?!\w)|\"[^\"]{{{MOST},}}\"|\S{{{2 * MOST},}}")


def shortened(text: str, most: int = MOST) -> str:
    """`text`, or its first quarter and its length where it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 4]}... ({len(text)} characters)"


def quoted(value: Any, most: int = MOST) -> str:
    """`repr(value)`, shortened; of a whole number with more digits than Python writes, how many it has."""
    try:
        return shortened(repr(value), most)
    except ValueError:  # Python's limit on digits
        return (
            f"a number of some {round(math.log10(2) * value.bit_length())} digits" if isinstance(value, int) else "..."
        )


def in_one_line(text: str) -> str:
    """`text` with line breaks and other characters that do not print by their escapes, as `repr` has them."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def shorten_quoted(sentence: str) -> str:
    """A sentence with what it quotes at length shortened, in quotation marks or as one word; one that is longer than
    six such values all the same, as by a path with spaces, loses its middle."""
    text = _LONG.sub(lambda match: shortened(match[0]), sentence)
    return text if len(text) <= 6 * MOST else f"{text[: 3 * MOST]} ... {text[-2 * MOST :]}"
