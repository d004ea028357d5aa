"""Runs a training function as a trial: parameters in, reports and files out, stopped and resumed like any other
trial."""

from __future__ import annotations

import inspect
import marshal
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.errors import UserError
from hpo.space import optuna_names, tags
from trainer.config.fields import Frozen
from trainer.errors import TrainerError
from trainer.files import scratch
from trainer.quote import quoted
from trainer.report import ENDS, LoopReporter, Outcome, OutcomeKind, VerdictKind, numbers

if TYPE_CHECKING:
    from trainer.checkpoint.copied_files import Source
    from trainer.checkpoint.store import CheckpointStore

SCRATCH = "hpo-trial-"  # prefix of trials' temporary directories


class Parameters(Mapping[str, Any]):
    """A trial's parameters, by attribute (`params.lr`) or by key (`params["lr"]`)."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"unknown parameter {name!r}; known: {', '.join(self)}.") from None

    def __repr__(self) -> str:
        return f"Parameters({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class Trial:
    """The argument of a training function.

    number      the trial's number in its study, from 0
    params      its parameters and constants
    seed        for every random number that it draws: the same in each attempt at the trial
    num_epochs  the last epoch, as the study declares it; None if it does not
    epoch       the last one that was reported, or that `resume` returned to; 0 at the beginning
    step        the same, in steps
    directory   an empty directory for other files; when the function ends they become the trial's artifacts
    """

    def __init__(
        self,
        config: Any,
        number: int,
        steps_per_epoch: int | None,
        reporter: LoopReporter,
        checkpoints: CheckpointStore,
        scratch_directory: Path,
    ) -> None:
        self.number = number
        self.params = Parameters({path: value for path, value in _values(config) if not path.startswith("train.")})
        self.seed: int = config.train.seed
        self.num_epochs: int | None = config.train.num_epochs
        self.epoch = self.step = 0
        self.directory = scratch_directory / "own"
        self.directory.mkdir()
        self.ended: OutcomeKind | None = None  # set once `report` has asked the function to return
        self.reported = False
        self._scratch, self._steps_per_epoch = scratch_directory, steps_per_epoch
        self._reporter, self._checkpoints, self._keep = reporter, checkpoints, config.train.checkpoint
        self._staged: Path | None = None
        self._resumed: Path | None = None
        self._verdict: VerdictKind = "continue"

    def __getattr__(self, name: str) -> Any:
        raise optuna_names.missing("trial", name, optuna_names.OF_TRIAL)

    def report(
        self, epoch: int | None = None, metrics: Mapping[str, object] | None = None, *, step: int | None = None
    ) -> bool:
        """Reports the metrics of an epoch, and what was saved since the last report.

        Returns True if the function must return now, without saving again. A function that counts steps gives `step`
        instead, and the study its `steps_per_epoch`: a report at or beyond the end of an epoch closes that epoch. Later
        values for the same epoch are ignored; a function that begins again after a kill reports the same ones. Raises
        TrainerError for an epoch or step that goes back.
        """
        if not metrics:
            raise TrainerError("trial.report() was given no metrics: write trial.report(epoch, {'val/loss': loss}).")
        if not isinstance(metrics, Mapping):
            raise TrainerError(
                f"trial.report() takes metrics by name, not {quoted(metrics)}: write {{'val/loss': loss}}."
            )
        self._check_obeyed("epoch" if step is None else "step", step if epoch is None else epoch)
        step, closes = self._position(epoch, step)
        try:
            values = numbers(metrics)
        except (TypeError, ValueError) as error:
            raise TrainerError(str(error)) from None
        ref = None
        if self._staged is not None:
            state = {"report": {"metrics": values, "closes": closes is not None}}
            ref = self._checkpoints.save(
                state, step=step, epoch=closes or self.epoch, metrics=values, files=self._staged
            )
            self._staged = None
        verdict = self._reporter.report(step, values, epoch=closes, checkpoint=ref)
        self.reported = True
        self.step, self.epoch = step, closes or self.epoch
        self._verdict = verdict.kind
        if ref is not None:
            self._checkpoints.commit(ref, self._keep)
        self.ended = ENDS.get(verdict.kind) or ("preempted" if self._reporter.preempted else None)
        return self.ended is not None

    def save(self, files: Source) -> None:
        """Saves files with the next report as the trial's checkpoint: a directory, a file, or names with files.

        They are copied unchanged, in any format, under their names; `resume` returns them. Call it right before
        `report`. Raises CheckpointError for what cannot be saved.
        """
        from trainer.checkpoint import copied_files  # imports nothing heavy; the store needs torch

        staged = self._scratch / f"saved-{os.urandom(4).hex()}"
        for name, path in copied_files.found(files).items():
            copied_files.stage(path, staged / name)
        self._staged = staged

    def resume(self) -> Path | None:
        """Returns a copied directory with the files of the last checkpoint; None if the trial begins.

        Sets `epoch` and `step` to those of that checkpoint. Obeys the verdict on its report now, such as to stop.
        """
        if self._resumed is not None:
            return self._resumed
        checkpoint = self._checkpoints.load_latest()
        if checkpoint is None:
            return None
        state, ref = checkpoint
        self._resumed = self._scratch / "resumed"
        self._resumed.mkdir()
        self._checkpoints.copy_files(ref, self._resumed)
        self.epoch, self.step, reported = ref.epoch, ref.step, state["report"]
        if self._checkpoints.owns(ref):  # its report may have a verdict that was never obeyed
            self.reported = True
            epoch = ref.epoch if reported["closes"] else None
            verdict = self._reporter.report(ref.step, reported["metrics"], epoch=epoch)
            if outcome_kind := ENDS.get(verdict.kind):
                self.ended = outcome_kind
                raise Ended
        return self._resumed

    def tag(self, key: str, value: str | float | bool) -> None:
        """Sets a tag of the trial, which `hpo show`, MLflow and reports show; reports can group trials by it.

        Raises TrainerError for a name that the platform uses, or a value that is not text or number.
        """
        try:
            self._reporter.tag(*tags.checked(key, value))
        except UserError as error:
            raise TrainerError(f"trial.tag(): {error}") from error

    @property
    def preempted(self) -> bool:
        """Returns whether the function should return, after a Ctrl-C or because its node is needed.

        A function with long epochs should check it; it trains again what was not saved.
        """
        return self._reporter.preempted

    def _check_obeyed(self, what: str, at: int | None) -> None:
        if self._verdict in ENDS:
            raise TrainerError(
                f"trial.report() gave True at {what} {getattr(self, what)}, and the function went on to {what} "
                f"{at}: return then, `if trial.report(...): return`."
            )

    def _position(self, epoch: int | None, step: int | None) -> tuple[int, int | None]:
        """Returns the report's step, and the epoch that it closes."""
        if (epoch is None) == (step is None):
            raise TrainerError(
                "trial.report() takes an epoch or a step: trial.report(epoch, {...}) or report(step=...)."
            )
        for unit, value, last in (("epoch", epoch, self.epoch), ("step", step, self.step)):
            if value is None:
                continue
            if (count := _whole(value)) is None:
                raise TrainerError(f"trial.report({unit}={quoted(value)}): give a whole number from 1.")
            if count <= last:
                when = f"after {unit} {last}: report {unit}s as they grow"
                if not self.reported:
                    when = f"first: {unit}s count from 1, as in `for {unit} in range(1, n + 1)`"
                raise TrainerError(f"trial.report({unit}={count}) comes {when}.")
        if epoch is not None:
            steps_per_epoch = self._steps_per_epoch or 1
            return int(epoch) * steps_per_epoch, int(epoch)
        assert step is not None
        if self._steps_per_epoch is None:
            return int(step), None
        closed = int(step) // self._steps_per_epoch
        return int(step), closed if closed > self.epoch else None


