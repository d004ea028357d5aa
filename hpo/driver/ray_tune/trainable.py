"""Ray Tune decides, the ledger records: a study as a Tune trainable, for `hpo run --executor ray-tune` and for a Tuner
of your own.

    study = hpo.load("mlp")
    trainable = ray_tune.as_trainable(study, home=".hpo")
    tune.Tuner(
        trainable,
        param_space=ray_tune.param_space(study),
        tune_config=tune.TuneConfig(metric="val/accuracy", mode="max", num_samples=8, scheduler=...),
        run_config=tune.RunConfig(
            callbacks=[ray_tune.Recorder(trainable)], failure_config=tune.FailureConfig(max_failures=-1)
        ),
    ).fit()

With max_failures=-1 a trial whose process dies begins again as under every executor, until it was lost too often
without getting on (hpo.ledger.transactions.lose); without it Tune gives it up at the first time. Each epoch is a result
with `epoch`, `step` and the metrics; schedulers take `time_attr="epoch"`. With it goes a Tune checkpoint that holds the
trainer's. See hpo.ledger.external for what becomes of a trial of Tune's in the ledger.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from hpo.declaration import compatibility
from hpo.declaration.identity import check_worker
from hpo.declaration.study import Study
from hpo.driver.end_reason import has_value
from hpo.driver.open import check_home, open_study
from hpo.driver.ray_tune.job import ALIAS, Job
from hpo.driver.ray_tune.recorder import Recorder
from hpo.driver.ray_tune.space import param_space, params_of
from hpo.driver.request import DriverOptions
from hpo.errors import HpoError, NoLedger, UserError
from hpo.ledger import Ledger, external, queries, transactions
from hpo.ledger.claims import Claim, renew
from hpo.ledger.history import Curves, Judgement
from hpo.ledger.leases import Heartbeat
from hpo.ledger.process_id import Process
from hpo.ledger.rows import RowMapping
from hpo.ledger.store import PATIENCE
from hpo.search.samplers.base import ask_seed
from hpo.space.hashing import json_sha256
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.tracking.files import link
from hpo.workers.executors.placement import Placement
from hpo.workers.executors.ray_cluster import carried_environ
from hpo.workers.executors.resources import gpu_share, gpus_asked, keep_to_share
from hpo.workers.reporter import LedgerReporter
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.errors import Fenced
from trainer.report import CONTINUE, CheckpointRef, Outcome, Reporter, Verdict
from trainer.runtime.process_state import kept

__all__ = ["Recorder", "as_trainable", "param_space"]

_NOTE = "hpo.json"  # beside a checkpoint in Tune's: whose it is


def as_trainable(
    study: Study, home: Home | str | None = None, *, name: str | None = None, storage: str | None = None
) -> Any:
    """A function for `ray.tune.Tuner` that trains the study's trials, and is told by its attribute `job` of which one.

    The study, from `hpo.load`, is opened in the ledger of `home`, or at `storage`. Raises UserError and DriftError as
    `hpo run` does.
    """
    from hpo.driver.request import RunRequest
    from hpo.driver.resolve import declare

    at = home if isinstance(home, Home) else Home.at(home)
    _refuse_bucket(storage or at.storage, name or study.name)
    at.create()
    ledger = Ledger(storage or at.storage)
    flags: dict[str, Any] = {"overrides": study.overrides, "order": "async", "strategy": "none"}
    request = RunRequest(at, study.reference, name or study.name, **flags)
    resolved = declare(request, ledger, workers=1)
    left_open = Placement("ray-tune", scheduler="fifo")  # `hpo resume` trains what the Tuner has left to its end
    options = DriverOptions(at, ledger.url, at.tracking_uri, placement=left_open)
    row = open_study(ledger, resolved, options)
    check_home(ledger, row, at)
    ledger.close()
    return trainable(resolved.study, Job(ledger.url, at, row["id"], row["name"], row["uid"], "ray-tune", Path.cwd()))


def _refuse_bucket(storage: str, name: str) -> None:
    """Raise UserError where the ledger, if there is one, has the study with its checkpoints in a bucket."""
    try:
        ledger = Ledger(storage, create=False, upgrade=True)
    except NoLedger:
        return
    with closing(ledger), ledger.read() as connection:
        known = name in queries.study_names(connection)
        if known and (bucket := locations.url(queries.study_row(connection, name))):
            raise UserError(f"study {name!r} has its checkpoints in {bucket}, and Tune keeps its own: use another.")


def trainable(study: Study, job: Job) -> Any:
    """The function that Tune calls with a configuration: path -> value, for each dimension of the space."""
    if study.shape.ranks > 1:
        raise UserError("train.parallel asks for several ranks, and under Ray Tune a trial is one process: leave it.")

    def train(config: Mapping[str, Any]) -> None:
        try:
            _train(config, job)
        except _TakenAway:
            sys.exit(0)  # what Tune has asked for

    train.__name__ = job.name
    vars(train).update(job=job)  # and not the study: Tune pickles the function
    return train


# In the process of a trial


def _train(config: Mapping[str, Any], job: Job) -> None:
    for key, value in carried_environ(job.carried).items():
        os.environ.setdefault(key, value)  # by the first trial, before this process goes elsewhere
    if job.directory.is_dir():
        os.chdir(job.directory)
    gpus = tune.get_context().get_trial_resources().required_resources.get("GPU", 0.0)
    os.environ.update(gpu_share(gpus) | gpus_asked(gpus if job.gpus_asked else None))
    keep_to_share()
    from hpo.workers.attempt import attempt  # before a trial is claimed, whose lease nothing renews until it trains

    with ExitStack() as stack:
        ledger = Ledger(job.storage, create=False, patience=PATIENCE)
        stack.callback(ledger.close)
        row = dict(ledger.look(lambda connection: queries.study_row(connection, job.name)))
        locations.check(job.home, row)
        opened = StudySession(row)
        check_worker(row, opened.study)
        given = tune.get_checkpoint()
        origin = None if given is None else _origin(Path(stack.enter_context(given.as_directory())), job.uid)
        claim = _begin(ledger, opened, config, job, origin)
        reporter, outcome = (None, None) if claim is None else _attempt(attempt, ledger, opened, claim, job, origin)
        last = ledger.look(lambda c: external.newest(c, opened.id, tune.get_context().get_trial_id()))
    if reporter and outcome and outcome.kind == "complete":
        reporter.send_last()
    elif last is not None and last["state"] in TERMINAL_STATES:
        tune.report(_judged(opened.study, last))


def _judged(study: Study, row: RowMapping) -> dict[str, Any]:
    """The last result of a trial that has ended in the ledger, which is no failure to be tried again by Tune.

    What failed has no number, at epoch 0: no scheduler ranks a trial by that, nor others by it.
    """
    names = [one.metric for one in study.objectives]
    scored = has_value(row)
    values = row["values"] if scored else [math.nan] * len(names)
    epoch, step = (row["epoch"], row["step"]) if scored else (0, 0)
    return {**dict(zip(names, values, strict=True)), "epoch": epoch, "step": step, "trial": row["number"], "done": True}


def _begin(
    ledger: Ledger, opened: StudySession, config: Mapping[str, Any], job: Job, origin: _Origin | None
) -> Claim | None:
    """The trial to be trained; None where nothing is left: it has ended, or the donor has trained to its end."""
    study, spec = opened.study, opened.resolved.spec
    coordinates, params = params_of(study, config)
    mine = ledger.look(lambda c: external.newest(c, opened.id, tune.get_context().get_trial_id()))
    if origin is not None and mine is not None and mine["number"] != origin.trial:
        compatibility.whole("this scheduler of Ray Tune's", study.shape)
    if origin is not None and origin.ref.epoch >= TrialShape.of(study.resolved(params)[0]).epochs:
        return None
    origin_of = (origin.trial, origin.ref.sha256) if origin else None
    start = external.Start(tune.get_context().get_trial_id(), params, origin_of, config.get(ALIAS, ""))

    def make(number: int) -> transactions.Ask:
        resolved, refused = study.resolved(params)
        parts = params, coordinates, resolved, json_sha256(resolved)
        return transactions.Ask(number, 0, ask_seed(spec.seed, number), 0, *parts, refused=refused)

    process, token = Process.current(), uuid.uuid4().hex
    ledger.transact(lambda c: transactions.register(c, process, "ray-tune"))
    worker = (process.id, token)
    return ledger.transact(lambda c: external.begin(c, opened.id, start, make, worker, opened.curves, job.who))


def _attempt(
    attempt: Callable[..., Outcome],
    ledger: Ledger,
    opened: StudySession,
    claim: Claim,
    job: Job,
    origin: _Origin | None,
) -> tuple[_Results, Outcome]:
    """Train the trial to its end, and end it in the ledger."""

    def renew_lease() -> None:
        ledger.transact(lambda connection: renew(connection, claim))

    with Heartbeat(f"trial {claim.number}", renew_lease, claim.lease_seconds / 3) as heartbeat:

        def preempted() -> bool:
            heartbeat.check()
            return False

        inner = LedgerReporter(ledger, job.home, opened, claim, preempted, SystemMetrics())
        inner.sweep_files()
        store = inner.store()
        if origin is not None and origin.trial != claim.number:
            store.kept.append(origin.ref)  # where it begins, until it has a checkpoint of its own
        reporter = _Results(inner, claim, job)
        try:
            with kept():
                outcome = attempt(opened.study, job.home, claim, reporter, store)
        except HpoError as error:  # this place is at fault, and not the trial
            left = Outcome("preempted", error=str(error))
            ledger.transact(lambda connection: transactions.finish(connection, claim, left, None))
            raise
        return reporter, ledger.transact(lambda c: _finish(c, opened.curves, claim, outcome))


def _finish(connection: Any, curves: Curves, claim: Claim, outcome: Outcome) -> Outcome:
    judged = Judgement(outcome)
    if outcome.kind == "complete":
        judged = curves.judge(connection, claim.trial_id, outcome)
    transactions.finish(connection, claim, judged.outcome, judged.values, judged.violations)
    return judged.outcome


@dataclass(frozen=True)
class _Origin:
    """Whose checkpoint Tune has handed over: the trial's own, or that of another one to go on from."""

    trial: int
    ref: CheckpointRef


