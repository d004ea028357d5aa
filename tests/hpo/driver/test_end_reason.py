"""A study that ends without a complete trial has failed, and says why."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from driven import driven

from hpo.driver.loop import Driver
from hpo.driver.request import RunRequest
from hpo.ledger import Ledger, queries

KEPT = Path(__file__).parents[2] / "harness" / "kept_study.py"


def test_a_study_whose_trials_were_all_stopped_has_failed(home):
    """A threshold stops each trial of the first study, and none of the second."""
    file = home.create().root / "kept.py"
    bound = 'sampler="random", strategy={"name": "threshold", "upper": -1.0}'
    file.write_text(KEPT.read_text().replace('sampler="random"', bound))
    drivers: list[Driver] = []
    with closing(Ledger(home.storage)) as ledger:
        for name, change in (("stopped", {}), ("whole", {"strategy": "none"})):
            request = RunRequest(home, reference=str(file), name=name, **change)
            _, state = driven(ledger, request, trials=3, tick=drivers.append)
            ended = ledger.look(lambda c, name=name: queries.status(c, name))
            assert state == ("stopped" if name == "stopped" else "complete"), ended.trials
        again = driven(ledger, RunRequest(home, name="stopped"), trials=3)
    assert drivers[0].reason.startswith("no trial is complete: of 3 trials each was pruned, `hpo compare")
    assert "`hpo resume --study stopped --trials 6" in drivers[0].reason
    assert again == ("stopped", "stopped"), "a resume with nothing left to train says the same"
