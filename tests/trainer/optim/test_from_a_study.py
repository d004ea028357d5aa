"""Every optimizer from a study's configuration and search space, and one of the user's own."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest
from rounds import rounds
from torch import nn
from trainer_runs import MemoryReporter
from typer.testing import CliRunner

from hpo import Bool, Choice, Float, Int, Objective, Study, load
from hpo.cli.main import app
from hpo.errors import SpaceError
from studies.mlp.config import Config
from studies.mlp.task import MlpTask
from trainer.checkpoint.store import CheckpointStore
from trainer.config.optim import OPTIMIZERS, OptimConfig
from trainer.errors import ConfigError
from trainer.loop import fit
from trainer.optim import build as optim

pytestmark = pytest.mark.whole

TINY = {"train.num_epochs": "1", "train.batch_size": "256", "model.hidden_size": "16", "model.num_layers": "2"}


def knowing(field: str) -> dict[str, set[str]]:
    """The condition under which `field` is searched: the optimizers that have it."""
    whole = "betas" if field in ("beta1", "beta2") else field
    return {"train.optim.name": {name for name, known in OPTIMIZERS.items() if whole in known.defaults}}


# Each field of an optimizer that is a number, over the range that docs/guide/optimizers.md gives.
SPACE = {
    "train.optim.name": Choice(list(OPTIMIZERS)),
    "train.optim.wrap": Choice(
        ["none", "lookahead", "sam"], when={"train.optim.name": set(OPTIMIZERS) - {"schedule_free"}}
    ),
    "train.optim.lookahead.k": Int(2, 20, when={"train.optim.wrap": "lookahead"}),
    "train.optim.lookahead.alpha": Float(0.2, 0.8, when={"train.optim.wrap": "lookahead"}),
    "train.optim.sam.rho": Float(0.01, 0.5, log=True, when={"train.optim.wrap": "sam"}),
    "train.optim.sam.adaptive": Bool(when={"train.optim.wrap": "sam"}),
    "train.optim.lr": Float(1e-4, 1.0, log=True),
    "train.optim.weight_decay": Float(1e-6, 1.0, log=True),
    "train.optim.layer_decay": Float(0.5, 1.0),
    "train.optim.momentum": Float(0.1, 0.99, when=knowing("momentum")),
    "train.optim.nesterov": Bool(when=knowing("nesterov")),
    "train.optim.beta1": Float(0.8, 0.98, when=knowing("beta1")),
    "train.optim.beta2": Float(0.9, 0.9999, when=knowing("beta2")),
    "train.optim.eps": Float(1e-10, 1e-4, log=True, when=knowing("eps")),
    "train.optim.trust_coefficient": Float(1e-4, 0.1, log=True, when=knowing("trust_coefficient")),
    "train.optim.d0": Float(1e-8, 1e-4, log=True, when=knowing("d0")),
    "train.optim.d_coef": Float(0.1, 10, log=True, when=knowing("d_coef")),
    "train.optim.gamma": Float(1e-3, 0.1, log=True, when=knowing("gamma")),
    "train.optim.update_every": Int(1, 100, log=True, when=knowing("update_every")),
    "train.optim.max_dim": Int(64, 8192, powers_of_two=True, when=knowing("max_dim")),
    "train.optim.beta2_decay": Float(-0.95, -0.5, when=knowing("beta2_decay")),
    "train.optim.clip_threshold": Float(1.0, 4.0, when=knowing("clip_threshold")),
    "train.optim.ns_steps": Int(3, 8, when=knowing("ns_steps")),
}


def study(space: dict) -> Study:
    return Study(name="s", config=Config(), task=MlpTask, space=space, objectives=[Objective("val/loss", "minimize")])


def test_a_space_of_every_optimizer_is_valid_wherever_it_is_sampled():
    assert {path.split(".")[2] for path in SPACE} >= {
        name for known in OPTIMIZERS.values() for name in known.defaults
    } - {
        "betas",
        "adamw",
    }
    whole = study(SPACE).configure({})
    draw = random.Random(0)
    for _ in range(300):
        params = whole.space.decode(whole.space.from_unit([draw.random() for _ in whole.space.paths]))
        config = whole.build(params).train.optim
        assert config.hyperparameters["lr"] == params["train.optim.lr"]
        assert all(config.hyperparameters[field] is not None for field in OPTIMIZERS[config.name].defaults)


def test_a_searched_field_that_no_optimizer_has_is_refused():
    space = {"train.optim.name": Choice(["sgd", "adam", "lion"]), "train.optim.momentum": Float(0.0, 0.9)}
    with pytest.raises(SpaceError, match=r"refused configuration: train\.optim: momentum is set, and adam has none"):
        study(space).configure({})


def test_what_another_optimizer_has_is_refused_in_one_sentence(home):
    given = ("-o", "train.optim.name=lion", "-o", "train.optim.momentum=0.9")
    result = CliRunner().invoke(app, ["run", "--study", "mlp", "--trials", "1", *given, "--home", str(home.root)])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: train.optim: momentum is set, and lion has none: its own are lr, weight_decay, betas; leave momentum "
        "out, or search it only when the name is one that has it.\n"
    )


@pytest.mark.parametrize(
    "given",
    [
        *({"train.optim.name": name} for name in OPTIMIZERS),
        {"train.optim.wrap": "lookahead", "train.optim.lookahead.k": "3"},
        {"train.optim.wrap": "sam", "train.optim.sam.rho": "0.1"},
        {
            "train.optim.layer_decay": "0.8",
            "train.optim.groups": "[{pattern: '*bias', lr_scale: 2, weight_decay: 0.1}]",
        },
    ],
    ids=lambda given: " ".join(given.values()),
)
def test_the_quickstart_trains_with_each_from_o(given, tmp_path):
    configured = load("mlp").configure(TINY | {"model.dropout": "0", "train.optim.lr": "0.02"} | given)
    config = configured.build({})
    reporter = MemoryReporter()
    outcome = fit(MlpTask(config), config.train, reporter, CheckpointStore(tmp_path, fence=1))
    assert (outcome.kind, outcome.epoch) == ("complete", 1)
    assert reporter.values[5, "train/skipped_steps"] == 0
    assert reporter.values[5, "train/loss"] < 2.6


OWN = """
import torch

