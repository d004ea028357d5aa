"""Records are text, and a template's special tokens are tokens: of the tokenizer of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from studies._lm.config import DataConfig, ModelConfig
from studies._lm.records import _lengths
from studies._lm.text import IGNORED, Pretrained, prompt_of, tokens_of
from trainer.data.text import Bytes

pytestmark = pytest.mark.whole

CHAT = "<s><|user|>{prompt}<|bot|>{response}</s>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A byte-level tokenizer with five special tokens, as transformers saves one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|bot|>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(["hello world"] * 3, trainer)
    extra = {"additional_special_tokens": special[2:]}
    path = tmp_path_factory.mktemp("tokenizers") / "chat"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **extra).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def text(directory) -> Pretrained:
    return Pretrained(directory)


SPELT = ["say </s>", "<s>", "<|user|>hello<|bot|>", "hello world", "</s></s>"]


@pytest.mark.parametrize("record", SPELT)
def test_what_a_record_spells_is_text(text, record):
    ids = text.encode(record)
    assert text.decode(ids) == record
    assert not {*ids} & {*text.parse("<s></s><|user|><|bot|>")}
    sample = tokens_of(text, record, record, DataConfig())["tokens"].tolist()
    assert sample == [*text.begin, *ids, *ids, text.end]


def test_what_a_template_spells_is_tokens_and_none_is_doubled(text):
    begin, user, bot, end = text.parse("<s><|user|><|bot|></s>")
    said, answer = text.encode("hello </s>"), text.encode("world")
    sample = tokens_of(text, "hello </s>", "world", DataConfig(template=CHAT))
    assert sample["tokens"].tolist() == [begin, user, *said, bot, *answer, end]
    assert sample["labels"].tolist() == [*[IGNORED] * (len(said) + 3), *answer, end]
    without = DataConfig(template="<|user|>{prompt}<|bot|>{response}")
    assert torch.equal(tokens_of(text, "hello </s>", "world", without)["tokens"], sample["tokens"])


def test_of_bytes_a_template_is_bytes():
    sample = tokens_of(Bytes(), "a", "b", DataConfig(template="Q: {prompt}\nA: {response}."))
    assert sample["tokens"].tolist() == [*b"Q: a\nA: b.", Bytes.end]
    assert sample["labels"].tolist() == [*[IGNORED] * 8, *b"b.", Bytes.end]


@pytest.mark.parametrize("template", ["{prompt}{response}", CHAT, "Q {prompt} A {response}"])
@pytest.mark.parametrize("prompt", SPELT)
def test_prompts_are_measured_before_the_study_as_they_are_trained(directory, text, template, prompt):
    data = DataConfig(template=template)
    count = _lengths(ModelConfig(path=str(directory)), data)
    assert count is not None and count(prompt) == len(prompt_of(text, prompt, data))
    count = _lengths(ModelConfig(), data)
    assert count is not None and count(prompt) == len(prompt_of(Bytes(), prompt, data))


def test_a_token_that_begins_texts_may_be_described(directory, text, tmp_path):
    """As older versions of transformers write it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((directory / name).read_text())
    about = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    count = _lengths(ModelConfig(path=str(tmp_path)), DataConfig(template=CHAT))
    assert count is not None and count("hello") == len(prompt_of(text, "hello", DataConfig(template=CHAT)))
