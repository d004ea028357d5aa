"""The gpt study from the command line: run, interrupted and resumed; what it writes; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.storage.home import Home

TINY = (
    "data.corpus.general=80", "data.corpus.target=30", "model.hidden_size=16", "model.num_heads=2",
    "model.num_kv_heads=1", "model.num_layers=1", "train.num_epochs=2", "samples.tokens=8",
)  # fmt: skip
LEARNT = (
    "train.peak_tflops=0.1",
    "train.num_epochs=2",
    "train.batch_size=8",
    "train.optim.lr=0.01",
    "train.schedule.warmup_ratio=0",
    "model.hidden_size=32",
    "model.num_layers=1",
)

pytestmark = pytest.mark.whole
FLAGS = ("--study", "gpt", "--executor", "inline", "--sampler", "random")


def hpo(*arguments: str, home: Home, given: tuple[str, ...] = TINY):
    overrides = [part for one in given for part in ("-o", one)]
    return CliRunner().invoke(app, [*arguments, *overrides, "--home", str(home.root)])


def status(home: Home) -> dict:
    return json.loads(hpo("status", "--study", "gpt", "--json", home=home, given=()).stdout)


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    home = Home.at(tmp_path_factory.mktemp("gpt") / "home")
    result = hpo("run", *FLAGS, "--trials", "2", home=home)
    assert result.exit_code == 0, result.output
    return home


def test_every_epoch_reports_both_domains_and_what_it_has_cost(searched):
    assert len([*(searched.root / "shared" / "tokens").iterdir()]) == 1, "tokenised once for all trials"
    trial = json.loads(hpo("show", "0", "--study", "gpt", "--json", home=searched, given=()).stdout)
    curves = trial["curves"]
    for domain in ("", "general_"):
        for name in ("loss", "perplexity", "bits_per_byte", "floor", "excess"):
            assert [epoch for _, epoch, _ in curves[f"val/{domain}{name}"]] == [1, 2]
    assert curves["val/loss"][1][2] < curves["val/loss"][0][2] < 5.6  # nats of a token of 257
    tokens = [value for _, _, value in curves["budget/tokens"]]
    assert tokens[1] == pytest.approx(2 * tokens[0])
    assert "train/tokens_per_sec" in curves and not any(key.startswith("test/") for key in curves)


def test_what_the_model_writes_is_shown_in_mlflow(searched):
    written = sorted(path.name for path in searched.artifacts.rglob("samples/*.txt"))
    assert written == ["epoch-0001.txt"] * 2 + ["epoch-0002.txt"] * 2
    texts = [path.read_text() for path in searched.artifacts.rglob("samples/*.txt")]
    assert all(text.count("---\n") == 1 for text in texts)


def test_the_best_model_goes_to_hugging_faces_format(searched, tmp_path):
    from studies.gpt import llama

    file = tmp_path / "best.safetensors"
    result = hpo("export", "0", "--study", "gpt", "--to", str(file), home=searched, given=())
    assert result.exit_code == 0, result.output
    llama.main(["save", str(file), str(tmp_path / "there")])
    model, vocab_size = llama.read_config(tmp_path / "there")
    assert (model.hidden_size, model.num_layers, vocab_size) == (16, 1, 257)


@pytest.mark.usefixtures("process")
def test_resumed_is_as_run_at_once(searched, home):
    assert hpo("run", *FLAGS, "--trials", "1", home=home).exit_code == 0
    assert hpo("run", *FLAGS, "--trials", "2", home=home).exit_code == 0
    assert status(home)["digest"] == status(searched)["digest"]


def test_a_trial_cut_in_the_middle_goes_on_to_the_bit(tmp_path):
    """Killed between two steps of the second epoch: every value and weight as without."""
    from trainer_runs import Trial, killed_at, uninterrupted

    from hpo import load
    from studies.gpt.config import Config
    from studies.gpt.task import GptTask

    config = load("gpt").configure(dict(one.split("=") for one in TINY)).config
    assert isinstance(config, Config)

    class Task(GptTask):
        def __init__(self, _: object) -> None:
            super().__init__(config)

        def model(self):
            self.net = super().model()
            return self.net

    given = {"task": Task, "batch_size": 12, "optim": {"name": "adamw", "lr": 3e-3}}
    whole = uninterrupted(tmp_path / "whole", **given)
    cut = Trial(tmp_path / "cut", **given)
    steps = whole.reporter.committed[0].step
    assert cut.attempt(killed_at(steps - 2)) is None
    assert cut.attempt() is not None
    assert cut.digest() == whole.digest()


@pytest.mark.parametrize(
    ("content", "given", "sentence"),
    [
        (None, (), "No such file or directory"),
        ("", (), "has no text in it"),
        ("word " * 20, (), "fewer than one block of 128 tokens"),
        ("word " * 2000, ("model.num_heads=3",), "num_heads 3 do not divide hidden_size 64"),
        ("word\nd\udcffrow " * 2000, ("data.tokenizer=bpe", "data.vocab_size=300"), "line 2 is not UTF-8"),
        ("word " * 2000, ("model.weights=.",), "config.json cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(content, given, sentence, home, tmp_path):
    path: Path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    result = hpo("run", *FLAGS, "--trials", "1", home=home, given=(f"data.path={path}", *given))
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.stderr.split()) and result.stderr.count("error:") == 1
    assert "Traceback" not in result.output and not (home.root / "ledger.db").exists()


@pytest.mark.usefixtures("process")
def test_text_of_ones_own_is_learnt(home, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    result = hpo("run", *FLAGS, "--trials", "1", home=home, given=(f"data.path={path}", *LEARNT))
    assert result.exit_code == 0, result.output
    curves = json.loads(hpo("show", "0", "--study", "gpt", "--json", home=home, given=()).stdout)["curves"]
    assert curves["val/bits_per_byte"][-1][2] < 6 and 0 < curves["train/mfu"][-1][2] < 1
    assert "val/floor" not in curves and "val/general_loss" not in curves
