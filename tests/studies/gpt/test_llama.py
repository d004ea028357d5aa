"""Weights to and from Hugging Face's Llama: the same logits there and here."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch

from studies.gpt import llama
from studies.gpt.check import check
from studies.gpt.config import Config
from studies.gpt.model import Llama
from studies.gpt.task import GptTask, sizes
from trainer.data.text import BPE, Bytes
from trainer.errors import ConfigError, DataError
from trainer.runtime.quiet_imports import quiet_torchao

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 48, "rope_theta": 500.0}


@pytest.fixture(scope="module")
def transformers():
    quiet_torchao()  # which transformers looks for
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("transformers", reason="runs with pip install -e '.[llm]'")
        yield module


def config_of(tie: bool, **data: object) -> Config:
    return Config.model_validate(
        {"model": SIZES | {"tie": tie}, "data": {"corpus": {"general": 30, "target": 20}, **data}}
    )


def their_logits(transformers, directory, tokens: torch.Tensor) -> torch.Tensor:
    theirs = transformers.LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return theirs(tokens).logits


@pytest.mark.parametrize("tie", [False, True])
@torch.no_grad()
def test_what_is_saved_has_the_same_logits_there(tie, transformers, tmp_path):
    config, tokens = config_of(tie), torch.randint(257, (2, 40))
    torch.manual_seed(1)
    model = Llama(257, **sizes(config)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    llama.save(model.state_dict(), config, tmp_path, end=256)
    torch.testing.assert_close(their_logits(transformers, tmp_path, tokens), model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tie", [False, True])
@torch.no_grad()
def test_what_is_loaded_has_the_logits_it_had_there(tie, transformers, tmp_path):
    """In several files, and continued: `model.weights` is what the training starts from."""
    torch.manual_seed(2)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            initializer_range=0.2,
            tie_word_embeddings=tie,
        )
    ).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    given = dict(one.removeprefix("-o ").split("=", 1) for one in llama.flags(tmp_path))
    from studies.gpt import STUDY

    config = STUDY.configure(given | {"data.corpus.general": 30, "data.corpus.target": 20}).config
    assert isinstance(config, Config)
    check(config)
    model, tokens = GptTask(config).model().eval(), torch.randint(257, (2, 40))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_a_directory_in_which_something_lies_is_not_written_into(tmp_path):
    """It may hold the weights that the trial began with."""
    from safetensors.torch import save_model

    config = config_of(True)
    save_model(Llama(257, **sizes(config)), str(tmp_path / "a.safetensors"), {"config": config.model_dump_json()})
    llama.main(["save", str(tmp_path / "a.safetensors"), str(tmp_path / "there")])
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    save_model(Llama(257, **sizes(config)), str(tmp_path / "a.safetensors"), {"config": config.model_dump_json()})
    with pytest.raises(
        DataError, match=r"there is not empty, and nothing in it is overwritten: name a new directory\."
    ):
        llama.main(["save", str(tmp_path / "a.safetensors"), str(tmp_path / "there")])
    assert {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()} == before


def test_an_exported_trial_is_written_with_its_tokenizer(tmp_path, transformers):
    from safetensors.torch import save_model

    config = config_of(True, tokenizer="bpe", vocab_size=280)
    task = GptTask(config)
    model = task.model().eval()
    save_model(model, str(tmp_path / "a.safetensors"), metadata={"config": config.model_dump_json()})
    llama.main(["save", str(tmp_path / "a.safetensors"), str(tmp_path / "there")])
    again = config_of(True, tokenizer="bpe", vocab_size=280, tokenizer_file=str(tmp_path / "there" / "tokenizer.json"))
    other = GptTask(
        again.model_copy(update={"model": again.model.model_copy(update={"weights": str(tmp_path / "there")})})
    )
    for mine, theirs in zip(model.parameters(), other.model().parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.tokens.tokenizer.encode("abc def") == task.tokens.tokenizer.encode("abc def")
    kept = json.loads((tmp_path / "there" / "config.json").read_text())
    assert kept["eos_token_id"] == task.tokens.tokenizer.end
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "there")
    ids = task.tokens.tokenizer.encode("abc def")
    assert (opened.eos_token_id, opened("abc def", add_special_tokens=False)["input_ids"]) == (
        kept["eos_token_id"],
        ids,
    )
    other_end = again.model_copy(update={"data": again.data.model_copy(update={"end_token": "</s>"})})
    with pytest.raises(
        DataError, match=r"tokenizer\.json: the tokenizer has no token '</s>' .* such as '<\|end\|>'\.$"
    ):
        check(other_end)
    with pytest.raises(DataError, match=r"has 280 tokens and data.vocab_size is 270: set it to 280"):
        GptTask(config_of(True, tokenizer="bpe", vocab_size=270, tokenizer_file=again.data.tokenizer_file)).train_set()


@pytest.mark.parametrize("kind", ["bytes", "given"])
def test_a_trial_is_saved_when_the_text_it_read_is_gone(kind, tmp_path):
    from safetensors.torch import save_model

    data: dict[str, object] = {"path": str(tmp_path / "gone.txt")}
    tokenizer = Bytes() if kind == "bytes" else BPE.train(["abc abd abe"], 280)
    if isinstance(tokenizer, BPE):
        tokenizer.save(tmp_path / "given.json")
        data |= {"tokenizer": "bpe", "vocab_size": 280, "tokenizer_file": str(tmp_path / "given.json")}
    config = config_of(True, **data)
    model = Llama(config.data.vocab_size, **sizes(config))
    save_model(model, str(tmp_path / "a.safetensors"), metadata={"config": config.model_dump_json()})
    llama.main(["save", str(tmp_path / "a.safetensors"), str(tmp_path / "there")])
    assert json.loads((tmp_path / "there" / "config.json").read_text())["eos_token_id"] == tokenizer.end
    assert (tmp_path / "there" / "tokenizer.json").exists()


def test_byte_pairs_of_a_text_that_is_gone_are_refused_by_its_name(tmp_path):
    from safetensors.torch import save_model

    config = config_of(True, path=str(tmp_path / "gone.txt"), tokenizer="bpe", vocab_size=280)
    model = Llama(280, **sizes(config))
    save_model(model, str(tmp_path / "a.safetensors"), metadata={"config": config.model_dump_json()})
    with pytest.raises(DataError, match=r"gone\.txt is not there"):
        llama.main(["save", str(tmp_path / "a.safetensors"), str(tmp_path / "there")])


def test_what_is_no_such_llama_is_refused(tmp_path, capsys):
    config = config_of(True)
    llama.save(Llama(257, **sizes(config)).state_dict(), config, tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())

    def says(sentence: str, **changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(kept | changes))
        with pytest.raises(DataError, match=sentence):
            check(config.model_copy(update={"model": config.model.model_copy(update={"weights": str(tmp_path)})}))

    says("model_type='gpt2'", model_type="gpt2")
    says("attention_bias=True, which", attention_bias=True)
    says("rope_type='llama3'", rope_parameters={"rope_type": "llama3", "rope_theta": 500.0})
    says("head_dim=16", head_dim=16)
    says(r"model.num_layers is 2 and model.weights .* has 3: give the sizes", num_hidden_layers=3)
    says(r"data.vocab_size is 257 and .* has 300", vocab_size=300)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="is not the configuration of a Llama"):
        llama.read_config(tmp_path)
    with pytest.raises(DataError, match=r"config.json cannot be read \(No such file or directory\)"):
        llama.read_config(tmp_path / "none")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        llama.main(["save", str(tmp_path / "none"), str(tmp_path)])
    with pytest.raises(ConfigError, match="give `show DIR` or `save FILE NEW`"):
        llama.main([])
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="its safetensors cannot be read"):
        llama.load(GptTask(config).model(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        llama.load(GptTask(config).model(), tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("process")
def test_looking_at_a_directory_imports_no_torch():
    import subprocess

    code = "import sys; from studies.gpt.check import check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
