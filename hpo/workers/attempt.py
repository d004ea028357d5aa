"""Runs one attempt at a trial: configuration, task, fit, outcome."""

from __future__ import annotations

import errno
import math
import traceback
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args

from hpo.declaration.preflight import lacking
from hpo.declaration.study import Study
from hpo.declaration.user_code import frame
from hpo.errors import HpoError, Unreported, UserError
from hpo.ledger.claims import Claim
from hpo.space.config import apply
from hpo.storage.home import Home
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed.rank import peer_lost
from trainer.errors import CheckpointError, ConfigError, DataError, Fenced, OutOfMemory, TrainerError, is_stop
from trainer.redaction import redacted
from trainer.report import LoopReporter, Outcome, OutcomeKind, Reporter, trains_itself
from trainer.runtime.device import out_of_memory
from trainer.runtime.first_seed import seed_attempt
from trainer.runtime.threads import limited

if TYPE_CHECKING:
    from trainer.loop import Watch

if find_spec("torch"):  # so that a worker imports it before it claims: this takes seconds
    import_module("trainer.cross_validation")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def attempt(
    study: Study, home: Home, claim: Claim, reporter: Reporter, store: CheckpointStore, watch: Watch | None = None
) -> Outcome:
    """Trains the trial in this process, observed by `watch`; returns how it ended.

    Raises Fenced, CheckpointError, OutOfMemory (of several ranks) or HpoError if the trial is not at fault.
    """
    try:
        return _attempt(study, home, claim, reporter, store, watch)
    except BaseException as error:
        if is_stop(error):
            raise
        return outcome_of(error)


def _attempt(
    study: Study, home: Home, claim: Claim, reporter: Reporter, store: CheckpointStore, watch: Watch | None
) -> Outcome:
    config: Any = config_of(study, claim)
    with limited(getattr(getattr(config, "train", None), "num_threads", 1)):
        task = task_of(study, home, config)
        task.number = claim.number
        shape = claim.shape
        if lack := lacking(task, shape):
            raise ConfigError(lack)
        if trains_itself(task):
            return _own_loop(task, LoopReporter(reporter), store, shape.epochs)
        from trainer.cross_validation import fit_folds
        from trainer.loop import fit

        return (fit_folds if shape.parts > 1 else fit)(task, config.train, reporter, store, watch)


def config_of(study: Study, claim: Claim) -> Any:
    """Returns the trial's configuration, including the values set by a restart."""
    return apply(study.rebuild(claim.config, claim.config_hash), claim.changes)


def task_of(study: Study, home: Home, config: object) -> Any:
    """Returns the trial's task; its code draws the same numbers in every process until it sets a seed itself."""
    seed = getattr(getattr(config, "train", None), "seed", 0)
    seed_attempt(seed if isinstance(seed, int) else 0)
    task = study.task_class()(config)
    task.shared = home.shared
    return task


def _is_plain_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _left(left: SystemExit, last: LoopReporter, epochs: float) -> Outcome:
    """Returns the outcome of a loop that called sys.exit(); it counts as having returned if nothing was left to
    train."""
    over = last.epoch >= epochs or (last.step > 0 and math.isinf(epochs))
    kind = last.kind or ("complete" if over else "preempted" if last.preempted else None)
    if kind is None:
        done = f"after epoch {last.epoch}" + ("" if math.isinf(epochs) else f" of {epochs:g}")
        at = frame(left)
        raise TrainerError(
            f"{at}{at and ': '}sys.exit() ended the training {done if last.step else 'before its first report'}: let "
            "it train to its end, or raise what went wrong."
        )
    return Outcome(kind, last.step, last.epoch)


def _own_loop(task: Any, reporter: LoopReporter, store: CheckpointStore, epochs: float) -> Outcome:
    try:
        outcome = task.fit(reporter, store)
    except SystemExit as left:
        if not _is_plain_exit(left):
            raise
        return _left(left, reporter, epochs)
    if not isinstance(outcome, Outcome):
        raise TrainerError(f"fit() of {type(task).__name__} returned {outcome!r}: return a trainer.report.Outcome.")
    if outcome.kind not in get_args(OutcomeKind):
        raise TrainerError(
            f"fit() of {type(task).__name__} returned an Outcome of kind {outcome.kind!r}: a kind is one of "
            f"{', '.join(get_args(OutcomeKind))}."
        )
    return outcome


def outcome_of(error: BaseException) -> Outcome:
    """Returns the outcome of an attempt that raised `error`; raises it if the trial is not at fault."""
    if isinstance(error, Unreported):
        return Outcome("unreported", error=str(error))
    if isinstance(error, (ConfigError, DataError, UserError)):
        return Outcome("bad_config", error=str(error))
    if isinstance(error, (Fenced, CheckpointError, OutOfMemory, HpoError)) or peer_lost(error):
        raise error
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        raise CheckpointError(f"the disk takes no more ({error}): free some space, then resume.") from error
    where, words = frame(error), _words(error)
    if out_of_memory(error):  # not handled by the trainer: in a constructor or a user's own loop
        return Outcome("out_of_memory", error=f"out of memory{where and ', '}{where}: {words}")
    # A bug in the study's code; its whole traceback goes to the ledger, unless the trainer has made it a sentence.
    if isinstance(error, TrainerError) and not where:
        return Outcome("user_error", error=str(error))
    trace = redacted("".join(traceback.format_exception(error)))
    return Outcome("user_error", error=f"{where}: {words}" if where else words, traceback=trace)


def _words(error: BaseException) -> str:
    """Returns `ValueError: message`; formatting it may run the study's code, and may fail."""
    if _is_plain_exit(error):
        return "sys.exit() ended the training: let it end by itself, or raise what went wrong"
    name = type(error).__name__
    try:
        return redacted(f"{name}: {error}")
    except Exception as second_error:
        return f"{name}, whose text cannot be had ({type(second_error).__name__})"
