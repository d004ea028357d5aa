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


SPELT = ["the token <|end|> ends a document", "<|end|>", "<|end|><|end|>", "<|end|", "<<|end|>>", "\0<|end|>"]


@LIBRARY
@pytest.mark.parametrize("text", SPELT)
def test_the_spelling_of_the_end_is_text(bpe, text, tmp_path):
    bpe.save(tmp_path / "bpe.json")
    for tokenizer in (bpe, BPE.load(tmp_path / "bpe.json"), pickle.loads(pickle.dumps(bpe)), Bytes()):
        ids = tokenizer.encode(text)
        assert tokenizer.end not in ids and tokenizer.decode(ids) == text


@LIBRARY
@pytest.mark.parametrize("text", [text.replace("<|end|>", "</s>") for text in SPELT])
def test_the_spelling_of_any_token_that_ends_is_text(text):
    """Also of one that is not special there, or that the pairs themselves lead to."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    joined = {letter: i for i, letter in enumerate(sorted(letters))} | {"</": 256, "s>": 257, "</s>": 258}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    for vocabulary, pairs, added in (
        (joined, merges, None),
        ({k: v for k, v in joined.items() if v < 256}, [], AddedToken("</s>", special=False)),
        ({k: v for k, v in joined.items() if v < 256}, [], AddedToken("</s>", special=True)),
    ):
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        if added is not None:
            tokenizer.add_tokens([added])
        bpe = BPE(tokenizer, "</s>")
        ids = bpe.encode(text)
        assert bpe.end not in ids and bpe.decode(ids) == text


@LIBRARY
def test_what_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json is not the JSON of a tokenizer"):
        BPE.load(tmp_path / "bad.json")
    with pytest.raises(DataError, match=r"none\.json cannot be read .*: give the file of a tokenizer\.$"):
        BPE.load(tmp_path / "none.json")
    with pytest.raises(DataError, match="vocab_size is 100: give at least 257"):
        BPE.train(TEXTS, 100)


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"BPE needs tokenizers: pip install 'hpo\[text\]'"):
        BPE.train(TEXTS, 300)