def _origin(directory: Path, uid: str) -> _Origin:
    note = json.loads((directory / _NOTE).read_text())
    if note.pop("uid") != uid:
        raise UserError(
            f"the Tune checkpoint {directory} belongs to another study: give each study a Tuner of its own."
        )
    # Without metrics: another trial's checkpoint is never this one's best.
    return _Origin(note.pop("trial"), CheckpointRef(directory / "checkpoint", **note))


class _TakenAway(Fenced):
    """The trial is not to go on in this process; what becomes of it is recorded where Tune is."""


class _Results:
    """A Reporter whose epochs also are results of Tune's, which stops or pauses a trial by not letting it go on.

    A result is sent when the fit looks around again, after it has tidied its checkpoints; that of the last epoch once
    the trial has ended in the ledger: no scheduler cuts that short.
    """

    def __init__(self, inner: Reporter, claim: Claim, job: Job) -> None:
        self._inner, self._job, self._number = inner, job, claim.number
        self._last_epoch = TrialShape.of(claim.config).epochs
        self._newest: CheckpointRef | None = None
        self._held: dict[str, Any] | None = None

    @property
    def preempted(self) -> bool:
        self._send()
        return self._inner.preempted

    def report(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        epoch: int | None = None,
        fold: int = 0,
        checkpoint: CheckpointRef | None = None,
    ) -> Verdict:
        self._send()
        self._inner.report(step, metrics, epoch=epoch, fold=fold, checkpoint=checkpoint)
        self._newest = checkpoint or self._newest
        if epoch is not None and fold == 0:
            self._held = {**metrics, "epoch": epoch, "step": step, "trial": self._number}
        return CONTINUE

    def event(self, kind: str, **fields: Any) -> None:
        self._inner.event(kind, **fields)

    def artifact(self, path: Path, name: str | None = None) -> None:
        self._inner.artifact(path, name)

    def tag(self, key: str, value: str) -> None:
        self._inner.tag(key, value)

    def _send(self) -> None:
        if self._held is not None and self._held["epoch"] < self._last_epoch:
            try:
                self.send_last()
            except SystemExit as left:
                raise _TakenAway("Ray Tune has stopped or paused the trial.") from left

    def send_last(self) -> None:
        """What has not been sent. Tune ends the thread by SystemExit where it does not let the trial go on."""
        result, self._held, ref = self._held, None, self._newest
        if result is None:
            return
        if ref is None or not ref.path.is_dir():
            tune.report(result)
            return
        with _copied(ref, self._job.home.tune / "tmp", {"uid": self._job.uid, "trial": self._number}) as directory:
            tune.report(result, checkpoint=tune.Checkpoint.from_directory(directory))


@contextmanager
def _copied(ref: CheckpointRef, scratch: Path, note: Mapping[str, Any]) -> Iterator[Path]:
    """A directory for Tune to take: the checkpoint's files under a second name, and whose it is."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        link(ref.path, Path(directory, "checkpoint"))
        where = {"step": ref.step, "epoch": ref.epoch, "sha256": ref.sha256, "size": ref.size}
        Path(directory, _NOTE).write_text(json.dumps({**note, **where}))
        yield Path(directory)
