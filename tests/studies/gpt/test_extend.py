"""A vocabulary is extended for a domain: the tokens that save most, and rows that begin as the mean of their pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_runs import Trial, killed_at, uninterrupted

from studies._lm.corpus import prepare
from studies.gpt import extend as command
from studies.gpt import llama
from studies.gpt.added_tokens import Extension
from studies.gpt.check import check
from studies.gpt.config import Config
from studies.gpt.extend import extend
from studies.gpt.model import Llama
from studies.gpt.task import GptTask, sizes
from trainer.data.text import BPE
from trainer.errors import DataError

tokenizers = pytest.importorskip("tokenizers", reason="runs with pip install -e '.[text]'")
SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 48}
GENERAL = ["the man and the dog ran to the other end", "another man than the first", "a then and a there"] * 5
DOMAIN = ["the mitochondria of the cell", "mitochondrial cells, and a mitochondrion", "aaaa aaa cellcell"] * 4


def base_of() -> BPE:
    return BPE.train(GENERAL, 275)


def length(tokenizer, texts: list[str]) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def test_each_token_is_the_one_that_saves_most():
    """A brute force encodes the text with each pair of neighbours in turn, by the library itself."""
    extension = Extension(base_of()._tokenizer, "base")
    extension.choose(DOMAIN, 14)
    content = json.loads(base_of()._tokenizer.to_str())
    for token in extension.added:
        before = tokenizers.Tokenizer.from_str(json.dumps(content))
        encoded = [before.encode(text).tokens for text in DOMAIN]
        pairs = {pair for tokens in encoded for pair in pairwise(tokens) if "Ġ" not in pair[1]}
        saved = {pair: length(before, DOMAIN) - length(with_pair(content, pair), DOMAIN) for pair in pairs}
        assert saved[token.joins] == max(saved.values()) == token.saved
        content = json.loads(with_pair(content, token.joins).to_str())
    assert len(extension.added) == 14
    assert extension.tokenizer().to_str() == tokenizers.Tokenizer.from_str(json.dumps(content)).to_str()


def with_pair(content: dict, pair: tuple[str, str]):
    model = content["model"]
    ids = [*model["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
    vocabulary = {"".join(pair): max(ids) + 1} | model["vocab"]
    model = model | {"vocab": vocabulary, "merges": [*model["merges"], list(pair)]}
    return tokenizers.Tokenizer.from_str(json.dumps(content | {"model": model}))


def test_the_base_stays_the_beginning_of_the_extended_tokenizer():
    base, extension = base_of(), Extension(base_of()._tokenizer, "base")
    extension.choose(DOMAIN, 40)
    extended = BPE(extension.tokenizer())
    before, after = (json.loads(tokenizer._tokenizer.to_str())["model"] for tokenizer in (base, extended))
    assert after["merges"][: len(before["merges"])] == before["merges"]
    assert {token: after["vocab"][token] for token in before["vocab"]} == before["vocab"]
    assert [token.id for token in extension.added] == [*range(base.vocab_size, extended.vocab_size)]
    spelled = {token.id: token.pieces for token in extension.added}
    for text in DOMAIN + GENERAL:
        ids = extended.encode(text)
        assert extended.decode(ids) == text
        assert [piece for id in ids for piece in spelled.get(id, (id,))] == base.encode(text)
    saved = length(base._tokenizer, DOMAIN) - length(extended._tokenizer, DOMAIN)
    assert sum(token.saved for token in extension.added) == saved > 0


def test_special_tokens_outside_the_pairs_keep_their_ids():
    """As in Llama 3's and Qwen's files."""
    base, names = base_of()._tokenizer, ["<|user|>", "<|pad|>"]
    base.add_special_tokens(names)
    extension = Extension(base, "base")
    extension.choose(DOMAIN, 14)
    extended = extension.tokenizer()
    assert [extended.token_to_id(name) for name in names] == [base.token_to_id(name) for name in names] == [275, 276]
    assert sorted(extended.get_vocab().values()) == [*range(277 + 14)]
    assert extended.encode("<|user|>the cell").ids[0] == 275 and extended.decode([275]) == ""
    assert [extended.id_to_token(token.id) for token in extension.added] == [token.token for token in extension.added]


def test_tokens_end_when_none_saves_two():
    extension = Extension(base_of()._tokenizer, "base")
    extension.choose(["mitochondria", "xyzzy"], 100)
    assert extension.added == []
    extension.choose(["mitochondria"] * 2, 100)
    assert extension.added[-1].token == "mitochondria" and all(token.saved >= 2 for token in extension.added)


def test_words_of_a_text_without_divisions_are_not_joined():
    """As SentencePiece's: the text is one, ▁ begins a word, and bytes stand for what is unknown."""
    letters = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "▁", *"abcde"]
    model = tokenizers.models.BPE({token: i for i, token in enumerate(letters)}, [], unk_token="<unk>")
    model.byte_fallback, model.fuse_unk = True, True
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    extension = Extension(tokenizer, "base")
    texts = ["ab cd 日日 ab cd"] * 9
    extension.choose(texts, 20)
    assert {token.token for token in extension.added} == {"▁a", "▁ab", "▁c", "▁cd"}
    saved = length(tokenizer, texts) - length(extension.tokenizer(), texts)
    assert sum(token.saved for token in extension.added) == saved


