"""What `hpo status` and `hpo show` say of trials that were lanes of one model."""

from __future__ import annotations

import json
from contextlib import closing

from crafted import open_crafted, put_trial
from study_runs import hpo

from hpo.storage.home import Home


def test_trials_of_a_group_are_told_and_one_alone_is_not(home: Home):
    with closing(open_crafted(home.create().root / "ledger.db")) as ledger:
        for number, group in enumerate(["a", "a", "b", None, "c", "c", "c"]):
            put_trial(ledger, number, "complete", (0.5,), group=group)
    assert "5 trials trained as lanes in 2 groups" in hpo("status", home=home).stdout
    assert json.loads(hpo("status", "--json", home=home).stdout)["lanes"] == {"trials": 5, "groups": 2}
    assert "trained as a lane of one model beside trials 4, 6\n" in hpo("show", "5", home=home).stdout
    assert "beside trial 1\n" in hpo("show", "0", home=home).stdout
    for alone in ("2", "3"):
        assert "as a lane" not in hpo("show", alone, home=home).stdout
