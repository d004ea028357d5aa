"""A study of Optuna's comes in whole and goes out again equal; a damaged or foreign storage is one sentence."""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

import hpo
from hpo.errors import UserError
from hpo.interchange.export import export_study
from hpo.ledger import Ledger
from hpo.ledger.process_id import start_time
from hpo.search.samplers.optuna_sampler import quiet_optuna

_ALIKE = ("number", "state", "values", "params", "distributions", "intermediate_values", "user_attrs", "system_attrs")
_ALIKE = (*_ALIKE, "datetime_start", "datetime_complete", "constraints")


def ended(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials() if trial.state.is_finished()]


def assert_equal(left: Iterable[FrozenTrial], right: Iterable[FrozenTrial]) -> None:
    for one, other in zip(left, right, strict=True):
        for name in _ALIKE:  # by their texts, since NaN equals nothing
            assert repr(getattr(one, name)) == repr(getattr(other, name)), (one.number, name)


def round_trip(home, brought, url: str, to: str, **given: Any) -> tuple[optuna.Study, optuna.Study]:
    """Import, export under another name, and load both."""
    done = brought("optuna", url, **given).done
    ledger = Ledger(home.storage)
    export_study(ledger, home, done.name, to, "optuna", "again")
    with quiet_optuna():
        return optuna.load_study(study_name=given.get("study"), storage=url), optuna.load_study(
            study_name="again", storage=to
        )


@pytest.fixture
def made(tmp_path):
    """A new study in a storage: its URL and the study."""

    def make(name: str = "s", **given: Any) -> tuple[str, optuna.Study]:
        url = f"sqlite:///{tmp_path / 'made.db'}"
        with quiet_optuna():
            return url, optuna.create_study(storage=url, study_name=name, **given)

    return make


@pytest.mark.parametrize("release", ["3.6.2", "5.0.0"])
def test_round_trip_of_a_released_database_is_equal(asset, home, brought, tmp_path, release):
    """By 5.0.0 and by 3.6.2, whose schema 5.0.0 still reads."""
    url = f"sqlite:///{asset(f'optuna-{release}.db.xz')}"
    before, after = round_trip(home, brought, url, f"sqlite:///{tmp_path / 'out.db'}")
    assert_equal(ended(before), after.get_trials())
    assert (before.directions, before.user_attrs) == (after.directions, after.user_attrs)
    assert {trial.state for trial in ended(before)} == {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}


def test_what_the_ledger_has_of_a_released_database(asset, brought):
    found = brought("optuna", asset("optuna-5.0.0.db.xz"), metrics=["val/accuracy"])
    assert found.done.name == "digits-sweep" and found.study.state == "complete"
    assert found.study.spec.objectives == [{"metric": "val/accuracy", "direction": "maximize", "select": "last"}]
    states = {trial.number: trial.state for trial in found.trials}
    assert {number for number, state in states.items() if state == "pruned"} == {5, 9}
    assert states[4] == "failed" and states[7] == "infeasible"  # its value is infinite
    assert [step for step, _ in found.curves[0]["val/accuracy"]] == [1, 2, 3]
    assert math.isnan(found.curves[6]["val/accuracy"][1][1])
    assert found.curves[8]["val/accuracy"][-1] == (4, found.trials[8].values[0])  # its value is not its last report
    assert {type(trial.params["optimizer"]) for trial in found.trials} > {str, int}
    assert sum("momentum" in trial.params for trial in found.trials) == sum(
        trial.params["optimizer"] == "sgd" for trial in found.trials
    )
    assert found.study.spec.imported["space"]["lr"] == {
        "type": "Float", "low": 1e-5, "high": 0.1, "log": True, "step": None,
    }  # fmt: skip
    assert found.done.left == ["1 trial in state RUNNING, which may end yet"]


def test_a_source_is_left_as_it_is(asset, brought, tmp_path):
    """Also where it may not be written: a database is opened for reading alone."""
    file = asset("optuna-5.0.0.db.xz")
    before = file.read_bytes()
    file.chmod(0o400)
    brought("optuna", file)
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(file.name)] == [file.name]


