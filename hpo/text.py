"""Formats text for people: counts, tables, and commands that they can type."""

from __future__ import annotations

import difflib
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hpo.door import flag, step
from trainer.redaction import redacted

_given: dict[str, str] = {}  # option -> value, as typed for this process's command
_home: ContextVar[str | None] = ContextVar("home", default=None)
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def counted(count: int, noun: str) -> str:
    """Returns `1 trial` or `2 trials`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def tally(counts: Mapping[str, int]) -> str:
    """Returns `1 study, 2 trials` from counts by plural nouns."""
    return ", ".join(f"{count} {_one(noun) if count == 1 else noun}" for noun, count in counts.items())


def _one(noun: str) -> str:
    return {"studies": "study", "batches": "batch"}.get(noun, noun.removesuffix("s"))


def portion(count: int, of: object, noun: str) -> str:
    """Returns `1 of 10 trials`, or `1 trial` without a bound."""
    return f"{count} of {of} {noun}{'' if of == 1 else 's'}" if of else counted(count, noun)


def endings(paths: Iterable[str]) -> dict[str, str]:
    """Returns the shortest unique ending of each dotted path: `optim.lr` beside `schedule.lr`, else `lr`.

    An ending that starts with `name` or a number, which mean nothing alone, includes the preceding part too.
    """
    parts = {path: path.split(".") for path in paths}

    def ending(path: str) -> str:
        own_parts = parts[path]
        for begin in range(len(own_parts) - 1, 0, -1):
            tail = own_parts[begin:]
            unique = sum(other[-len(tail) :] == tail for other in parts.values()) == 1
            if unique and tail[0] != "name" and not tail[0].isdigit():
                return ".".join(tail)
        return path

    return {path: ending(path) for path in parts}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def given(name: str, value: str) -> None:
    """Remembers an option of the running command, for the commands that its output names."""
    _given[name] = value


def forget() -> None:
    """Forgets the options of the command."""
    _given.clear()


@contextmanager
def from_anywhere(home: str) -> Iterator[None]:
    """Makes the commands named in the block refer to this home from any directory, as needed on a page."""
    token = _home.set(home)
    try:
        yield
    finally:
        _home.reset(token)


def command(words: str) -> str:
    """Returns `hpo` and `words`, with the flags that give the next command the same home and ledger as this one.

    If the running `hpo` is not on PATH, it is written with the path by which it was called. A URL with a password is
    left to the environment, since the output may be kept in a log.
    """
    names = ("home", "tracking_uri") if words.split()[0] == "ui" else ("home", "storage")
    known = _given | ({"home": home} if (home := _home.get()) else {})
    text = step(" ".join([words, *(f"{flag(name)} {_quoted(name, known[name])}" for name in names if name in known)]))
    if home or Path(sys.argv[0]).name != "hpo" or shutil.which("hpo"):
        return text
    return text if text.startswith("hpo.") else shlex.quote(sys.argv[0]) + text.removeprefix("hpo")


def _quoted(name: str, value: str) -> str:
    if redacted(value) == value:  # not redacted_url: a directory may be called `q?x`
        return shlex.quote(value)
    return f'"${{HPO_{name.upper()}:?export the URL that {flag(name)} had}}"'


def near(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'a' or 'b'?` with the at most three names in `known` most similar to `name`, else "".

    Paths are compared by their last parts first, where `lr` also stands for `learning_rate`, then by parents. A name
    that extends a known one by a word, such as `atft_production` for `atft`, matches that one.
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
    """Returns 1 for equal names, 0 for names that have nothing in common."""
    return difflib.SequenceMatcher(None, a, b).ratio()


def megabytes(size: int) -> str:
    """Returns `1.2 MB`, or `3.4 GB`."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def roughly(seconds: float) -> str:
    """Returns `spelled` of the time to the minute from an hour on, and to the hour from a day on.

    >>> roughly(59.7), roughly(3.1 * 3600), roughly(40 * 3600)
    ('1m', '3h6m', '1d16h')
    """
    unit = 3600 if seconds >= 86400 else 60 if seconds >= 3600 else 1
    return spelled(round(seconds / unit) * unit)


def spelled(seconds: float) -> str:
    """Returns the time to the second in the form that `parse_time` reads: `1h30m`."""
    left, text = max(round(seconds), 0), ""
    for unit, size in UNITS.items():
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"
