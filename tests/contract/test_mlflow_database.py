"""MLflow's own database as it is made for a home."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from hpo.tracking.base import Batch, Dataset, Model, Point, Refused, Run, Unreachable
from hpo.tracking.mlflow import store as mlflow_store
from hpo.tracking.mlflow.sqlite import SqliteTracker, open_mlflow
from hpo.tracking.mlflow.store import initialise
from hpo.tracking.mlflow.tracker import MlflowTracker

TIMES = ("creation_time", "last_update_time")


def contents(path) -> tuple[list[str], list[dict]]:
    """Everything in a database but when its first experiment was made.

    The lines of a statement are sorted: Alembic rebuilds a table with its constraints in the order of a set.
    """
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT * FROM experiments")
        names = [column[0] for column in rows.description]
        first = [{name: value for name, value in zip(names, row, strict=True) if name not in TIMES} for row in rows]
        connection.execute("DELETE FROM experiments")
        return sorted(_sorted_lines(statement) for statement in connection.iterdump()), first


def _sorted_lines(statement: str) -> str:
    return "\n".join(sorted(line.strip().rstrip(",") for line in statement.splitlines()))


def test_recorded_statements_make_what_migrations_make(tmp_path, monkeypatch):
    """`python -m hpo.tracking.mlflow.store` records those of another version of MLflow."""
    made, migrated = tmp_path / "made.db", tmp_path / "migrated.db"
    initialise(made, tmp_path / "artifacts")
    monkeypatch.setattr(mlflow_store, "version", lambda _: "0.0.0")  # nothing is recorded of it
    initialise(migrated, tmp_path / "artifacts")
    assert contents(made) == contents(migrated)
    assert f"VALUES('{mlflow_store.REVISION}')" in "".join(contents(migrated)[0])
    assert contents(made)[1][0]["artifact_location"] == str(tmp_path / "artifacts" / "0")


WHEN = (*TIMES, "creation_timestamp_ms", "last_updated_timestamp_ms", "input_uuid")


def everything_sent(tracker: MlflowTracker, root: Path) -> dict[str, list]:
    """What a study and a trial leave in every table, without ids, times of writing and places."""
    study = Run("u" * 32, "s", 1_700_000_000_000, {"hpo.run_uid": "u" * 32, "hpo.study": "s"}, "studies.mlp", "c0ffee")
    parent = tracker.open_study("s", study)
    tracker.describe("s", {"mlflow.note.content": "first"})
    tracker.describe("s", {"mlflow.note.content": "second", "other": "ü"})
    uid = f"{study.uid}/0"
    child = tracker.open_trial(parent, Run(uid, "s-0000", 5, {"hpo.run_uid": uid, "hpo.study": "s"}))
    values = [0.5, math.nan, math.inf, -math.inf, 0.1 + 0.2, -0.0]
    points = [Point(key, step, 7 + step, v) for key in ("val/loss", "a b") for step, v in enumerate(values)]
    late = [Point("val/loss", 1, 9, 1.0), Point("val/loss", 5, 12, 2.0), Point("val/loss", 5, 12, 1.0)]
    (root / "weights").write_bytes(b"\x00\x01")
    model = Model("trial-0-step-5", 5, {"hpo.step": "5"}, points[:1], {"c.json": "{}"}, {"weights": root / "weights"})
    tracker.send(parent, Batch(tags={"hpo.state": "running"}, status="RUNNING", texts={"study.json": "{}"}))
    tracker.send(child, Batch(points, {"train.lr": "0.1", "model.name": "x" * 4000}, {"hpo.state": "running"}))
    read = [Dataset("x.csv", "a" * 16, "data.path", "/data/x.csv", "{}"), Dataset("y", "b", "more", "y", "{}")]
    tracker.send(child, Batch(datasets=read, tags={"user.tag": "1"}))
    tracker.send(parent, Batch(datasets=read[:1], removed_tags=["never there"]))
    tracker.send(child, Batch(datasets=read, removed_tags=["user.tag"]))
    for status in ("SCHEDULED", "RUNNING"):
        tracker.send(child, Batch(late, tags={"hpo.state": status}, status=status))
    end = Batch(points[-2:], tags={"hpo.state": "complete"}, models=[model], status="FINISHED", ended_at=9)
    for batch in (end, end, Batch(removed_models=[model.name])):
        tracker.send(child, batch)
    tracker.flush()
    [made] = {path.parent.name for path in (root / "artifacts").glob("s/models/*/artifacts")} or {"none"}
    tracker.close()
    names = {parent: "PARENT", child: "CHILD", made: "MODEL", str(root): "ROOT"}
    found = {}
    with closing(sqlite3.connect(root / "mlflow.db")) as connection:
        connection.row_factory = sqlite3.Row
        models = [row[0] for row in connection.execute("SELECT model_id FROM logged_models")]
        names |= dict.fromkeys(models, "MODEL")
        for column, table in (("dataset_uuid", "datasets"), ("input_uuid", "inputs")):
            uuids = connection.execute(f"SELECT {column} FROM {table}")
            names |= {row[0]: column for row in uuids}
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            rows = [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]
            texts = [repr(sorted((k, v) for k, v in row.items() if k not in WHEN)) for row in rows]
            for old, new in names.items():
                texts = [text.replace(old, new) for text in texts]
            found[table] = sorted(texts)
    return found


def test_rows_are_those_of_mlflows_client(tmp_path):
    for name in ("own", "client"):
        (tmp_path / name).mkdir()
    own, client = (
        everything_sent(kind(f"sqlite:///{tmp_path / name}/mlflow.db", tmp_path / name / "artifacts"), tmp_path / name)
        for name, kind in (("own", SqliteTracker), ("client", MlflowTracker))
    )
    assert own == client
    assert len(own["metrics"]) == 15 and len(own["latest_metrics"]) == 2 and own["logged_models"]
    assert (len(own["datasets"]), len(own["inputs"]), len(own["input_tags"])) == (2, 4, 3)  # an output is an input too


def test_what_mlflow_may_refuse_is_left_to_its_client(tmp_path):
    tracker = open_mlflow(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "artifacts")
    assert isinstance(tracker, SqliteTracker)
    run = tracker.open_study("s", Run("u" * 32, "s", 5, {"hpo.run_uid": "u" * 32, "hpo.study": "s"}))
    assert "_client" not in tracker.__dict__
    with pytest.raises(Refused, match="Invalid value"):
        tracker.send(run, Batch(params={"lr(max)": "1"}))
    tracker.send(run, Batch(params={"long": "x" * 6000}))
    assert tracker.find("s", "u" * 32)[0].params == {"long": "x" * 6000}
    tracker.close()


@pytest.mark.parametrize("known", ["0000", ""])
def test_another_release_of_mlflow_is_spoken_to_by_its_client(tmp_path, monkeypatch, known):
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    open_mlflow(uri, tmp_path / "artifacts").close()
    if known:  # tables of another revision
        monkeypatch.setattr("hpo.tracking.mlflow.sqlite.REVISION", known)
    else:  # a version of which nothing is recorded
        monkeypatch.setattr(mlflow_store, "version", lambda _: "0.0.0")
    tracker = open_mlflow(uri, tmp_path / "artifacts")
    assert type(tracker) is MlflowTracker
    tracker.close()


def migrated(database: Path, revision: str, *statements: str) -> None:
    """As a newer `mlflow ui` does that is started beside a run."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for statement in (f"UPDATE alembic_version SET version_num = '{revision}'", *statements):
            connection.execute(statement)


