"""A run reads its study once, plans without a word, and drives what it has planned."""

from __future__ import annotations

import re
from contextlib import closing

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from study_runs import begin

from hpo.driver.prepare import planned_run
from hpo.driver.request import request_of
from hpo.driver.run import run
from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.storage.home import Home

STUDY = """
import hpo


@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss")
def small(trial):
    return trial.params.x
"""
LEASE = re.compile(r"(INSERT INTO|UPDATE) leases\b")
READS = re.compile(r"\bFROM studies\b")


class Leased(Exception):
    """The lease is held."""


@pytest.fixture
def statements():
    seen: list[str] = []

    def note(connection, cursor, statement, *rest):
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield seen
    event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(STUDY)
    return str(file)


def held(*_):
    raise Leased


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("reference", ["file", "stored"])
def test_the_study_is_read_once_before_the_lease(tmp_path, file, statements, reference):
    home = Home(tmp_path / "home")
    begin(home, reference=file)
    statements.clear()
    asked = {"reference": file} if reference == "file" else {"name": "small"}
    with pytest.raises(Leased):
        run(request_of(home, trials=1, executor="inline", **asked), held)
    before = statements[: next(i for i, text in enumerate(statements) if LEASE.match(text))]
    assert sum(bool(READS.search(text)) for text in before) == 1, before


def test_a_plan_is_silent_and_writes_nothing(tmp_path, file, capfd, statements):
    home = Home(tmp_path / "home")
    begin(home, reference=file)
    capfd.readouterr()
    with closing(Ledger(home.storage, create=False)) as ledger:
        statements.clear()
        planned = planned_run(request_of(home, file, trials=3), ledger)
    assert planned.resolved.spec.name == "small" and planned.options.trials == 3
    assert not [text for text in statements if not text.startswith(("SELECT", "PRAGMA", "BEGIN"))]
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_new_study_needs_a_bound(tmp_path, file):
    request = request_of(Home(tmp_path / "home"), file)
    with pytest.raises(
        UserError, match=r"^study 'small' is new: say how far it is to go, by --trials, .* or --stop-when"
    ):
        planned_run(request, None)