@pytest.fixture
def directory(tmp_path) -> Path:
    """A model of byte pairs, whose head is its own, and a text of another domain."""
    base_of().save(tmp_path / "base.json")
    (tmp_path / "domain.txt").write_text("\n".join(DOMAIN * 30))
    config = config_of(tmp_path / "base.json", 275)
    torch.manual_seed(0)
    llama.save_with_tokenizer(Llama(275, **sizes(config)).state_dict(), config, tmp_path / "base")
    return tmp_path


def config_of(tokenizer: Path, size: int, weights: str = "") -> Config:
    data = {"path": str(tokenizer.parents[tokenizer.name == "tokenizer.json"] / "domain.txt"), "separator": "\n"}
    data |= {"tokenizer": "bpe", "tokenizer_file": str(tokenizer), "vocab_size": size, "block_size": 32}
    return Config.model_validate({"data": data, "model": SIZES | {"tie": False, "weights": weights}})


def test_new_rows_are_the_mean_of_their_pieces(directory):
    config = config_of(directory / "base.json", 275)
    report = extend(str(directory / "base"), str(directory / "new"), config.data, 12)
    old, new = (load_file(directory / name / "model.safetensors") for name in ("base", "new"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(new[name][:275], old[name]) and new[name].shape == (287, 32)
        for token in report["tokens"]:
            mean = old[name][list(token["pieces"])].double().mean(0)
            torch.testing.assert_close(new[name][token["id"]].double(), mean, rtol=1e-6, atol=1e-8)
    assert all(torch.equal(new[name], old[name]) for name in old if "layers" in name or "norm" in name)
    assert json.loads((directory / "new" / "extension.json").read_text()) == json.loads(json.dumps(report))
    texts = prepare(config.data)["target"]["train"].documents
    extended = BPE.load(directory / "new" / "tokenizer.json")
    assert report["tokens_after"] == sum(len(extended.encode(text.decode())) for text in texts)
    assert report["bytes_per_token_after"] == sum(map(len, texts)) / report["tokens_after"]


def test_training_starts_from_the_extended_directory(directory):
    extend(str(directory / "base"), str(directory / "new"), config_of(directory / "base.json", 275).data, 12)
    config = config_of(directory / "new" / "tokenizer.json", 287, str(directory / "new"))
    check(config)
    task = GptTask(config)
    with torch.no_grad():
        metrics = task.evaluate(task.model().eval())
    before = GptTask(config_of(directory / "base" / "tokenizer.json", 275, str(directory / "base")))
    tokens = [len(each.tokens.files["target", "val"]) for each in (before, task)]
    assert tokens[1] < tokens[0] and metrics["val/bits_per_byte"] > 0
    transformers = pytest.importorskip("transformers", reason="runs with pip install -e '.[llm]'")
    opened = transformers.AutoTokenizer.from_pretrained(directory / "new")
    assert opened(DOMAIN[0], add_special_tokens=False)["input_ids"] == task.tokens.tokenizer.encode(DOMAIN[0])


def test_the_command_says_what_it_has_added(directory, capsys):
    arguments = [str(directory / "base"), str(directory / "new"), "--tokens", "5"]
    arguments += [f"data.path={directory / 'domain.txt'}", "data.separator=\n", "data.block_size=32"]
    command.main(arguments)
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("5 tokens added; ") and "bytes per token before" in first
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert "new is not empty, and nothing in it is overwritten" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main([*arguments, "--tokens", "0"])
    assert "--tokens is 0: give 1 or more." in capsys.readouterr().err


def test_nothing_is_written_for_weights_or_texts_that_cannot_be_used(directory, capsys):
    base, new, file = directory / "base", directory / "new", directory / "base" / "model.safetensors"
    data, stored = config_of(directory / "base.json", 275).data, load_file(file)
    (base / "config.json").write_text((base / "config.json").read_text().replace("275", "270"))
    with pytest.raises(DataError, match=r"model\.embed_tokens\.weight has not the 270 rows that config\.json has"):
        extend(str(base), str(new), data, 5)
    (base / "config.json").write_text((base / "config.json").read_text().replace("270", "275"))
    save_file(stored | {"lm_head.weight": stored["lm_head.weight"][:200]}, file)
    with pytest.raises(DataError, match=r"lm_head\.weight has not the 275 rows"):
        extend(str(base), str(new), data, 5)
    file.unlink()
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        extend(str(base), str(new), data, 5)
    with pytest.raises(SystemExit, match="2"):
        command.main([str(base), str(new), "--tokens", "5", "data.path="])
    assert "the text of the new domain is not given: name it by data.path=FILE." in capsys.readouterr().err
    assert not new.exists()


def test_models_without_pairs_are_refused(directory):
    words = {"[UNK]": 0} | {letter: i for i, letter in enumerate("abcdefgh", 1)}
    tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]")).save(
        str(directory / "base" / "tokenizer.json")
    )
    data = config_of(directory / "base.json", 275).data
    with pytest.raises(DataError, match="is a WordPiece model, which has no pairs to go on with: use BPE"):
        extend(str(directory / "base"), str(directory / "new"), data, 5)
    base_of().save(directory / "base" / "tokenizer.json")
    (directory / "domain.txt").write_text("a\n" * 2000)
    with pytest.raises(DataError, match="no pair of its tokens occurs twice"):
        extend(str(directory / "base"), str(directory / "new"), data, 5)
    assert not (directory / "new").exists()


