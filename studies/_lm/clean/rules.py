"""Rules of quality: Gopher's (Rae et al. 2021, arXiv 2112.11446, A1.1) and C4's (Raffel et al. 2020, arXiv 1910.10683,
2.2).

Rules of lines take lines out of a document, rules of documents take the document. A word is what stands between white
space.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from studies._lm.clean.grams import Hashes, covered, hashed, runs

STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
BULLETS = ("\u2022", "\u2023", "\u25e6", "\u25cf", "\u25aa", "*", "-")
ELLIPSES = ("...", "\u2026")
TERMINALS = (".", "?", "!", '"', "\u201d")
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
TOP_GRAMS = {2: 0.20, 3: 0.18, 4: 0.16}  # words -> most of the characters in the commonest run
REPEATED_GRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}  # in runs that occur more than once
_PARAGRAPHS = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"[.?!]+[\"'\u201d\u2019)\]]*(?=\s|$)")


class Facts:
    """The counts of a document that the rules ask for, each computed at first use."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.words = text.split()
        self._distinct = len(self.words)  # length from which no run occurs more than once

    @cached_property
    def lower(self) -> str:
        return self.text.lower()

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.fromiter(map(len, self.words), dtype=np.int64, count=len(self.words))

    @cached_property
    def hashes(self) -> Hashes:
        return hashed(self.words)

    @cached_property
    def lines(self) -> list[str]:
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part for part in map(str.strip, _PARAGRAPHS.split(self.text)) if part]

    @property
    def mean_length(self) -> float:
        return float(self.lengths.mean()) if self.words else 0.0

    @property
    def sentences(self) -> int:
        return sum(1 for _ in _SENTENCE.finditer(self.text))

    def share_of_lines(self, holds: Callable[[str], bool]) -> float:
        return share(sum(map(holds, self.lines)), len(self.lines))

    def symbols(self, symbols: Iterable[str]) -> float:
        """Returns how often the symbols occur per word."""
        return share(sum(map(self.text.count, symbols)), len(self.words))

    def top(self, length: int) -> float:
        """Returns the share of characters in the commonest run of `length` words, if it occurs more than once.

        Characters between words do not count. Of equally common runs the longest counts.
        """
        if not self._repeats(length):
            return 0.0
        _, first, counts = np.unique(runs(self.hashes, length), return_index=True, return_counts=True)
        most = int(counts.max())
        ends = np.concatenate(([0], np.cumsum(self.lengths)))
        starts = first[counts == most]
        longest = int((ends[starts + length] - ends[starts]).max())
        return share(most * longest, int(ends[-1]))

    def repeated(self, length: int) -> float:
        """Returns the share of characters in runs of `length` words that occur more than once, each counted once."""
        if not self._repeats(length):
            return 0.0
        _, places, counts = np.unique(runs(self.hashes, length), return_inverse=True, return_counts=True)
        words = covered(counts[places] > 1, length)
        return share(int(self.lengths[words].sum()), int(self.lengths.sum()))

    def _repeats(self, length: int) -> bool:
        """Returns True if a run of `length` words occurs more than once, as then does a run of fewer words."""
        if length >= self._distinct:
            return False
        grams = np.sort(runs(self.hashes, length))
        if (grams[1:] == grams[:-1]).any():
            return True
        self._distinct = length
        return False


def share(count: int, whole: int) -> float:
    return count / whole if whole else 0.0


def duplicates(parts: list[str]) -> float:
    """Returns the share of parts that are equal to an earlier part."""
    return share(len(parts) - len(set(parts)), len(parts))


def duplicate_characters(parts: list[str]) -> float:
    """Returns the share of characters in parts that are equal to an earlier part."""
    repeats = sum((count - 1) * len(part) for part, count in Counter(parts).items())
    return share(repeats, sum(map(len, parts)))


def _alphabetic(facts: Facts) -> float:
    return share(sum(word[0].isalpha() or any(map(str.isalpha, word)) for word in facts.words), len(facts.words))


def _stop_words(facts: Facts) -> int:
    return len(STOP_WORDS.intersection(facts.lower.split()))


def _is_policy(line: str) -> bool:
    lower = line.lower()
    return any(policy in lower for policy in POLICIES)


def _top(length: int, most: float) -> Callable[[Facts], bool]:
    return lambda facts: facts.top(length) > most


