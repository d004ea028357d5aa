"""Weights to and from Hugging Face's BERT and T5: the same logits there and here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

import studies.bert.config
import studies.bert.pretrained
import studies.t5.config
import studies.t5.pretrained
from studies.bert.model import Bert
from studies.t5.model import T5
from trainer.errors import DataError

ModelConfig = studies.bert.config.ModelConfig | studies.t5.config.ModelConfig
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "mlp_size": 48}
BERT = studies.bert.config.ModelConfig(**SIZES, positions=40)
T5S = {
    f"{activation} {'tied' if tie else 'untied'}": studies.t5.config.ModelConfig(
        head_size=6,
        activation=activation,
        tie=tie,
        **SIZES,
    )
    for activation in ("relu", "geglu")
    for tie in (True, False)
}
MODELS = {"bert": BERT, **T5S}
VOCABULARY = 60
TOKENS, TARGETS = torch.randint(VOCABULARY, (3, 30)), torch.randint(VOCABULARY, (3, 9))
SEEN = torch.arange(30) < torch.tensor([[30], [17], [1]])


def pretrained(model: ModelConfig) -> ModuleType:
    return sys.modules[type(model).__module__.replace("config", "pretrained")]


def is_bert(model: ModelConfig) -> bool:
    return isinstance(model, studies.bert.config.ModelConfig)


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model with weights so large that each shows in the logits."""
    with torch.no_grad():
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def network(model: ModelConfig) -> torch.nn.Module:
    return (Bert if is_bert(model) else T5)(VOCABULARY, **model.sizes).eval()


def logits(model: torch.nn.Module, seen: torch.Tensor | None) -> torch.Tensor:
    """Returns the logits of tokens that are seen, and of a T5's targets all."""
    if isinstance(model, Bert | T5):
        out = model(TOKENS, seen) if isinstance(model, Bert) else model(TOKENS, seen, TARGETS)
    else:
        mask = None if seen is None else seen.long()
        targets = {} if model.config.model_type == "bert" else {"decoder_input_ids": TARGETS}
        out = model(input_ids=TOKENS, attention_mask=mask, **targets).logits
    return out[seen] if seen is not None and out.shape[1] == 30 else out


def theirs_of(transformers, model: ModelConfig) -> torch.nn.Module:
    """Returns transformers' model of such sizes, untied as Google's T5 1.1 is."""
    if is_bert(model):
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=40,
        )
        return drawn(transformers.BertForMaskedLM(config))
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            num_layers=2,
            num_heads=4,
            d_kv=6,
            d_ff=48,
            feed_forward_proj="relu" if model.activation == "relu" else "gated-gelu",
            tie_word_embeddings=model.tie,
        )
    )
    if not model.tie:
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
    return drawn(theirs)


def save(ours: torch.nn.Module, model: ModelConfig, directory: Path) -> None:
    tokens = {"end": 4} if is_bert(model) else {"start": 3, "end": 4}
    pretrained(model).save(ours.state_dict(), model, VOCABULARY, directory, **tokens)


def opened(transformers, directory: Path) -> torch.nn.Module:
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(directory).eval()


def started(directory: Path, like: ModelConfig) -> torch.nn.Module:
    """Returns the network that a run with the options of `show` starts from."""
    settings = dict(option.removeprefix("-o ").split("=", 1) for option in pretrained(like).flags(directory))
    vocab_size = int(settings.pop("data.vocab_size"))
    model = type(like).model_validate({name.removeprefix("model."): value for name, value in settings.items()})
    ours = network(model)
    pretrained(model).load(ours, model, vocab_size)
    return ours


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_what_is_saved_has_the_same_logits_there(name, transformers, tmp_path):
    model = MODELS[name]
    ours = drawn(network(model))
    save(ours, model, tmp_path)
    theirs = opened(transformers, tmp_path)
    for seen in (None, SEEN):
        torch.testing.assert_close(logits(theirs, seen), logits(ours, seen), rtol=1e-5, atol=1e-5)
    assert theirs.config.eos_token_id == 4
    assert is_bert(model) or theirs.config.decoder_start_token_id == theirs.config.pad_token_id == 3


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_what_is_loaded_has_the_logits_it_had_there(name, transformers, tmp_path):
    """In several files, by the options that are shown."""
    theirs = theirs_of(transformers, MODELS[name])
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = started(tmp_path, MODELS[name])
    for seen in (None, SEEN):
        torch.testing.assert_close(logits(ours, seen), logits(theirs, seen), rtol=1e-5, atol=1e-5)
    if not is_bert(MODELS[name]) and not MODELS[name].tie:
        assert not torch.equal(ours.head.weight, ours.embed.weight)


