"""Optuna's storage as a tracker: it shows what `to_optuna` makes of the ledger, once, wherever the mirror is killed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from mirrored import Made
from sqlalchemy import update
from typer.testing import CliRunner

from hpo import Choice, Float, Objective
from hpo.analysis.plots.optuna_study import to_optuna
from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.ledger import leases, tables
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.tracking import mirror, mirror_process
from hpo.tracking.base import Batch, Point, Refused, Run, Unreachable
from hpo.tracking.optuna_tracker import OptunaTracker, Searched
from hpo.tracking.trackers import OPTUNA, lease_of
from trainer.runtime import failpoint

SPACE = {"train.optim.lr": Float(1e-6, 1.0, log=True), "opt": Choice(["adamw", "sgd"])}
DECLARED: Any = SimpleNamespace(
    objectives=[Objective("val/loss")], constraints=[], space=SimpleNamespace(dimensions=SPACE)
)


def tracker_of(home: Home) -> OptunaTracker:
    return OptunaTracker(home.root / "optuna.db", lambda name: Searched(["val/loss"], ["minimize"], SPACE))


@pytest.fixture
def made(home: Home) -> Iterator[Made]:
    study = Made(home)
    yield study
    study.ledger.close()


def drained(made: Made) -> list[optuna.trial.FrozenTrial]:
    """What the storage holds once another mirror has sent all."""
    tracker = tracker_of(made.home)
    result = mirror_process.drain(made.ledger, tracker, made.name, made.home)
    assert (result.behind, result.why) == (0, "")
    trials = tracker.storage.get_all_trials(tracker.storage.get_study_id_from_name(made.name))
    tracker.close()
    return trials


def facts(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """All that Optuna shows of a trial; NaN equals NaN."""
    curve = {step: repr(value) for step, value in trial.intermediate_values.items()}
    attributes = {key: repr(value) for key, value in trial.user_attrs.items()}
    times = [at and at.timestamp() for at in (trial.datetime_start, trial.datetime_complete)]
    what = (trial.number, trial.state, trial.values, trial.params, trial.distributions, trial.constraints)
    return dict(zip(("number", "state", "values", "params", "distributions", "constraints"), what, strict=True)) | {
        "curve": curve,
        "attributes": attributes,
        "times": times,
    }


def check_equal(made: Made, trials: list[optuna.trial.FrozenTrial]) -> None:
    """The storage's trials are those of the ledger that were ever begun, by another way."""
    expected = [facts(one) for one in to_optuna(DECLARED, made.home, made.name).trials]
    begun = [one for one in expected if one["state"] is not optuna.trial.TrialState.WAITING]
    found = {trial.number: facts(trial) for trial in trials if trial.state is not optuna.trial.TrialState.WAITING}
    assert len(trials) == len({trial.number for trial in trials})
    assert len(found) == len(begun)
    for one in begun:
        shown, times = found[one["number"]], one.pop("times")
        # A tracker has times in whole milliseconds.
        assert shown.pop("times") == [at and pytest.approx(at, abs=0.0011) for at in times] and shown == one


def moved_on(made: Made) -> None:
    """Trials of every state, with a curve whose values and epochs come apart."""
    made.ask(8)
    for kind, values, error in (
        ("complete", [0.5], ""),
        ("pruned", None, ""),
        ("paused", None, ""),
        ("nonfinite", None, "loss is NaN"),
        ("user_error", None, "ZeroDivisionError: division by zero"),
    ):
        taken = made.claim()
        for epoch in (1, 2):
            value = math.nan if kind == "nonfinite" and epoch == 2 else 1 / epoch
            made.report(taken, 10 * epoch, {"val/loss": value, "val/odd": math.inf}, epoch=epoch)
        made.finish(taken, kind, 20, values, error)
    running = made.claim()
    made.report(running, 5, {"train/loss": 1.0})
    made.report(running, 10, {"val/loss": 0.25}, epoch=1)


def test_every_state_is_shown_as_the_ledger_has_it(made):
    moved_on(made)
    check_equal(made, drained(made))
    last = made.claim()  # which was waiting, as a gap that the next number fills, or never seen
    made.report(last, 10, {"val/loss": 0.125}, epoch=1)
    made.finish(last, "complete", 10, [0.125])
    check_equal(made, drained(made))


