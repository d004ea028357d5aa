"""Exports of gpt in the formats of language models: transformers opens them, with the logits of the model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.gpt.config import Config
from studies.gpt.task import GptTask
from trainer.data.text import BPE, Tokenizer
from trainer.errors import ConfigError
from trainer.model.exported import Exported
from trainer.model.language_model import export_language_model
from trainer.runtime.quiet_imports import quiet_torchao
from trainer.task import built

ABOUT = {"study": "gpt", "trial": "3", "step": "5", "config": "{}"}
TEXTS = ["abc abd abe", "Grüße, 東京! þÿ\n\ttwo  spaces it's 3.14"]
FORMATS = ["huggingface", "gguf"]


@pytest.fixture(scope="module")
def transformers():
    quiet_torchao()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers", reason="runs with pip install -e '.[llm]'")


def task_of(model: dict[str, Any], **data: Any) -> GptTask:
    sizes = {"hidden_size": 32, "num_layers": 2, "mlp_size": 48, "rope_theta": 500.0, "norm_eps": 1e-3, **model}
    return GptTask(Config.model_validate({"model": sizes, "data": data}))


def exported(task: GptTask, format: str, directory: Path) -> tuple[torch.nn.Module, Exported]:
    """The model, of weights that are large enough to tell layouts apart, and its export."""
    if format == "gguf":
        pytest.importorskip("gguf", reason="runs with pip install -e '.[gguf]'")
    torch.manual_seed(1)
    model = built(task).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    path = directory / ("model" if format == "huggingface" else "model.gguf")
    return model, export_language_model(task, model, format, path, ABOUT)


def opened(transformers: Any, kind: str, path: Path) -> Any:
    where = {} if path.is_dir() else {"gguf_file": path.name}
    directory = path if path.is_dir() else path.parent
    return getattr(transformers, kind).from_pretrained(directory, **where)


@pytest.mark.parametrize(("heads", "kv_heads", "tie"), [(4, 4, True), (4, 2, False), (4, 1, True)])
@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_transformers_computes_the_same_logits(format, heads, kv_heads, tie, transformers, tmp_path):
    task = task_of({"num_heads": heads, "num_kv_heads": kv_heads, "tie": tie})
    model, done = exported(task, format, tmp_path)
    theirs, tokens = opened(transformers, "AutoModelForCausalLM", done.path).eval(), torch.randint(257, (2, 100))
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)
    assert done.difference < 1e-5 and done.note == "" and done.free is None
    assert theirs.config.max_position_embeddings == 128 and theirs.config.tie_word_embeddings == tie
    assert [file.name for file in tmp_path.iterdir()] == [done.path.name]
    assert done.size == sum(file.stat().st_size for file in [done.path, *done.path.glob("*")] if file.is_file())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("format", FORMATS)
def test_transformers_opens_the_tokenizer_too(format, kind, transformers, tmp_path):
    data: dict[str, Any] = {}
    if kind == "bpe":
        BPE.train(TEXTS, 280).save(tmp_path / "given.json")
        data = {"tokenizer": "bpe", "vocab_size": 300, "tokenizer_file": str(tmp_path / "given.json")}
    task = task_of({}, **data)
    _, done = exported(task, format, tmp_path)
    ours: Tokenizer = BPE.load(tmp_path / "given.json") if kind == "bpe" else task.tokens.tokenizer
    theirs = opened(transformers, "AutoTokenizer", done.path)
    for text in TEXTS if kind == "bpe" or format != "gguf" else [text.replace("þÿ", "ÿ") for text in TEXTS]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text) and theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.end and done.note == ""


def test_a_tokenizer_that_gguf_has_no_form_for_is_named(transformers, tmp_path):
    tokenizer = BPE.train(TEXTS, 280)
    content = json.loads(tokenizer._tokenizer.to_str())
    content["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "given.json").write_text(json.dumps(content))
    data = {"tokenizer": "bpe", "vocab_size": 280, "tokenizer_file": str(tmp_path / "given.json")}
    _, done = exported(task_of({}, **data), "gguf", tmp_path)
    assert done.note.startswith("The tokenizer has no form in GGUF (it is not byte-level pairs on GPT-2's words)")
    from gguf import GGUFReader

    fields = GGUFReader(done.path).fields
    assert fields["tokenizer.ggml.model"].contents() == "none" and "tokenizer.ggml.tokens" not in fields
    assert fields["hpo.trial"].contents() == "3" and fields["general.name"].contents() == "gpt 3"


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_refused_by_their_field(format, tmp_path):
    with pytest.raises(ConfigError, match=r"model.moe.experts is 2, and Hugging Face's Llama has no experts"):
        exported(task_of({"moe": {"experts": 2}}), format, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}}, "rope_type='llama3'"),
        ({"head_dim": 64}, "head_dim=64"),
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
    ],
)
def test_what_is_no_plain_llama_is_no_gguf(changes, named):
    from trainer.model.gguf_file import check_plain

    plain = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "hidden_act": "silu"}
    check_plain(plain)
    with pytest.raises(ConfigError, match=f"config.json has {named}, and only a plain Llama is written as GGUF"):
        check_plain(plain | changes)


def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch):
    from trainer.model import language_model

    monkeypatch.setattr(language_model, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ConfigError, match=r"--format gguf needs gguf: pip install 'hpo\[gguf\]'\.$"):
        export_language_model(task_of({}), torch.nn.Linear(1, 1), "gguf", tmp_path / "a.gguf", ABOUT)