@torch.no_grad()
def test_a_t5_whose_head_was_never_trained_apart_loads(transformers, tmp_path):
    """transformers ties the head of a new T5 1.1, without the scale of 1.0, and stores it once."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, num_layers=1, num_heads=4, d_kv=6, d_ff=48, tie_word_embeddings=False
    )
    theirs = drawn(transformers.T5ForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert not studies.t5.pretrained.read_config(tmp_path)[0].tie
    torch.testing.assert_close(
        logits(started(tmp_path, MODELS["geglu untied"]), SEEN), logits(theirs, SEEN), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("name", ["bert", "relu tied", "geglu untied"])
@torch.no_grad()
def test_files_of_old_releases_load(name, transformers, tmp_path):
    """They lack what newer ones write, have parts that are not used, copies of tied tensors, and LayerNorm's gamma."""
    model = MODELS[name]
    theirs = theirs_of(transformers, model)
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("scale_decoder_outputs", None)
    if name == "relu tied":
        del fields["tie_word_embeddings"], fields["feed_forward_proj"], fields["relative_attention_max_distance"]
    elif name != "bert":
        fields["tie_word_embeddings"] = model.tie
    (tmp_path / "config.json").write_text(json.dumps(fields))
    stored = load_file(tmp_path / "model.safetensors")
    if name == "bert":
        renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, old in renamed.items():
            stored = {key.replace(new, old): value for key, value in stored.items()}
        stored |= {"bert.pooler.dense.bias": torch.ones(32), "cls.seq_relationship.bias": torch.ones(2)}
        stored |= {"bert.embeddings.position_ids": torch.arange(40)[None]}
        stored["cls.predictions.decoder.weight"] = stored["bert.embeddings.word_embeddings.weight"].clone()
        stored["cls.predictions.decoder.bias"] = stored["cls.predictions.bias"].clone()
    else:
        copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"] + ["lm_head.weight"] * model.tie
        stored |= {copy: stored["shared.weight"].clone() for copy in copies}
        cross = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        stored[cross] = torch.ones(32, 4)
    save_file(stored, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(started(tmp_path, model), SEEN), logits(theirs, SEEN), rtol=1e-5, atol=1e-5)


def saved(model: ModelConfig, directory: Path) -> tuple[ModelConfig, dict[str, object], dict[str, torch.Tensor]]:
    """Returns the configuration that starts from a directory, the fields of its config.json and its tensors."""
    save(network(model), model, directory)
    fields = json.loads((directory / "config.json").read_text())
    return model.model_copy(update={"weights": str(directory)}), fields, load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"model_type": "roberta"}, "model_type='roberta'"),
        ("bert", {"hidden_act": "gelu_new"}, "hidden_act='gelu_new'"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bert", {"type_vocab_size": 1}, "type_vocab_size=1"),
        ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ("relu tied", {"model_type": "mt5"}, "model_type='mt5'"),
        ("relu tied", {"feed_forward_proj": "gated-silu"}, "feed_forward_proj='gated-silu'"),
        ("relu tied", {"num_decoder_layers": 3}, "num_layers=2 and num_decoder_layers=3"),
        ("relu tied", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets=16"),
        ("relu tied", {"is_encoder_decoder": False}, "is_encoder_decoder=False"),
    ],
)
def test_models_that_are_not_computed_are_refused(name, changes, words, tmp_path):
    _, fields, _ = saved(MODELS[name], tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(DataError) as error:
        pretrained(MODELS[name]).flags(tmp_path)
    study, kind = ("bert", "BertForMaskedLM") if name == "bert" else ("t5", "T5ForConditionalGeneration")
    assert str(error.value) == (
        f"{tmp_path / 'config.json'} has {words}, which studies/{study}/model.py does not compute: give a plain {kind}."
    )


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"num_heads": 2}, "model.num_heads is 2 and .* has 4"),
        ("bert", {"positions": 50}, "model.positions is 50 and .* has 40"),
        ("bert", {"norm_eps": 1e-6}, "model.norm_eps is 1e-06 and .* has 1e-12"),
        ("relu tied", {"head_size": None}, "model.head_size is 8 and .* has 6"),
        ("relu tied", {"tie": False}, "model.tie is False and .* has True"),
        ("geglu tied", {"activation": "relu"}, "model.activation is relu and .* has geglu"),
        ("geglu tied", {"mlp_size": None}, "model.mlp_size is 96 and .* has 48"),
    ],
)
def test_other_sizes_than_the_weights_have_are_refused(name, changes, words, tmp_path):
    model, _, _ = saved(MODELS[name], tmp_path)
    pretrained(model).check(model, VOCABULARY)
    pretrained(model).check(model.model_copy(update={"dropout": 0.3}), VOCABULARY)
    pretrained(model).check(model.model_copy(update={"weights": "", **changes}), VOCABULARY)
    with pytest.raises(DataError, match=f"^{words}.*`python -m studies.(bert|t5).pretrained show .*` prints\\.$"):
        pretrained(model).check(model.model_copy(update=changes), VOCABULARY)
    with pytest.raises(DataError, match=r"^data.vocab_size is 61 and model.weights .* has 60: give the sizes"):
        pretrained(model).check(model, VOCABULARY + 1)


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    def refused(name: str, words: str, **changes: torch.Tensor | None) -> None:
        model, _, stored = saved(MODELS[name], tmp_path)
        stored |= {key.replace("__", "."): value for key, value in changes.items()}
        save_file({key: value for key, value in stored.items() if value is not None}, tmp_path / "model.safetensors")
        with pytest.raises(DataError, match=f"^model.weights: {tmp_path} has {words}"):
            pretrained(model).load(network(model), model, VOCABULARY)

    refused("bert", r"none for cls.predictions.bias, and the model has \(60,\): give", cls__predictions__bias=None)
    refused("relu tied", r"\(9, 32\) for shared.weight, and the model has \(60, 32\)", shared__weight=torch.ones(9, 32))
    refused("bert", "bert.encoder.layer.2.output.bias, and the model has no such tensor: give a directory that",
            bert__encoder__layer__2__output__bias=torch.ones(32))  # fmt: skip
    refused("relu tied", "other values for lm_head.weight than for shared.weight, and in the model they are a single",
            lm_head__weight=torch.ones(60, 32))  # fmt: skip


