"""MinHash estimates the exact Jaccard similarity, and components are those of all pairs, however files are divided."""

from __future__ import annotations

import random

import numpy as np
import pytest

from studies._lm.clean import duplicates
from studies._lm.clean.duplicates import Corpus, marked
from studies._lm.clean.filters import kept
from studies._lm.clean.minhash import alike, bands_of, digest, signature
from studies._lm.clean.store import publish


def words(draw: random.Random, count: int) -> list[str]:
    return [f"w{draw.randrange(10**9)}" for _ in range(count)]


def jaccard(first: str, second: str) -> float:
    sets = [{tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)} for text in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def changed(draw: random.Random, text: list[str], count: int) -> list[str]:
    copy = list(text)
    for place in draw.sample(range(len(text)), count):
        copy[place] = f"c{draw.randrange(10**9)}"
    return copy


def test_an_estimate_is_the_similarity_within_its_deviation():
    draw = random.Random(1)
    errors = []
    for number in range(60):
        text = words(draw, 300)
        pair = " ".join(text), " ".join(changed(draw, text, 1 + 2 * number))
        exact = jaccard(*pair)
        errors.append((alike(*map(signature, pair)) - exact) / (exact * (1 - exact) / 128) ** 0.5)
    assert max(map(abs, errors)) < 4
    assert abs(np.mean(errors)) < 3 / 60**0.5
    assert 0.7 < np.std(errors) < 1.3


def test_case_punctuation_and_white_space_change_no_signature():
    assert (signature("One, two: three FOUR five six") == signature("one two\nthree four five (six)")).all()
    assert digest("One  two\n") == digest("one TWO") != digest("one, two")
    assert digest("Caf\u00e9") == digest("cafe\u0301")


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95])
def test_bands_catch_pairs_at_the_threshold_with_as_many_rows_as_can(threshold):
    bands, rows = bands_of(threshold)
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.95
    assert 1 - (1 - threshold ** (rows + 1)) ** (128 // (rows + 1)) < 0.95


def corpus(work, batches: list[list[str]]) -> Corpus:
    for number, texts in enumerate(batches):
        publish(kept(work, number, "digests"), b"".join(map(digest, texts)))
        publish(kept(work, number, "signatures"), b"".join(signature(text).tobytes() for text in texts))
    return Corpus(work, tuple(map(len, batches)))


def firsts(corpus: Corpus, threshold: float = 0.8) -> list[int]:
    duplicates.begin(corpus)
    duplicates.mark_exact(corpus)
    bands, rows = bands_of(threshold)
    for band in range(bands):
        duplicates.write_edges(corpus, threshold, rows, band)
    duplicates.mark_near(corpus, bands)
    duplicates.settle_exact(corpus)
    return [first for batch in range(len(corpus.counts)) for first in marked(corpus, batch)[1]]


def test_a_chain_is_one_component_whose_first_document_stays(tmp_path):
    """Each text is like the one before, the last unlike the first; copies of any of them belong to the first."""
    draw = random.Random(2)
    chain = [words(draw, 400)]
    for _ in range(4):
        chain.append(changed(draw, chain[-1], 4))
    a, b, c, d, e = (" ".join(text) for text in chain)
    assert jaccard(a, b) > 0.85 and jaccard(a, e) < 0.8
    other = " ".join(words(draw, 400))
    texts = [[other, c, ""], [], [a, e, "..."], [b, d, c.upper(), other.title(), ""]]
    assert firsts(corpus(tmp_path, texts)) == [0, 1, 2, 1, 1, 5, 1, 1, 1, 0, 2]


def test_parts_on_disk_give_what_one_part_in_memory_gives(tmp_path, monkeypatch):
    draw = random.Random(3)
    texts = [" ".join(words(draw, 60)) for _ in range(150)]
    texts += [text.upper() for text in texts[::5]] + [" ".join(changed(draw, t.split(), 1)) for t in texts[::7]]
    draw.shuffle(texts)
    batches = [texts[start : start + 40] for start in range(0, len(texts), 40)]
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    whole = firsts(corpus(tmp_path / "one", batches))
    monkeypatch.setattr(duplicates, "_PART", 16)
    assert firsts(corpus(tmp_path / "many", batches)) == whole
    assert sum(first != number for number, first in enumerate(whole)) >= 30
    assert not list((tmp_path / "many").glob("parts-*"))
