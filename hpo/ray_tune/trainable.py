"""Makes a study a Tune trainable, for `hpo run --executor ray-tune` and for your own Tuner.

Ray Tune decides, and the ledger records.

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
without progress (hpo.ledger.transactions.lose); without it Tune gives up at the first failure. Each epoch is a result
with `epoch`, `step` and the metrics; schedulers take `time_attr="epoch"`. A Tune checkpoint with the trainer's comes
with it. See hpo.ledger.external on how the ledger records a trial of Tune's.
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

from hpo.declaration import compatibility, preflight
from hpo.declaration.identity import check_worker
from hpo.declaration.study import Study
from hpo.driver.open import check_home, open_study
from hpo.driver.request import DriverOptions
from hpo.driver.trial_rows import has_value
from hpo.errors import HpoError, NoLedger, UserError
from hpo.ledger import Ledger, external, queries, transactions, worker_rows
from hpo.ledger.claims import Claim
from hpo.ledger.database.store import PATIENCE
from hpo.ledger.process_id import Process
from hpo.ledger.rows import ProposedTrial
from hpo.ray_tune.job import ALIAS, Job
from hpo.ray_tune.recorder import Recorder
from hpo.ray_tune.space import param_space, params_of
from hpo.search.samplers.base import ask_seed
from hpo.secret_environment import withheld
from hpo.space.assignments import NO_PRESET
from hpo.space.hashing import json_sha256
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.tracking.files import link
from hpo.workers.executors.placement import Placement
from hpo.workers.executors.ray_cluster import carried_environ
from hpo.workers.executors.resources import gpu_share, gpus_asked, keep_to_share
from hpo.workers.held_trial import Holder, holding
from hpo.workers.session import StudySession
from trainer.errors import Fenced
from trainer.report import CONTINUE, CheckpointRef, Outcome, Relay, Report, Reporter, Verdict
from trainer.runtime.process_state import kept

__all__ = ["Recorder", "as_trainable", "param_space"]

_NOTE = "hpo.json"  # beside a checkpoint in Tune's: the trial and the study that it belongs to


def as_trainable(
    study: Study, home: Home | str | None = None, *, name: str | None = None, storage: str | None = None
) -> Any:
    """Returns a function for `ray.tune.Tuner` that trains the study's trials; its attribute `job` identifies the study.

    The study, from `hpo.load`, is opened in the ledger of `home`, or at `storage`. Raises UserError and DriftError as
    `hpo run` does.
    """
    from hpo.driver.request import request_of
    from hpo.driver.resolve import declare

    opened_home = home if isinstance(home, Home) else Home.at(home)
    _refuse_bucket(storage or opened_home.storage, name or study.name)
    opened_home.create()
    ledger = Ledger(storage or opened_home.storage)
    overrides = {
        "preset": NO_PRESET,
        **study.overrides,
    }  # the study is what it is, with no preset that it does not name
    flags: dict[str, Any] = {"overrides": overrides, "order": "async", "strategy": "none", "learn_from": "none"}
    request = request_of(opened_home, study.reference, name=name or study.name, **flags)
    resolved = declare(request, ledger, workers=1)
    left_open = Placement("ray-tune", scheduler="fifo")  # `hpo resume` finishes what the Tuner has left
    options = DriverOptions(opened_home, ledger.url, opened_home.tracking_uri, placement=left_open)
    row = open_study(ledger, resolved, options)
    check_home(ledger, row, opened_home)
    ledger.close()
    return trainable(resolved.study, Job(ledger.url, opened_home, row.id, row.name, row.uid, "ray-tune", Path.cwd()))


def _refuse_bucket(storage: str, name: str) -> None:
    """Raises UserError if the ledger, if there is one, has the study with its checkpoints in a bucket."""
    try:
        ledger = Ledger(storage, create=False, upgrade=True)
    except NoLedger:
        return
    with closing(ledger), ledger.read() as connection:
        known = name in queries.study_names(connection)
        if known and (bucket := locations.url(queries.study_row(connection, name))):
            raise UserError(f"study {name!r} has its checkpoints in {bucket}, and Tune keeps its own: use another.")


def trainable(study: Study, job: Job) -> Any:
    """Returns the function that Tune calls with a configuration: path -> value, for each dimension of the space."""
    if study.shape.ranks > 1:
        raise UserError("train.parallel asks for several ranks, and under Ray Tune a trial is one process: leave it.")
    preflight.check_one_by_one(study.shape, "Ray Tune")

    def train(config: Mapping[str, object]) -> None:
        try:
            _train(config, job)
        except _TakenAway:
            sys.exit(0)  # Tune has asked for it

    train.__name__ = job.name
    vars(train).update(job=job)  # not the study: Tune pickles the function
    return train


# In the process of a trial


def _train(config: Mapping[str, object], job: Job) -> None:
    for key, value in carried_environ(job.carried).items():
        os.environ.setdefault(key, value)  # by the first trial, before this process changes its directory
    if job.directory.is_dir():
        os.chdir(job.directory)
    gpus = tune.get_context().get_trial_resources().required_resources.get("GPU", 0.0)
    os.environ.update(gpu_share(gpus) | gpus_asked(gpus if job.gpus_asked else None))
    keep_to_share()
    from hpo.workers.attempt import attempt  # before a trial is claimed, whose lease nothing renews until it trains

    with ExitStack() as stack:
        ledger = Ledger(job.storage, create=False, patience=PATIENCE)
        stack.callback(ledger.close)
        stack.enter_context(withheld())
        row = ledger.look(lambda connection: queries.study_row(connection, job.name))
        locations.check(job.home, row)
        opened = StudySession(row)
        check_worker(opened.resolved, row.identity, row.environment)
        checkpoint = tune.get_checkpoint()
        origin = None if checkpoint is None else _origin(Path(stack.enter_context(checkpoint.as_directory())), job.uid)
        claim = _begin(ledger, opened, config, job, origin)
        reporter, outcome = (None, None) if claim is None else _attempt(attempt, ledger, opened, claim, job, origin)
        last = ledger.look(lambda c: external.newest(c, opened.id, tune.get_context().get_trial_id()))
    if reporter and outcome and outcome.kind == "complete":
        reporter.send_last()
    elif last is not None and last.state in TERMINAL_STATES:
        tune.report(_judged(opened.study, last))


def _judged(study: Study, row: ProposedTrial) -> dict[str, Any]:
    """Returns the last result of a trial that has ended in the ledger; Tune must not retry it as a failure.

    A failed trial gets NaN at epoch 0, so that schedulers rank neither it nor others by it.
    """
    names = [objective.metric for objective in study.objectives]
    scored = row.values if has_value(row) else None
    values = scored or [math.nan] * len(names)
    epoch, step = (row.epoch, row.step) if scored else (0, 0)
    return {**dict(zip(names, values, strict=True)), "epoch": epoch, "step": step, "trial": row.number, "done": True}


def _begin(
    ledger: Ledger, opened: StudySession, config: Mapping[str, Any], job: Job, origin: _Origin | None
) -> Claim | None:
    """Returns the trial to train; None if nothing is left because it has ended or its donor has trained to its end."""
    study, spec = opened.study, opened.resolved.spec
    coordinates, params = params_of(study, config)
    newest_row = ledger.look(lambda c: external.newest(c, opened.id, tune.get_context().get_trial_id()))
    if origin is not None and newest_row is not None and newest_row.number != origin.trial:
        compatibility.whole("this scheduler of Ray Tune's", study)
    if origin is not None and origin.ref.epoch >= TrialShape.of(study.resolved(params)[0]).epochs:
        return None
    origin_of = (origin.trial, origin.ref.sha256) if origin else None
    start = external.Start(tune.get_context().get_trial_id(), params, origin_of, config.get(ALIAS, ""))

    def make(number: int) -> transactions.Ask:
        resolved, refused = study.resolved(params)
        parts = params, coordinates, resolved, json_sha256(resolved)
        return transactions.Ask(number, 0, ask_seed(spec.seed, number), 0, *parts, refused=refused)

    process, token = Process.current(), uuid.uuid4().hex
    ledger.transact(lambda c: worker_rows.register(c, process, "ray-tune"))
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
    """Trains the trial to its end and records that in the ledger."""
    with holding(Holder(ledger, job.home), claim) as trial:
        inner = trial.begin(opened)
        inner.sweep_files()
        store = inner.store()
        if origin is not None and origin.trial != claim.number:
            store.kept.append(origin.ref)  # its start, until it has its own checkpoint
        reporter = _Results(inner, claim, job)
        try:
            with kept():
                outcome = attempt(opened.study, job.home, claim, reporter, store)
        except HpoError as error:
            trial.give_back(error)
            raise
        return reporter, trial.finish(outcome)


@dataclass(frozen=True)
class _Origin:
    """Identifies the checkpoint that Tune has handed over: the trial's own, or another trial's to continue from."""

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
    """Raised when the trial must not go on in this process; the Tuner's process records its fate."""


