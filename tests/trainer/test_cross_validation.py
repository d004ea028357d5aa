"""Cross-validation inside a trial: its folds against runs of their own, cut anywhere, pruned between two of them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy
import pytest
import torch
from driven import driven
from pydantic import ValidationError
from study_runs import digest
from trainer_runs import MemoryReporter, Toy, Trial, killed_at

from hpo import Float, Int, Objective, Study
from hpo.analysis.results.trial import describe, detail
from hpo.driver.request import request_of
from hpo.driver.run import run
from hpo.errors import SpaceError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import reports
from hpo.storage.home import Home
from hpo.verify import verify
from studies.atft.config import Config as AtftConfig
from studies.atft.task import AtftTask
from studies.mlp.config import Config
from studies.mlp.task import MlpTask
from trainer.config import Frozen, TrainConfig
from trainer.cross_validation import fit_folds
from trainer.data import TensorDataset
from trainer.errors import ConfigError
from trainer.loop import fit
from trainer.report import Report, Verdict
from trainer.runtime.seeding import derive

pytestmark = pytest.mark.whole

FOLDS = 3


def of_machine(key: str) -> bool:
    return key.startswith(("time/", "system/")) or key.endswith("per_sec")


class Folded(Toy):
    """A third of the samples, another one in each fold, is left out and evaluated; the folds differ in length."""

    fold = 0

    def in_fold(self, fold: int, folds: int) -> Folded:
        assert folds == FOLDS
        self.fold = fold
        return self

    def _samples(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(self.samples, 6, generator=generator)
        return TensorDataset(x, (x[:, 0] > 0).long())

    def train_set(self) -> TensorDataset:
        x, y = self._samples()[range(10 * self.fold, self.samples)]
        return TensorDataset(x, y)

    def evaluate(self, model):
        x, y = self._samples()[range(self.fold, self.samples, FOLDS)]
        return {"val/loss": torch.nn.functional.cross_entropy(model(x), y).item()}


class ByFold(MemoryReporter):
    """Keeps what is reported of folds apart, and never takes a decision on one."""

    def report(self, report: Report) -> Verdict:
        fold = report.fold
        assert fold == 0 or report.epoch is None
        named = {key if of_machine(key) else f"{fold}|{key}": value for key, value in report.metrics.items()}
        return super().report(replace(report, metrics=named))


class CrossValidated(Trial):
    fit = staticmethod(fit_folds)

    def __init__(self, directory, task=Folded, verdict=None, **config: Any) -> None:
        super().__init__(directory, task, **{"folds": FOLDS} | config)
        self.reporter = ByFold(verdict)

    def of(self, fold: int, key: str = "val/loss") -> dict[int, float]:
        return {step: v for (step, name), v in self.reporter.values.items() if name == f"{fold}|{key}"}


def alone(directory, fold: int, **config: Any) -> Trial:
    """A run of one fold by itself."""

    class One(Folded):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.fold = fold

    trial = Trial(directory, One, **config)
    trial.fit = fit
    outcome = trial.attempt()
    assert outcome is not None and outcome.kind == "complete"
    return trial


@pytest.mark.parametrize("monitor", [None, "val/loss"])
def test_each_fold_is_the_run_alone_and_the_trial_their_mean(tmp_path, monitor):
    given = {"num_epochs": 4, "optim": {"lr": 0.2}, "checkpoint": {"every_epochs": 1, "monitor": monitor}}
    trial = CrossValidated(tmp_path / "all", **given)
    outcome = trial.attempt()
    offset, counted, expected = 0, [], {}
    for fold in range(FOLDS):
        run = alone(tmp_path / str(fold), fold, **given).reporter
        mine = {(step, key) for step, key in trial.reporter.values if key.startswith(f"{fold + 1}|")}
        values = {(step, key): value for (step, key), value in run.values.items() if not of_machine(key)}
        assert mine == {(step + offset, f"{fold + 1}|{key}") for step, key in values}
        for (step, key), value in values.items():
            assert trial.reporter.values[step + offset, f"{fold + 1}|{key}"] == value
        curve = [value for (_, key), value in sorted(run.values.items()) if key == "val/loss"]
        counted.append(curve[-1] if monitor is None else min(curve))
        offset += max(run.epochs)
        expected[offset] = fmean(counted)
    assert monitor is None or counted != [curve[-1] for curve in [list(trial.of(i).values()) for i in (1, 2, 3)]]
    assert trial.of(0) == expected
    assert trial.reporter.epochs == dict(zip(expected, range(1, FOLDS + 1), strict=True))
    assert (outcome.kind, outcome.step, outcome.epoch) == ("complete", offset, FOLDS)


@pytest.mark.parametrize("given", [{}, {"checkpoint": {"every_epochs": 1, "monitor": "val/loss", "keep_last": 1}}])
def test_cut_at_every_step_it_is_the_trial_that_was_not(tmp_path, given):
    given = given | {"optim": {"lr": 0.2}}
    whole = CrossValidated(tmp_path / "whole", **given)
    steps = whole.attempt().step
    cut = CrossValidated(tmp_path / "cut", **given)
    attempts = 0
    for read in [*range(1, 7), *[4] * steps]:  # each attempt dies some steps on
        attempts += 1
        if cut.attempt(killed_at(read)) is not None:
            break
    assert attempts > 4 and cut.digest() == whole.digest()
    assert {ref.step for ref in cut.reporter.committed} == {ref.step for ref in whole.reporter.committed}
    left = CrossValidated(tmp_path / "left", **given)
    while (outcome := left.attempt(lambda read: read == 3)).kind == "preempted":
        assert left.reporter.committed[0].step == outcome.step
    assert outcome.kind == "complete" and left.digest() == whole.digest()


@pytest.mark.parametrize(("verdict", "kind"), [("stop", "pruned"), ("pause", "paused"), ("leave", "preempted")])
def test_it_ends_between_two_folds(tmp_path, verdict, kind):
    trial = CrossValidated(tmp_path / "cut", verdict=lambda step, metrics, epoch: Verdict(verdict, step))
    outcome = trial.attempt()
    assert (outcome.kind, outcome.epoch) == (kind, 1) and not trial.of(2)
    trial.reporter.decisions = dict.fromkeys(trial.reporter.decisions, Verdict())  # it was obeyed, and goes on
    trial.reporter.verdict = None
    whole = CrossValidated(tmp_path / "whole")
    whole.attempt()
    assert trial.attempt().kind == "complete" and trial.digest() == whole.digest()


def test_a_damaged_checkpoint_is_told_once(tmp_path):
    trial = CrossValidated(tmp_path)
    trial.attempt(killed_at(7))
    (trial.reporter.committed[0].path / "model.safetensors").write_bytes(b"")
    trial.attempt()
    assert [kind for kind, _ in trial.reporter.events].count("checkpoint_damaged") == 1
    whole = CrossValidated(tmp_path / "whole")
    whole.attempt()
    assert trial.digest() == whole.digest()


class WholeConfig(Frozen):
    train: TrainConfig


class Repeated(CrossValidated):
    """Three seeds of the task that draws its data, its weights and its dropout."""

    def __init__(self, directory, task=Toy, **config: Any) -> None:
        super().__init__(directory, task, **{"folds": 1, "seeds": 3} | config)
        self.task_class = lambda _: task(WholeConfig(train=self.config))

    def values(self) -> dict[tuple[int, str], float]:
        return {at: value for at, value in self.reporter.values.items() if not of_machine(at[1].split("|")[-1])}


def test_each_seed_is_the_run_alone_under_it(tmp_path):
    trial = Repeated(tmp_path / "all", num_epochs=2)
    outcome = trial.attempt()
    offset, counted = 0, []
    for number in range(3):
        seed = derive(0, "repeat", number) if number else 0
        run = Trial(tmp_path / str(number), num_epochs=2, seed=seed)
        steps = run.attempt().step
        for (step, key), value in run.reporter.values.items():
            if not of_machine(key):
                assert trial.reporter.values[step + offset, f"{number + 1}|{key}"] == value
        offset += steps
        counted.append(run.reporter.values[steps, "val/loss"])
        assert trial.of(0)[offset] == fmean(counted)
        low, high = trial.of(0, "val/loss/low")[offset], trial.of(0, "val/loss/high")[offset]
        if number:
            error = numpy.std(counted, ddof=1) / numpy.sqrt(len(counted))  # of the mean
            assert (low, high) == pytest.approx((fmean(counted) - error, fmean(counted) + error), rel=1e-12)
            assert trial.of(0, "val/loss/std")[offset] == pytest.approx(numpy.std(counted, ddof=1), rel=1e-12)
        else:
            assert low == high == counted[0] and offset not in trial.of(0, "val/loss/std")
    assert len(set(counted)) == 3 and (outcome.kind, outcome.step, outcome.epoch) == ("complete", offset, 3)


def test_seeds_cut_anywhere_are_the_trial_that_was_not(tmp_path):
    whole, cut = Repeated(tmp_path / "whole"), Repeated(tmp_path / "cut")
    whole.attempt()
    attempts = 1
    while cut.attempt(killed_at(5)) is None:
        attempts += 1
    assert attempts > 3 and cut.values() == whole.values()


def test_the_task_of_a_seed_is_given_that_seed(tmp_path):
    seen = []

    class Asking(Toy):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            seen.append(config.train.seed)

    Repeated(tmp_path, Asking).attempt()
    assert seen == [0, derive(0, "repeat", 1), derive(0, "repeat", 2)]


def test_folds_and_seeds_at_once_are_refused():
    with pytest.raises(ValidationError, match="folds=2 and seeds=3: a trial repeats by one of them"):
        TrainConfig(folds=2, seeds=3)
    with pytest.raises(ValidationError, match=r"seeds are trained by one process: leave parallel out, or seeds=1\."):
        TrainConfig.model_validate({"seeds": 2, "parallel": {"data": 2}})


def test_what_has_no_folds_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"train.folds=3: Toy does not divide its data; give it a method in_fold"):
        CrossValidated(tmp_path, Toy).attempt()
    with pytest.raises(ValidationError, match=r"folds are trained by one process: leave parallel out, or folds=1\."):
        CrossValidated(tmp_path, parallel={"data": 2})


def test_folds_of_the_studies_cover_what_they_divide():
    parts = [MlpTask(Config()).in_fold(fold, 5) for fold in range(5)]
    seen = torch.cat([task._split("val")[0] for task in parts])
    assert len(seen) == 1437 and len(torch.unique(seen, dim=0)) > 1400
    for task in parts:
        assert len(task.train_set()) + len(task._split("val")[0]) == 1437
        assert torch.equal(task._split("test")[0], MlpTask(Config())._split("test")[0])
    walked = [AtftTask(AtftConfig()).in_fold(fold, 2).panel.split for fold in range(2)]
    assert walked[0].val[-1] + 1 == walked[1].val[0] and walked[0].train[-1] < walked[0].val[0]
    assert walked[1].train[-1] > walked[0].train[-1] and (walked[0].test == walked[1].test).all()


GIVEN = {"train.folds": 4, "train.num_epochs": 1, "train.batch_size": 256, "model.num_layers": 1}


SEARCH = {"reference": "mlp", "sampler": "random", "strategy": "halving", "overrides": GIVEN}


# MLflow 3.17 with SQLAlchemy 2.1.
@pytest.mark.usefixtures("process")
def test_a_study_is_pruned_across_folds(tmp_path):
    """And taken in two parts it is the same study, to the last bit."""
    whole, parts = Home.at(tmp_path / "whole"), Home.at(tmp_path / "parts")
    run(request_of(home=whole, trials=6, executor="inline", **SEARCH), lambda *_: lambda notice="": None)
    with closing(Ledger(parts.create().storage)) as ledger:
        for trials in (3, 6):
            driven(ledger, request_of(parts, **SEARCH), trials=trials)
    assert digest(parts, "mlp") == digest(whole, "mlp")
    ledger = Ledger(whole.storage, create=False)
    with ledger.read() as connection:
        trials = queries.trial_rows(connection, queries.study_row(connection, "mlp").id)
        rows = connection.execute(reports.select().where(reports.c.key == "val/accuracy")).mappings().all()
    ledger.close()
    assert {"complete", "pruned"} == {trial.state for trial in trials}
    for trial in trials:
        mine = [row for row in rows if row["trial_id"] == trial.id]
        of_folds = [row["value"] for row in mine if row["fold"] > 0]  # one epoch each
        means = [row["value"] for row in mine if row["fold"] == 0]
        assert trial.epoch == len(means) == len(of_folds) and (trial.epoch == 4) == (trial.state == "complete")
        assert means == pytest.approx([fmean(of_folds[: i + 1]) for i in range(len(of_folds))])
        assert trial.values[0] == means[-1]
    assert not verify(whole, whole.storage, None, None).differences


@pytest.mark.usefixtures("process")
def test_a_study_of_seeds_is_pruned_and_shown_by_seed(tmp_path):
    home = Home.at(tmp_path / "home")
    given = GIVEN | {"train.folds": 1, "train.seeds": 4}
    request = request_of(home, trials=9, executor="inline", **SEARCH | {"overrides": given})
    run(request, lambda *_: lambda notice="": None)
    ledger = Ledger(home.storage, create=False)
    with ledger.read() as connection:
        study = queries.study_row(connection, "mlp")
        trials = queries.trial_rows(connection, study.id)
        shown = describe(detail(connection, home, "mlp", trials[0].number), {})
    ledger.close()
    assert {trial.epoch for trial in trials if trial.state == "complete"} == {4}
    assert {"complete", "pruned"} == {trial.state for trial in trials}
    assert "\nseeds\n" in shown and "val/accuracy/low" in shown
    assert not verify(home, home.storage, None, None).differences


def test_folds_are_no_dimension_and_are_judged_by_their_mean():
    study = Study(
        "s", Config(), "studies.mlp.task:MlpTask", {"train.optim.lr": Float(0.1, 1)}, [Objective("a", select="best")]
    )
    assert study.configure({}).objectives[0].select == "best"
    assert study.configure({"train.folds": 2}).objectives[0].select == "last"
    searched = Study("s", Config(), "studies.mlp.task:MlpTask", {"train.folds": Int(1, 3)}, [Objective("a")])
    with pytest.raises(SpaceError, match=r"train.folds cannot be searched, since trials of other folds cannot be"):
        searched.configure({})
