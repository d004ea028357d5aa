"""The file that says how a trial has ended."""

from __future__ import annotations

from crafted import open_crafted, put_trial
from sqlalchemy import event

from hpo.home import Home
from hpo.results import NAME, Results


def test_a_driver_that_begins_anew_reads_nothing_of_trials_whose_file_is_there(tmp_path):
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
    assert len(read) == 1 and read[0][0] == 2, "of the trial alone whose file is gone"