class Signs(torch.optim.Optimizer):
    def __init__(self, groups, lr, weight_decay, power):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "power": power})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign() * p.grad.abs() ** group["power"]

def dictionary(groups, **hyperparameters):
    return hyperparameters
"""


@pytest.fixture
def signs(tmp_path, monkeypatch):
    (tmp_path / "signs_of_mine.py").write_text(OWN)
    (tmp_path / "mine.py").write_text("from studies.mlp import STUDY\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield str(tmp_path / "mine.py")
    sys.modules.pop("signs_of_mine", None)


@pytest.mark.usefixtures("process")
def test_an_optimizer_of_the_users_own_by_its_path(signs, home):
    """Beside the study's file; its learning rate is searched, and what has no field is among the options."""
    given = TINY | {"train.optim.name": "signs_of_mine:Signs", "train.optim.options.power": "0.5"}
    flags = ["--study", signs, "--trials", "2", "--executor", "inline", "--sampler", "random"]
    flags += [word for path, value in given.items() for word in ("-o", f"{path}={value}")]
    result = CliRunner().invoke(app, ["run", *flags, "--home", str(home.root)])
    assert result.exit_code == 0, result.output
    rows = json.loads(CliRunner().invoke(app, ["compare", "--json", "--home", str(home.root)]).stdout)
    assert len({row["params.train.optim.lr"] for row in rows}) == 2
    assert all(row["state"] == "complete" for row in rows), rows


@rounds(
    ("name", "option", "words"),
    [
        ("signs_of_mine:Sings", "power", "has no 'Sings'"),
        ("signz_of_mine:Signs", "power", "module 'signz_of_mine' does not exist"),
        (
            "signs_of_mine:Signs",
            "root",
            "unexpected keyword argument 'root'): let it take lr, weight_decay, root, or change",
        ),
        ("builtins:dict", "root", "was not made of its hyperparameters"),
        ("types:SimpleNamespace", "root", "was not made of its hyperparameters"),
        ("signs_of_mine:dictionary", "root", "makes a dict, no optimizer: name a torch.optim.Optimizer"),
    ],
)
def test_one_that_cannot_be_made_is_said_in_one_sentence(name, option, words, signs):
    config = OptimConfig(name=name, options={option: 1.0})
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        optim.build(config, nn.Linear(2, 2))
    assert str(raised.value).startswith(f"train.optim.name='{name}'")


def test_a_bug_in_the_users_module_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "broken_of_mine.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        optim.build(OptimConfig(name="broken_of_mine:Signs"), nn.Linear(2, 2))
