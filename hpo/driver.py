"""The driver: adopt -> fill -> tell, one per study. It starts from the ledger, always; resuming is not a mode."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.engine import Connection, RowMapping

from hpo.clock import Clock, SystemClock
from hpo.config import as_json, config_hash
from hpo.environment import deciding_versions, describe
from hpo.errors import DriftError
from hpo.executors.base import Executor, WorkerContext
from hpo.home import Home
from hpo.ledger import Ledger, writes
from hpo.ledger.history import Curves
from hpo.ledger.leases import Lease, acquire
from hpo.ledger.process import Process, is_dead
from hpo.ledger.statements import insert_new
from hpo.ledger.tables import TERMINAL_STATES, asks, attempts, checkpoints, studies, trials, workers
from hpo.search.sampler import Sampler, TrialRecord
from hpo.search.samplers import make_sampler
from hpo.study import Study, StudySpec, drift, tree_sha256
from hpo.tracking.mlflow import tracker_name
from trainer.failpoint import failpoint

LEASE_SECONDS = 30.0
MAX_EQUAL_TRACEBACKS = 3  # failures in a row with one and the same traceback end the study


@dataclass(frozen=True)
class Options:
    """How to drive, as opposed to what: nothing here changes the study's digest."""

    home: Home
    storage: str
    tracking_uri: str
    trials: int | None = None  # the total over all resumptions; None keeps what was asked for before
    allow_drift: bool = False
    data: Mapping[str, Any] | None = None  # the study's report on its data
    lease_timeout: float = LEASE_SECONDS


def open_study(ledger: Ledger, study: Study, spec: StudySpec, options: Options) -> RowMapping:
    """The study's row, made if there is none; DriftError, naming what changed, if the ledger knows another one."""
    new = {"name": spec.name, "uid": uuid.uuid4().hex, "created_at": SystemClock().wall(), "state": "open"}
    new |= {"requested": options.trials or 0, "spec": spec.to_json(), "identity": identity(study, spec)}
    environment = describe(study) | {"home": str(options.home.root), "tracking_uri": tracker_name(options.tracking_uri)}
    environment |= {"data": dict(options.data)} if options.data else {}

    def body(connection: Connection) -> RowMapping:
        connection.execute(insert_new(connection, studies), new | {"environment": environment})
        return connection.execute(select(studies).where(studies.c.name == spec.name)).mappings().one()

    row = ledger.transact(body)
    changed = drift(row["identity"], new["identity"])
    if changed and not options.allow_drift:
        raise DriftError(
            f"study {spec.name!r} is in the ledger already, and {'; '.join(changed)}: give the new one its own --name, "
            "or continue with --allow-drift."
        )
    return row


def identity(study: Study, spec: StudySpec) -> dict[str, Any]:
    """All that decides a study's results, by component."""
    trainer = tree_sha256(Path(__file__).parent.parent / "trainer", "*.py")
    return study.identity() | spec.identity() | {"versions": deciding_versions(), "trainer": trainer}