def test_several_objectives_constraints_and_names_come_back(home, brought, made, tmp_path):
    url, study = made(directions=["minimize", "maximize"])
    with quiet_optuna():
        study.set_metric_names(["loss", "accuracy"])

    def objective(trial):
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_constraint("latency", x - 0.5)
        return x, x

    for x in (0.2, 0.4, 0.8):
        study.enqueue_trial({"x": x})
    with quiet_optuna():
        study.optimize(objective, n_trials=3)
    before, after = round_trip(home, brought, url, f"sqlite:///{tmp_path / 'out.db'}")
    assert_equal(ended(before), after.get_trials())
    assert after.metric_names == ["loss", "accuracy"] and after.directions == before.directions
    assert [trial["number"] for trial in hpo.open("s", home=home.root).front] == [0, 1]  # 2 breaks the constraint
    trials = hpo.open("s", home=home.root).trials()
    assert list(trials["state"]) == ["complete", "complete", "infeasible"]
    assert list(trials["values.loss"]) == [0.2, 0.4, 0.8]


def test_odd_choices_and_ranges_that_change_come_back(home, brought, made, tmp_path):
    """A choice that is not a number, a range that depends on the trial, and attributes that JSON hardly holds."""
    url, study = made()

    def objective(trial):
        top = 2.0 if trial.number else 1.0
        trial.set_user_attr("odd", float("inf"))
        trial.suggest_categorical("c", [None, float("nan"), 1, "1", True])
        return trial.suggest_float("x", 0.0, top) + trial.suggest_int("n", 0, 10, step=5)

    study.enqueue_trial({"c": float("nan")})
    with quiet_optuna():
        study.optimize(objective, n_trials=4)
    before, after = round_trip(home, brought, url, f"sqlite:///{tmp_path / 'out.db'}")
    assert_equal(ended(before), after.get_trials())


def test_a_second_import_adds_what_is_new(brought, made):
    url, study = made()
    trial = study.ask()
    study.add_trial(optuna.create_trial(value=1.0))
    assert brought("optuna", url).done.added == 1
    study.tell(trial, 0.5)
    study.add_trial(optuna.create_trial(value=2.0))
    found = brought("optuna", url)
    assert found.done.added == 2 and [trial.values for trial in found.trials] == [[1.0], [0.5], [2.0]]
    assert found.study.requested == 3 and brought("optuna", url).done.added == 0


def test_a_journal_is_read_too(brought, tmp_path):
    path = tmp_path / "journal.log"
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with quiet_optuna():
        study = optuna.create_study(storage=JournalStorage(JournalFileBackend(str(path))), study_name="j")
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    assert len(brought("optuna", path).trials) == 2


def test_names_are_changed_on_the_way_in_and_go_out_so(home, brought, made, tmp_path):
    url, study = made()
    study.add_trial(optuna.create_trial(value=1.0, params={"lr": 0.1}, distributions={"lr": _unit()}))
    found = brought("optuna", url, rename={"lr": "train.optim.lr", "value": "val/loss"})
    assert found.trials[0].params == {"train.optim.lr": 0.1}
    assert found.study.spec.objectives[0]["metric"] == "val/loss"
    assert hpo.open("s", home=home.root).to_optuna().best_trial.params == {"train.optim.lr": 0.1}
    with pytest.raises(UserError, match=r"--rename nothing=x: .* has lr, value, not nothing\.$"):
        brought("optuna", url, rename={"nothing": "x"}, name="other")
    assert not (tmp_path / "other").exists()


def _unit() -> optuna.distributions.FloatDistribution:
    return optuna.distributions.FloatDistribution(0.0, 1.0)


def test_a_storage_that_cannot_be_read_is_one_sentence(asset, brought, home, tmp_path):
    """Nothing is written: the home is not even made."""
    database = asset("optuna-5.0.0.db.xz")
    (tmp_path / "text").write_text("no database")
    (tmp_path / "journal.log").write_text('{"op_code": 0, "study_name"\nand so on\n')
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE x (y)").connection.close()
    torn = tmp_path / "torn.db"
    shutil.copy(database, torn)
    with torn.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 40_000)
    for source, said in {
        "sqlite:///nowhere.db": "file nowhere.db does not exist: name a storage",
        tmp_path / "text": "is neither a database of SQLite nor a journal",
        tmp_path / "journal.log": "cannot be read as a storage of Optuna's",
        tmp_path / "other.db": "cannot be read as a storage of Optuna's .*no such table",
        torn: "cannot be read as a storage of Optuna's .*malformed",
        "nosuch://host/db": "cannot be read as a storage of Optuna's",
    }.items():
        with pytest.raises(UserError, match=said) as raised:
            brought("optuna", source)
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match=r"has no study 'digit sweep' \(it has digits sweep\); did you mean"):
        brought("optuna", database, study="digit sweep")
    with pytest.raises(UserError, match=r"has 1 objective, and 2 are named"):
        brought("optuna", database, metrics=["a", "b"])
    assert not home.root.exists()


