"""The gpt's corpora: an entropy that is what it says, parts that do not meet, and texts that are refused."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from hpo import load
from hpo.space.config import parse_override
from studies._lm.corpus import prepare
from studies._lm.corpus_config import CorpusConfig
from studies._lm.source import Source, generate
from studies._lm.token_files import Tokens
from studies.gpt.check import check
from studies.gpt.config import Config, DataConfig, MixPhase
from studies.gpt.data import phase_ratios, train_rows
from studies.gpt.experts import Load
from studies.gpt.task import GptTask
from trainer.config import TrainConfig
from trainer.errors import DataError

TINY = CorpusConfig(general=60, target=30, num_words=8, successors=3)


def data(**given: Any) -> DataConfig:
    return DataConfig.model_validate({"corpus": TINY, **given})


def test_the_floor_is_the_logarithm_of_how_often_a_text_comes():
    source = Source(["a", "bc", "def"], CorpusConfig(num_words=4, successors=2), np.random.default_rng(0))
    text = source.text(6000, np.random.default_rng(1))
    assert text.nats is not None
    counts = Counter(text.documents)
    for document, count in counts.most_common(5):
        chain = [source.words.index(word) for word in document.decode().split(" ")]
        p = math.exp(-source.nats(chain))
        assert abs(count / 6000 - p) < 4 * math.sqrt(p * (1 - p) / 6000)
    chains = [[source.words.index(word) for word in one.decode().split(" ")] for one in text.documents]
    assert text.nats == pytest.approx(sum(source.nats(chain) for chain in chains))
    assert max(map(len, chains)) == 16


def test_of_all_texts_the_probabilities_add_up_to_one():
    """By the length of the document, up to the end that comes for certain."""
    source = Source(["a", "b"], CorpusConfig(num_words=4, successors=2), np.random.default_rng(0))
    total, chains = 0.0, [[0], [1]]
    for length in range(1, 17):
        assert all(len(chain) == length for chain in chains)
        total += sum(math.exp(-source.nats(chain)) for chain in chains)
        if length < 10:
            chains = [[*chain, word] for chain in chains for word in (0, 1)]
        else:
            break
    assert total == pytest.approx(1 - (1 - 1 / 8) ** 10)


def test_documents_fit_the_least_row_and_domains_differ():
    corpus = generate(CorpusConfig(general=300, target=300), seed=3)
    everything = [document for parts in corpus.values() for text in parts.values() for document in text.documents]
    assert max(map(len, everything)) + 2 <= CorpusConfig().longest
    pairs = [
        {pair for d in corpus[domain]["train"].documents for pair in zip(d.split(), d.split()[1:], strict=False)}
        for domain in ("general", "target")
    ]
    assert len(pairs[0] & pairs[1]) < 0.5 * min(map(len, pairs))
    assert generate(CorpusConfig(general=300, target=300), seed=3) == corpus


def test_a_file_is_divided_at_characters_and_nothing_is_lost(tmp_path):
    text = "aé漢𝄞\n" * 200
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    corpus = prepare(data(path=str(tmp_path / "a.txt"), block_size=16, held_out=0.1))
    parts = [b"".join(corpus["target"][part].documents) for part in ("train", "val", "test")]
    assert b"".join(parts).decode() == text and [part.decode() for part in parts]
    assert [len(part) / len(text.encode()) for part in parts] == pytest.approx([0.8, 0.1, 0.1], abs=0.01)


def test_a_directory_and_a_table_are_texts_too(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"document {i}. " * 40 + "\n\n" + f"another {i}. " * 40)
    split = prepare(data(path=str(tmp_path / "texts"), separator="\n\n", block_size=32))["target"]
    assert sum(len(split[part].documents) for part in split) in (6, 7, 8)  # two of which are cut
    lines = [json.dumps({"text": f"row {i} has words", "n": i}) for i in range(100)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    table = prepare(data(path=str(tmp_path / "t.jsonl"), block_size=16))["target"]
    assert table["train"].documents[7] == b"row 7 has words"
    assert [len(table[part].documents) for part in ("train", "val", "test")] == pytest.approx([90, 5, 5], abs=1)


def test_a_document_that_spells_the_end_is_one_document(tmp_path):
    text = "the token <|end|> ends a document. " * 40
    (tmp_path / "a.txt").write_text(text)
    given = {"path": str(tmp_path / "a.txt"), "tokenizer": "bpe", "vocab_size": 300, "block_size": 8}
    tokens = Tokens(data(**given), tmp_path / "shared")
    parts = ("train", "val", "test")
    assert [tokens.files["target", part].num_documents for part in parts] == [1, 1, 1]
    ids = [token for part in parts for token in tokens.files["target", part][:].tolist()[1:-1]]
    assert tokens.tokenizer.decode(ids) == text and tokens.tokenizer.end not in ids


@pytest.mark.parametrize("separator", ["\n\n", "\n---\n", "\t", " "])
def test_a_separator_is_given_on_the_command_line_as_it_is(separator, tmp_path):
    (tmp_path / "a.txt").write_text(separator.join(f"document-{i}." * 9 for i in range(99)))
    overrides = dict(parse_override(f"{path}={value}") for path, value in (
        ("data.path", tmp_path / "a.txt"), ("data.separator", separator), ("data.block_size", 16)
    ))  # fmt: skip
    corpus = prepare(load("gpt").configure(overrides).config.data)
    assert sum(len(part.documents) for part in corpus["target"].values()) in (99, 100, 101)  # two of which are cut


@pytest.mark.parametrize(
    ("content", "given", "sentence"),
    [
        (None, {}, r"cannot be read \(No such file or directory\): give a file of text"),
        (b"", {}, "has no text in it"),
        (b" \n ", {}, "has no text in it"),
        (b"x" * 300, {"block_size": 512}, "leaves 270 bytes to train, fewer than one block of 512 tokens"),
        (b"x" * 300, {"block_size": 64}, "leaves 15 bytes to val, fewer than one block of 64 tokens"),
        (
            b"abc\nd\xff" + b"x" * 3000,
            {"tokenizer": "bpe", "vocab_size": 300},
            r"line 2 is not UTF-8 \(byte 0xff\), which BPE needs",
        ),
    ],
)
def test_texts_that_cannot_be_used_are_refused(content, given, sentence, tmp_path):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        check(Config(data=data(path=str(path), **given)))


def test_bytes_need_no_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 400)
    config = data(path=str(tmp_path / "latin.txt"), block_size=16)
    tokens = Tokens(config)
    assert tokens.files["target", "train"][0:6].tolist() == [256, *b"caf\xe9 "]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_tokens_are_the_texts_with_their_ends_and_are_made_once(tokenizer, tmp_path):
    given = {"tokenizer": "bpe", "vocab_size": 280} if tokenizer == "bpe" else {}
    config = data(cache=str(tmp_path), **given)
    tokens, corpus = Tokens(config), prepare(config)
    [place] = (tmp_path / "tokens").iterdir()
    stamps = {file: file.stat().st_mtime_ns for file in place.iterdir()}
    for domain, part in tokens.files:
        file, documents = tokens.files[domain, part], corpus[domain][part].documents
        ids = file[0 : len(file)].tolist()
        assert ids.count(256 if tokenizer == "bytes" else tokens.tokenizer.end) == 2 * len(documents)
        assert tokens.tokenizer.decode(ids) == b"".join(documents).decode()
    Tokens(config)
    assert {file: file.stat().st_mtime_ns for file in place.iterdir()} == stamps


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 400)
    config = data(path=str(path), block_size=16, cache=str(tmp_path / "cache"))
    first = Tokens(config).files["target", "train"][1:4].tolist()
    stamp = path.stat()
    path.write_text("xyz " * 400)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert Tokens(config).files["target", "train"][1:4].tolist() == first == [*b"abc"]
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    assert Tokens(config).files["target", "train"][1:4].tolist() == [*b"xyz"]


def test_trials_share_the_tokens_of_one_content_wherever_it_lies(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("abc " * 400)
    shared = tmp_path / "shared"
    left = shared / "tokens" / ".new-killed"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    places = set()
    for name in ("one", "other", "one"):
        task = GptTask(Config(data=data(path=str(tmp_path / name / "text.txt"), block_size=16)))
        task.shared = shared
        places.add(task.tokens.files["target", "train"].path.parent)
    assert [*places] == [*(shared / "tokens").iterdir()], "one, and what a killed process left is gone"


def test_rows_are_mixed_by_the_ratio_of_the_phase():
    phases = (MixPhase(target=0.0), MixPhase(start=0.3, target=0.5), MixPhase(start=0.75, target=1.0))
    config = Config(data=data(phases=phases, tokens_per_parameter=1.0), train=TrainConfig(num_epochs=4))
    assert phase_ratios(config.data, 4) == {0: (1.0, 0.0), 2: (0.5, 0.5), 3: (0.0, 1.0)}
    assert phase_ratios(config.data, 1) == {0: (1.0, 0.0)}
    rows = train_rows(Tokens(config.data), config)
    for epoch, target in enumerate((0.0, 0.0, 0.5, 1.0)):
        share = np.mean([rows.source(index) for index in rows.order(0, epoch, 16)])
        assert share == pytest.approx(target, abs=1 / len(rows))


@torch.no_grad()
def test_a_uniform_model_has_the_loss_of_its_vocabulary():
    task = GptTask(Config(data=data(test=True)))
    model = task.model()
    torch.nn.init.zeros_(model.get_parameter("embed.tokens.weight"))
    metrics = task.evaluate(model.eval())
    for name in ("val/", "val/general_", "test/", "test/general_"):
        assert metrics[name + "loss"] == pytest.approx(math.log(257), rel=1e-5)
        assert metrics[name + "perplexity"] == pytest.approx(257, rel=1e-4)
        assert 0.1 < metrics[name + "floor"] < 0.6 and metrics[name + "excess"] > 4
    documents = task.tokens.files["target", "val"].num_documents
    spent = metrics["val/bits_per_byte"] * task.tokens.bytes["target", "val"] / 8.0056  # log2(257) bits a token
    assert spent == pytest.approx(task.tokens.bytes["target", "val"] + documents, rel=1e-3)


@torch.no_grad()
def test_what_is_counted_is_every_token_but_the_first_of_each_document():
    task = GptTask(Config(data=data()))
    file = task.tokens.files["general", "val"]
    _, count = task._spent(task.model().eval(), "general", "val", Load())
    assert count == len(file) - file.num_documents


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"general_path": "a.txt"}, "general_path is given and path, the target domain, is not"),
        ({"vocab_size": 300}, "vocab_size=300 is BPE's"),
        ({"block_size": 64}, "block_size 64 cuts documents of the generated corpus"),
        ({"phases": [{"start": 0.1, "target": 1}]}, "let the first start at 0"),
        ({"corpus": {"num_words": 4, "successors": 5}}, "successors 5 are more than num_words 4"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        DataConfig.model_validate(given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": {"hidden_size": 66, "num_heads": 4}}, "num_heads 4 do not divide hidden_size 66"),
        ({"model": {"hidden_size": 20, "num_heads": 4}}, "heads of even width"),
        ({"model": {"num_heads": 4, "num_kv_heads": 3}}, "num_kv_heads 3 do not divide num_heads 4"),
        ({"train": {"parallel": {"tensor": 4}}}, "train.parallel.tensor=4 does not divide model.num_kv_heads 2"),
        (
            {"train": {"parallel": {"pipeline": 2}, "micro_batch_size": 8}},
            "model.tie shares weights of the first and the last stage",
        ),
    ],
)
def test_models_that_cannot_be_built_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config.model_validate(given)
