"""What people add, change, rename and delete in MLflow's pages, and what `hpo verify` and `hpo sync` make of it."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator

import pytest
from mirrored import ENVIRONMENT, ME, Made, sync
from mlflow import MlflowClient
from sqlalchemy import update
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger.database import tables
from hpo.ledger.views import mirror as mirror_queries
from hpo.storage.home import Home
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.verify import verify

pytestmark = pytest.mark.whole


@pytest.fixture
def made(tmp_path, empty_mlflow) -> Iterator[Made]:
    """Two trials, the first with a checkpoint, a model and a file, all mirrored."""
    home = Home.at(tmp_path / "home").create()
    shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    study = Made(home)
    with study.ledger.write() as connection:
        row = {**ENVIRONMENT, "home": str(home.root), "tracking_uri": home.tracking_uri, "host": ME.host}
        connection.execute(update(tables.studies).values(environment=row))
    home.mark(study.name, study.uid)
    study.ask()
    taken = study.claim()
    study.report(taken, 1, {"val/loss": 0.3}, epoch=1, checkpoint=study.checkpoint(taken, 1))
    study.artifact(taken, "notes.txt", "seen")
    study.finish(taken, "complete", 1, [0.3])
    study.complete(2)
    study.end()
    sync(study)
    yield study
    study.ledger.close()


@pytest.fixture
def pages(made) -> MlflowClient:
    """What the pages do, through MLflow's client."""
    with contextlib.closing(MlflowTracker(made.home.tracking_uri, made.home.artifacts)) as tracker:
        return tracker._client


def run_of(made: Made, number: int) -> str:
    return made.ledger.look(lambda c: mirror_queries.cursors(c, made.home.tracking_uri, made.id))[number].run_id


def at(made: Made) -> list[str]:
    return ["--home", str(made.home.root), "--tracking-uri", made.home.tracking_uri]


def more(made: Made) -> None:
    """Another trial, as after `hpo resume`."""
    with made.ledger.write() as connection:
        connection.execute(update(tables.studies).values(state="open", revision=tables.studies.c.revision + 1))
    made.complete(2)
    made.end()


def synced(made: Made, *options: str) -> str:
    ran = CliRunner().invoke(app, ["sync", *at(made), *options])
    assert ran.exit_code == 0, ran.output
    return ran.output


def differences(made: Made) -> list[str]:
    return verify(made.home, made.home.storage, made.home.tracking_uri, made.name).differences


NOTHING = "s: MLflow has everything (0 batches sent).\n"


def test_what_people_add_is_no_difference(made, pages, tmp_path):
    for run in (run_of(made, 0), run_of(made, mirror_queries.STUDY)):
        pages.log_param(run, "reviewed by", "me")
        pages.log_metric(run, "own/score", 0.5, step=3)
        pages.set_tag(run, "own", "tag")
        pages.set_tag(run, "mlflow.note.content", "a note")
        (tmp_path / "own.txt").write_text("own")
        pages.log_artifact(run, str(tmp_path / "own.txt"))
        pages.update_run(run, name="renamed")
    assert differences(made) == []
    assert synced(made) == "s: MLflow has everything (1 batch sent).\n"
    assert pages.get_run(run_of(made, 0)).data.params["reviewed by"] == "me"


def test_a_status_and_a_tag_set_by_hand_are_set_back(made, pages):
    pages.set_terminated(run_of(made, 0), "KILLED")
    pages.set_tag(run_of(made, 1), "hpo.state", "mine")
    pages.update_run(run_of(made, mirror_queries.STUDY), "RUNNING")
    assert len(differences(made)) > 2
    said = synced(made)
    assert re.search(
        r"s: trial 0: status, end changed there, and sent again\.\ns: trial 1: tag hpo\.state changed", said
    )
    assert "s: the study: status changed there, and sent again." in said
    assert differences(made) == [] and synced(made) == "s: MLflow has everything (1 batch sent).\n"