class Driver:
    """Drives one study to its requested number of trials. `request_stop` may be called from a signal handler."""

    def __init__(
        self,
        ledger: Ledger,
        study: Study,
        spec: StudySpec,
        options: Options,
        executor: Executor,
        clock: Clock | None = None,
    ) -> None:
        self._ledger, self._study, self._spec = ledger, study, spec
        self._options, self._executor = options, executor
        self._clock = clock or SystemClock()
        self._stopping = False
        self._watched: dict[tuple[int, int], tuple[tuple[int, int], float]] = {}
        self._failures: list[str] = []
        self.stopped_because = ""

    def acquire(self) -> None:
        """Become the study's driver; raise Busy if another one lives."""
        row = open_study(self._ledger, self._study, self._spec, self._options)
        self._id, name = row["id"], f"driver:{row['id']}"
        self._lease: Lease = acquire(self._ledger, name, Process.current(), self._clock, self._options.lease_timeout)
        try:
            self._take_over()
        except BaseException:
            self.release()
            raise

    def _take_over(self) -> None:
        """As the study's only driver: note what the user wants now, and rebuild what memory holds."""
        row = open_study(self._ledger, self._study, self._spec, self._options)  # as the last driver left it
        changed = drift(row["identity"], identity(self._study, self._spec))
        wanted = row["requested"] if self._options.trials is None else self._options.trials
        saved = select(checkpoints.c.id).join(trials).where(trials.c.study_id == row["id"]).limit(1)
        if self._ledger.look(lambda connection: connection.execute(saved).first()) is not None:
            self._options.home.check_mark(self._spec.name, row["uid"], row["environment"]["host"])
        self._options.home.mark(self._spec.name, row["uid"])

        def body(connection: Connection) -> None:
            self._lease.check(connection)
            values: dict[str, Any] = {"state": "open", "requested": wanted, "revision": studies.c.revision + 1}
            if changed:
                values |= {"spec": self._spec.to_json(), "identity": identity(self._study, self._spec)}
                uid = f"{self._lease.name}.{self._lease.fence}.drift"
                writes.note(connection, row["id"], "drift", {"changed": changed}, uid)
            connection.execute(update(studies).where(studies.c.id == row["id"]).values(**values))

        self._ledger.transact(body)
        self._requested = wanted
        self._curves = Curves(self._id, self._study.objectives[0])
        self._adopt()

    def run(self, on_tick: Callable[[], None] = lambda: None) -> str:
        """Ask and tell until all is done; the state the study is left in: complete, stopped or interrupted."""
        context = WorkerContext(self._options.storage, self._options.home, self._id, self._options.lease_timeout)
        self._executor.start(context)
        next_look = self._clock.monotonic()
        try:
            while not self._stopping:
                if self._fill():
                    return self._end((self.stopped_because and "stopped") or "complete")
                if self._clock.monotonic() >= next_look:
                    self._lease.renew()
                    self._reclaim()
                    next_look = self._clock.monotonic() + min(1.0, self._options.lease_timeout / 3)
                if not self._executor.step():
                    self._clock.sleep(0.02)
                on_tick()
            return "interrupted"
        finally:
            self._executor.stop(grace=self._options.lease_timeout)

    def request_stop(self) -> None:
        """Stop gracefully: workers checkpoint and leave, trials wait for the next resume."""
        self._stopping = True
        self._executor.preempt()

    def kill(self) -> None:
        """End the workers at once."""
        self._executor.kill()

    def release(self) -> None:
        """Let another process drive the study."""
        self._lease.release()

    # adopt

    def _adopt(self) -> None:
        """Rebuild the sampler from the ledger, and take back what dead workers of an earlier driver hold."""
        self._reclaim(counted=False)
        self._sampler: Sampler = make_sampler(
            self._spec.sampler, self._study.space, self._study.objectives, self._spec.seed
        )
        rows, records = self._ledger.look(self._all)
        self._asked = len(rows)
        self._lost = {row["number"] for row in rows if row["outcome"] == "lost"}
        self._ended_before = {row["number"] for row in rows if row["state"] in TERMINAL_STATES}
        if self._spec.order == "ordered":  # what the last ask saw, whatever was told after it
            due = range(max(0, self._asked - self._spec.window))
            told = [number for number in due if number in self._ended_before]  # all, unless the window has changed
        else:
            told = [
                number for _, number in sorted((row["told"], row["number"]) for row in rows if row["told"] is not None)
            ]
        self._told = len(told)
        self._open = set(records) - set(told)
        for number in sorted(self._open):
            self._sampler.adopt(records[number].open())
        for number in told:
            self._sampler.tell(records[number])

    def _all(self, connection: Connection) -> tuple[Sequence[RowMapping], dict[int, TrialRecord]]:
        mine = _TRIALS.where(trials.c.study_id == self._id).order_by(trials.c.number)
        rows = connection.execute(mine).mappings().all()
        return rows, {row["number"]: self._record(connection, row) for row in rows}

    def _record(self, connection: Connection, row: RowMapping) -> TrialRecord:
        curve = (
            self._curves.of(connection, row["id"]) if row["told"] is not None or row["state"] in TERMINAL_STATES else []
        )
        return TrialRecord(
            number=row["number"],
            state=row["state"],
            coordinates=row["coordinates"],
            values=None if row["values"] is None else tuple(row["values"]),
            curve=[(epoch, self._curves.as_loss(loss)) for epoch, loss in curve],
            trial_attrs=row["trial_attrs"],
            study_attrs=row["study_attrs"],
        )

    # fill and tell

    def _fill(self) -> bool:
        """Tell what has ended, ask what may be asked, commit both; True once everything asked for has ended."""
        ended = self._ended() if self._open else {}
        self._lost |= {number for number, row in ended.items() if row["outcome"] == "lost"}
        told: list[tuple[int, int]] = []
        proposals: list[writes.Ask] = []
        while self._wants_more() and self._may_ask(ended, told):
            proposals.append(self._ask(self._asked))
        if not self._wants_more() and self._open <= ended.keys():
            self._tell_all(ended, told)
        if told or proposals:
            self._commit(proposals, told)
        return not self._wants_more() and not self._open

    def _wants_more(self) -> bool:
        short = self._asked - len(self._lost) < self._requested
        return short and not self.stopped_because and not self._sampler.exhausted(self._asked)

    def _may_ask(self, ended: dict[int, RowMapping], told: list[tuple[int, int]]) -> bool:
        """Ordered: tell trial k exactly before ask k + W, never earlier. Async: tell what has ended, keep W open."""
        if self._spec.order == "async":
            self._tell_all(ended, told)
            return self._wants_more() and len(self._open) < self._spec.window
        due = self._asked - self._spec.window
        if due in self._open:
            if due not in ended:
                return False
            self._tell(ended[due], told)
        return self._wants_more()

    def _tell_all(self, ended: dict[int, RowMapping], told: list[tuple[int, int]]) -> None:
        for number in sorted(ended):
            if number in self._open:
                self._tell(ended[number], told)

    def _tell(self, row: RowMapping, told: list[tuple[int, int]]) -> None:
        self._sampler.tell(self._ledger.look(lambda connection: self._record(connection, row)))
        told.append((row["number"], self._told))
        self._told += 1
        self._open.remove(row["number"])
        if row["number"] not in self._ended_before:
            self._note_failure(row)

    def _note_failure(self, row: RowMapping) -> None:
        trace = {"user_error": row["traceback"] or row["error"], "bad_config": row["error"]}.get(row["outcome"])
        self._failures = (
            [*self._failures, trace] if trace and trace in self._failures[-1:] else [trace] if trace else []
        )
        if len(self._failures) >= MAX_EQUAL_TRACEBACKS:
            self.stopped_because = (
                f"{len(self._failures)} trials in a row failed in the same way:\n{trace}\n"
                "mend the task, then `hpo resume --allow-drift` goes on."
            )

    def _ask(self, number: int) -> writes.Ask:
        proposal = self._sampler.ask(number)
        params = self._study.space.decode(proposal.coordinates, self._study.fixed())
        config = self._study.build(params)
        self._open.add(number)
        self._asked += 1
        return writes.Ask(
            number=number,
            draw=proposal.draw,
            seed=proposal.seed,
            told=self._told,
            params=params,
            coordinates=proposal.coordinates,
            config=as_json(config),
            config_hash=config_hash(config),
            trial_attrs=proposal.trial_attrs,
            study_attrs=proposal.study_attrs,
        )

    def _commit(self, proposals: list[writes.Ask], told: list[tuple[int, int]]) -> None:
        def body(connection: Connection) -> None:
            self._lease.check(connection)
            writes.ask(connection, self._id, proposals, told)

        failpoint("driver.before_ask_commit")
        self._ledger.transact(body)
        if proposals:
            failpoint("driver.after_ask")
        if told:
            failpoint("driver.after_tell")

    def _ended(self) -> dict[int, RowMapping]:
        """The terminal trials the sampler does not know of, by number."""
        where = {"study": self._id, "first": min(self._open)}
        rows = self._ledger.look(lambda connection: connection.execute(_ENDED, where).mappings().all())
        return {row["number"]: row for row in rows if row["number"] in self._open}

    # leases

    def _reclaim(self, *, counted: bool = True) -> None:
        """Take trials back from workers that are dead, or have not renewed for the lease's time on our own clock."""
        rows = self._ledger.look(lambda connection: connection.execute(_RUNNING, {"study": self._id}).all())
        now = self._clock.monotonic()
        running = {}
        for row in rows:
            key, token = (row.id, row.fence), (row.renewals, row.revision)
            seen, since = self._watched.get(key, (None, now))
            running[key] = (token, since if seen == token else now)
            if is_dead(row.host, row.pid, row.pid_started):
                why = f"pid {row.pid} on {row.host} is gone"
            elif now - running[key][1] >= self._options.lease_timeout:
                why = f"pid {row.pid} on {row.host} was silent for {self._options.lease_timeout:g} s"
            else:
                continue
            self._ledger.transact(lambda c, row=row, why=why: writes.lose(c, row.id, row.fence, why, counted=counted))
        self._watched = running

    def _end(self, state: str) -> str:
        def body(connection: Connection) -> None:
            self._lease.check(connection)
            values = {"state": state, "revision": studies.c.revision + 1}
            connection.execute(update(studies).where(studies.c.id == self._id).values(**values))

        self._ledger.transact(body)
        return state


_TRIALS = select(trials, asks.c.coordinates, asks.c.trial_attrs, asks.c.study_attrs).join(
    asks, asks.c.trial_id == trials.c.id
)

_ENDED = _TRIALS.where(
    trials.c.study_id == bindparam("study"),
    trials.c.number >= bindparam("first"),
    trials.c.state.in_(TERMINAL_STATES),
)

_RUNNING = (
    select(
        trials.c.id,
        trials.c.fence,
        trials.c.revision,
        attempts.c.renewals,
        workers.c.host,
        workers.c.pid,
        workers.c.pid_started,
    )
    .join(attempts, (attempts.c.trial_id == trials.c.id) & (attempts.c.fence == trials.c.fence))
    .join(workers, workers.c.id == attempts.c.worker_id)
    .where(trials.c.state == "running", trials.c.study_id == bindparam("study"))
)
