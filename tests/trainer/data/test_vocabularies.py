"""Vocabularies of SentencePiece, WordPiece and tiktoken: the ids of the libraries that they come from."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

pytest.importorskip("tokenizers", reason="runs with pip install -e '.[text]'")

from trainer.data import sentencepiece
from trainer.data.text import BPE, word_begins
from trainer.data.vocabularies import PATTERNS
from trainer.errors import ConfigError, DataError

TRAINED_ON = [
    "The quick brown fox jumps over the lazy dog.",
    "Déjà vu: naïve café, Über straße, ½ of 100 % is 50.",
    "日本語のテキストと中文字符。",
    "Emoji 🎉🚀👩‍👩‍👧 and more text, more words, more pairs!",
    "it's we'll they've I'M 12345 aaaa aaaaa\tdone",
] * 8
MIXED = [
    *TRAINED_ON[:5],
    "  two  leading, and   inner spaces ",
    "line one\nline two\n\n\tand a tab\r\n",
    "marks n\u0323\u0302 İ É \u1101\u1162 \u0928\u093c \ufefb\u0651 \u2028 \u200b end",
    "unseen ЖЯ ሀሁ 🦀🦀 \u00a0 ﬁne e\u0301 ①",
    "the spelling of </s>, <s>, <unk>, <0x41>, [SEP], [UNK] and <|endoftext|> is text",
    "aaaaaaaaaaa aaa   aaaa       ",
    "",
]
ASSETS = ROOT / "tests" / "assets" / "vocabularies"  # of write_vocabularies.py
TEXTS = st.text(st.sampled_from([*"aeht Ttdjé日🎉,.'0123</s>\n▁"]), max_size=40)


@pytest.mark.parametrize("name", ["unigram", "bpe", *PATTERNS])
def test_ids_are_those_that_the_libraries_gave(name):
    """As recorded, with tables of SentencePiece's normalisation; the tests below ask the libraries themselves."""
    pytest.importorskip("google.protobuf", reason="runs with pip install -e '.[tfrecord]'")
    recorded = json.loads((ASSETS / "ids.json").read_text(encoding="utf-8"))
    file, end = (f"{name}.model", "</s>") if name in ("unigram", "bpe") else ("ranks.tiktoken", "<|endoftext|>")
    ours = BPE.load(ASSETS / file, end, name if name in PATTERNS else "cl100k")
    for text, ids in zip(recorded["texts"], recorded["ids"][name], strict=True):
        assert ours.encode(text) == ids, text


class Oracles:
    """Models of SentencePiece by their training options, each with the library's own processor."""

    def __init__(self, directory: Path) -> None:
        self.library = pytest.importorskip("sentencepiece", reason="runs with pip install sentencepiece")
        self.directory, self.made = directory, {}

    def __call__(self, **options: Any) -> tuple[BPE, Any]:
        key = json.dumps(options)
        if key not in self.made:
            prefix = str(self.directory / f"m{len(self.made)}")
            sizes = {"vocab_size": 150, "hard_vocab_limit": False, "minloglevel": 2}
            kind = {"model_type": "unigram"}
            self.library.SentencePieceTrainer.train(
                sentence_iterator=iter(TRAINED_ON), model_prefix=prefix, **(sizes | kind | options)
            )
            processor = self.library.SentencePieceProcessor(model_file=f"{prefix}.model")
            self.made[key] = BPE.load(f"{prefix}.model", "</s>"), processor
        return self.made[key]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Oracles:
    return Oracles(tmp_path_factory.mktemp("spm"))