class _Results(Relay):
    """A Reporter whose epochs also become results of Tune, which stops or pauses a trial by not returning.

    A result is sent when the fit next uses the reporter, after the fit has cleaned up its checkpoints. The last epoch's
    result is sent once the trial has ended in the ledger, so that no scheduler cuts it short.
    """

    def __init__(self, reporter: Reporter, claim: Claim, job: Job) -> None:
        super().__init__(reporter)
        self._job, self._number = job, claim.number
        self._last_epoch = claim.shape.epochs
        self._newest: CheckpointRef | None = None
        self._held: dict[str, Any] | None = None

    @property
    def preempted(self) -> bool:
        self._send()
        return self.reporter.preempted

    def report(self, report: Report) -> Verdict:
        self._send()
        self.reporter.report(report)
        self._newest = report.checkpoint or self._newest
        if report.epoch is not None and report.fold == 0:
            self._held = {**report.metrics, "epoch": report.epoch, "step": report.step, "trial": self._number}
        return CONTINUE

    def _send(self) -> None:
        if self._held is not None and self._held["epoch"] < self._last_epoch:
            try:
                self.send_last()
            except SystemExit as left:
                raise _TakenAway("Ray Tune has stopped or paused the trial.") from left

    def send_last(self) -> None:
        """Sends the last unsent result. Tune ends the thread by SystemExit if the trial must not go on."""
        unsent, self._held, ref = self._held, None, self._newest
        if unsent is None:
            return
        if ref is None or not ref.path.is_dir():
            tune.report(unsent)
            return
        with _copied(ref, self._job.home.tune / "tmp", {"uid": self._job.uid, "trial": self._number}) as directory:
            tune.report(unsent, checkpoint=tune.Checkpoint.from_directory(directory))


@contextmanager
def _copied(ref: CheckpointRef, scratch: Path, note: Mapping[str, object]) -> Iterator[Path]:
    """Yields a directory for Tune to take: links to the checkpoint's files, and a note about its origin."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        link(ref.path, Path(directory, "checkpoint"))
        where = {"step": ref.step, "epoch": ref.epoch, "sha256": ref.sha256, "size": ref.size}
        Path(directory, _NOTE).write_text(json.dumps({**note, **where}))
        yield Path(directory)
