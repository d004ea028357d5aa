"""Quotas of people hold on every ledger, whatever number of workers claims at once."""

from __future__ import annotations

import getpass
import itertools
import json
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
from mirrored import ME, Made
from sqlalchemy import insert, select
from study_runs import refused
from typer.testing import CliRunner

import hpo
from hpo.cli.main import app
from hpo.ledger import Ledger, claims, quotas
from hpo.ledger.database import tables
from hpo.ledger.quotas import Quota
from hpo.storage.home import Home

NOBODY_LEFT: list[claims.Claim] = []


class Owned(Made):
    """A study that `person` began."""

    def __init__(self, home: Home, name: str, storage: str, person: str) -> None:
        super().__init__(home, name, storage)
        entry = {"uid": uuid.uuid4().hex, "at": time.time() + 1, "study": name, "action": "run", "user": person}
        with self.ledger.write() as connection:
            connection.execute(insert(tables.audit).values(entry | {"host": "h", "command": "hpo run"}))


@pytest.fixture
def studies(storage, tmp_path) -> Iterator[tuple[Owned, Owned, Owned]]:
    """Two studies of ann's and one of ben's, each with six waiting trials."""
    people = {"a1": "ann", "a2": "ann", "b": "ben"}
    made = tuple(Owned(Home(tmp_path / name), name, storage, person) for name, person in people.items())
    for study in made:
        study.ask(6)
    yield made
    for study in made:
        study.ledger.close()


def bound(ledger: Ledger, trials: int | None = None, size: int | None = None) -> None:
    ledger.transact(lambda connection: quotas.put(connection, Quota("ann", trials, size)))


def taken(ledger: Ledger, *among: Owned, n: int = 1) -> list[claims.Claim]:
    token = uuid.uuid4().hex
    return ledger.transact(lambda c: claims.claim(c, ME.id, token, [study.id for study in among], n))


def test_the_studies_of_a_person_share_a_quota_and_others_have_none(studies):
    first, second, other = studies
    bound(first.ledger, trials=2)
    [one] = taken(first.ledger, first)
    [two] = taken(first.ledger, second)
    assert taken(first.ledger, first, second) == NOBODY_LEFT
    assert [claim.study_id for claim in taken(first.ledger, *studies)] == [other.id]
    first.finish(one, "complete", 1, [0.5])
    [three] = taken(first.ledger, first, second)
    assert (three.study_id, three.number, two.number) == (first.id, 1, 0)
    bound(first.ledger)
    assert len(taken(first.ledger, first, n=4)) == 4


def test_claims_at_once_keep_it(studies):
    first, second, _ = studies
    bound(first.ledger, trials=3)
    start, found = threading.Barrier(8), []

    def claims_one(study: Owned) -> None:
        start.wait()
        found.extend(taken(study.ledger, first, second))

    threads = [threading.Thread(target=claims_one, args=(studies[i % 2],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3


def test_one_claim_of_several_takes_no_more_than_is_left(studies):
    first, second, _ = studies
    bound(first.ledger, trials=3)
    assert len(taken(first.ledger, second)) == 1
    assert len(taken(first.ledger, first, n=6)) == 2


def test_lanes_take_no_more_than_is_left(studies):
    first, second, _ = studies
    bound(first.ledger, trials=3)
    assert len(taken(first.ledger, second)) == 1

    def alike() -> list[claims.Claim]:
        token = uuid.uuid4().hex
        return first.ledger.transact(
            lambda c: claims.claim_alike(c, ME.id, token, first.id, "g", 4, lambda config, changes: True, True)
        )

    assert len(alike()) == 2 and alike() == NOBODY_LEFT


def test_a_trial_before_one_that_trains_begins_in_any_case(studies):
    """A rung compares with lower numbers: the one that trains may wait for the one that its worker gave back."""
    first, second, _ = studies
    bound(first.ledger, trials=2)
    zero, one = taken(first.ledger, first, n=2)
    first.finish(zero, "preempted")
    taken(first.ledger, second)
    assert [claim.number for claim in taken(first.ledger, second, first)] == [0]
    assert taken(first.ledger, second, first) == NOBODY_LEFT and one.number == 1


def test_checkpoints_beyond_the_quota_keep_new_trials_waiting(studies):
    first, second, _ = studies
    [one] = taken(first.ledger, first)
    saved = first.checkpoint(one, 1)
    first.report(one, 1, {"val/loss": 1.0}, epoch=1, checkpoint=saved)
    bound(first.ledger, size=saved.size)
    assert taken(first.ledger, first, second) == NOBODY_LEFT
    [said] = first.ledger.look(lambda c: quotas.exhausted(c, [first.id]))
    assert said.startswith("the checkpoints of ann take 0.00 MB of a quota of 0.00 MB: new trials wait, and `hpo gc`")
    first.drop(one, saved)
    assert len(taken(first.ledger, first, second)) == 1


def test_the_command_sets_shows_and_removes_it(studies):
    first, *_ = studies
    url = first.ledger.url

    def quota(*words: str) -> str:
        result = CliRunner().invoke(app, ["quota", *words, "--storage", url])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert quota() == "nobody has a quota.\n"
    taken(first.ledger, first)
    said = quota("ann", "--trials", "8", "--max-bytes", "200GB")
    assert said == "ann: 1 of 8 trials train, 0.00 MB of 200.00 GB kept\n"
    quota("ben", "--trials", "1")
    ann = {"person": "ann", "trials": 8, "bytes": 200 * 10**9, "used": {"trials": 1, "bytes": 0}}
    assert json.loads(quota("ann", "--json")) == [ann]
    assert quota("ann", "--none") == "ann has no quota.\n"
    assert quota() == "ben: 0 of 1 trial train\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trials", "8"], "name the person first, such as `hpo quota ann --trials 8`"),
        (["ann", "--none", "--trials", "8"], "give one or the other"),
        (["ann", "--max-bytes", "much"], "is not a size"),
        (["a" * 251, "--trials", "8"], "names have 250 at most"),
        (["ann", "--trials", "0"], "--trials 0: give a whole number from 1"),
    ],
)
def test_a_wrong_quota_is_refused_in_one_sentence(words, said, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger(url).close()
    assert said in refused(CliRunner().invoke(app, ["quota", *words, "--storage", url]), 2)


FUNCTION = """
import time

import hpo


@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss")
def fit(trial):
    time.sleep(0.2)
    trial.report(1, {"loss": trial.params.x})
"""


@pytest.mark.whole
def test_two_workers_under_a_quota_of_one_train_one_after_the_other(tmp_path):
    """The digest is that of two workers that train at once."""
    file = tmp_path / "fit.py"
    file.write_text(FUNCTION)

    def digest(name: str, most: int | None) -> str:
        home = Home(tmp_path / name).create()
        ledger = Ledger(home.storage)
        ledger.transact(lambda connection: quotas.put(connection, Quota(getpass.getuser(), most, None)))
        study = hpo.run(str(file), trials=6, workers=2, learn_from="none", home=home.root, progress=False)
        a = tables.attempts.c
        with ledger.read() as connection:
            spans = connection.execute(select(a.started_at, a.ended_at).order_by(a.started_at)).all()
        ledger.close()
        overlaps = sum(end > begun for (_, end), (begun, _) in itertools.pairwise(spans))
        assert len(spans) == 6 and (overlaps == 0) == (most == 1), spans
        return study.digest

    assert digest("bounded", 1) == digest("free", None)