LLAMA = {
    "model_type": "bpe",
    "vocab_size": 420,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
OPTIONS = [
    {"model_type": "unigram"},
    {"model_type": "bpe"},
    LLAMA,
    {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True, "add_dummy_prefix": False},
    LLAMA | {"user_defined_symbols": ["<sep>", "\n\n", "quick"], "add_dummy_prefix": False},
    {"model_type": "unigram", "user_defined_symbols": ["<sep>", "quick"], "pad_id": 3},
    {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_pieces_have_sentencepieces_ids(options, trained):
    ours, theirs = trained(**options)
    assert (ours.vocab_size, ours.end) == (theirs.vocab_size(), theirs.eos_id())
    again = pickle.loads(pickle.dumps(ours))
    for text in [*MIXED, "a<sep>quick\n\n\nquicker<sep>"]:
        assert ours.encode(text) == theirs.encode(text) == again.encode(text), text
        assert ours.decode(ours.encode("the fox, dog")) == "the fox, dog"


@pytest.mark.parametrize("options", OPTIONS[:3])
@given(text=TEXTS)
def test_pieces_have_sentencepieces_ids_on_any_text(options, trained, text):
    ours, theirs = trained(**options)
    assert ours.encode(text) == theirs.encode(text)


def test_models_of_sentencepiece_that_cannot_be_used_are_refused(tmp_path):
    pytest.importorskip("google.protobuf", reason="runs with pip install -e '.[tfrecord]'")

    def says(sentence: str, change: Callable[[Any], None]) -> None:
        model: Any = sentencepiece._model_type()()
        model.ParseFromString((ASSETS / "bpe.model").read_bytes())
        change(model)
        (tmp_path / "changed.model").write_bytes(model.SerializeToString())
        with pytest.raises(DataError, match=sentence):
            BPE.load(tmp_path / "changed.model")

    says("is a model of words or of characters", lambda model: setattr(model.trainer_spec, "model_type", 4))
    suffix = "treat_whitespace_as_suffix"
    says(f"has {suffix}", lambda model: setattr(model.trainer_spec, suffix, True))
    says("or not escape_whitespaces", lambda model: setattr(model.normalizer_spec, "escape_whitespaces", False))
    says(
        r"symbol '\\n', which its own normalisation changes",
        lambda model: [setattr(piece, "piece", "\n") for piece in model.pieces if piece.piece == "quick"],
    )
    says("has a piece twice, or one", lambda model: model.pieces.append(model.pieces[-1]))
    says("or none for text", lambda model: [setattr(piece, "type", 3) for piece in model.pieces[1:]])
    says("table of normalisation", lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", b"\xff" * 4))
    says(r"no token '<\|end\|>' .* such as '<unk>', '<s>', '</s>'\.$", lambda model: None)


def test_files_that_are_no_vocabulary_are_refused(tmp_path):
    pytest.importorskip("google.protobuf", reason="runs with pip install -e '.[tfrecord]'")

    def says(name: str, content: bytes, sentence: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            BPE.load(tmp_path / name)

    says("a.model", b"\xff\xff no model", "cannot be parsed as a model of SentencePiece")
    says("b.model", b"", "has no piece for what is unknown")
    says("vocab.txt", b"a\nb\n", r"has no line \[UNK\]")
    says("latin.txt", b"caf\xe9\n", "is not UTF-8")
    damaged = (ASSETS / "bpe.model").read_bytes().replace("▁".encode(), b"\xe2\x96\xff", 1)
    says("c.model", damaged, "has a piece twice, or one that is not UTF-8: copy or train it anew")
    says("a.tiktoken", b"YQ== 0\nYg==\n", "line 2 is not a token in base64 and its rank")
    says("b.tiktoken", b"YQ== 0\n", "has no rank for the byte 0x00, and needs all 256")
    for number, line in enumerate((b"YQ== -1", b"YWI= 7", b"YQ== 419")):  # b"ab" has the rank of a byte, b"a" two ranks
        sentence = "a token or a rank on two of its 420 lines" if number else "line 420 is not a token in base64"
        says(f"{number}.tiktoken", RANKS.read_bytes().rstrip() + b"\n" + line, sentence)
    for name in ("none.model", "none.txt", "none.tiktoken"):
        with pytest.raises(DataError, match=r"cannot be read \(No such file or directory\)"):
            BPE.load(tmp_path / name)


def test_without_protobuf_one_sentence_says_what_to_install(monkeypatch):
    sentencepiece._model_type.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ConfigError, match=r"SentencePiece need protobuf: pip install 'hpo\[tfrecord\]'\.$"):
        BPE.load(ASSETS / "unigram.model", "</s>")


@pytest.mark.parametrize("cased", [False, True])
def test_words_are_divided_as_bert_divides_them(cased, tmp_path):
    legacy = pytest.importorskip(
        "transformers.models.bert.tokenization_bert_legacy", reason="runs with pip install -e '.[llm]'"
    )
    basic = legacy.BasicTokenizer(do_lower_case=not cased)
    counts = Counter(word for text in TRAINED_ON for word in basic.tokenize(text))
    pieces = {word[:2] for word in counts} | {f"##{word[i]}" for word in counts for i in range(1, len(word))}
    words = [word for word, count in counts.items() if len(word) < 5]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*words, *pieces, *(w[0] for w in counts)})]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    ours = BPE.load(tmp_path / "vocab.txt", "[SEP]")
    theirs = legacy.WordpieceTokenizer({token: i for i, token in enumerate(tokens)}, "[UNK]")
    assert (ours.vocab_size, ours.end) == (len(tokens), 3)
    for text in MIXED:
        split = [piece for word in basic.tokenize(text) for piece in theirs.tokenize(word)]
        assert ours.encode(text) == [tokens.index(piece) for piece in split], text


RANKS = ASSETS / "ranks.tiktoken"
PUBLISHED = {"gpt2": "r50k_base", "cl100k": "cl100k_base", "o200k": "o200k_base"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bytes_are_joined_by_rank_as_tiktoken_joins_them(pattern, monkeypatch):
    """By the patterns in tiktoken's own source. Its encodings themselves would be downloaded."""
    tiktoken = pytest.importorskip("tiktoken", reason="runs with pip install tiktoken")
    made = {base64.b64decode(token): int(rank) for token, rank in map(str.split, RANKS.read_text().splitlines())}
    source = pytest.importorskip("tiktoken_ext.openai_public", reason="runs with pip install tiktoken")
    monkeypatch.setattr(source, "load_tiktoken_bpe", lambda *_, **__: made)
    published = source.ENCODING_CONSTRUCTORS[PUBLISHED[pattern]]()["pat_str"]
    ours = BPE.load(RANKS, "<|endoftext|>", pattern)
    theirs = tiktoken.Encoding("ours", pat_str=published, mergeable_ranks=made, special_tokens={})
    assert (ours.vocab_size, ours.end) == (420, 419)

    @given(text=TEXTS)
    def same(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text

    same()
    for text in MIXED:
        assert ours.encode(text) == theirs.encode(text, disallowed_special=()), text


def test_the_end_takes_the_rank_that_is_free_among_others(tmp_path):
    """As in p50k_base, which goes on after GPT-2's vocabulary and its end."""
    lines = RANKS.read_bytes().splitlines()
    beyond = base64.b64encode(b"abcdef")
    (tmp_path / "a.tiktoken").write_bytes(b"\n".join([*lines, beyond + b" %d" % (len(lines) + 1)]))
    ours = BPE.load(tmp_path / "a.tiktoken", "<|endoftext|>")
    assert (ours.vocab_size, ours.end) == (421, 419)
    (tmp_path / "b.tiktoken").write_bytes(b"\n".join([*lines, beyond + b" 500"]))
    with pytest.raises(DataError, match="has 420 tokens and ranks up to 500"):
        BPE.load(tmp_path / "b.tiktoken", "<|endoftext|>")


def test_every_id_is_below_the_size_of_a_vocabulary_that_leaves_ids_out(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[SEP]\na\na\nb\n")  # as in BERT's own, the last line of a token counts
    ours = BPE.load(tmp_path / "vocab.txt", "[SEP]")
    assert (ours.encode("a b"), ours.vocab_size, ours.spelling(2)) == ([3, 4], 5, "")
    assert word_begins(ours) == [True] * 5
