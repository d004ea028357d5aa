"""Leaves out duplicates and documents of high perplexity, and writes the others as shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import islice
from pathlib import Path

import numpy as np

from studies._lm.clean.documents import Document
from studies._lm.clean.duplicates import EXACT_KIND, Corpus, marked
from studies._lm.clean.filters import kept
from studies._lm.clean.settings import EXACT, NEAR
from studies._lm.clean.store import MOST_EXAMPLES, Tally, line_of, publish, size_of

PERPLEXITY = "perplexity"
SCORER = "studies.gpt.perplexity:scorer"  # by name: what studies share imports none of them


@dataclass(frozen=True)
class Selection:
    """The documents that the filters have left, and the largest score with which one stays."""

    corpus: Corpus
    most: float = float("inf")

    def scores(self, batch: int) -> Path:
        """Returns the file of the scores of a batch's documents, in nats for a token; duplicates have none."""
        return self.corpus.work / "scores" / f"{batch:06d}.f4"

    def tally(self, batch: int) -> Path:
        return self.corpus.work / "written" / f"{batch:06d}.json"


def score_batch(selection: Selection, model: str, batch: int) -> None:
    score = scorer_of(model)
    kinds, _ = marked(selection.corpus, batch)
    texts = (document.text for document in _stored(selection.corpus, batch))
    scores = [np.nan if kind else score(text) for kind, text in zip(kinds, texts, strict=True)]
    publish(selection.scores(batch), np.array(scores, "<f4").tobytes())


@lru_cache(maxsize=1)
def scorer_of(model: str) -> Callable[[str], float]:
    """Returns the function that scores a text by a model; raises DataError for a file that is not a model."""
    module, _, name = SCORER.partition(":")
    return getattr(import_module(module), name)(model)


def threshold_of(selection: Selection, quantile: float) -> float:
    """Returns the quantile of all scores, one of them."""
    scores = [np.fromfile(selection.scores(batch), "<f4") for batch, _ in enumerate(selection.corpus.counts)]
    known = np.concatenate([np.empty(0, "<f4"), *scores])
    known = known[~np.isnan(known)]
    return float(np.quantile(known, quantile, method="lower")) if len(known) else float("inf")


def write_shard(selection: Selection, shards: Path, batch: int) -> None:
    """Writes what stays of a batch as a shard, unless that is nothing, and the counts of what goes."""
    corpus, tally = selection.corpus, Tally()
    kinds, firsts = marked(corpus, batch)
    file = selection.scores(batch)
    scores = np.fromfile(file, "<f4").tolist() if file.exists() else [0.0] * len(kinds)
    lines: list[str] = []
    for document, kind, first, score in zip(_stored(corpus, batch), kinds, firsts, scores, strict=True):
        size = size_of(document.text)
        if kind:
            step = EXACT if kind == EXACT_KIND else NEAR
            shown = step not in tally.entries or len(tally.entries[step].examples) < MOST_EXAMPLES
            like = _place(corpus, first) if shown else ""
            tally.take(step, size, document, document.text, documents=1, like=like)
        elif score > selection.most:
            tally.take(PERPLEXITY, size, document, document.text, documents=1)
        else:
            tally.written.documents += 1
            tally.written.bytes += size
            lines.append(line_of(document))
    if lines:
        publish(shards / f"{batch:06d}.jsonl", "".join(lines).encode())
        tally.written.parts = 1
    tally.save(selection.tally(batch))


def _stored(corpus: Corpus, batch: int) -> Iterator[Document]:
    with kept(corpus.work, batch, "jsonl").open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield _parsed(line)


def _parsed(line: str) -> Document:
    record = json.loads(line)
    return Document(record["file"], record["row"], record["text"])


def _place(corpus: Corpus, document: int) -> str:
    """Returns the place of a document in the input, by its number among those that the filters have left."""
    batch = int(np.searchsorted(corpus.starts, document, side="right")) - 1
    with kept(corpus.work, batch, "jsonl").open(encoding="utf-8", newline="\n") as lines:
        stored = _parsed(next(islice(lines, document - int(corpus.starts[batch]), None)))
    return f"{stored.file} row {stored.row}"