def test_a_directory_that_cannot_be_read_is_one_sentence(tmp_path):
    model, _, _ = saved(BERT, tmp_path)
    for text in ("{}", "[]", "no"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DataError, match=r"config\.json is not the configuration of a BERT"):
            studies.bert.pretrained.read_config(tmp_path)
    with pytest.raises(DataError, match=r"config.json cannot be read \(No such file or directory\)"):
        studies.bert.pretrained.read_config(tmp_path / "none")
    saved(BERT, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="its safetensors cannot be read"):
        pretrained(model).load(network(model), model, VOCABULARY)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no \*\.safetensors"):
        pretrained(model).load(network(model), model, VOCABULARY)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"hidden_size": None}, "a BERT (KeyError('hidden_size'))"),
        ("bert", {"hidden_size": "x"}, "a BERT (hidden_size: Input should be a valid integer"),
        ("bert", {"hidden_size": 33}, "num_heads 4 do not divide hidden_size 33 into equal heads"),
        ("relu tied", {"d_kv": None}, "a T5 (KeyError('d_kv'))"),
        ("relu tied", {"d_model": -1}, "a T5 (hidden_size: Input should be greater than or equal to 1"),
    ],
)
def test_sizes_that_are_none_or_missing_are_one_sentence(name, changes, words, tmp_path):
    _, fields, _ = saved(MODELS[name], tmp_path)
    changed = {key: value for key, value in (fields | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(DataError) as error:
        pretrained(MODELS[name]).read_config(tmp_path)
    assert words in str(error.value) and "config.json is not the configuration of a " in str(error.value)


def test_a_damaged_configuration_of_a_tokenizer_is_one_sentence(tmp_path):
    saved(BERT, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for text in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(DataError, match=r"tokenizer_config\.json is not the configuration of a tokenizer"):
            studies.bert.pretrained.flags(tmp_path)


def test_the_command_shows_the_options(tmp_path):
    saved(BERT, tmp_path)
    command = [sys.executable, "-m", "studies.bert.pretrained"]
    shown = subprocess.run([*command, "show", str(tmp_path)], capture_output=True, text=True, check=True)
    assert shown.stdout.split(" -o ") == [
        "-o model.hidden_size=32",
        "model.num_layers=2",
        "model.num_heads=4",
        "model.mlp_size=48",
        "model.positions=40",
        "model.norm_eps=1e-12",
        "data.vocab_size=60",
        "model.dropout=0.0",
        f"model.weights={tmp_path}\n",
    ]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (2, "error: give `show DIR`: see studies/bert/README.md.\n")


def test_heads_that_do_not_divide_are_one_sentence():
    for module, words in (
        (studies.bert, "change one of them."),
        (studies.t5, "change one of them, or give head_size."),
    ):
        with pytest.raises(
            ValidationError, match=f"num_heads 5 do not divide hidden_size 64 into equal heads: {words}"
        ):
            module.config.ModelConfig(num_heads=5)


def test_the_default_width_of_the_mlp_depends_on_its_kind():
    t5 = studies.t5.config.ModelConfig
    assert studies.bert.config.ModelConfig().mlp == t5(activation="relu").mlp == 256
    assert t5().mlp == 176  # 64 * 8/3 = 170.67
    assert t5(hidden_size=768).mlp == 2048  # as T5 1.1 base has


@pytest.mark.usefixtures("process")
def test_looking_at_a_directory_imports_no_torch(tmp_path):
    model, _, _ = saved(BERT, tmp_path)
    code = (
        "import sys; from studies.bert import config, pretrained; "
        f"pretrained.check(config.ModelConfig.model_validate_json(sys.argv[1]), {VOCABULARY}); "
        f"pretrained.flags({str(tmp_path)!r}); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, model.model_dump_json()], check=True)
