"""A study that ends without a complete trial has failed, and says why."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from driven import driven

from hpo.driver.end_reason import of_stopped
from hpo.driver.loop import Driver
from hpo.driver.request import request_of
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
            request = request_of(home, reference=str(file), name=name, **change)
            _, state = driven(ledger, request, trials=3, tick=drivers.append)
            ended = ledger.look(lambda c, name=name: queries.status(c, name))
            assert state == ("stopped" if name == "stopped" else "complete"), ended.trials
        again = driven(ledger, request_of(home, name="stopped"), trials=3)
        row = ledger.look(lambda c: queries.study_row(c, "stopped"))
        assert ledger.look(lambda c: of_stopped(c, row)) == drivers[0].reason
    assert drivers[0].reason.startswith("no trial is complete: of 3 trials each was pruned, `hpo compare")
    assert "`hpo resume --study stopped --trials 6" in drivers[0].reason
    assert again == ("stopped", "stopped"), "a resume with nothing left to train says the same"


@pytest.mark.parametrize("trains", ["raise ValueError(trial.params.x > 2)", "trial.report(1, {'los': 1.0})"])
def test_the_ledger_tells_why_failures_have_stopped_a_study(home, trains):
    file = home.create().root / "wrong.py"
    file.write_text(
        "import hpo\n@hpo.study(space={'x': hpo.Float(0.0, 1.0)}, minimize='loss')\n"
        f"def wrong(trial):\n    {trains}\n    trial.report(2, {{'los': 1.0}})\n"
    )
    drivers: list[Driver] = []
    with closing(Ledger(home.storage)) as ledger:
        _, state = driven(ledger, request_of(home, reference=str(file)), trials=5, tick=drivers.append)
        row = ledger.look(lambda c: queries.study_row(c, "wrong"))
        assert state == "stopped" and ("wrong.py" in drivers[0].reason or "'los'" in drivers[0].reason)
        assert ledger.look(lambda c: of_stopped(c, row)) == drivers[0].reason
