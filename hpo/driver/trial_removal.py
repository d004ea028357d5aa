"""`hpo rm N`: frees a trial's files and hides the trial. Its row stays, so that nothing the sampler knows changes.

The trial is first marked in the ledger, which hides it. Then its runs and files are deleted, and a second mark records
that. After a kill the next `hpo rm N` finishes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.clock import Clock, SystemClock
from hpo.driver.reclaim import Reclaimer
from hpo.driver.removal import (
    check_answering,
    check_home,
    check_needed,
    holding,
    remove_from_trackers,
    tracked,
)
from hpo.errors import StorageError, UserError
from hpo.ledger import Ledger, audit, promotions, queries, removal, removed
from hpo.ledger.removal import check_whole
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import files as file_queries
from hpo.ledger.views import mirror as mirror_queries
from hpo.ledger.views import trial as trial_queries
from hpo.search.population.base import breeding
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.text import command, counted, megabytes
from trainer.runtime.failpoint import failpoint


@dataclass(frozen=True)
class TrialContents:
    """Holds what `hpo rm N` frees."""

    name: str  # of the study
    trials: Sequence[int]
    checkpoints: int
    size: int  # bytes of the checkpoints
    freed: Sequence[int]  # those of the trials that were removed before

    def describe(self) -> str:
        """Returns `trial 3 of study s: 2 checkpoints (1.20 MB), its files and its runs`."""
        several = len(self.trials) > 1
        name = f"trial{'s' if several else ''} {', '.join(map(str, self.trials))} of study {self.name}"
        whose = "their" if several else "its"
        kept = f"{counted(self.checkpoints, 'checkpoint')} ({megabytes(self.size)})"
        before = f" (removed before: {', '.join(map(str, self.freed))})" if self.freed else ""
        return f"{name}: {kept}, {whose} files and {whose} runs{before}"


def contents(ledger: Ledger, home: Home, name: str, numbers: Sequence[int]) -> TrialContents:
    """Returns the contents to free. Raises UserError if one of the trials cannot be removed."""
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    _check(ledger, home, row, numbers)
    kept = ledger.look(lambda connection: removed.contents(connection, row.id, numbers))
    freed = ledger.look(lambda connection: removed.numbers(connection, row.id, removed.FREED)) & {*numbers}
    return TrialContents(name, list(numbers), kept["checkpoints"], kept["bytes"], sorted(freed))


def remove(
    ledger: Ledger,
    home: Home,
    name: str,
    numbers: Sequence[int],
    tracking_uri: str | None = None,
    *,
    leave_mlflow: bool = False,
    clock: Clock | None = None,
) -> None:
    """Removes the trials. Raises Busy while the study is driven or mirrored, UserError if a trial has not ended or
    is needed, and Unreachable if MLflow does not answer, unless `leave_mlflow` is set."""
    clock = clock or SystemClock()
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    with holding(ledger, row, clock) as leases:
        Reclaimer(ledger, row.id, clock, row.lease_seconds).reclaim(counted=False)
        _check(ledger, home, row, numbers)
        check_home(ledger, home, row)
        trackers = [] if leave_mlflow else tracked(ledger, home, row, tracking_uri)
        check_answering(ledger, home, row, trackers)

        entry = audit.Entry(name, "rm")

        def hide(connection: Connection) -> None:
            for lease in leases:
                lease.check(connection)
            entry.write(connection)
            for number in numbers:
                _drop(connection, row, number)
                removed.mark(connection, row, number)

        ledger.transact(hide)
        failpoint("removal.after_trial_mark")
        remove_from_trackers(ledger, home, row, trackers, [f"{row.uid}/{number}" for number in numbers])
        failpoint("removal.after_trial_runs")
        for number in numbers:
            _remove_files(home, row, number)
        failpoint("removal.after_trial_files")

        def free(connection: Connection) -> None:
            for lease in leases:
                lease.check(connection)
            for tracker in removal.mirrored(connection, row.id):
                mirror_queries.forget(connection, tracker, row.id, numbers)
            for number in numbers:
                removed.mark(connection, row, number, removed.FREED)

        ledger.transact(free)


def check_unpromoted(ledger: Ledger, name: str, numbers: Sequence[int]) -> None:
    """Raises UserError if a registered model is a version of one of the trials."""
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    standing = ledger.look(lambda connection: promotions.standing(connection, row.id))
    promotions.check_none([promotion for promotion in standing if promotion.trial in numbers], name)


def _check(ledger: Ledger, home: Home, row: StudyRow, numbers: Sequence[int]) -> None:
    """Raises UserError for a trial that does not exist, has not ended, or from which another one starts."""
    check_whole(row)
    name = row.name
    if row.state == "open" and breeding(row.spec.strategy):
        raise UserError(
            f"the trials of study {name!r} go on from each other's checkpoints: let it end, by "
            f"`{command(f'resume --study {name}')}`, before one is removed."
        )

    def look(connection: Connection, number: int) -> None:
        trial = trial_queries.find_trial(connection, row.id, number)
        if trial is None:
            raise UserError(f"study {name!r} has no trial {number}: {trial_queries.there(connection, row.id)}.")
        if trial.state == "paused" and row.state != "open":
            raise UserError(
                f"trial {number} of study {name!r} waits at a rung, and may go on once the study has more trials: only "
                "a trial that has ended is removed."
            )
        if trial.state not in TERMINAL_STATES:
            resumes = command(f"resume --study {name}")
            raise UserError(
                f"trial {number} of study {name!r} is {trial.state}: only a trial that has ended is removed; let it "
                f"end, by `{resumes}`."
            )

    for number in numbers:
        ledger.look(lambda connection, number=number: look(connection, number))
        check_needed(ledger, home, row, number)


def _drop(connection: Connection, row: StudyRow, number: int) -> None:
    """Marks the checkpoints of a trial as deleted. Raises UserError if an open trial starts from one."""
    trial = trial_queries.held(connection, row.id, number)[0]
    paths = removed.kept_paths(connection, trial)
    if paths and not file_queries.drop(connection, row.id, number, trial, paths):
        raise UserError(
            f"another trial of study {row.name!r} is to start from a checkpoint of trial {number}: let it end, by "
            f"`{command('resume --study ' + row.name)}`, first."
        )


def _remove_files(home: Home, row: StudyRow, number: int) -> None:
    location = locations.of(home, row)
    for directory in (home.checkpoints(row.name, number), home.files(row.name, number)):
        try:
            for file in location.files(directory):
                location.remove(directory / file)
            if directory.exists():
                shutil.rmtree(directory)
        except OSError as error:
            removes = command(f"rm {number} --study {row.name}")
            raise StorageError(
                f"{error.filename or Path(directory)} cannot be removed ({error.strerror}): make its directory "
                f"writable, then `{removes}` goes on."
            ) from error
