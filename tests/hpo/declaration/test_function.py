"""A function as a study: how it is declared, what its trial gives and refuses, what its files come back as."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from places import HARNESS
from sqlalchemy import select
from study_runs import drive, query
from told import SPACE, Told, fit

from hpo import Float, Objective, load, study
from hpo.analysis.results.progress import Progress
from hpo.clock import SystemClock
from hpo.declaration.function_trial import Ended, FunctionTask, Parameters
from hpo.errors import HpoError, StudyError
from hpo.ledger import Ledger
from hpo.ledger.database.tables import asks, checkpoints, events, reports, trials
from hpo.storage.home import Home
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import TrainerError
from trainer.report import Outcome


def counting(trial: Any) -> None:
    """Five epochs, whose state is their number."""
    (trial.directory / "log.txt").write_text("begun")
    done = 0
    if saved := trial.resume():
        done = json.loads((saved / "deep" / "state.json").read_text())
        assert done == trial.epoch
    for epoch in range(trial.epoch + 1, 6):
        done += 1
        file = trial.directory / "state.json"
        file.write_text(json.dumps(done))
        trial.save({"deep/state.json": file})
        file.unlink()  # what was saved outlives its file
        if trial.report(epoch, {"val/loss": 1 / done}):
            return


# --- What is declared


def test_a_function_declares_a_study_of_its_parameters():
    @study(space=SPACE, maximize=["val/accuracy"], minimize="val/loss", constants={"depth": 3}, num_epochs=7)
    def train(trial):
        pass

    assert train.name == "train" and sorted(train.space.paths) == ["kind", "lr", "width"]
    assert train.objectives == (Objective("val/loss", "minimize"), Objective("val/accuracy", "maximize"))
    config: Any = train.config
    assert config.lr == pytest.approx(math.sqrt(1e-4 * 1e-1)) and (config.width, config.kind, config.depth) == (
        34,
        "a",
        3,
    )
    assert config.train.num_epochs == 7
    changed: Any = train.configure({"depth": "5", "lr": 0.01}).config
    assert (changed.depth, changed.lr) == (5, 0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"minimize": ()}, "say what it is judged by: minimize='val/loss'"),
        ({"objectives": [Objective("a")]}, "say what it is judged by"),
        ({"space": {"optim.lr": Float(0.0, 1.0)}}, "parameter 'optim.lr' must be a name such as 'lr'"),
        ({"space": {"lambda": Float(0.0, 1.0)}}, "it is trial.params.lr: call it 'lambda_'"),
        ({"space": {"train": Float(0.0, 1.0)}}, "cannot be called 'train'"),
        ({"space": {"copy": Float(0.0, 1.0)}}, "cannot be called 'copy'"),
        ({"space": {"items": Float(0.0, 1.0)}}, "cannot be called 'items'"),
        ({"space": {"lr": (1e-4, 1e-1)}}, "is not a dimension: write hpo.Float(0.0001, 0.1)."),
        ({"space": {"width": [4, 64]}}, "is not a dimension: write hpo.Int(4, 64)."),
        ({"space": {"kind": ["a", "b"]}}, "is not a dimension: write hpo.Choice(['a', 'b'])."),
        ({"space": {"lr": 0.1}}, "is not a dimension: write hpo.Float(0.0, 1.0)."),
        ({"space": {"lr": Float(1.0, 0.1)}}, "low=1.0 is above high=0.1; swap them"),
        ({"constants": {"lr": 1.0}}, "'lr' is searched and a constant"),
        ({"num_epochs": 0}, "num_epochs=0 must be a whole number from 1"),
        ({"steps_per_epoch": 0.5}, "steps_per_epoch=0.5 must be a whole number from 1"),
    ],
)
def test_what_cannot_be_declared_is_refused_in_a_sentence(change, said):
    with pytest.raises(HpoError, match=re.escape(said)):
        study(**({"space": SPACE, "minimize": "val/loss"} | change))(counting)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda: None, "must take one argument, the trial"),
        (FunctionTask, "stands above a function, not above a type"),
    ],
)
def test_what_is_no_training_function_is_refused(function, said):
    with pytest.raises(StudyError, match=said):
        study(space=SPACE, minimize="val/loss")(function)


def test_a_bare_decorator_is_told_what_it_needs():
    with pytest.raises(StudyError, match=r"write @hpo.study\(space=\{...\}, minimize='val/loss'\)"):
        study(counting)


def test_a_file_with_one_study_needs_no_name(tmp_path):
    file = tmp_path / "mine.py"
    text = (HARNESS / "function_study.py").read_text()
    file.write_text(text)
    assert load(str(file)).reference == f"{file}:tiny" == load(f"{file}:tiny").reference


# --- What a trial gives


def test_parameters_are_read_by_attribute_and_by_key():
    params = Parameters({"lr": 0.1, "width": 8})
    assert params.lr == params["lr"] == 0.1 and dict(params) == {"lr": 0.1, "width": 8}
    with pytest.raises(AttributeError, match="unknown parameter 'rate'; known: lr, width"):
        params.rate  # noqa: B018


def test_it_reports_saves_and_hands_its_own_files_over(tmp_path):
    told = Told()
    assert fit(counting, tmp_path, told) == Outcome("complete", 5, 5)
    assert told.reports == [(n, n, {"val/loss": 1 / n}) for n in range(1, 6)]
    assert [ref.step for ref in told.committed] == [5, 4, 3, 2, 1]
    assert told.artifacts == {"log.txt": b"begun"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ref.path.name for ref in told.committed[:2])


@pytest.mark.parametrize(("verdict", "kind"), [("stop", "pruned"), ("pause", "paused"), ("leave", "preempted")])
def test_it_obeys_a_verdict_also_of_a_report_before_a_kill(tmp_path, verdict, kind):
    first, again = Told({2: verdict}), Told({2: verdict})
    assert fit(counting, tmp_path, first) == Outcome(kind, 2, 2)
    assert fit(counting, tmp_path, again, first.committed[:1]) == Outcome(kind, 2, 2)
    assert again.reports == first.reports[-1:], "the report is made again, for its verdict, and nothing is trained"


def test_cut_at_any_epoch_it_reports_what_it_would_have_reported(tmp_path):
    for cut in range(1, 5):
        first, rest = Told({cut: "leave"}), Told()
        fit(counting, tmp_path / str(cut), first)
        assert fit(counting, tmp_path / str(cut), rest, first.committed[:1]) == Outcome("complete", 5, 5)
        assert [*first.reports[:-1], *rest.reports] == [(n, n, {"val/loss": 1 / n}) for n in range(1, 6)]


def test_asked_to_leave_it_leaves_at_its_next_report(tmp_path):
    assert fit(counting, tmp_path, Told(preempted=True)) == Outcome("preempted", 1, 1)


def test_nothing_in_a_function_takes_the_end_for_an_error(tmp_path):
    def careful(trial):
        try:
            trial.resume()
        except Exception as error:
            raise AssertionError("swallowed") from error
        trial.save(HARNESS / "function_study.py")
        trial.report(1, {"val/loss": 1.0})

    first = Told({1: "stop"})
    fit(careful, tmp_path, first)
    assert fit(careful, tmp_path, Told({1: "stop"}), first.committed).kind == "pruned"
    assert not issubclass(Ended, Exception)


def test_steps_close_the_epochs_that_they_come_to(tmp_path):
    def stepping(trial):
        for step in (200, 500, 900, 1600):
            trial.report(step=step, metrics={"val/loss": np.float32(1 / step)})

    told = Told()
    assert fit(stepping, tmp_path, told, steps_per_epoch=500) == Outcome("complete", 1600, 3)
    assert [(step, epoch) for step, epoch, _ in told.reports] == [(200, None), (500, 1), (900, None), (1600, 3)]


@pytest.mark.parametrize("returned", [0.25, np.float64(0.25), {"val/loss": 0.25}, (0.25,)])
def test_a_value_that_is_returned_is_its_report(tmp_path, returned):
    told = Told()
    assert fit(lambda trial: returned, tmp_path, told) == Outcome("complete", 1, 1)
    assert told.reports == [(1, 1, {"val/loss": 0.25})]


def both(trial):
    trial.report(1, {"val/loss": 1.0})
    return 1.0


def back(trial):
    trial.report(2, {"val/loss": 1.0})
    trial.report(1, {"val/loss": 1.0})


def deaf(trial):
    for epoch in (1, 2, 3):
        trial.report(epoch, {"val/loss": 1.0})


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (lambda trial: None, TrainerError, "ended without a report: call trial.report(epoch, {'val/loss': ...})"),
        (lambda trial: "fine", TrainerError, "metric 'val/loss' is not a number but 'fine'"),
        (lambda trial: (1.0, 2.0), TrainerError, "returned (1.0, 2.0): return val/loss, in this order"),
        (lambda trial: "0.5", TrainerError, "metric 'val/loss' is not a number but '0.5': give a float of it"),
        (lambda trial: trial.report(1, {"val/loss": b"0.5"}), TrainerError, "is not a number but b'0.5'"),
        (
            lambda trial: trial.report(1, {0: 0.5, "val/loss": 1.0}),
            TrainerError,
            "metric 0 has a name that is not text: write {'0': ...}.",
        ),
        (both, TrainerError, "reported epochs and returned 1.0"),
        (back, TrainerError, "trial.report(epoch=1) comes after epoch 2: report epochs as they grow"),
        (
            lambda trial: trial.report(0, {"val/loss": 1.0}),
            TrainerError,
            "first: epochs count from 1, as in `for epoch in range(1, n + 1)`",
        ),
        (lambda trial: trial.report(1, 0.5), TrainerError, "takes metrics by name, not 0.5: write {'val/loss': loss}"),
        (lambda trial: trial.report(1), TrainerError, "was given no metrics"),
        (
            deaf,
            TrainerError,
            "gave True at epoch 2, and the function went on to epoch 3: return then, `if trial.report(...): return`.",
        ),
        (lambda trial: trial.report(metrics={"val/loss": 1.0}), TrainerError, "takes an epoch or a step"),
        *(
            (
                lambda trial, epoch=epoch: trial.report(epoch, {"val/loss": 1.0}),
                TrainerError,
                f"trial.report(epoch={shown}): give a whole number from 1.",
            )
            for epoch, shown in (
                (1.5, "1.5"),
                ("a", "'a'"),
                ("1", "'1'"),
                (True, "True"),
                (math.nan, "nan"),
                (math.inf, "inf"),
                ([1], "[1]"),
                (2**63, "9223372036854775808"),
            )
        ),
        (
            lambda trial: trial.save("/nowhere"),
            TrainerError,
            "/nowhere cannot be saved (No such file or directory): write it first",
        ),
        (lambda trial: trial.save(trial.directory), TrainerError, "there is nothing to save in"),
        (lambda trial: trial.save("/dev/null"), TrainerError, "it is not a regular file"),
        (lambda trial: trial.save({"../x": __file__}), TrainerError, "cannot name a file of a checkpoint"),
        (lambda trial: trial.save({"/x": __file__}), TrainerError, "cannot name a file of a checkpoint"),
    ],
)
def test_what_a_function_gets_wrong_is_said_in_a_sentence(tmp_path, function, error, said):
    with pytest.raises(error, match=re.escape(said)):
        fit(function, tmp_path, Told({2: "stop"} if function is deaf else None))


def test_a_checkpoint_deleted_under_it_begins_the_trial_anew(tmp_path):
    first, again = Told({3: "leave"}), Told()
    fit(counting, tmp_path, first)
    for ref in first.committed[:2]:
        (ref.path / "files" / "deep" / "state.json").unlink()
    assert fit(counting, tmp_path, again, first.committed[:2]) == Outcome("complete", 5, 5)
    assert [epoch for _, epoch, _ in again.reports] == [1, 2, 3, 4, 5]


# --- A whole study


@pytest.fixture(scope="module")
def driven(tmp_path_factory) -> Home:
    home = Home(tmp_path_factory.mktemp("driven") / "home")
    reference = f"{HARNESS / 'function_study.py'}:tiny"
    _, status, state, _ = drive(home, trials=6, reference=reference, overrides={"pause": 0.0}, seed=1)
    assert state == "complete" and status.trials["complete"] and status.trials["pruned"]
    return home


@pytest.mark.whole
def test_files_reports_and_artifacts_are_in_the_ledger(driven):
    kept = query(
        driven,
        select(checkpoints.c.path, checkpoints.c.size, trials.c.number)
        .join(trials)
        .where(checkpoints.c.state == "kept"),
    )
    assert {number for _, _, number in kept} == {*range(6)}
    for path, size, number in kept:
        directory = driven.checkpoints("tiny", number) / path
        files = [file for file in directory.rglob("*") if file.is_file()]
        assert {str(file.relative_to(directory)) for file in files} == {
            "manifest.json",
            "files/rng.json",
            "files/state/weights.npz",
        }
        assert size == sum(file.stat().st_size for file in files)
    handed = query(driven, select(events.c.fields).where(events.c.kind == "artifact"))
    assert {fields["path"] for (fields,) in handed} == {"kept/rng.json", "kept/state/weights.npz"}


@pytest.mark.whole
def test_the_platforms_run_is_the_function_called_by_hand(driven, tmp_path):
    """Against the function itself, in a loop that somebody would write."""
    declared = load(f"{HARNESS / 'function_study.py'}:tiny")
    values = (
        select(reports.c.epoch, reports.c.value).join(trials).where(reports.c.key == "val/loss", trials.c.number == 0)
    )
    ran = dict(map(tuple, query(driven, values)))

    [(params,)] = query(driven, select(asks.c.params).join(trials).where(trials.c.number == 0))
    told = Told()
    task = declared.task_class()(declared.build({**params, "pause": 0.0}))
    task.fit(told, CheckpointStore(tmp_path, 1))
    assert ran == {epoch: metrics["val/loss"] for _, epoch, metrics in told.reports if epoch in ran}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("second", "strategy", "said"),
    [
        ("1, {'loss': 1.0}", "none", "trial.report(epoch=1) comes after epoch 2"),
        ("3, {'loss': 1.0}", "threshold", "gave True at epoch 2, and the function went on to epoch 3: return then"),
        ("3, {'loss': 'low'}", "none", "metric 'loss' is not a number but 'low'"),
        ("3, {'loss': 1.0, '': 1.0}", "none", "metric name '' cannot be stored"),
        ("2**31, {'loss': 1.0}", "none", "step 2147483648 cannot be reported"),
    ],
)
def test_a_mistake_is_shown_with_the_functions_frames_alone(tmp_path, second, strategy, said):
    bound = ", 'upper': 0.5" if strategy == "threshold" else ""
    file = tmp_path / "wrong.py"
    file.write_text(
        "import hpo\n@hpo.study(space={'x': hpo.Float(0.0, 1.0)}, minimize='loss', "
        f"strategy={{'name': '{strategy}'{bound}}})\n"
        f"def wrong(trial):\n    trial.report(2, {{'loss': 1.0}})\n    trial.report({second})\n"
    )
    _, _, state, reason = drive(Home(tmp_path / "home"), trials=5, reference=str(file))
    assert state == "stopped"
    assert 'wrong.py", line 5, in wrong' in reason and said in reason
    assert not any(f"{own}.py" in reason for own in ("function_trial", "attempt", "reporter", "report"))


@pytest.mark.whole
def test_who_is_stopped_at_a_last_epoch_is_told_to_declare_it(tmp_path):
    file = tmp_path / "brief.py"
    for declares, told in (("", True), (", num_epochs=2", False)):
        file.write_text(
            "import hpo\n@hpo.study(space={'x': hpo.Float(0.0, 1.0)}, minimize='loss', "
            f"strategy={{'name': 'asha', 'min_epochs': 2, 'eta': 2}}{declares})\n"
            "def brief(trial):\n    for epoch in (1, 2):\n        if trial.report(epoch, {'loss': trial.params.x}):\n"
            "            return\n"
        )
        home = Home(tmp_path / f"home{declares}")
        _, status, state, _ = drive(home, trials=8, reference=str(file), window=1)
        assert state == "complete" and (status.trials["pruned"] > 0) is told
        said = [*Progress(Ledger(home.storage), "brief", SystemClock()).remarks()]
        words = (
            f"{status.trials['pruned']} trials stopped at epoch 2, where complete ones end: if every trial has 2 "
            "epochs, declare num_epochs=2 in the study, and none is stopped at its last one"
        )
        assert said == ([words] if told else [])
