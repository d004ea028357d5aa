"""`hpo diagnose`: what it says of trials and configurations whose illness is known, and where it leaves that."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch
from places import ROOT
from rounds import rounds
from torch import nn
from trainer_runs import Toy
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.storage.home import Home
from trainer.config import TrainConfig
from trainer.config.optim import OPTIMIZERS
from trainer.diagnose.trial import examine
from trainer.task import Loss

pytestmark = pytest.mark.whole

CHECKS = [
    *("gradient flow", "update ratio", "dead units", "loss landscape"),
    *("data loading", "over/underfitting", "plateau", "gradient norm", "gpu utilisation"),
]
PICTURES = {"gradient_flow.png", "landscape.png", "landscape_lines.png", "curves.png"}


def hpo(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    """Trial 0 learns; a second study, still, takes steps too small to."""
    home = Home.at(tmp_path_factory.mktemp("searched") / "home")
    flags = ("--executor", "inline", "--trials", "1", "--home", str(home.root), "-o", "train.num_epochs=8")
    adam = ("-o", "train.optim.name=adamw", "-o", "train.optim.lr=0.01", "-o", "model.hidden_size=64")
    still = ("-o", "train.optim.name=sgd", "-o", "train.optim.lr=0.0001", "-o", "train.optim.momentum=0")
    for name, given in (("mlp", adam), ("still", still)):
        shown = hpo("run", "--study", "mlp", "--name", name, *flags, *given)
        assert shown.exit_code == 0, shown.output
    return home


def diagnosed(home: Home, *arguments: str, study: str = "mlp") -> dict:
    shown = hpo("diagnose", "0", "--study", study, "--home", str(home.root), "--json", *arguments)
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def verdicts(found: dict) -> dict[str, str]:
    return {one["check"]: one["verdict"] for one in found["findings"]}


def test_a_trial_that_learns_is_told_so_and_a_flat_one_what_to_do(searched):
    found = verdicts(diagnosed(searched, "--print-only"))
    assert list(found) == CHECKS
    assert found["gradient flow"] == found["update ratio"] == found["loss landscape"] == "healthy"
    still = diagnosed(searched, "--print-only", study="still")
    assert verdicts(still)["loss landscape"] == "nothing learned"
    assert verdicts(still)["over/underfitting"] == "underfitting"
    assert verdicts(still)["plateau"] == "plateau"
    for one in still["findings"]:
        assert bool(one["advice"]) == (one["verdict"] not in ("healthy", "not measured")), one


def test_what_is_found_is_left_with_the_trial_and_shown_in_mlflow(searched, tmp_path):
    def digest() -> str:
        return json.loads(hpo("status", "--study", "mlp", "--json", "--home", str(searched.root)).stdout)["digest"]

    before, directory = digest(), tmp_path / "diagnosis"
    for _ in range(2):  # the second takes the place of the first
        found = diagnosed(searched, "--profile", "--to", str(directory), "--force")
    names = PICTURES | {"findings.json", "trace.json.gz"}
    assert {path.name for path in directory.iterdir()} == names
    assert {path.name for path in searched.artifacts.rglob("files/diagnosis/*")} == names
    left = [path for path in searched.files("mlp", 0).rglob("*") if path.is_file()]
    assert sorted(path.name for path in left) == sorted(names)
    for name in PICTURES:
        assert (directory / name).read_bytes().startswith(b"\x89PNG")
    assert json.loads((directory / "findings.json").read_text()) == found
    verified = hpo("verify", "--home", str(searched.root))
    assert verified.exit_code == 0, verified.output
    assert digest() == before


@pytest.mark.usefixtures("process")
def test_the_reports_of_jumps_are_among_the_trials_artifacts(home):
    """A threshold so low that what is only noise counts as a jump."""
    rollback = {"enabled": "true", "threshold": "0.1", "window": "4", "min_history": "4", "max_rollbacks": "50"}
    given = [text for key, value in rollback.items() for text in ("-o", f"train.rollback.{key}={value}")]
    given += ["-o", "train.num_epochs=1", "-o", "train.batch_size=32", "-o", "train.optim.name=adamw"]
    ran = hpo("run", "--study", "mlp", "--trials", "1", "--executor", "inline", "--home", str(home.root), *given)
    assert ran.exit_code == 0, ran.output
    trial = json.loads(hpo("show", "0", "--json", "--home", str(home.root)).stdout)
    jumps = {one["fields"]["report"]: one["fields"] for one in trial["events"] if one["kind"] == "loss_jumped"}
    shown = {f"anomalies/{path.name}": json.loads(path.read_text()) for path in home.artifacts.rglob("anomalies/*")}
    assert jumps and shown.keys() == jumps.keys()
    for name, report in shown.items():
        assert {key: report[key] for key in ("step", "loss", "action")} == {
            key: jumps[name][key] for key in ("step", "loss", "action")
        }
    verified = hpo("verify", "--home", str(home.root))
    assert verified.exit_code == 0, verified.output


def test_the_profile_is_a_chrome_trace_and_names_what_is_dearest(tmp_path):
    shown = hpo("diagnose", "--study", "mlp", "--steps", "3", "--profile", "--to", str(tmp_path))
    assert shown.exit_code == 0, shown.output
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert names.count("wait for data") == 5
    assert "aten::addmm" in names and any(name.startswith("Optimizer.step") for name in names)
    table = shown.stdout.partition("operation")[2].splitlines()[1:]
    assert len(table) == 10
    shares = [float(row.split()[-1].rstrip("%")) for row in table]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 100.5


def test_a_configuration_is_diagnosed_without_a_trial_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sgd = ("-o", "train.optim.name=sgd", "-o", "train.optim.momentum=0")
    shown = hpo("diagnose", "--study", "mlp", *sgd, "-o", "train.optim.lr=50", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert verdicts(found)["update ratio"] == "too large"
    assert verdicts(found)["plateau"] == verdicts(found)["loss landscape"] == "not measured"
    assert list(tmp_path.iterdir()) == []


@rounds(
    ("arguments", "sentence"),
    [
        ([], "give a trial's number, or by --study"),
        (["7", "--study", "mlp"], "has no trial 7: it has trials 0 to 0"),
        (["0", "--study", "mlp", "-o", "train.optim.lr=1"], "a trial is what it was"),
        (["0", "--study", "mlp", "--points", "4"], "--points 4: give an odd number"),
        (["--study", "mlp", "--profile"], "name a directory for it by --to"),
        (["0", "--study", "mlp", "--to", "/proc/none"], "/proc/none cannot be written"),
        (["0"], "name one with --study"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(searched, arguments, sentence):
    shown = hpo("diagnose", *arguments, "--home", str(searched.root), "--steps", "1")
    assert shown.exit_code == 2, shown.output
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr


def config(**given) -> TrainConfig:
    return TrainConfig.model_validate({"num_epochs": 2, "batch_size": 12, "micro_batch_size": 5} | given)


@rounds(
    "given",
    [*({"optim": {"name": name}} for name in OPTIMIZERS), {"optim": {"wrap": "sam"}}, {"optim": {"wrap": "lookahead"}}],
)
def test_every_optimizer_can_be_measured(given):
    seen = examine(Toy(None), config(**given), steps=3, points=0)
    assert [layer.name for layer in seen.layers] == ["0", "1", "4"]
    assert all(math.isfinite(layer.gradient) and layer.update_ratio > 0 for layer in seen.layers)


def test_what_is_not_finite_is_named():
    class Poisoned(Toy):
        def loss(self, model: nn.Module, batch) -> Loss:
            with torch.no_grad():
                model[4].bias[0] = math.inf
            return super().loss(model, batch)

    seen = examine(Poisoned(None), config(), steps=3, points=0)
    assert seen.findings[0].verdict == "not finite"
    assert "parameter 4.bias is not finite" in seen.findings[0].advice


def test_a_loss_that_jumps_is_looked_at_and_not_passed_over():
    class Jumps(Toy):
        def loss(self, model: nn.Module, batch) -> Loss:
            loss = super().loss(model, batch)
            return Loss(loss.sum * (math.nan if self.step == 3 else 1.0), loss.count)

    rollback = {"enabled": True, "min_history": 2}
    seen = examine(Jumps(None), config(rollback=rollback), steps=6, points=0)
    assert seen.findings[0].verdict == "not finite"
    assert "1 of 6 steps" in seen.findings[0].figure


FAILS = """
from torch import nn
import torch
from hpo import Float, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.data import TensorDataset
from trainer.task import Loss, Task

