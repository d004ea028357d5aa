"""The lora study: what is trained, what is kept of it, and that a killed study ends as one that was not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from trainer_runs import MemoryReporter, Trial, killed_at, uninterrupted
from typer.testing import CliRunner

from hpo import load
from hpo.cli.main import app
from hpo.space.config import from_json
from hpo.storage.home import Home
from studies._lm import adapter, base
from studies._lm.adapter import adapted
from studies._lm.base import base_model
from studies._lm.config import PROJECTIONS, DataConfig, ModelConfig, check_modules
from studies._lm.exported import save_adapter
from studies._lm.records import split
from studies._lm.text import IGNORED, padded, tokens_of
from studies._lm.words import OPERATIONS, instructions
from studies.lora import task as lora_task
from studies.lora.config import Config
from studies.lora.task import LoraTask, contrast
from trainer.checkpoint.store import CheckpointStore
from trainer.data.text import Bytes
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.report import Outcome

pytestmark = pytest.mark.whole

SMALL = ("-o", "data.generated=60", "-o", "train.num_epochs=2", "-o", "loss.contrastive=0.1")
FLAGS = ("--study", "lora", "--trials", "2", "--executor", "inline", "--sampler", "random", *SMALL)


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def status(home: Home) -> dict:
    return json.loads(hpo("status", "--study", "lora", "--json", home=home).stdout)


def trial_config(home: Home, number: int) -> Config:
    return from_json(Config, json.loads(hpo("show", str(number), "--json", home=home).stdout)["config"])


def task(**overrides) -> LoraTask:
    return LoraTask(load("lora").configure(overrides).config)


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    """A home with two trials that nothing has interrupted."""
    home = Home.at(tmp_path_factory.mktemp("lora") / "home")
    result = hpo("run", *FLAGS, home=home)
    assert result.exit_code == 0, result.output
    return home


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The tiny model as a directory of transformers'."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    base_model(ModelConfig()).save_pretrained(path)
    return path


# --- Data


def test_only_responses_are_learnt():
    sample = tokens_of(Bytes(), "ab: ", "AB", DataConfig())
    assert sample["tokens"].tolist() == [*b"ab: AB", Bytes.end]
    assert sample["labels"].tolist() == [*[IGNORED] * 4, *b"AB", Bytes.end]
    assert tokens_of(Bytes(), "ab: ", "AB", DataConfig(max_length=5))["labels"].tolist() == [*[IGNORED] * 4, *b"A"]
    batch = padded([sample, tokens_of(Bytes(), "a", "b", DataConfig())], Bytes.end).__getitems__([0, 1])
    assert batch["labels"][1].tolist() == [IGNORED, ord("b"), Bytes.end, *[IGNORED] * 4]


def test_the_loss_is_the_cross_entropy_of_the_responses_alone():
    """Against each sequence by itself, without padding."""
    it = task()
    model, data = it.model().eval(), it.train_set()
    loss = it.loss(model, data.__getitems__(range(5)))
    want, count = 0.0, 0
    for i in range(5):
        one = data.data[i]
        log_p = model(input_ids=one["tokens"][None]).logits[0].log_softmax(-1).detach()
        places = [t for t in range(1, len(one["tokens"])) if one["labels"][t] != IGNORED]
        want -= sum(float(log_p[t - 1, one["tokens"][t]]) for t in places)
        count += len(places)
    assert float(loss.count) == count
    assert loss.sum.item() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("train", "most"),
    [({"train.micro_batch_size": 5}, 5), ({}, 16), ({"train.batch_size": 200}, 64)],
)
def test_no_more_rows_are_evaluated_at_once_than_are_trained_on(train, most):
    it, whole = task(**{"data.generated": 400, **train}), task(**{"data.generated": 400, "train.batch_size": 64})
    model, seen = it.model().eval(), []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(len(given["input_ids"])), with_kwargs=True)
    with torch.no_grad():
        assert it.evaluate(model) == pytest.approx(whole.evaluate(it.model().eval()), rel=1e-5)
    assert max(seen) == most and sum(seen) == 80


def test_instructions_have_one_answer_and_are_divided_without_overlap():
    records = instructions(200, seed=3)
    for record in records:
        name, word = record["prompt"].removesuffix(": ").split()
        assert OPERATIONS[name][1](word) == record["response"]
    train, val = split(records, 0.2, seed=1)
    assert len(val) == 40
    assert {one["prompt"] for one in train} & {one["prompt"] for one in val} == set()
    assert split(records, 0.2, seed=1) == (train, val) != split(records, 0.2, seed=2)


# --- The contrastive loss


def test_a_state_is_told_from_earlier_ones_that_predict_other_tokens():
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 6, 5, generator=generator).double().requires_grad_()
    targets = torch.tensor([[IGNORED, 3, 4, 3, 5, IGNORED], [IGNORED, IGNORED, 4, 6, 7, 7]])
    found, want, count = contrast(states, targets, 0.2), 0.0, 0
    assert not found.terms, "an anchor that is its own positive is always told right"
    for b, t in [(b, t) for b in range(2) for t in range(6) if targets[b, t] != IGNORED]:
        others = [
            states[c, u]
            for c in range(2)
            for u in range(t + 1)
            if targets[c, u] not in (IGNORED, targets[b, t]) and (c, u) != (b, t)
        ]
        if others:
            each = torch.stack([states[b, t], *others])
            want = want - F.cosine_similarity(states[b, t], each, dim=-1).div(0.2).log_softmax(0)[0]
            count += 1
    assert found.count == count
    torch.testing.assert_close(found.sum, want)
    alone = contrast(states[:1], targets[:1], 0.2)
    assert alone.count == 3  # one sequence has negatives of its own; the first state has none
    (gradient,) = torch.autograd.grad(alone.sum, states)
    assert gradient[0, 1:5].abs().sum() > 0
    assert gradient[0, 5].abs().sum() == gradient[1].abs().sum() == 0


def test_prompts_and_padding_are_compared_with_nothing(monkeypatch):
    sizes, plain = [], lora_task.causal_contrastive
    monkeypatch.setattr(
        lora_task, "causal_contrastive", lambda a, b, **kw: sizes.append((len(a), len(b))) or plain(a, b, **kw)
    )
    contrast(torch.randn(2, 6, 5), torch.tensor([[IGNORED, 3, 4, 3, 5, IGNORED], [IGNORED] * 4 + [7, 8]]), 0.2)
    assert sizes == [(6, 6)]


# --- Adapters


@pytest.mark.parametrize("held", ["fp32", "nf4"])
def test_fresh_adapters_change_nothing_and_training_changes_them_alone(held):
    config, tokens = ModelConfig(base=held, rank=4), torch.arange(24).reshape(2, 12)
    plain, model = base_model(config), adapted(config)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(PROJECTIONS)  # A and B in each of two layers
    assert set(model.state_dict()) == trained | {adapter.BASE}
    model(input_ids=tokens).logits.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained


def test_an_evaluation_leaves_what_nf4_holds_as_it_is(monkeypatch):
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)  # as on a processor that has such products
    model, tokens = base_model(ModelConfig(base="nf4")), torch.arange(24).reshape(2, 12)
    weight = model.get_submodule("model.layers.0.mlp.up_proj").weight
    before, scales = weight.data.clone(), weight.quant_state.absmax.clone()
    with torch.no_grad():
        trained, judged = (model.train(mode)(input_ids=tokens).logits for mode in (True, False))
    assert torch.equal(trained, judged)
    assert torch.equal(weight.data, before) and torch.equal(weight.quant_state.absmax, scales)


def test_an_unused_kernels_warning_is_silenced_and_all_else_is_heard(caplog):
    from bitsandbytes.backends.cpu.ops import logger

    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "No module named 'kernels'")
    logger.warning("something else")
    assert caplog.messages == ["something else"]


def test_nf4_holds_half_a_byte_a_weight_near_what_it_was():
    full, small = base_model(ModelConfig()), base_model(ModelConfig(base="nf4"))
    layer = small.get_submodule("model.layers.0.mlp.up_proj")
    assert layer.weight.dtype == torch.uint8 and layer.weight.numel() == 64 * 128 // 2
    assert layer.weight.quant_state.nested and layer.weight.quant_type == "nf4"
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    want, got = full.get_submodule("model.layers.0.mlp.up_proj")(x), layer(x.bfloat16()).float()
    assert 0 < float((got - want).norm() / want.norm()) < 0.15


def test_alpha_is_twice_the_rank_unless_it_is_given():
    scaling = {alpha: _scaling(ModelConfig(rank=4, alpha=alpha)) for alpha in (None, 4.0)}
    assert scaling == {None: 2.0, 4.0: 1.0}


def _scaling(config: ModelConfig) -> float:
    return adapted(config).get_submodule("base_model.model.model.layers.0.mlp.up_proj").scaling["default"]


def test_the_tiny_model_is_made_the_same_again(monkeypatch):
    monkeypatch.setattr(base, "STEPS", 3)
    first = base._tiny.__wrapped__().state_dict()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    again = base._tiny.__wrapped__().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_adapters_of_another_tiny_base_are_refused(searched, monkeypatch):
    """As on a machine whose rounding makes it otherwise."""
    best = json.loads(hpo("best", "--json", home=searched).stdout)
    monkeypatch.setattr(adapter, "tiny_sha256", lambda: bytes(range(32)))
    with pytest.raises(CheckpointError, match=r"a tiny base model of other weights.*model\.path"):
        load("lora").load_model(best["checkpoint"], trial_config(searched, best["number"]))


def test_what_a_trial_leaves_loads_in_plain_peft(searched, directory, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    best = json.loads(hpo("best", "--json", home=searched).stdout)
    model = load("lora").load_model(best["checkpoint"], trial_config(searched, best["number"]))
    file = str(tmp_path / "best.safetensors")
    exported = hpo("export", str(best["number"]), "--study", "lora", "--to", file, home=searched)
    assert exported.exit_code == 0, exported.output
    save_adapter(file, str(tmp_path / "adapter"))
    with pytest.raises(DataError, match="adapter is not empty"):
        save_adapter(file, str(tmp_path / "adapter"))
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), tmp_path / "adapter").eval()
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        assert torch.equal(plain(input_ids=tokens).logits, want)
        with plain.disable_adapter():
            assert not torch.equal(plain(input_ids=tokens).logits, want)


def test_what_holds_no_adapters_is_refused(tmp_path):
    file = str(tmp_path / "a.safetensors")
    says = {
        "has no configuration": None,
        "holds no adapters": {"model": {"hidden_size": 8}},
        "is a reward model": {"model": {"rank": 4}, "loss": {"name": "reward"}},
    }
    for sentence, config in says.items():
        save_file({"a": torch.zeros(1)}, file, None if config is None else {"config": json.dumps(config)})
        with pytest.raises(DataError, match=sentence):
            save_adapter(file, str(tmp_path))
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        save_adapter(str(tmp_path / "none"), str(tmp_path))


# --- Studies


def test_checkpoints_hold_the_adapters_alone(searched):
    files = list(searched.root.glob("checkpoints/lora/*/step-*/*.safetensors"))
    assert {path.name for path in files} == {"model.safetensors", "optimizer.safetensors"}
    [weights] = {path.stat().st_size for path in searched.checkpoints("lora", 0).rglob("step-*/model.safetensors")}
    trained = sum(p.nbytes for p in adapted(trial_config(searched, 0).model).parameters() if p.requires_grad)
    assert trained < weights < trained + 10_000


def test_trials_learn_what_the_base_does_not_know(searched):
    start = task(**{"data.generated": 60})
    with torch.no_grad():
        before = start.evaluate(start.model().eval())
    assert before["val/accuracy"] < 0.05
    assert json.loads(hpo("best", "--json", home=searched).stdout)["value"] < before["val/loss"]


def test_a_trial_cut_in_the_middle_goes_on_to_the_bit(tmp_path):
    """Killed between two steps of the second epoch: every value and weight as without."""
    config = load("lora").configure({"data.generated": 60, "loss.contrastive": 0.1}).config

    class Cut(LoraTask):
        def __init__(self, _: object) -> None:
            super().__init__(config)

        def model(self):
            self.net = super().model()
            return self.net

    given = {"task": Cut, "batch_size": 16, "micro_batch_size": 8, "optim": {"name": "adamw", "lr": 3e-3}}
    whole = uninterrupted(tmp_path / "whole", **given)
    cut = Trial(tmp_path / "cut", **given)
    steps = whole.reporter.committed[0].step
    assert cut.attempt(killed_at(steps - 1)) is None
    assert cut.attempt() is not None
    assert cut.digest() == whole.digest()


@pytest.mark.slow
def test_a_killed_study_resumes_bit_for_bit(searched, home, tmp_path):
    """Killed in the second trial, between two of its checkpoints."""
    fired = tmp_path / "fired"
    fired.mkdir()
    failpoint = {"HPO_FAILPOINTS": "checkpoint.before_rename=kill@4", "HPO_FAILPOINTS_FIRED": str(fired)}
    command = [sys.executable, "-m", "hpo", "run", *FLAGS, "--home", str(home.root)]
    killed = subprocess.run(
        command, env={**os.environ, "HPO_TESTING": "1", **failpoint}, capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    assert status(home)["trials"]["complete"] == 1
    resumed = hpo("resume", "--executor", "inline", home=home)
    assert resumed.exit_code == 0, resumed.output
    assert status(home)["digest"] == status(searched)["digest"]
    assert status(home)["attempts"] == status(searched)["attempts"] + 1


def test_a_directory_trains_as_the_model_it_was_saved_from(directory, tmp_path):
    """And with its own tokenizer, where it has one."""
    assert _fit(tmp_path / "a") == _fit(tmp_path / "b", **{"model.path": str(directory), "model.tokenizer": "bytes"})


def _fit(directory: Path, **overrides) -> dict[str, float]:
    from trainer.loop import fit

    it = task(**{"data.generated": 60, "train.num_epochs": 1, **overrides})
    reporter = MemoryReporter(None)
    outcome: Outcome = fit(it, it.config.train, reporter, CheckpointStore(directory, 1, []))
    assert outcome.kind == "complete"
    return {key: value for (_, key), value in reporter.values.items() if key.startswith("val/")}


# --- What is refused


LINES = [json.dumps({"prompt": f"say {i}", "response": str(i)}) for i in range(4)]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*LINES, '{"prompt": "a"}'], ["line 5 lacks the field 'response'", "it has prompt"]),
        ([LINES[0], "", "{"], ["line 3 is not JSON"]),
        ([*LINES, "[1]"], ["line 5 holds list"]),
        ([*LINES, '{"prompt": "a", "response": 3}'], ["line 5: response is 3", "text that is not empty"]),
        ([LINES[0]], ["holds one record", "at least 2"]),
        ([LINES[0] + ",", LINES[1] + ","], ["line 1 ends in a comma", "nothing between them; remove it there"]),
        (
            [*LINES, '{"prompt": "b", "response": "y \\ud83d z"}'],
            ["line 5: response holds \\ud83d, one half of a surrogate pair: write both halves"],
        ),
    ],
)
def test_records_that_cannot_be_used(home, tmp_path, lines, words):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    for word in [*words, "mine.jsonl"]:
        assert word in refused(home, f"data.path={file}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.path=/nowhere.jsonl", ["data.path='/nowhere.jsonl' cannot be read", "No such file"]),
        ("model.rank=0", ["model.rank='0'", "greater than or equal to 1"]),
        ("model.base=int8", ["model.base='int8'", "'nf4'"]),
        ("model.path=/nowhere", ["model.path='/nowhere' is not a directory"]),
        ("model.tokenizer=bytes", ["tokenizer is read only with path"]),
        ("model.modules=foo", ["model.modules=foo names no linear layers of the model", "give of down_proj, "]),
        ("data.max_length=12", ["the prompt '", "tokens and data.max_length is 12"]),
        ("data.template=Q: {prompt}", ["template='Q: {prompt}' holds not {prompt} and then {response}"]),
        ("data.template={response}{prompt}", ["holds not {prompt} and then {response}, each of them once"]),
    ],
)
def test_settings_that_cannot_be_used(home, override, words):
    sentence = refused(home, override)
    for word in words:
        assert word in sentence


def test_a_directory_without_a_model(home, tmp_path, directory):
    assert "has no config.json" in refused(home, f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    assert "has no *.safetensors" in refused(home, f"model.path={tmp_path}")
    assert "has no tokenizer" in refused(home, f"model.path={directory}")


@pytest.mark.usefixtures("process")
def test_layers_and_prompts_of_a_directory_are_looked_at_without_torch(tmp_path, directory):
    """Against peft, which takes or refuses the same names, and the tokenizer that counts words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place, file = shutil.copytree(directory, tmp_path / "model"), tmp_path / "mine.jsonl"
    words = Tokenizer(models.WordLevel({"say": 0, "it": 1, "</s>": 2}, unk_token="it"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text('{"bos_token": "</s>", "eos_token": "</s>"}')
    file.write_text(2 * (json.dumps({"prompt": "say 0 a b", "response": "c"}) + "\n"))
    code = "import sys, hpo; hpo.load('lora').configure({}).check_data(); assert 'torch' not in sys.modules"
    given = {"model.path": str(place), "data.path": str(file)}
    subprocess.run([sys.executable, "-c", code.format(given | {"data.max_length": 6})], check=True)
    with pytest.raises(
        DataError, match=r"mine\.jsonl', record 1: the prompt 'say 0 a b' has 5 tokens and data.max_length is 5"
    ):
        load("lora").configure(given | {"data.max_length": 5}).check_data()
    names = ("q_proj", "0.mlp.up_proj", "lm_head", "mlp", "norm", "proj", "foo")
    for model in (ModelConfig(path=path, modules=(*one.split(","),)) for one in names for path in ("", str(place))):
        assert _takes(check_modules, model) == _takes(adapted, model), model
    misspelt = ModelConfig(modules=("v_proj", "q_porj"))
    assert _takes(adapted, misspelt) and not _takes(check_modules, misspelt), (
        "peft passes over a name that fits nothing"
    )


def _takes(looks: Callable[[ModelConfig], object], model: ModelConfig) -> bool:
    with suppress(ConfigError):
        looks(model)
        return True
    return False


def refused(home: Home, override: str) -> str:
    result = hpo("run", "--study", "lora", "--trials", "1", "-o", override, home=home)
    assert result.exit_code == 2, (result.output, result.exception)
    assert not (home.root / "ledger.db").exists()
    [line] = result.stderr.strip().splitlines()
    return line


def test_packages_that_are_not_installed_are_named(home, monkeypatch):
    monkeypatch.setattr("studies._lm.config.find_spec", lambda name: None if name == "peft" else object())
    sentence = "language models need peft: pip install 'hpo[llm]'."
    assert sentence in refused(home, "model.rank=4")
    planned = CliRunner().invoke(app, ["plan", "--study", "lora", "--memory", "6GB"])
    assert (planned.exit_code, planned.stderr) == (2, f"error: {sentence}\n")


def test_a_prompt_that_fills_the_length_is_refused_by_its_words():
    with pytest.raises(DataError, match=r"the prompt '.*' has 1[0-4] tokens and data.max_length is 8"):
        task(**{"data.max_length": 8}).train_set()
