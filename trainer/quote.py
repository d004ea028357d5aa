"""Quotes values in messages: long ones shortened, characters that act on a terminal escaped."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

MOST = 200  # characters of a value
# Categories of characters that a reader does not see and a terminal or a page may obey: controls, direction marks
# (Boucher and Anderson 2021, "Trojan Source") and other formats, surrogates, line separators.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
# A quoted text, whose quotation marks are at word ends, unlike an apostrophe; or a word.
_LONG = re.compile(rf"(?<!\w)'[^']{{{MOST},}}'(?!\w)|\"[^\"]{{{MOST},}}\"|\S{{{2 * MOST},}}")


def shortened(text: str, most: int = MOST) -> str:
    """Returns `text`, or its first quarter and its length if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 4]}... ({len(text)} characters)"


def quoted(value: Any, most: int = MOST) -> str:
    """Returns `repr(value)`, shortened; for an integer with more digits than Python writes, the number of digits."""
    try:
        return shortened(repr(value), most)
    except ValueError:  # Python's limit on digits
        return (
            f"a number of some {round(math.log10(2) * value.bit_length())} digits" if isinstance(value, int) else "..."
        )


def unseen(character: str) -> bool:
    """Returns True for a character that a reader does not see, other than line ends and tabs."""
    return character not in "\n\t" and unicodedata.category(character) in _UNSEEN


def visible(text: str) -> str:
    """Returns `text` with its unseen characters escaped, such as `\\u001b`, so that none acts on its display."""
    if text.isprintable():
        return text
    return "".join(_escape(character) if unseen(character) else character for character in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def in_one_line(text: str) -> str:
    """Returns `text` as `visible` does, with line ends and tabs escaped too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten_quoted(sentence: str) -> str:
    """Returns a sentence with long values shortened, whether in quotation marks or a single word.

    A sentence that is still longer than six such values, as by a path with spaces, loses its middle.
    """
    text = _LONG.sub(lambda match: shortened(match[0]), sentence)
    return text if len(text) <= 6 * MOST else f"{text[: 3 * MOST]} ... {text[-2 * MOST :]}"