def _repeated(length: int, most: float) -> Callable[[Facts], bool]:
    return lambda facts: facts.repeated(length) > most


# Name -> (the reason, True for a document that goes); the first rule that holds takes the document.
DOCUMENT_RULES: dict[str, tuple[str, Callable[[Facts], bool]]] = {
    "c4-lorem": ("has the words lorem ipsum", lambda facts: "lorem ipsum" in facts.lower),
    "c4-brackets": ("has a curly bracket", lambda facts: "{" in facts.text or "}" in facts.text),
    "c4-sentences": ("has fewer than 3 sentences", lambda facts: facts.sentences < 3),
    "gopher-words": ("has fewer than 50 words or more than 100,000", lambda facts: not 50 <= len(facts.words) <= 1e5),
    "gopher-word-length": (
        "has words of a mean length outside 3 to 10",
        lambda facts: not 3 <= facts.mean_length <= 10,
    ),
    "gopher-hashes": ("has more than 0.1 hash signs per word", lambda facts: facts.symbols("#") > 0.1),
    "gopher-ellipses": ("has more than 0.1 ellipses per word", lambda facts: facts.symbols(ELLIPSES) > 0.1),
    "gopher-bullets": (
        "begins more than 90 % of its lines with a bullet",
        lambda facts: facts.share_of_lines(lambda line: line.startswith(BULLETS)) > 0.9,
    ),
    "gopher-ellipsis-lines": (
        "ends more than 30 % of its lines with an ellipsis",
        lambda facts: facts.share_of_lines(lambda line: line.endswith(ELLIPSES)) > 0.3,
    ),
    "gopher-alphabetic": ("has a letter in fewer than 80 % of its words", lambda facts: _alphabetic(facts) < 0.8),
    "gopher-stop-words": (
        "has fewer than two of the, be, to, of, and, that, have, with",
        lambda facts: _stop_words(facts) < 2,
    ),
    "gopher-lines": ("repeats more than 30 % of its lines", lambda facts: duplicates(facts.lines) > 0.3),
    "gopher-paragraphs": ("repeats more than 30 % of its paragraphs", lambda facts: duplicates(facts.paragraphs) > 0.3),
    "gopher-line-characters": (
        "has more than 20 % of its characters in repeated lines",
        lambda facts: duplicate_characters(facts.lines) > 0.2,
    ),
    "gopher-paragraph-characters": (
        "has more than 20 % of its characters in repeated paragraphs",
        lambda facts: duplicate_characters(facts.paragraphs) > 0.2,
    ),
    **{
        f"gopher-top-{length}": (
            f"has more than {most:.0%} of its characters in its commonest {length} words",
            _top(length, most),
        )
        for length, most in TOP_GRAMS.items()
    },
    **{
        f"gopher-repeated-{length}": (
            f"has more than {most:.0%} of its characters in repeated runs of {length} words",
            _repeated(length, most),
        )
        for length, most in REPEATED_GRAMS.items()
    },
}

# Name -> (the reason, True for a line that goes), of lines in which there is more than white space.
LINE_RULES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "c4-terminal": ("does not end in a terminal punctuation mark", lambda line: not line.endswith(TERMINALS)),
    "c4-line-words": ("has fewer than 5 words", lambda line: len(line.split()) < 5),
    "c4-javascript": ("has the word javascript", lambda line: "javascript" in line.lower()),
    "c4-policy": ("is of a policy, such as on cookies", _is_policy),
}
NAMES = (*LINE_RULES, *DOCUMENT_RULES)


def broken(text: str, names: Iterable[str]) -> str | None:
    """Returns the first of the rules of documents that takes the text, or None."""
    facts = Facts(text)
    return next((name for name in names if DOCUMENT_RULES[name][1](facts)), None)


def cut_lines(text: str, names: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text without the lines that a rule takes, and (rule, line) of each."""
    tests = [(name, LINE_RULES[name][1]) for name in names]
    kept: list[str] = []
    gone: list[tuple[str, str]] = []
    for line in text.split("\n"):
        stripped = line.strip()
        name = next((name for name, goes in tests if goes(stripped)), None) if stripped else None
        if name is None:
            kept.append(line)
        else:
            gone.append((name, line))
    return ("\n".join(kept), gone) if gone else (text, gone)