def steps(database: Path) -> list[int]:
    with closing(sqlite3.connect(database)) as connection:
        return [step for (step,) in connection.execute("SELECT step FROM metrics ORDER BY step")]


@pytest.mark.parametrize("statements", [(), ("ALTER TABLE params RENAME COLUMN value TO text",)])
def test_tables_that_are_migrated_meanwhile_are_the_clients(tmp_path, statements):
    """The second migration breaks what is read before a transaction begins."""
    database = tmp_path / "mlflow.db"
    tracker = open_mlflow(f"sqlite:///{database}", tmp_path / "artifacts")
    run = tracker.open_study("s", Run("u" * 32, "s", 5, {"hpo.run_uid": "u" * 32, "hpo.study": "s"}))
    tracker.send(run, Batch([Point("loss", 0, 5, 0.5)], {"lr": "1"}))
    migrated(database, "0123456789ab", *statements)
    with pytest.raises(Unreachable, match="no such column" if statements else "migrated to .*0123456789ab"):
        tracker.send(run, Batch([Point("loss", 1, 6, 0.25)], {"lr": "1"}))
    assert steps(database) == [0] and type(tracker) is MlflowTracker
    with pytest.raises(Unreachable, match="out-of-date database schema"):  # which the installed client does not know
        tracker.send(run, Batch([Point("loss", 1, 6, 0.25)]))
    assert steps(database) == [0]
    back = ["ALTER TABLE params RENAME COLUMN text TO value"] if statements else []
    migrated(database, mlflow_store.REVISION, *back)
    tracker.send(run, Batch([Point("loss", 1, 6, 0.25)], {"lr": "1"}))
    tracker.flush()
    tracker.close()
    assert steps(database) == [0, 1]