def test_files_that_were_deleted_are_made_again(made):
    [notes] = made.home.artifacts.rglob("notes.txt")
    [saved] = [path for path in made.home.artifacts.rglob("checkpoints") if path.is_dir()]
    notes.unlink()
    shutil.rmtree(saved)
    assert "trial 0: files/notes.txt, checkpoints/step-00000001 changed there" in synced(made).replace(
        "checkpoints/step-00000001, files/notes.txt", "files/notes.txt, checkpoints/step-00000001"
    )
    assert notes.exists() and saved.exists() and differences(made) == []


@pytest.mark.parametrize("for_ever", [False, True], ids=["hidden", "for good"])
def test_a_deleted_run_is_made_again(made, pages, for_ever):
    run = run_of(made, 1)
    pages.delete_run(run)
    if for_ever:
        pages._tracking_client.store._hard_delete_run(run)
    [difference] = differences(made)
    assert "trial 1: its run" in difference and "hpo sync" in difference
    assert "s: 1 run (trial 1) deleted there, and made again." in synced(made)
    assert differences(made) == [] and (run_of(made, 1) == run) != for_ever


def test_a_deleted_run_is_left_so_and_made_again_when_asked(made, pages):
    run = run_of(made, 1)
    pages.delete_run(run)
    said = synced(made, "--deleted", "leave")
    assert re.search("s: 1 run .trial 1. deleted there, and left so: `hpo sync .*--deleted restore.*` makes it", said)
    assert differences(made) == []
    synced(made)
    assert pages.get_run(run).info.lifecycle_stage == "deleted", "that it is left is remembered"
    assert "made again" in synced(made, "--deleted", "restore")
    assert pages.get_run(run).info.lifecycle_stage == "active" and differences(made) == []


def test_a_run_of_the_study_itself_that_was_deleted_is_restored(made, pages):
    run = run_of(made, mirror_queries.STUDY)
    pages.delete_run(run)
    assert "s: 1 run (the study) deleted there, and made again." in synced(made)
    assert run_of(made, mirror_queries.STUDY) == run and differences(made) == []


def test_a_renamed_experiment_is_followed(made, pages):
    experiment = pages.get_experiment_by_name("s")
    pages.rename_experiment(experiment.experiment_id, "digits, May")
    assert differences(made) == []
    assert "s: its experiment is called 'digits, May' there." in synced(made)
    more(made)
    sync(made)
    assert pages.get_experiment_by_name("s") is None, "no second one is made"
    assert pages.get_run(run_of(made, 2)).info.experiment_id == experiment.experiment_id
    removed = CliRunner().invoke(app, ["rm", "--study", "s", "--yes", *at(made)])
    assert removed.exit_code == 0, removed.output
    assert "digits, May" not in [one.name for one in pages.search_experiments()]


def test_a_deleted_experiment_is_restored(made, pages):
    where = pages.get_experiment_by_name("s").experiment_id
    pages.delete_experiment(where)
    [difference] = differences(made)
    assert "MLflow's experiment 's' was deleted: `hpo sync" in difference
    assert "s: its experiment, which was deleted there, is restored." in synced(made)
    assert pages.get_experiment(where).lifecycle_stage == "active" and differences(made) == []


def test_a_deleted_experiment_is_left_so(made, pages):
    where = pages.get_experiment_by_name("s").experiment_id
    pages.delete_experiment(where)
    assert "deleted there with its experiment, and left so" in synced(made, "--deleted", "leave")
    more(made)
    assert differences(made) == [] and synced(made) == NOTHING
    assert pages.get_experiment(where).lifecycle_stage == "deleted"
    assert "is restored" in synced(made, "--deleted", "restore")
    assert differences(made) == []
    assert len(pages.search_runs([where])) == 4


def test_a_driver_beside_a_deleted_experiment_says_so_and_loses_nothing(made, pages):
    pages.delete_experiment(pages.get_experiment_by_name("s").experiment_id)
    more(made)
    with pytest.raises(AssertionError):
        sync(made)
    assert "is restored" in synced(made)
    assert differences(made) == []
