"""Chooses tokens that a tokenizer of byte pairs lacks for a domain, each by the tokens that it saves on a text.

The pairs go on where the tokenizer's end: after all of its own, the pair that saves most is joined, all pairs are
counted anew, and so on. New pairs stand last, so whatever the tokenizer made of a text before is what they begin with,
and a count is what the extended tokenizer saves. Of equal pairs the one of the lowest ids comes first.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from trainer.data.vocabularies import tokenizers
from trainer.errors import DataError

LEAST = 2  # tokens that a new one saves
SPACE = "▁"
Pair = tuple[int, int]


@dataclass(frozen=True)
class Added:
    """A new token: its id, spelling, the two tokens that it joins, and the tokens of the base that it is made of.

    `saved` is the number of tokens that it saves on the text, once those before it are there.
    """

    id: int
    token: str
    joins: tuple[str, str]
    pieces: tuple[int, ...]
    saved: int


class Words:
    """The different words of a text as ids of tokens, and the tokens that each pair of neighbours would save."""

    def __init__(self, words: Mapping[tuple[int, ...], int], barred: frozenset[int]) -> None:
        self.words, self.counts, self.barred = [list(word) for word in words], list(words.values()), barred
        self.saves: Counter[Pair] = Counter()
        self.places: defaultdict[Pair, set[int]] = defaultdict(set)
        for place in range(len(self.words)):
            self._count(place, 1)
        self.heap = [(-saved, pair) for pair, saved in self.saves.items()]
        heapq.heapify(self.heap)

    def best(self) -> tuple[Pair, int] | None:
        """Returns the pair that saves most and what it saves; None if there is none left. It is returned once."""
        while self.heap:
            before, pair = heapq.heappop(self.heap)
            if self.saves[pair] == -before:
                return pair, -before
            if self.saves[pair] > 0:
                heapq.heappush(self.heap, (-self.saves[pair], pair))
        return None

    def join(self, pair: Pair, new: int) -> None:
        """Makes each occurrence of a pair the token `new`."""
        changed = set()
        for place in self.places.pop(pair):
            self._count(place, -1)
            self.words[place] = joined(self.words[place], pair, new)
            changed |= self._count(place, 1)
        for other in changed:
            heapq.heappush(self.heap, (-self.saves[other], other))

    def _count(self, place: int, sign: int) -> set[Pair]:
        saves = savings(self.words[place], self.barred)
        for pair, times in saves.items():
            self.saves[pair] += sign * times * self.counts[place]
            if sign > 0:
                self.places[pair].add(place)
        return set(saves)


def joined(word: Sequence[int], pair: Pair, new: int) -> list[int]:
    """Returns a word in which each occurrence of a pair, from the left, is the token `new`."""
    made: list[int] = []
    for token in word:
        if made and (made[-1], token) == pair:
            made[-1] = new
        else:
            made.append(token)
    return made


def savings(word: Sequence[int], barred: frozenset[int] = frozenset()) -> Counter[Pair]:
    """Returns the tokens that each pair would save in a word: its occurrences, of which no two overlap."""
    saves: Counter[Pair] = Counter()
    runs = [(token, len(list(run))) for token, run in groupby(word)]
    for token, length in runs:
        saves[token, token] += length // 2
    for (left, _), (right, _) in pairwise(runs):
        saves[left, right] += 1
    return Counter({pair: times for pair, times in saves.items() if times and not barred & {*pair}})


class Extension:
    """A tokenizer of byte pairs and the tokens that are added to it."""

    def __init__(self, tokenizer: Any, where: str | Path) -> None:
        content = json.loads(tokenizer.to_str())
        if content["model"]["type"] != "BPE":
            raise DataError(
                f"{where} is a {content['model']['type']} model, which has no pairs to go on with: use BPE."
            )
        self.base, self.content, self.vocabulary = tokenizer, content, content["model"]["vocab"]
        # Special tokens that stand outside the vocabulary of pairs would be numbered anew, by ids of new tokens.
        self.vocabulary.update((token["content"], token["id"]) for token in content["added_tokens"])
        self.start = max(tokenizer.get_vocab().values()) + 1  # id of the first new token
        self.added: list[Added] = []

    def choose(self, texts: Iterable[str], count: int) -> None:
        """Adds up to `count` tokens, as long as one saves two or more."""
        words = Words(self._words(texts), self._barred())
        spelling = {number: token for token, number in self.vocabulary.items()}
        pieces: dict[int, tuple[int, ...]] = {}
        while len(self.added) < count and (best := words.best()) and best[1] >= LEAST:
            (left, right), saved = best
            token = spelling[left] + spelling[right].removeprefix(self._inside)
            if token in self.vocabulary or SPACE in token.lstrip(SPACE):
                continue  # a token already, by other pairs, or one beyond a word
            number = self.start + len(self.added)
            words.join((left, right), number)
            spelling[number] = token
            pieces[number] = pieces.get(left, (left,)) + pieces.get(right, (right,))
            self.added.append(Added(number, token, (spelling[left], spelling[right]), pieces[number], saved))
            self.vocabulary[token] = number
            self.content["model"]["merges"].append([spelling[left], spelling[right]])

    def tokenizer(self) -> Any:
        """Returns the tokenizer with the tokens that are added."""
        return tokenizers().Tokenizer.from_str(json.dumps(self.content))

    @property
    def _inside(self) -> str:
        return self.content["model"]["continuing_subword_prefix"] or ""

    def _barred(self) -> frozenset[int]:
        """Returns tokens that are not joined: those of single bytes where a character is unknown, and the unknown."""
        unknown = self.content["model"]["unk_token"]
        byte = re.compile(r"<0x[0-9A-F]{2}>")
        return frozenset(id for token, id in self.vocabulary.items() if token == unknown or byte.fullmatch(token))

    def _words(self, texts: Iterable[str]) -> dict[tuple[int, ...], int]:
        """Returns how often each word is in the texts, by its tokens. Pairs are joined within words only."""
        base, counts = self.base, Counter[str]()
        for text in texts:
            normal = text if base.normalizer is None else base.normalizer.normalize_str(text)
            if base.pre_tokenizer is None:
                counts.update(re.findall(f"{SPACE}*[^{SPACE}]+|{SPACE}+", normal))
            else:
                counts.update(word for word, _ in base.pre_tokenizer.pre_tokenize_str(normal))
        words: Counter[tuple[int, ...]] = Counter()
        for word, times in counts.items():
            words[tuple(token.id for token in base.model.tokenize(word))] += times
        return words
