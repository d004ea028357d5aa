"""Runs one attempt at a trial: configuration, task, fit, outcome."""

from __future__ import annotations

import errno
import traceback
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from hpo.declaration.preflight import lacking
from hpo.declaration.study import Study
from hpo.declaration.user_code import place
from hpo.errors import HpoError, Unreported, UserError
from hpo.ledger.claims import Claim
from hpo.space.config import apply
from hpo.space.trial_config import TrialShape
from hpo.storage.home import Home
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed.rank import peer_lost
from trainer.errors import CheckpointError, ConfigError, DataError, Fenced, OutOfMemory, TrainerError
from trainer.redaction import redacted
from trainer.report import Outcome, OutcomeKind, Reporter, trains_itself
from trainer.runtime.device import out_of_memory
from trainer.runtime.threads import limited

if TYPE_CHECKING:
    from trainer.loop import Watch

if find_spec("torch"):  # a worker is ready before it claims: this import takes seconds
    import_module("trainer.cross_validation")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def attempt(
    study: Study, home: Home, claim: Claim, reporter: Reporter, store: CheckpointStore, watch: Watch | None = None
) -> Outcome:
    """Train the trial in this process, seen by `watch`; how it ended. Raises Fenced, CheckpointError, OutOfMemory (of
    several ranks) and HpoError, for which the trial is not to blame."""
    try:
        return _attempt(study, home, claim, reporter, store, watch)
    except (Exception, SystemExit) as error:
        return outcome_of(error)


def _attempt(
    study: Study, home: Home, claim: Claim, reporter: Reporter, store: CheckpointStore, watch: Watch | None
) -> Outcome:
    config: Any = config_of(study, claim)
    with limited(getattr(getattr(config, "train", None), "num_threads", 1)):
        task = task_of(study, home, config)
        task.number = claim.number
        shape = TrialShape.of(claim.config)
        if shape.lanes > 1:
            only = "Ray Tune trains each trial on its own"
            raise ConfigError(f"train.lanes: {only}: leave it out, or use another executor.")
        if lack := lacking(task, shape):
            raise ConfigError(lack)
        if trains_itself(task):
            return _own_loop(task, reporter, store)
        from trainer.cross_validation import fit_folds
        from trainer.loop import fit

        return (fit_folds if shape.parts > 1 else fit)(task, config.train, reporter, store, watch)


def config_of(study: Study, claim: Claim) -> Any:
    """The trial's configuration, with what a restart has set."""
    return apply(study.rebuild(claim.config, claim.config_hash), claim.changes)


def task_of(study: Study, home: Home, config: Any) -> Any:
    task = study.task_class()(config)
    task.shared = home.shared
    return task


def _own_loop(task: Any, reporter: Reporter, store: CheckpointStore) -> Outcome:
    outcome = task.fit(reporter, store)
    if not isinstance(outcome, Outcome):
        raise TrainerError(f"fit() of {type(task).__name__} returned {outcome!r}: return a trainer.report.Outcome.")
    if outcome.kind not in get_args(OutcomeKind):
        raise TrainerError(
            f"fit() of {type(task).__name__} returned an Outcome of kind {outcome.kind!r}: a kind is one of "
            f"{', '.join(get_args(OutcomeKind))}."
        )
    return outcome


def outcome_of(error: BaseException) -> Outcome:
    """What the attempt that raised `error` comes to; raises it where the trial is not to blame."""
    if isinstance(error, Unreported):
        return Outcome("unreported", error=str(error))
    if isinstance(error, (ConfigError, DataError, UserError)):
        return Outcome("bad_config", error=str(error))
    if isinstance(error, (Fenced, CheckpointError, OutOfMemory, HpoError)) or peer_lost(error):
        raise error
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        raise CheckpointError(f"the disk takes no more ({error}): free some space, then resume.") from error
    where, said = place(error), _words(error)
    if out_of_memory(error):  # where the trainer has not halved the micro-batch: in a constructor or a loop of its own
        return Outcome("out_of_memory", error=f"out of memory{where and ', '}{where}: {said}")
    # A bug in the study's code; its whole traceback goes to the ledger, unless the trainer has put it into a sentence.
    if isinstance(error, TrainerError) and not where:
        return Outcome("user_error", error=str(error))
    trace = redacted("".join(traceback.format_exception(error)))
    return Outcome("user_error", error=f"{where}: {said}" if where else said, traceback=trace)


def _words(error: BaseException) -> str:
    """`ValueError: what it says`; saying it is the study's code too, and may fail."""
    name = type(error).__name__
    try:
        return redacted(f"{name}: {error}")
    except Exception as again:
        return f"{name}, whose text cannot be had ({type(again).__name__})"