@pytest.mark.parametrize("read", [2, 5])
def test_training_in_two_phases_that_is_cut_ends_with_the_same_bits(read, directory, tmp_path):
    """First the embedding and the head alone, then all."""
    extend(str(directory / "base"), str(directory / "new"), config_of(directory / "base.json", 275).data, 12)
    config = config_of(directory / "new" / "tokenizer.json", 287, str(directory / "new"))

    class Extended(GptTask):
        def __init__(self, _: object) -> None:
            super().__init__(config.model_copy(update={"samples": config.samples.model_copy(update={"tokens": 0})}))

        def model(self) -> torch.nn.Module:
            self.net = super().model()
            return self.net

    begun = load_file(directory / "new" / "model.safetensors")
    phases = {"freeze": {"patterns": ["blocks.*", "head.norm.*"], "until": 0.5}, "batch_size": 32, "num_epochs": 2}
    whole = uninterrupted(tmp_path / "whole", task=Extended, **phases)
    assert not torch.equal(whole.task.net.embed.tokens.weight, begun["model.embed_tokens.weight"])
    cut = Trial(tmp_path / "cut", task=Extended, **phases)
    assert cut.attempt(killed_at(read)) is None
    assert cut.attempt().kind == "complete" and cut.digest() == whole.digest()
    joint = uninterrupted(tmp_path / "joint", task=Extended, **{k: v for k, v in phases.items() if k != "freeze"})
    assert joint.digest() != whole.digest()