def text_of(function: FunctionType) -> str:
    """Returns the text of a function, or its code if Python keeps no text, as for functions typed at a prompt."""
    try:
        return inspect.getsource(function)
    except OSError:
        return marshal.dumps(function.__code__).hex()


def _whole(value: Any) -> int | None:
    """Returns the integer that `value` equals, such as NumPy's or 3.0.

    Returns None for any other value, and for a number that the ledger cannot hold.
    """
    if isinstance(value, bool | str | bytes):
        return None
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return count if count == value and abs(count) < 2**63 else None


def _values(config: Frozen, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of each field, those of sections with the section's path as a prefix."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Frozen):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Ended(BaseException):
    """Raised when the function must train no more, since an earlier attempt was stopped.

    Not an Exception, so that user code does not catch it as an error.
    """


class FunctionTask:
    """The task of a study that a function declares; each such study has its own class."""

    function: ClassVar[FunctionType]
    steps_per_epoch: ClassVar[int | None] = None
    metrics: ClassVar[tuple[str, ...]] = ()

    number = 0  # set by the worker
    shared: Path  # set by the worker

    def __init__(self, config: object) -> None:
        self.config = config

    @classmethod
    def source(cls) -> str:
        """Returns the function's text, which distinguishes the studies of a notebook."""
        return text_of(cls.function)

    def fit(self, reporter: LoopReporter, checkpoints: CheckpointStore) -> Outcome:
        """Calls the function; returns how the trial has ended."""
        checkpoints.sweep()  # removes saves that were never committed
        with scratch.temporary(SCRATCH) as directory:
            trial = Trial(self.config, self.number, self.steps_per_epoch, reporter, checkpoints, directory)
            try:
                returned = type(self).function(trial)
                self._report_returned(trial, returned)
            except Ended:
                pass
            finally:
                hand_over_files(trial.directory, reporter)
        return Outcome(trial.ended or "complete", trial.step, trial.epoch)

    def _report_returned(self, trial: Trial, returned: object) -> None:
        """Reports values that the function has returned, which it may do instead of reporting."""
        name = type(self).__name__
        if returned is not None and trial.reported:
            raise TrainerError(
                f"{name}() reported epochs and returned {returned!r:.80}: report it, and return nothing."
            )
        if returned is None and not trial.reported and not trial.ended:
            metrics = ", ".join(f"'{metric}': ..." for metric in self.metrics)
            raise TrainerError(f"{name}() ended without a report: call trial.report(epoch, {{{metrics}}}) in it.")
        if returned is not None:
            if not isinstance(returned, Mapping):
                values = returned if isinstance(returned, tuple | list) else [returned]
                if len(values) != len(self.metrics):
                    raise TrainerError(
                        f"{name}() returned {returned!r:.80}: return {', '.join(self.metrics)}, in this order."
                    )
                returned = dict(zip(self.metrics, values, strict=True))
            trial.report(1, returned)


def hand_over_files(directory: Path, reporter: LoopReporter) -> None:
    """Gives all files below a directory to the reporter, under their names there."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            reporter.artifact(path, path.relative_to(directory).as_posix())
