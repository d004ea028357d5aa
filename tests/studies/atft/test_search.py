"""The study from the command line: searched, confirmed on the days no trial has seen, refused, and what it declares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from hpo import Float
from hpo.analysis.training.schedule import curve
from hpo.cli.main import app
from hpo.declaration.folds import unfit
from hpo.declaration.search_preset import as_new
from hpo.ledger import Ledger, queries
from hpo.space.config import apply
from hpo.space.space import Space
from hpo.storage.home import Home
from studies.atft import STUDY
from studies.atft.phases import plan
from studies.atft.split import walk_forward

pytestmark = pytest.mark.whole

SMALL = {
    "preset": "none",
    "data.market.num_days": 260,
    "data.market.num_stocks": 24,
    "data.split.val_days": 40,
    "data.split.test_days": 20,
    "data.split.min_train_days": 40,
    "data.min_stocks": 10,
    "model.hidden_size": 8,
    "train.batch_size": 2,
    "train.num_epochs": 1,
}


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def run(home: Home, *arguments: str, changes: dict | None = None):
    overrides = [text for path, value in (SMALL | (changes or {})).items() for text in ("-o", f"{path}={value}")]
    once = ("--executor", "inline", "--sampler", "random", "--strategy", "none")
    return hpo("run", *arguments, *once, *overrides, home=home)


def metrics(home: Home, study: str, number: int) -> dict[str, float]:
    return json.loads((home.checkpoints(study, number) / "metrics.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    """A home in which the study ran two small trials of one epoch, over the whole space."""
    home = Home.at(tmp_path_factory.mktemp("searched") / "home")
    result = run(home, "--study", "atft", "--trials", "2")
    assert result.exit_code == 0, result.output
    return home


def test_a_search_has_metrics_of_every_horizon_and_not_of_the_last_block(searched):
    for number in range(2):
        found = metrics(searched, "atft", number)
        assert {f"val/rank_ic_{h}d" for h in (1, 5, 10, 20)} <= found.keys()
        assert not any(name.startswith("test/") for name in found)


@pytest.mark.usefixtures("process")
def test_confirm_shows_the_gap_to_days_that_selected_nothing(searched):
    """The gap is held against metrics.json of the trials that were trained again."""
    result = hpo("confirm", "--study", "atft", "--top", "1", "--seeds", "2", "--json", home=searched)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    again = [metrics(searched, "atft-confirm", number) for number in (0, 2)]  # 1 and 3 are the default's
    held = [one["test/rank_ic_5d"] for one in again]
    assert found["hold_out"] == "test/rank_ic_5d"
    assert row["held_out"]["mean"] == pytest.approx(sum(held) / 2)
    assert row["gap"] == pytest.approx(sum(held) / 2 - row["selected"])
    assert row["selected"] == max(metrics(searched, "atft", n)["val/rank_ic_5d"] for n in range(2))


@pytest.mark.usefixtures("process")
def test_constant_predictions_make_a_trial_infeasible_and_never_the_best(tmp_path):
    """A model that collapsed has no RankIC on any day: the trial is not scored 0, it is not scored."""
    (tmp_path / "collapsed.py").write_text(
        "from dataclasses import replace\n"
        "from studies.atft import STUDY as SEARCH\n"
        "from studies.atft.task import AtftTask\n\n"
        "class Collapsed(AtftTask):\n"
        "    def evaluate(self, model):\n"
        "        for p in model.parameters():\n"
        "            p.zero_()\n"
        "        return super().evaluate(model)\n\n"
        "STUDY = replace(SEARCH, name='collapsed', task=Collapsed)\n"
    )
    home = Home.at(tmp_path / "home")
    result = run(home, "--study", str(tmp_path / "collapsed.py"), "--trials", "1")
    rows = Ledger(home.storage).look(lambda c: queries.trial_rows(c, queries.study_row(c, "collapsed").id))
    assert [row.state for row in rows] == ["infeasible"], result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "loss.phase=5"], ["loss.phase '5'", "1, 2, 3, 4, schedule"]),
        (["-o", "phases.2.weights.rankic=1"], ["phases.2.weights.rankic", "rank_ic"]),
        (["-o", "data.path=missing.parquet"], ["missing.parquet", "is not a file"]),
        (["-o", "data.split.purge=5"], ["split.purge 5", "longest horizon 20"]),
        (["-o", "train.early_stopping.monitor=val/rank_ic"], ["train.early_stopping.monitor", "val/rank_ic"]),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(tmp_path, arguments: Sequence[str], words):
    result = hpo("run", "--study", "atft", "--trials", "1", *arguments, home=Home.at(tmp_path / "home"))
    assert result.exit_code == 2
    text = result.output.strip()
    assert all(word in " ".join(text.split()) for word in words) and "Traceback" not in text
    assert not (tmp_path / "home" / "ledger.db").exists()


def test_a_rung_compares_trials_within_one_phase_and_never_by_their_loss():
    """An epoch lies in one phase in every trial: nothing that divides the run is searched."""
    study = STUDY.configure({"preset": "phases"})
    divides = [path for path in study.space.paths if path.startswith(("phases.", "train.num_epochs", "loss.phase"))]
    assert divides == []
    assert [objective.metric for objective in STUDY.objectives] == ["val/rank_ic_5d"]
    config = study.config
    run = plan(config.loss.phase, dict(config.loss.scale), config.phases)
    epochs = range(config.train.num_epochs)
    names = ["".join(k for k, p in config.phases.items() if p == run.at(e / len(epochs))) for e in epochs]
    assert names == list("11223344")


def test_hpo_schedule_shows_the_phases_own_rates():
    given = {"preset": "phases", "phases.2.lr": 2.0, "train.schedule.name": "constant", "train.optim.lr": 0.1}
    small = SMALL | {"train.num_epochs": 8, "train.schedule.warmup_ratio": 0.0}
    rates = curve("atft", small | given, steps_per_epoch=3).rates
    assert rates == pytest.approx([0.1] * 6 + [0.2] * 6 + [0.1] * 6 + [0.03] * 6)


def test_weights_of_a_phase_and_of_a_horizon_may_be_searched():
    space = Space({"phases.2.weights.rank_ic": Float(0.1, 1.0), "loss.horizon_weights.5": Float(0.5, 4.0)})
    study = replace(STUDY, space=space).configure({"loss.phase": "2"})
    assert study.space.paths == ("loss.horizon_weights.5", "phases.2.weights.rank_ic")
    config = apply(study.config, {"phases.2.weights.rank_ic": 0.7, "loss.horizon_weights.5": 4.0})
    assert plan("2", {}, config.phases).weights.at(0.0)["rank_ic"] == 0.7 and config.omega == [1.0, 4.0, 1.0, 1.0]


def test_tiers_begin_with_what_matters_and_end_with_the_loss():
    tiers = {tier: set(STUDY.upto(tier).space.paths) for tier in (1, 2, 3)}
    assert tiers[1] == {"train.optim.lr", "train.batch_size", "model.hidden_size"}
    assert {"model.num_frequencies", "model.num_heads", "train.optim.name", "train.schedule.name"} <= tiers[2]
    assert not any(path.startswith("loss.") for path in tiers[2])
    assert {"loss.scale.rank_ic", "loss.horizon_weights.1", "loss.point"} <= tiers[3]


@pytest.mark.usefixtures("process")
def test_the_plateau_follows_the_rank_ic_as_torchs_scheduler_does(tmp_path):
    """The rates that are reported are those of torch's ReduceLROnPlateau fed the reported RankIC; the trial ends with
    the third epoch in a row that is not better than the best by 0.1."""
    home = Home.at(tmp_path / "home")
    patience = {"train.schedule.plateau.patience": 0, "train.early_stopping.patience": 3}
    patience["train.early_stopping.min_delta"] = 0.1
    changes = {"preset": "plateau", **patience, "train.num_epochs": 8, "train.optim.lr": 0.05}
    result = run(home, "--study", "studies/atft/train.py", "--trials", "1", changes=changes)
    assert result.exit_code == 0, result.output
    names = ("train/lr", "val/rank_ic_5d")
    rows = Ledger(home.storage).look(lambda c: [*queries.curves(c, queries.study_row(c, "atft-train").id, names)])
    curves = {name: [value for _, key, _, _, value in rows if key == name] for name in names}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5, min_lr=1e-6)
    rates, best, bad = [], float("-inf"), 0
    for value in curves["val/rank_ic_5d"]:
        rates.append(optimizer.param_groups[0]["lr"])
        plateau.step(value)
        assert bad < 3, "it went on"
        best, bad = (value, 0) if value > best + 0.1 else (best, bad + 1)
    assert curves["train/lr"][1:] == pytest.approx(rates[1:])
    assert rates[-1] < rates[0], "nothing was tested"
    assert bad == 3 and len(rates) < 8


def test_a_market_too_short_for_the_folds_is_not_confirmed_by_them(tmp_path):
    result = run(Home.at(tmp_path), "--study", "atft", "--trials", "2", "--confirm", "1x3folds")
    assert result.exit_code == 2, result.output
    assert "data.split.fold=0" in result.stderr and "at least 40 to train on" in result.stderr
    assert "Or confirm under other seeds alone, by --confirm 1x3." in result.stderr


def test_each_fold_of_each_preset_leaves_days_to_train_on():
    for preset in ("none", "folds", "phases", "plateau"):
        study = STUDY.configure({"preset": preset})
        config, num_days = study.config, study.config.data.market.num_days
        first = config.in_fold(0, config.train.folds) if config.train.folds > 1 else config
        selects = walk_forward(num_days, first.data).val
        for fold in study.folds:
            inside = study.configure(fold).config
            days = walk_forward(num_days, inside.data)
            assert inside.train.folds == 1 and len(days.train) >= 100 and days.val[-1] < selects[0]
        assert not unfit(study)


def test_three_folds_train_on_no_more_days_than_one_training():
    plain, folded = STUDY.configure({}).config, as_new(STUDY, {}).config
    days = plain.data.market.num_days
    folds = [walk_forward(days, folded.in_fold(fold, folded.train.folds).data) for fold in range(folded.train.folds)]
    assert sum(len(fold.train) for fold in folds) <= len(walk_forward(days, plain.data).train)
    assert len({day for fold in folds for day in fold.val}) == 3 * 80
