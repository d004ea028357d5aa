"""The gpt on the vocabularies of other libraries."""

from __future__ import annotations

import base64

import pytest

from studies._lm.corpus import prepare
from studies._lm.token_files import Tokens
from studies.gpt.check import check
from studies.gpt.config import Config
from trainer.errors import DataError

pytest.importorskip("tokenizers", reason="runs with pip install -e '.[text]'")
CORPUS = {"general": 30, "target": 20, "num_words": 8, "successors": 3}


def config_of(**data: object) -> Config:
    return Config.model_validate({"data": {"corpus": CORPUS, "tokenizer": "bpe", "vocab_size": 300, **data}})


@pytest.fixture
def words(tmp_path):
    """A vocabulary of WordPiece: a letter at the start of a word, and within one."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(lines))
    return str(tmp_path / "vocab.txt")


def test_documents_are_tokens_of_a_vocabulary_of_wordpiece(words):
    config = config_of(tokenizer_file=words, end_token="[SEP]")
    check(config)
    tokens, documents = Tokens(config.data), prepare(config.data)["target"]["val"].documents
    ids = tokens.files["target", "val"][0 : len(documents[0].replace(b" ", b"")) + 2].tolist()
    words_of = documents[0].decode().split()
    inside = [5 + 26 * (i > 0) + ord(letter) - ord("a") for word in words_of for i, letter in enumerate(word)]
    assert ids == [3, *inside, 3]


def test_the_pattern_decides_the_tokens_of_tiktokens_ranks(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"12", b"34", b"1234"]
    (tmp_path / "a.tiktoken").write_bytes(b"\n".join(base64.b64encode(t) + b" %d" % i for i, t in enumerate(tokens)))
    (tmp_path / "a.txt").write_text("1234 " * 99)
    given = {"tokenizer_file": str(tmp_path / "a.tiktoken"), "end_token": "<|endoftext|>", "block_size": 8}
    for pattern, first in (("gpt2", [258, 32, 258]), ("cl100k", [256, 51, 52])):
        config = config_of(path=str(tmp_path / "a.txt"), tiktoken_pattern=pattern, cache=str(tmp_path), **given)
        check(config)
        assert Tokens(config.data).files["target", "train"][0:4].tolist() == [259, *first]


def test_the_tokens_that_may_end_a_document_are_named(words):
    with pytest.raises(
        DataError, match=r"vocab\.txt: .* name one of its own as end_token, such as '\[PAD\]', '\[UNK\]', .*'\[SEP\]'"
    ):
        check(config_of(tokenizer_file=words))
