"""Merged models of lora and dpo: the logits of the model with its adapters, from plain weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hpo import load
from studies._lm.merged import merged
from trainer.errors import ConfigError
from trainer.model.language_model import export_language_model
from trainer.task import Task, built

ABOUT = {"study": "lora", "trial": "3", "step": "5", "config": "{}"}


def perturbed(name: str, **overrides: Any) -> tuple[Task, Any]:
    """A study's task, and its model with adapters that say something."""
    study = load(name)
    task = study.task_class()(study.configure(overrides).config)
    model, generator = built(task).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return task, model


def opened(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    where = {} if path.is_dir() else {"gguf_file": path.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(path if path.is_dir() else path.parent, **where).eval()


@pytest.mark.parametrize(("study", "format"), [("lora", "huggingface"), ("lora", "gguf"), ("dpo", "huggingface")])
@torch.no_grad()
def test_a_merged_model_has_the_logits_of_its_adapters(study, format, tmp_path):
    if format == "gguf":
        pytest.importorskip("gguf", reason="runs with pip install -e '.[gguf]'")
    task, model = perturbed(study, **{"model.rank": 4})
    path = tmp_path / ("model" if format == "huggingface" else "model.gguf")
    done = export_language_model(task, model, format, path, ABOUT)
    theirs, tokens = opened(path), torch.randint(257, (2, 40))
    expected = model(input_ids=tokens).logits
    with model.disable_adapter():
        assert (model(input_ids=tokens).logits - expected).abs().max() > 0.1
    torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert done.difference < 1e-4 and done.note == ""


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of peft
@torch.no_grad()
def test_an_adapter_of_a_tied_end_unties_it(tmp_path):
    """The base is a directory whose head is its embedding; its tokenizer's files come along."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=257, tie_word_embeddings=True, num_key_value_heads=2, **sizes))
    base.save_pretrained(tmp_path / "base")
    modules = "q_proj,embed_tokens,lm_head"
    overrides = {"model.path": str(tmp_path / "base"), "model.tokenizer": "bytes", "model.modules": modules}
    task, model = perturbed("lora", **overrides)
    export_language_model(task, model, "huggingface", tmp_path / "model", ABOUT)
    theirs, tokens = opened(tmp_path / "model"), torch.randint(257, (2, 40))
    assert not theirs.config.tie_word_embeddings
    torch.testing.assert_close(theirs(tokens).logits, model(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_four_bits_are_decoded():
    """The merged weight is what bitsandbytes computes with plus the adapters' product, in float32."""
    from bitsandbytes.functional import dequantize_4bit

    _, model = perturbed("lora", **{"model.base": "nf4", "model.rank": 4})
    plain = merged(model)
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_base_model().get_submodule(name)
    weight = layer.base_layer.weight
    a, b = (getattr(layer, f"lora_{kind}")["default"].weight.double() for kind in "AB")
    expected = dequantize_4bit(weight.data, weight.quant_state).double() + 2.0 * b @ a
    torch.testing.assert_close(plain.get_submodule(name).weight.double(), expected, rtol=1e-5, atol=1e-6)
    tokens = torch.randint(257, (2, 40))
    logits = model(input_ids=tokens).logits.float()
    assert (plain(tokens).logits - logits).norm() / logits.norm() < 0.05


def test_a_reward_model_is_refused_by_its_field(tmp_path):
    study = load("dpo")
    task = study.task_class()(study.configure({"loss.name": "reward"}).config)
    with pytest.raises(ConfigError, match=r"loss\.name=reward trains a model of rewards"):
        export_language_model(task, torch.nn.Linear(1, 1), "huggingface", tmp_path / "model", ABOUT)
    assert list(tmp_path.iterdir()) == []