def test_a_database_of_2_10_is_upgraded_by_optuna_first(asset, home, brought, tmp_path):
    """It says how, and comes back equal then: distributions that are gone since among them."""
    url = f"sqlite:///{asset('optuna-2.10.1.db.xz')}"
    with pytest.raises(UserError, match=f"older release of Optuna: .*`optuna storage upgrade --storage {url}` brings"):
        brought("optuna", url)
    with quiet_optuna(), warnings.catch_warnings(action="ignore"):
        optuna.storages.RDBStorage(url, skip_compatibility_check=True, skip_table_creation=True).upgrade()
    before, after = round_trip(home, brought, url, f"sqlite:///{tmp_path / 'out.db'}")
    assert_equal(ended(before), after.get_trials())


def test_an_export_never_overwrites_a_study(asset, home, brought, tmp_path):
    done = brought("optuna", asset("optuna-5.0.0.db.xz")).done
    ledger, url = Ledger(home.storage), f"sqlite:///{tmp_path / 'out.db'}"
    export_study(ledger, home, done.name, url, "optuna")
    with pytest.raises(UserError, match="has a study 'digits-sweep' already: name another with --name"):
        export_study(ledger, home, done.name, url, "optuna")


WRITES = """
import os, signal, sys
from pathlib import Path
import optuna
from hpo.interchange import export
from hpo.ledger import Ledger
from hpo.storage.home import Home

at, root, name, url = sys.argv[1:]
whole = getattr(optuna.Study, at)

def cut(self, *arguments):
    if at == "add_trials":
        whole(self, arguments[0][:1])
    os.kill(os.getpid(), signal.SIGKILL)

setattr(optuna.Study, at, cut)  # ends the process there
home = Home(Path(root))
export.export_study(Ledger(home.storage), home, name, url, "optuna")
"""


@pytest.mark.parametrize("at", ["set_user_attr", "add_trials"])
def test_an_export_that_was_killed_is_made_anew(process, asset, home, brought, tmp_path, at):
    done = brought("optuna", asset("optuna-5.0.0.db.xz")).done
    url = f"sqlite:///{tmp_path / 'out.db'}"
    line = [sys.executable, "-c", WRITES, at, str(home.root), done.name, url]
    killed = subprocess.run(line, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with closing(Ledger(home.storage)) as ledger:
        assert "trials written" in export_study(ledger, home, done.name, url, "optuna")
    assert brought("optuna", url, name="again").done.added == done.added


def test_an_export_that_another_process_writes_is_left_alone(process, asset, home, brought, made):
    done = brought("optuna", asset("optuna-5.0.0.db.xz")).done
    url, study = made(done.name)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    writer = [socket.gethostname(), child.pid, start_time(child.pid)]
    study._storage.set_study_system_attr(study._study_id, "hpo.writer", writer)
    with closing(Ledger(home.storage)) as ledger:
        with pytest.raises(UserError, match=f"is being written by pid {child.pid} on .*: wait, or name another"):
            export_study(ledger, home, done.name, url, "optuna")
        child.communicate(b"\n")
        assert "trials written" in export_study(ledger, home, done.name, url, "optuna")


def test_a_file_is_written_and_read_whatever_is_in_its_name(asset, home, brought, tmp_path):
    """A URL of SQLAlchemy's ends a path at its first question mark."""
    done = brought("optuna", asset("optuna-5.0.0.db.xz")).done
    place = tmp_path / "which?" / "50%41#.db"
    place.parent.mkdir()
    export_study(Ledger(home.storage), home, done.name, str(place), "optuna")
    assert place.is_file() and not (tmp_path / "which").exists()
    assert brought("optuna", place, name="again").done.added == done.added
