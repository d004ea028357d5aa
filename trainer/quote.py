"""Quotes values in messages: long ones shortened, characters that act on a terminal as escapes."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

MOST = 200  # characters of a value
# Categories of characters that a reader does not see and a terminal or a page may obey: controls, marks of direction
# (Boucher and Anderson 2021, "Trojan Source") and other formats, halves of surrogate pairs, separators of lines.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
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


def unseen(character: str) -> bool:
    """Returns True for a character that a reader does not see, line ends and tabs apart."""
    return character not in "\n\t" and unicodedata.category(character) in _UNSEEN


def visible(text: str) -> str:
    """Returns `text` with its unseen characters as escapes, such as `\\u001b`, so that nothing in it acts on what
    shows it."""
    if text.isprintable():
        return text
    return "".join(_escape(character) if unseen(character) else character for character in text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def in_one_line(text: str) -> str:
    """Returns `text` as `visible` does, with its line ends and tabs as escapes too."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten_quoted(sentence: str) -> str:
    """A sentence with what it quotes at length shortened, in quotation marks or as one word; one that is longer than
    six such values all the same, as by a path with spaces, loses its middle."""
    text = _LONG.sub(lambda match: shortened(match[0]), sentence)
    return text if len(text) <= 6 * MOST else f"{text[: 3 * MOST]} ... {text[-2 * MOST :]}"
