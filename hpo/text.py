"""Words for people: counts, tables, and the next command as they can type it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from trainer.redaction import redacted

_given: dict[str, str] = {}  # flag -> value, as typed for the command that this process runs
_home: ContextVar[str | None] = ContextVar("home", default=None)
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def counted(count: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def tally(counts: Mapping[str, int]) -> str:
    """`1 study, 2 trials`, of nouns in the plural."""
    return ", ".join(f"{count} {_one(noun) if count == 1 else noun}" for noun, count in counts.items())


def _one(noun: str) -> str:
    return {"studies": "study", "batches": "batch"}.get(noun, noun.removesuffix("s"))


def portion(count: int, of: object, noun: str) -> str:
    """`1 of 10 trials`, or `1 trial` where there is no bound."""
    return f"{count} of {of} {noun}{'' if of == 1 else 's'}" if of else counted(count, noun)


def endings(paths: Iterable[str]) -> dict[str, str]:
    """Of each dotted path the shortest ending that no other one has: `optim.lr` beside `schedule.lr`, else `lr`.

    What says nothing by itself, `name` or a number, takes the part before it along.
    """
    parts = {path: path.split(".") for path in paths}

    def ending(path: str) -> str:
        own = parts[path]
        for begin in range(len(own) - 1, 0, -1):
            tail = own[begin:]
            alone = sum(other[-len(tail) :] == tail for other in parts.values()) == 1
            if alone and tail[0] != "name" and not tail[0].isdigit():
                return ".".join(tail)
        return path

    return {path: ending(path) for path in parts}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, their cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def given(flag: str, value: str) -> None:
    """Remember a flag of the running command, for the commands that it names."""
    _given[flag] = value


def forget() -> None:
    """End the command."""
    _given.clear()


@contextmanager
def from_anywhere(home: str) -> Iterator[None]:
    """Commands that are named within lead to this home from whatever directory, as those of a page must."""
    token = _home.set(home)
    try:
        yield
    finally:
        _home.reset(token)


def command(words: str) -> str:
    """`hpo` and `words`, followed by the flags that lead the next command to where this one was led.

    A URL with a password is left to the environment: what is printed may be kept in a log.
    """
    flags = ("--home", "--tracking-uri") if words.split()[0] == "ui" else ("--home", "--storage")
    known = _given | ({"--home": home} if (home := _home.get()) else {})
    return " ".join(["hpo", words, *(f"{flag} {_quoted(flag, known[flag])}" for flag in flags if flag in known)])


def _quoted(flag: str, value: str) -> str:
    if redacted(value) == value:  # and not redacted_url: a directory may be called `q?x`
        return shlex.quote(value)
    return f'"${{HPO_{flag[2:].upper().replace("-", "_")}:?export the URL that {flag} had}}"'


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'a' or 'b'?` for those of `known` that resemble `name` most, three at most; else an empty string.

    Paths resemble each other by their last parts first, of which `lr` stands for `learning_rate` too, then by parents.
    A name that goes on from a known one by a word of its own, `atft_production` from `atft`, means that one.
    """
    parent, _, leaf = name.rpartition(".")
    short = "".join(word[:1] for word in leaf.split("_")) if "_" in leaf else leaf
    scores: dict[str, float] = {}
    for path in known:
        above, _, end = path.rpartition(".")
        alike, whole = 1.0 if end == short else resemblance(leaf, end), resemblance(name, path)
        if len(path) > 2 and name.lower().startswith((f"{path}_".lower(), f"{path}-".lower())):
            scores[path] = 2.0 + len(path)
        elif alike >= 0.6 or whole >= 0.7:
            scores[path] = alike + whole - 0.1 * path.count(".") + 0.3 * (above == parent and alike >= 0.6)
    best = sorted(scores, key=lambda path: -scores[path])
    matches = [path for path in best[:3] if scores[path] > scores[best[0]] - 0.25]
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def resemblance(a: str, b: str) -> float:
    """1 of equal names, 0 of names that have nothing in common."""
    return difflib.SequenceMatcher(None, a, b).ratio()


def megabytes(size: int) -> str:
    """`1.2 MB`, or `3.4 GB`."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def spelled(seconds: float) -> str:
    """The time as `parse_time` reads it, to the second: `1h30m`."""
    left, text = max(round(seconds), 0), ""
    for unit, size in UNITS.items():
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"
