"""Text to tokens and back."""

from __future__ import annotations

import importlib.util
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.text import BPE, Bytes
from trainer.errors import ConfigError, DataError

MISSING = importlib.util.find_spec("tokenizers") is None
LIBRARY = pytest.mark.skipif(MISSING, reason="runs with pip install -e '.[text]'")
TEXTS = ["the quick brown fox", "the lazy dog", "the end of the fox", "déjà vu"] * 3


@pytest.fixture(scope="module")
def bpe() -> BPE:
    return BPE.train(TEXTS, 280)


@given(st.text())
def test_bytes_lose_nothing(text):
    ids = Bytes().encode(text)
    assert Bytes().decode([*ids, Bytes.end]) == text and all(0 <= i < 256 for i in ids)


@LIBRARY
@given(text=st.text())
def test_bpe_loses_nothing(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode([*ids, bpe.end]) == text and all(0 <= i < bpe.vocab_size and i != bpe.end for i in ids)


@LIBRARY
def test_bpe_learns_and_is_kept(bpe, tmp_path):
    assert bpe.vocab_size == 280 and len(bpe.encode("the fox")) < len("the fox")
    bpe.save(tmp_path / "bpe.json")
    kept = BPE.load(tmp_path / "bpe.json")
    for other in (kept, BPE.train(TEXTS, 280), pickle.loads(pickle.dumps(bpe))):
        assert (other.vocab_size, other.end) == (bpe.vocab_size, bpe.end)
        assert other.encode("the quick déjà") == bpe.encode("the quick déjà")


@LIBRARY
def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for path in (tmp_path / "bad.json", tmp_path / "none.json"):
        with pytest.raises(DataError, match="is not the JSON of a tokenizer"):
            BPE.load(path)
    with pytest.raises(DataError, match="vocab_size is 100: give at least 257"):
        BPE.train(TEXTS, 100)


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"BPE needs tokenizers: pip install 'hpo\[text\]'"):
        BPE.train(TEXTS, 300)
