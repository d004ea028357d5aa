"""Records Ray Tune's decisions where the Tuner runs: which trials it stops, pauses, restarts and gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray import tune

from hpo.clock import SystemClock
from hpo.driver.reclaim import Reclaimer
from hpo.driver.request import LEASE_SECONDS
from hpo.errors import HpoError
from hpo.ledger import Ledger, external, queries
from hpo.ledger.leases import Heartbeat, Lease, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import ProposedTrial
from hpo.workers.executors.ray_cluster import last_line
from hpo.workers.session import StudySession

if TYPE_CHECKING:
    from hpo.ray_tune.job import Job

_MAX_FAILURES = 3  # in a row, of processes that did not start to train; more mean that something is broken


class Recorder(tune.Callback):
    """Records Tune's decisions in the ledger. Each Tuner has one.

    While Tune runs it holds the study's lease; without it nothing is recorded, and Busy ends the Tuner. `hpo sync`
    sends everything to MLflow.
    """

    def __init__(self, trainable: Any) -> None:
        self._job: Job = trainable.job
        self._paused: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for Tune to pickle, without open connections."""
        return {"_job": self._job, "_paused": self._paused}

    def setup(
        self, stop: object = None, num_samples: object = None, total_num_samples: object = None, **info: object
    ) -> None:
        job = self._job
        self._ledger = Ledger(job.storage, create=False)
        row = self._ledger.look(lambda connection: queries.study_row(connection, job.name))
        self._curves = StudySession(row).curves
        self._over: set[tuple[int, int]] = set()  # attempts whose process has ended: the trial's id, and the fence
        self._failures = 0
        self._broken: HpoError | None = None  # ends Tune at its next step; Tune would wrap it if raised here
        self._lease, self._look, self._end = self._hold()

    def _hold(self) -> tuple[Lease, Callable[[], None], Callable[[], None]]:
        """Becomes the study's driver; returns its lease, and functions to call between Tune's steps and at the end."""
        job = self._job
        clock, process = SystemClock(), Process.current()
        lease = acquire(self._ledger, f"driver:{job.study_id}", job.name, process, clock, LEASE_SECONDS)
        heartbeat = Heartbeat(f"study {job.name}", lease.renew, 1.0)
        Reclaimer(self._ledger, job.study_id, clock, LEASE_SECONDS).reclaim(counted=False)  # what an earlier Tuner held

        def end() -> None:
            heartbeat.close()
            lease.release()

        return lease, heartbeat.check, end

    def on_step_begin(self, iteration: int, trials: list[Any], **info: object) -> None:
        self._look()
        if self._broken is not None:
            raise self._broken

    def on_step_end(self, iteration: int, trials: list[Any], **info: object) -> None:
        for trial in trials:
            if trial.status != "PAUSED":
                self._paused.discard(trial.trial_id)
            elif trial.trial_id not in self._paused:
                self._paused.add(trial.trial_id)
                self._decided(trial, "pause", "paused by the scheduler")

    def on_trial_result(self, iteration: int, trials: list[Any], trial: object, result: object, **info: object) -> None:
        self._failures = 0

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: object) -> None:
        """Counts a process that died during a trial as a loss of that trial.

        Makes the next step raise HpoError if other processes fail repeatedly.
        """
        attempt = self._ledger.look(lambda c: external.newest_attempt(c, self._job.study_id, trial.trial_id))
        over_it = attempt is not None and attempt.outcome in (None, "lost") and attempt[:2] not in self._over
        if attempt is not None:
            self._over.add(attempt[:2])
        self._failures = 0 if over_it else self._failures + 1
        if self._failures > _MAX_FAILURES:
            self._broken = HpoError(f"trials cannot go on under Ray Tune ({last_line(trial.get_error())}).")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: object, **info: object) -> None:
        self._decided(trial, "stop", "stopped by the scheduler")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: object, **info: object) -> None:
        if (row := self._newest(trial)) is not None:
            loss = (self._job.study_id, row.number, "Ray Tune gave it up")
            self._lease.write(lambda connection: external.lost(connection, *loss))
        self._tell()

    def on_experiment_end(self, trials: list[Any], **info: object) -> None:
        self._tell()
        self._end()

    def _decided(self, trial: object, verdict: str, reason: str) -> None:
        if (row := self._newest(trial)) is not None:
            decision = (self._job.study_id, row.number, verdict, self._job.who, reason, self._curves)
            self._lease.write(lambda connection: external.decide(connection, *decision))
        if verdict == "stop":
            self._tell()

    def _newest(self, trial: Any) -> ProposedTrial | None:
        """Returns the newest row in the ledger for this trial of Tune."""
        return self._ledger.look(lambda c: external.newest(c, self._job.study_id, trial.trial_id))

    def _tell(self) -> None:
        self._lease.write(lambda connection: external.tell(connection, self._job.study_id))