class Config(Frozen):
    train: TrainConfig = TrainConfig(num_epochs=8)

class Fails(Task):
    def model(self):
        return nn.Linear(2, 1)
    def train_set(self):
        return TensorDataset(torch.ones(8, 2))
    def loss(self, model, batch):
        if self.step >= STEP:
            raise ValueError("not today")
        out = model(batch[0])
        return Loss(out.square().sum(), len(out))
    def evaluate(self, model):
        return {"val/loss": 0.5}

STUDY = Study("fails", Config(), Fails, {"train.optim.lr": Float(1e-4, 1e-2)}, [Objective("val/loss")])
"""


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    ("step", "said"),
    [(0, "no train/loss and no val/loss was reported"), (2, "6 epochs are needed to judge by, and there are 2")],
)
def test_of_a_trial_that_failed_its_error_is_said(tmp_path, step, said):
    """Before its first checkpoint and after; there what it would do next fails in the same way."""
    file, home = tmp_path / "fails.py", ("--home", str(tmp_path / "home"))
    file.write_text(FAILS.replace("STEP", str(step)))
    ran = hpo("run", "--study", str(file), "--trials", "1", "--executor", "inline", *home)
    assert ran.exit_code == 5, (ran.output, ran.exception)
    file.write_text(FAILS.replace("STEP", "10**9"))
    shown = hpo("diagnose", "0", *home, "--print-only", "--points", "0")
    assert shown.exit_code == 0, shown.output
    assert "\n  failed: " in shown.stdout and "not today" in shown.stdout
    assert said in shown.stdout
    assert "not today" in json.loads(hpo("diagnose", "0", *home, "--print-only", "--json").stdout)["error"]


def test_a_checkpoint_to_start_from_that_is_none_is_named_by_its_field(tmp_path):
    shown = hpo("diagnose", "--study", "mlp", "--steps", "1", "-o", f"train.resume_from={tmp_path}/nowhere")
    assert shown.exit_code == 2, shown.output
    assert shown.stderr.startswith(f"error: train.resume_from: checkpoint {tmp_path}/nowhere cannot be used")


def test_a_loss_that_takes_its_time_over_data_is_told_to_use_workers():
    class Slow(Toy):
        def augment(self, sample, generator):
            import time

            time.sleep(0.01)
            return sample

    seen = examine(Slow(None), config(), steps=3, points=0)
    found = {one.check: one for one in seen.findings}["data loading"]
    assert (found.verdict, found.value > 0.1) == ("slow", True)
    assert "train.num_workers is 0: auto" in found.advice


def test_the_start_of_the_loader_is_not_the_pace_of_the_data():
    class SlowToBegin(Toy):
        first = True

        def augment(self, sample, generator):
            import time

            if self.first:
                time.sleep(0.5)
            SlowToBegin.first = False
            return sample

        def loss(self, model, batch):
            import time

            time.sleep(0.02)  # or a step is so short that a tenth of it is any pause of a busy machine
            return super().loss(model, batch)

    seen = examine(SlowToBegin(None), config(), steps=3, points=0)
    found = {one.check: one for one in seen.findings}["data loading"]
    assert found.verdict == "healthy", found
    alone = examine(Toy(None), config(), steps=1, points=0).findings
    assert {one.check: one for one in alone}["data loading"].verdict == "not measured"


@pytest.mark.usefixtures("process")
def test_a_trial_without_loss_or_checkpoint_is_judged_by_what_there_is(searched, tmp_path):
    guide = ROOT / "docs" / "guide" / "own-loop.md"
    import re

    code = re.search(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    (tmp_path / "own.py").write_text(code[1])
    home = ("--home", str(tmp_path / "home"))
    ran = hpo("run", "--study", str(tmp_path / "own.py"), "--trials", "1", "--executor", "inline", *home)
    assert ran.exit_code == 0, ran.output
    shown = hpo("diagnose", "0", *home, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)["findings"]
    assert "a loop of its own" in found[0]["figure"]
    refused = hpo("diagnose", "--study", str(tmp_path / "own.py"))
    assert refused.exit_code == 2 and "a loop of its own" in refused.stderr
