"""The file that says how a trial has ended."""

from __future__ import annotations

import json

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import event

from hpo.analysis.results.best import best_trials, describe_best
from hpo.analysis.results.progress import Progress
from hpo.analysis.results.trial import describe, detail
from hpo.clock import FakeClock
from hpo.display.summary import summary
from hpo.driver.request import RunResult
from hpo.storage.home import Home
from hpo.storage.metrics_json import NAME, Results


def test_a_new_driver_reads_nothing_of_trials_whose_file_exists(tmp_path):
    ledger, home = open_crafted(tmp_path / "ledger.db"), Home(tmp_path / "home")
    for number in range(3):
        put_trial(ledger, number, "complete", (0.5,))
    Results(ledger, "crafted", home).write()
    files = [home.checkpoints("crafted", number) / NAME for number in range(3)]
    written = [file.read_bytes() for file in files]
    files[1].unlink()
    put_trial(ledger, 3, "running", (0.5,))
    read: list[tuple] = []
    event.listen(
        ledger.engine,
        "before_cursor_execute",
        lambda *args: read.append(args[3]) if "FROM reports" in args[2] else None,
    )
    again = Results(ledger, "crafted", home)
    for _ in range(2):
        again.write()
    ledger.close()
    assert [file.read_bytes() for file in files] == written
    assert [one[0] for one in read] == [2, 2, 2], "of the trial alone whose file is gone"


HELD_OUT = {"test/accuracy": (0.4, 0.6, 0.8, 0.3)}


@pytest.mark.parametrize(
    ("select", "curve", "epoch"),
    [("best", (0.5, 0.9, 0.7, 0.9), 2), ("last", (0.5, 0.9, 0.7, 0.9), 4), ("best", (0.5, 0.6, 0.7, 0.1), 3)],
)
def test_what_was_held_out_is_of_the_epoch_that_the_trial_is_judged_by(tmp_path, select, curve, epoch):
    """In metrics.json, at the end of a run, in `hpo best` and in `hpo show`; the last epoch's stand there as well."""
    objective = {"metric": "val/accuracy", "direction": "maximize", "select": select}
    ledger, home = open_crafted(tmp_path / "ledger.db", objectives=[objective]), Home(tmp_path)
    value, held_out = curve[epoch - 1], HELD_OUT["test/accuracy"][epoch - 1]
    put_trial(ledger, 0, "complete", curve, metrics=HELD_OUT, values=[value])
    put_trial(ledger, 1, "failed", curve, metrics=HELD_OUT, values=None)
    Results(ledger, "crafted", home).write()
    found, failed = (json.loads((home.checkpoints("crafted", n) / NAME).read_text()) for n in (0, 1))
    metrics = {"test/accuracy": held_out, "val/accuracy": value}
    assert found["judged"] == {"step": 10 * epoch, "epoch": epoch, "metrics": metrics}
    assert found["metrics"] == {"test/accuracy": 0.3, "val/accuracy": curve[-1]}
    assert failed["judged"] is None
    told = f"val/accuracy {value:g}, test/accuracy {held_out:g}" + (f" (epoch {epoch} of 4)" if epoch < 4 else "")
    ended = summary(Progress(ledger, "crafted", FakeClock()), RunResult("crafted", "complete", "", 0, None), 0.0)
    assert f"best: trial 0, {told}" in ended.splitlines()
    with ledger.read() as connection:
        [best] = best_trials(connection, home, "crafted")
        shown = describe(detail(connection, home, "crafted", 0), "")
    ledger.close()
    assert describe_best(best).splitlines()[0] == f"crafted, trial 0: {told}"
    assert told in shown.splitlines()
