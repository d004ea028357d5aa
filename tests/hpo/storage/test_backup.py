"""`hpo backup`: one snapshot of the ledger, the list of what it needs, what is gone since, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest
from driven import driven
from mirrored import Made
from places import HARNESS
from sqlalchemy import select, update
from tiny_runs import PROMOTE, digest
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.ledger import Ledger, checkpoints, queries
from hpo.ledger.database import tables
from hpo.ledger.rows import Connection
from hpo.storage import backup, gc, reconcile
from hpo.storage.artifacts import attach
from hpo.storage.home import Home
from trainer.checkpoint.manifest import MANIFEST

TINY = str(HARNESS / "tiny_study.py")


@pytest.fixture
def made(home) -> Iterator[Made]:
    """A study with a trial of two checkpoints that has ended and has handed over a file."""
    study = Made(home)
    study.ask()
    taken = study.claim()
    for step in (1, 2):
        study.report(taken, step, {"val/loss": 0.5}, epoch=step, checkpoint=study.checkpoint(taken, step))
    study.finish(taken, "complete", 2, [0.5])
    notes = home.root / "notes.txt"
    notes.write_text("text")
    attach(study.ledger, home.files(study.name, 0), taken.trial_id, 1, {"notes.txt": notes})
    yield study
    study.ledger.close()


def command(home: Home, *arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(app, ["backup", *arguments, "--home", str(home.root)])
    assert ran.exit_code == code, (ran.output, ran.exception)
    return ran.output


def _digest(connection: Connection) -> str:
    return queries.digest(connection, queries.study_row(connection, "s"))


def test_the_list_has_what_the_copy_names_and_writers_go_on(made, tmp_path):
    target = tmp_path / "deep" / "backup"
    with made.ledger.write():  # a writer in the middle of its transaction does not keep the backup waiting
        said = json.loads(command(made.home, "--to", str(target), "--json"))
    assert sorted(path.name for path in target.iterdir()) == ["ledger.db", "objects.json"]
    listed = json.loads((target / "objects.json").read_text())["objects"]
    assert [entry["kind"] for entry in listed] == ["checkpoint", "checkpoint", "file"]
    assert said == {"directory": str(target), "objects": 3, "bytes": sum(entry["bytes"] or 0 for entry in listed)}
    for entry in listed:
        path = made.home.root / entry["path"]
        assert (path / MANIFEST if entry["kind"] == "checkpoint" else path).is_file()
    shutil.copy(target / "ledger.db", tmp_path / "restored.db")
    with closing(Ledger(f"sqlite:///{tmp_path / 'restored.db'}", create=False)) as restored:
        digests = [made_ledger.look(_digest) for made_ledger in (restored, made.ledger)]
    assert digests[0] == digests[1]
    assert command(made.home, "--check", str(target)) == "none of 3 objects is gone.\n"


def test_what_is_gone_is_named(made, tmp_path):
    target = tmp_path / "backup"
    command(made.home, "--to", str(target))
    checkpoint, _, file = backup.read(target).objects
    shutil.rmtree(made.home.root / checkpoint.path)
    (made.home.root / file.path).unlink()
    said = command(made.home, "--check", str(target), code=1)
    assert said == f"2 of 3 objects are gone.\n  s: {checkpoint.path}\n  s: {file.path}\n"
    gone = json.loads(command(made.home, "--check", str(target), "--json", code=1))["gone"]
    assert [entry["path"] for entry in gone] == [checkpoint.path, file.path]
    assert gone[0]["sha256"] == checkpoint.sha256 and gone[1]["sha256"] is None


def test_retention_leaves_alone_what_a_backup_holds(made, tmp_path):
    target = tmp_path / "backup"
    made.ask()
    taken = made.claim()
    saved = made.checkpoint(taken, 1)
    made.report(taken, 1, {"val/loss": 0.5}, epoch=1, checkpoint=saved)
    command(made.home, "--to", str(target), "--keep-for", "7d")

    def dropped_by_a_worker() -> set[str]:
        return made.ledger.transact(lambda c: checkpoints.change(c, taken, {saved.path.name: {"state": "deleted"}}))

    assert dropped_by_a_worker() == {saved.path.name}, "it is needed"
    later = made.checkpoint(taken, 2)
    made.report(taken, 2, {"val/loss": 0.5}, epoch=2, checkpoint=later)
    made.finish(taken, "complete", 2, [0.4])  # better than trial 0
    assert gc.collect(made.ledger, made.home, "s").dropped == []
    assert command(made.home, "--check", str(target)) == "none of 4 objects is gone.\n"
    rows = tables.checkpoints
    with made.ledger.write() as connection:
        assert set(connection.execute(select(rows.c.held_until.is_(None)).order_by(rows.c.id)).scalars()) == {0, 1}
        connection.execute(update(rows).values(held_until=rows.c.held_until - 7 * 86400 - 1))
    assert len(gc.collect(made.ledger, made.home, "s").dropped) == 2


def test_bad_input_is_refused_in_a_sentence(made, tmp_path):
    target, full = tmp_path / "backup", tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("text")

    def refused(*arguments: str, code: int = 2) -> str:
        said = command(made.home, *arguments, code=code)
        assert said.startswith("error: ") and said.count("\n") == 1
        return said

    assert "is not an empty directory" in refused("--to", str(full))
    assert "is not an empty directory" in refused("--to", str(full / "notes.txt"))
    assert "no study 'other'" in refused("--to", str(target), "--study", "other")
    assert not target.exists()
    assert "name one directory" in refused()
    assert "is copied by this command: name a directory by --to" in refused("--keep-for", "7d")
    assert "give it with --to" in refused("--keep-for", "7d", "--check", str(full))
    assert "is not a length of time" in refused("--keep-for", "soon", "--to", str(target))
    assert "name one directory" in refused("--to", str(target), "--check", str(full))
    assert "holds no complete backup" in refused("--check", str(full))
    command(made.home, "--to", str(target))
    assert "lists no study 'other': it lists s." in refused("--check", str(target), "--study", "other")
    with (target / "ledger.db").open("ab") as file:
        file.write(b"more")
    assert "has changed since it was written" in refused("--check", str(target), code=1)


def drive(storage: str, home: Home, after: int | None = None) -> str:
    """Drives the tiny study in this process and returns its state: after so many ticks it is interrupted."""
    ticks = 0

    def tick(driver: Driver) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == after:
            driver.request_stop()

    with closing(Ledger(storage)) as ledger:
        request = request_of(home.create(), reference=TINY, **PROMOTE)
        return driven(ledger, request, tick=tick, trials=4, lease_timeout=20)[1]


def test_a_restored_ledger_of_postgresql_ends_as_the_uninterrupted_study(tmp_path, postgres_server):
    server, home, dump = postgres_server(), Home(tmp_path / "home"), tmp_path / "ledger.dump"
    storage = server.url.render_as_string(hide_password=False)
    address = server.url.set(drivername="postgresql").render_as_string(hide_password=False)
    assert drive(storage, home, 4) == "interrupted"
    ran = CliRunner().invoke(
        app, ["backup", "--to", str(tmp_path / "b"), "--home", str(home.root), "--storage", storage]
    )
    assert ran.exit_code == 2 and "pg_dump" in ran.output and not (tmp_path / "b").exists()
    held = CliRunner().invoke(app, ["backup", "--keep-for", "7d", "--home", str(home.root), "--storage", storage])
    assert held.exit_code == 0 and "until then: now run `pg_dump --format=custom`" in held.stdout
    subprocess.run([server.programs / "pg_dump", "--format=custom", f"--file={dump}", address], check=True)
    assert drive(storage, home) == "complete"
    restore = [server.programs / "pg_restore", "--clean", "--if-exists", "--exit-on-error", f"--dbname={address}", dump]
    subprocess.run(restore, check=True)
    with closing(Ledger(storage)) as ledger:
        study = ledger.look(lambda connection: queries.study_row(connection, "tiny"))
        changes = reconcile.reconcile(ledger, home, study, None)
        assert changes != [] and not any("gone" in change for change in changes), "all that it needs was held"
    assert drive(storage, home) == "complete"
    golden = f"sqlite:///{tmp_path / 'golden.db'}"
    assert drive(golden, Home(tmp_path / "golden")) == "complete"
    with closing(Ledger(storage)) as ledger, closing(Ledger(golden)) as uninterrupted:
        assert digest(ledger) == digest(uninterrupted)
        assert reconcile.reconcile(ledger, home, study, None) == []
