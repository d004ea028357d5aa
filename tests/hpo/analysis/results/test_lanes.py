"""What `hpo status` and `hpo show` say of trials that were lanes of one model."""

from __future__ import annotations

import json
from contextlib import closing

from crafted import open_crafted, put_trial
from sqlalchemy import update
from study_runs import hpo

from hpo.ledger.database.tables import attempts
from hpo.storage.home import Home


def test_trials_of_a_group_are_told_and_one_alone_is_not(home: Home):
    with closing(open_crafted(home.create().root / "ledger.db")) as ledger:
        for number, group in enumerate(["a", "a", "b", None, "c", "c", "c"]):
            put_trial(ledger, number, "complete", (0.5,), group=group, fence=1)
    assert "5 trials trained as lanes in 2 groups" in hpo("status", home=home).stdout
    assert json.loads(hpo("status", "--json", home=home).stdout)["lanes"] == {"trials": 5, "groups": 2}
    assert "trained as a lane of one model beside trials 4, 6\n" in hpo("show", "5", home=home).stdout
    assert "beside trial 1\n" in hpo("show", "0", home=home).stdout
    for alone in ("2", "3"):
        assert "as a lane" not in hpo("show", alone, home=home).stdout


def test_beside_a_trial_were_those_that_trained_while_it_did(home: Home):
    """A group takes others in as lanes end; a trial that still runs has no end."""
    with closing(open_crafted(home.create().root / "ledger.db")) as ledger:
        for number, span in enumerate([(0.0, 10.0), (5.0, 20.0), (10.5, 30.0), (25.0, None)]):
            trial = put_trial(ledger, number, "running" if span[1] is None else "complete", (0.5,), group="a", fence=1)
            with ledger.write() as connection:
                times = {"started_at": span[0], "ended_at": span[1]}
                connection.execute(update(attempts).where(attempts.c.trial_id == trial).values(times))
    found = [json.loads(hpo("show", str(number), "--json", home=home).stdout)["lanes"] for number in range(4)]
    assert found == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
