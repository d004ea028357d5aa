"""Generates the corpus: two domains of one language, each a stochastic source whose entropy is known. Needs no torch.

A document is a chain of words: each word is drawn from a few successors of the one before it, by the domain's own
table, and after each word the document ends with probability 1/8, or when it reaches the most words it may have. Words
are separated by a space, so a text can be parsed in only one way and log p(text) is the sum over its words: no model
can do better on average, and the source's own loss on the same documents is the floor of every perplexity.

With keys, a document begins with a definition of each, such as "B7 A0 C7", in random order. As many words follow as it
may have, and before some of them, at random, each definition stands once more. Its digit then costs nothing to whoever
has seen the start, however far back that is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from studies._lm.corpus_config import LONGEST_WORD, CorpusConfig

DOMAINS = ("general", "target")
END = 1 / 8
SHORTEST_WORD = 2  # letters
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Text:
    """Documents as UTF-8, and their cost in nats by the source, their ends included (None: unknown)."""

    documents: list[bytes]
    nats: float | None = None

    @property
    def bytes(self) -> int:
        return sum(map(len, self.documents))


class Source:
    """One domain: `start` [words] has the probabilities of the first word, `table` [words, words] of the next word."""

    def __init__(self, words: list[str], config: CorpusConfig, rng: np.random.Generator) -> None:
        self.words, self.longest, self.keys, size = words, config.words, config.keys, len(words)
        self.start = rng.dirichlet(np.ones(size))
        self.table = np.zeros((size, size))
        for row in self.table:
            row[rng.choice(size, config.successors, replace=False)] = rng.dirichlet(np.ones(config.successors))

    def text(self, count: int, rng: np.random.Generator) -> Text:
        """Returns `count` documents."""
        documents, nats = [], 0.0
        start, table = self.start.cumsum(), self.table.cumsum(axis=1)
        for _ in range(count):
            chain = [_drawn(start, rng)]
            while len(chain) < self.longest and (self.keys or rng.random() >= END):
                chain.append(_drawn(table[chain[-1]], rng))
            documents.append(" ".join(self._with_keys([self.words[word] for word in chain], rng)).encode())
            nats += self.nats(chain)
        return Text(documents, nats)

    def _with_keys(self, words: list[str], rng: np.random.Generator) -> list[str]:
        """Returns the words of a document with its definitions, at its start and once more between the words."""
        if not self.keys:
            return words
        definitions = [f"{LETTERS[key].upper()}{rng.integers(10)}" for key in range(self.keys)]
        start, again = rng.permutation(definitions), rng.permutation(definitions)
        before = dict(zip(rng.choice(len(words), self.keys, replace=False).tolist(), again.tolist(), strict=True))
        between = ([before[place], word] if place in before else [word] for place, word in enumerate(words))
        return [*start.tolist(), *itertools.chain.from_iterable(between)]

    def nats(self, chain: list[int]) -> float:
        """Returns -log p of a document with these words.

        With K keys among N words it has the digits, the order of the definitions and of their repetitions, and the
        places of these: K log 10 + 2 log K! + log (N over K).
        """
        p = [self.start[chain[0]], *(self.table[a, b] for a, b in pairwise(chain))]
        if self.keys:
            places = math.comb(len(chain), self.keys) * math.factorial(self.keys) ** 2
            return -float(np.log(p).sum()) + self.keys * math.log(10) + math.log(places)
        going_on = (len(chain) - 1) * np.log(1 - END)
        return -float(np.log(p).sum() + going_on + (np.log(END) if len(chain) < self.longest else 0.0))


def _drawn(cumulative: np.ndarray, rng: np.random.Generator) -> int:
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))


def generate(config: CorpusConfig, seed: int) -> dict[str, dict[str, Text]]:
    """Returns domain -> part (train, val, test) -> its text."""
    rng = np.random.default_rng([seed, 0])
    words: set[str] = set()
    while len(words) < config.num_words:
        words.add("".join(rng.choice(list(LETTERS), rng.integers(SHORTEST_WORD, LONGEST_WORD + 1))))
    texts = {}
    for number, domain in enumerate(DOMAINS):
        rng = np.random.default_rng([seed, 1 + number])
        source, count = Source(sorted(words), config, rng), getattr(config, domain)
        rest = max(count // 10, 1)
        texts[domain] = {part: source.text(n, rng) for part, n in (("train", count), ("val", rest), ("test", rest))}
    return texts
