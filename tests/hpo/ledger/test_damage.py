"""A value that a ledger cannot be read for ends a command in one sentence, which names its table and row."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from crafted import open_crafted, put_trial
from rounds import rounds
from sqlalchemy import insert
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.errors import HomeError, StorageError
from hpo.ledger import Ledger
from hpo.ledger.database import damage, store, tables
from hpo.storage.home import Home

COLUMNS = [(table.name, column.name) for table in tables.metadata.sorted_tables for column in table.columns]
JSONS = [
    (table.name, column.name)
    for table in tables.metadata.sorted_tables
    for column in table.columns
    if isinstance(column.type, tables.Json)
]
COMMANDS = (["status"], ["best"], ["show", "1"], ["compare", "--all"], ["verify"], ["resume"], ["sync"], ["importance"])
# The bit that makes `{` a `;` and `[` a `{`, text that is not UTF-8, and another kind of JSON.
HARMS = ("CAST(X'3b' || substr(CAST({0} AS BLOB), 2) AS TEXT)", "CAST(X'7bff' AS TEXT)", "'\"a\"'")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A ledger with a row in every table that has a column of JSON."""
    path = tmp_path_factory.mktemp("whole") / "ledger.db"
    ledger = open_crafted(path)
    for number in range(3):
        trial = put_trial(ledger, number, "complete", (0.5, 0.6 + 0.1 * number), violations=[0.0])
    with ledger.write() as connection:
        kept = {"trial_id": trial, "step": 10, "fence": 1, "revision": 1}
        decided = {"verdict": "continue", "reason": "", "params": {}, "strategy": "median", "fold": 0}
        connection.execute(insert(tables.decisions).values(kept | decided))
        stored = {"epoch": 1, "path": "p", "sha256": "s", "size": 1, "state": "kept", "metrics": {}, "at": 0.0}
        connection.execute(insert(tables.checkpoints).values(kept | stored))
        event = {"study_id": 1, "trial_id": trial, "kind": "x", "fields": {}, "at": 0.0, "uid": "u", "revision": 1}
        connection.execute(insert(tables.events).values(event))
        told = {"study_id": 1, "target": "t", "event": "end/1", "content": {}, "state": "sent", "at": 0.0}
        connection.execute(insert(tables.alerts).values(told))
    assert all(damage.first(connection) == "" for connection in [ledger.engine.connect()])
    ledger.close()
    return path


def harmed(whole: Path, home: Home, table: str, column: str, value: str) -> None:
    home.create()
    with closing(sqlite3.connect(whole)) as source, closing(sqlite3.connect(home.root / "ledger.db")) as copy:
        source.backup(copy)
        copy.execute(f'UPDATE {table} SET "{column}" = {value}')
        copy.commit()
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def sentence(home: Home, command: list[str]) -> str:
    """What a command says on stderr if it fails, which it does in one sentence."""
    ran = CliRunner().invoke(app, [*command, "--home", str(home.root)])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), (command, ran.exception)
    lines = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == (ran.exit_code != 0) or command == ["verify"], ran.output
    return " ".join(lines)


@rounds(("table", "column"), JSONS)
def test_json_that_cannot_be_read_is_named(whole, tmp_path, table, column):
    for number, harm in enumerate(HARMS):
        home = Home.at(tmp_path / str(number))
        harmed(whole, home, table, column, harm.format(f'"{column}"'))
        said = [sentence(home, command) for command in (COMMANDS if number == 0 else COMMANDS[:3])]
        named = [text for text in said if f"is damaged: {column} in table {table}, row " in text]
        assert all("restore the file from a backup, or choose another --home" in text for text in named)
        if table in ("studies", "asks") and column in ("spec", "params"):
            assert len(named) >= 2, said
        ledger = Ledger(home.storage)
        with ledger.engine.connect() as connection:
            assert f"{column} in table {table}, row " in damage.first(connection)
        ledger.close()


