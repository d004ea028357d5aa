"""An objective that the task does not report ends the study at its first report, not after three trials in full."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from driven import driven
from places import HARNESS, ROOT

from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.ledger import Ledger, queries

PLAIN, CURVES = ROOT / "hpo" / "declaration" / "my_study.py", HARNESS / "curves_study.py"


def run(home, file: Path, old: str, new: str, **flags):
    """The state and the reason, and the trials, of a study whose text is changed."""
    copy = home.create().root / "study.py"
    text = file.read_text()
    assert old in text
    copy.write_text(text.replace(old, new))
    drivers: list[Driver] = []
    with closing(Ledger(home.storage)) as ledger:
        name, state = driven(ledger, request_of(home, str(copy), **flags), trials=6, tick=drivers.append)
        rows = ledger.look(lambda c: queries.trial_rows(c, queries.study_row(c, name).id))
    return state, drivers[-1].reason if drivers else "", rows


@pytest.mark.parametrize(
    ("file", "old", "new", "epoch"),
    [
        (PLAIN, 'Objective("val/accuracy"', 'Objective("val/acuracy"', 0),
        (CURVES, 'Objective("val/loss"', 'Objective("val/los"', 1),
    ],
)
def test_the_first_report_without_the_objective_ends_the_study(home, file, old, new, epoch):
    """By a task's first epoch; by the second one of a loop of its own, which may report an epoch in parts."""
    overrides = {"train.num_epochs": 3} if file == PLAIN else {}
    state, reason, rows = run(home, file, old, new, overrides=overrides, strategy="none", sampler="random", window=2)
    failed = [row for row in rows if row.state == "failed"]
    assert state == "stopped" and [(row.outcome, row.epoch) for row in failed] == [("unreported", epoch)], reason
    assert {row.state for row in rows if row not in failed} <= {"waiting"}
    wrong, right = ("val/acuracy", "val/accuracy") if file == PLAIN else ("val/los", "val/loss")
    said = f"no epoch has reported {wrong!r}, by which the study judges; did you mean {right!r}? Reported were "
    assert said in reason and right in reason.partition("Reported were ")[2]
    assert "`hpo resume --study " in reason and reason.startswith(failed[0].error)