def test_a_constraint_that_is_broken(made):
    spec = {"constraints": [{"metric": "size", "lower": None, "upper": 1.0}]}
    with made.ledger.write() as connection:
        row = connection.execute(tables.studies.select()).mappings().one()
        connection.execute(update(tables.studies).values(spec=row["spec"] | spec))
    made.complete(2, 1)
    with made.ledger.write() as connection:
        connection.execute(update(tables.trials).values(state="infeasible", violations=[0.5]))
    DECLARED.constraints = [SimpleNamespace(metric="size")]
    try:
        [trial] = drained(made)
        check_equal(made, [trial])
        assert trial.constraints == {"size": 0.5} and trial.state is optuna.trial.TrialState.COMPLETE
    finally:
        DECLARED.constraints = []


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, call: int, after: bool) -> None:
    """Have the mirror die at the n-th call that changes Optuna's storage, before or after it is carried out."""
    left = [call]

    def dying(method: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                raise Killed
            result = method(*args, **kwargs)
            if left[0] == 0:
                raise Killed
            return result

        return wrapped

    for name in dir(optuna.storages.RDBStorage):
        if name.startswith(("create_new", "set_", "delete_")):
            monkeypatch.setattr(optuna.storages.RDBStorage, name, dying(getattr(optuna.storages.RDBStorage, name)))


# Some of the writes by default: of the study, of a trial's parameters, values, attributes, state and times.
WRITES = [pytest.param(n, marks=[] if n in (2, 5, 9, 14, 24) else pytest.mark.slow) for n in range(1, 90)]


@pytest.mark.parametrize("call", WRITES)
def test_a_mirror_killed_at_a_write_sends_nothing_twice(made, monkeypatch, call):
    moved_on(made)
    for after in (False, True):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            killed_at(patch, call, after)
            drained(made)
        check_equal(made, drained(made))
        for file in made.home.root.glob("optuna.db*"):
            file.unlink()


@pytest.mark.parametrize("point", [name for name in failpoint.NAMES if name.startswith("mirror.")])
def test_a_mirror_killed_between_its_steps_goes_on(made, monkeypatch, point):
    moved_on(made)

    def die(name: str) -> None:
        if name == point:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "failpoint", die)
        with contextlib.suppress(Killed):
            drained(made)
    check_equal(made, drained(made))


def test_a_storage_that_is_lost_is_made_anew(made):
    moved_on(made)
    drained(made)
    for file in made.home.root.glob("optuna.db*"):
        file.unlink()
    check_equal(made, drained(made))


def test_a_ledger_that_was_taken_back_takes_the_storage_along(made):
    moved_on(made)
    drained(made)
    with made.ledger.write() as connection:  # as an older copy of it has it
        connection.execute(update(tables.trials).where(tables.trials.c.number == 0).values(revision=1))
    made.ledger.transact(lambda c: None)
    assert [trial.number for trial in drained(made)] == [*range(6)]
    check_equal(made, drained(made))


def test_a_study_of_the_name_that_is_another_takes_its_place(made):
    tracker, other = tracker_of(made.home), Run("v" * 32, "s", 0, {"hpo.run_uid": "v" * 32})
    token = tracker.open_study("s", other)
    moved_on(made)
    assert len(drained(made)) == 6
    assert tracker.find("s", other.uid) == [] and len(tracker.find("s", made.uid, children=True)) == 6
    with pytest.raises(Refused, match="was deleted"):
        tracker.send(f"{token}/0", Batch())
    tracker.remove("s", other.uid)
    assert tracker.find("s", made.uid), "what another study of that name has stays"
    tracker.remove("s", made.uid)
    assert tracker.find("s", made.uid) == []
    tracker.close()


def test_a_study_that_is_deleted_leaves_the_storage_too(made):
    made.complete(1, 1)
    drained(made)
    here = ["rm", "--study", "s", "--yes", "--leave-mlflow", "--json", "--home", str(made.home.root)]
    lease = leases.acquire(made.ledger, lease_of(made.id, OPTUNA), "s", Process.current(), SystemClock(), 60.0)
    assert CliRunner().invoke(app, here).exit_code == 3, "its mirror lives"
    lease.release()
    said = CliRunner().invoke(app, here)
    assert said.exit_code == 0, said.output
    tracker = tracker_of(made.home)
    assert tracker.find("s", made.uid) == [] == tracker.storage.get_all_studies()
    tracker.close()


def test_parameters_that_the_space_does_not_hold_are_refused(made):
    tracker = tracker_of(made.home)
    parent = tracker.open_study("s", Run(made.uid, "s", 0, {}))
    for params, why in (({"x": "1"}, "nothing that"), ({"opt": "lion"}, "none of"), ({"train.optim.lr": "x"}, "fit")):
        child = tracker.open_trial(parent, Run(f"{made.uid}/0", "s-0", 0, {}))
        with pytest.raises(Refused, match=why):
            tracker.send(child, Batch(params=params, tags={"hpo.state": "running"}))
    assert [*tracker.points(tracker.find("s", made.uid, children=True))] == []
    epoch = [Point("val/loss", 3, 9, 0.5), Point("epoch", 3, 9, 1.0)]
    tracker.send(child, Batch(points=epoch, tags={"hpo.state": "running"}))
    assert [*tracker.points(tracker.find("s", made.uid, children=True))] == [(child, Point("val/loss", 1, 0, 0.5))]
    tracker.close()


def test_a_file_that_is_no_storage_is_unreachable(tmp_path: Path):
    (tmp_path / "optuna.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Unreachable, match=r"is damaged .*: move it away, .* and `hpo ui --optuna` makes it anew"):
        OptunaTracker(tmp_path / "optuna.db", lambda name: Searched([], [], {}))