@rounds(("table", "column"), [("trials", "step"), ("trials", "state"), ("reports", "value"), ("events", "at")])
def test_a_value_of_another_type_is_found(whole, tmp_path, table, column):
    harmed(whole, home := Home.at(tmp_path), table, column, "X'00ff'")
    ledger = Ledger(home.storage)
    with pytest.raises(StorageError, match=f"is damaged: {column} in table {table}, row "), ledger.read():
        raise TypeError("what code that reads it may raise")
    ledger.close()


def test_an_error_that_is_none_of_the_ledgers_stays_what_it_is(whole):
    ledger = Ledger(f"sqlite:///{whole}")
    with pytest.raises(KeyError, match="mine"), ledger.read():
        raise KeyError("mine")

    def body(connection: sa.Connection) -> None:
        raise KeyError("mine")

    for asked in (ledger.look, ledger.transact):
        with pytest.raises(KeyError, match="mine"):
            asked(body)
    ledger.close()


@rounds(
    ("before", "after"), [("objectives", "objecuives"), ("metric", "metrik"), ("median", "mediam"), ("name", "namd")]
)
def test_one_flipped_bit_in_a_specification_is_a_sentence(whole, tmp_path, before, after):
    harmed(whole, home := Home.at(tmp_path), "studies", "spec", f"replace(spec, '\"{before}\"', '\"{after}\"')")
    for command in COMMANDS:
        said = sentence(home, command)
        assert before in ("median", "name") or "is damaged: spec in table studies, row id 1, has " in said


@rounds(
    ("code", "says", "kind"),
    [
        (errno.EPERM, "make it readable and writable", HomeError),
        (errno.EACCES, "make it readable and writable", HomeError),
        (errno.ENOSPC, "No space left on device", StorageError),
        (errno.EDQUOT, "quota exceeded", StorageError),
        (errno.EIO, "Input/output error", StorageError),
        (0, "the system's log may say why", StorageError),
    ],
)
def test_an_error_of_the_disk_names_its_cause(whole, code, says, kind):
    """SQLite says no more than "disk I/O error", and a file that may not be written is no want of space."""
    ledger, told = Ledger(f"sqlite:///{whole}"), sqlite3.OperationalError("disk I/O error")
    told.sqlite_errorcode = sqlite3.SQLITE_IOERR | 3 << 8  # SQLITE_IOERR_WRITE

    def refuse(path, flags, *rest, opened=os.open, **options):
        if code and str(path).startswith(str(whole)):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, flags, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.os, "open", refuse)
        with pytest.raises(kind, match=says) as caught, ledger.read():
            raise sa.exc.OperationalError("INSERT", {}, told)
    assert "free some space" not in str(caught.value)
    ledger.close()


def test_a_full_disk_asks_for_space(whole, tmp_path):
    harmed(whole, home := Home.at(tmp_path), "trials", "step", "step")
    ledger = Ledger(home.storage)
    with pytest.raises(StorageError, match="free some space"), ledger.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        connection.execute(sa.update(tables.studies).values(identity={"a": json.dumps([0.5] * 100_000)}))
    ledger.close()


def test_a_file_that_takes_no_more_writes_is_no_want_of_space(tmp_path):
    """A real EPERM: the file is made immutable under an open ledger, as an administrator or a ransom guard does."""
    ledger = open_crafted(tmp_path / "ledger.db")
    files = [
        str(tmp_path / name) for name in ("ledger.db", "ledger.db-wal")
    ]  # a mapped file, as -shm is, would end the process
    if subprocess.run(["chattr", "+i", *files], capture_output=True).returncode:
        ledger.close()
        pytest.skip("runs as root, on a file system that knows immutable files")
    try:
        with pytest.raises(HomeError, match=r"make it readable and writable") as caught:
            put_trial(ledger, 0, "complete", (0.5,))
        with pytest.raises(HomeError, match=r"make it readable and writable"):
            put_trial(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), 0, "complete", (0.5,))
    finally:
        subprocess.run(["chattr", "-i", *files], check=True)
    assert "free some space" not in str(caught.value)
    assert put_trial(ledger, 0, "complete", (0.5,)), "nothing is wrong with it once it may be written again"
    ledger.close()
