"""Runs a training function as a trial: parameters in, reports and files out, stopped and resumed as any other trial."""

from __future__ import annotations

import inspect
import marshal
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.errors import UserError
from hpo.space import tags
from trainer.config.fields import Frozen
from trainer.errors import TrainerError
from trainer.files import scratch
from trainer.quote import quoted
from trainer.report import ENDS, Outcome, OutcomeKind, Reporter, VerdictKind, numbers

if TYPE_CHECKING:
    from trainer.checkpoint.copied import Source
    from trainer.checkpoint.store import CheckpointStore

SCRATCH = "hpo-trial-"  # what the names of trials' temporary directories begin with


class Parameters(Mapping[str, Any]):
    """A trial's parameters, by attribute (`params.lr`) or by key (`params["lr"]`)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
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
            raise AttributeError(f"there is no parameter {name!r}: there are {', '.join(self)}.") from None

    def __repr__(self) -> str:
        return f"Parameters({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class Trial:
    """What a training function is given.

    number      the trial's number in its study, from 0
    params      its parameters and constants
    seed        for every random number that it draws: the same in each attempt at the trial
    num_epochs  the last epoch, as the study declares it; None where it does not
    epoch       the last one that was reported, or that `resume` went back to; 0 at the beginning
    step        the same, in steps
    directory   an empty directory for files of its own; when the function ends they become the trial's artifacts
    """

    def __init__(
        self,
        config: Any,
        number: int,
        steps_per_epoch: int | None,
        reporter: Reporter,
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
        self.ended: OutcomeKind | None = None  # once `report` has said that the function is to return
        self.reported = False
        self._scratch, self._steps_per_epoch = scratch_directory, steps_per_epoch
        self._reporter, self._checkpoints, self._keep = reporter, checkpoints, config.train.checkpoint
        self._staged: Path | None = None
        self._resumed: Path | None = None
        self._told: VerdictKind = "continue"

    def report(
        self, epoch: int | None = None, metrics: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> bool:
        """Report what an epoch came to, with what was saved since the last report; True: save nothing more and return.

        A function that counts steps gives `step` instead, and the study its `steps_per_epoch`: a report that has come
        to the end of an epoch, or beyond it, closes that epoch. Values given for an epoch once stand; a function that
        begins anew after a kill reports the same again. Raises TrainerError for an epoch or step that goes back.
        """
        if not metrics:
            raise TrainerError("trial.report() was given no metrics: write trial.report(epoch, {'val/loss': loss}).")
        if not isinstance(metrics, Mapping):
            raise TrainerError(
                f"trial.report() takes metrics by name, not {quoted(metrics)}: write {{'val/loss': loss}}."
            )
        self._check_obeyed("epoch" if step is None else "step", step if epoch is None else epoch)
        step, closes = self._place(epoch, step)
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
        self._told = verdict.kind
        if ref is not None:
            self._checkpoints.commit(ref, self._keep)
        self.ended = ENDS.get(verdict.kind) or ("preempted" if self._reporter.preempted else None)
        return self.ended is not None

    def save(self, files: Source) -> None:
        """Save files with the next report, as the trial's checkpoint: a directory, a file, or names with files.

        They are copied whole, in whatever format, under their names; `resume` gives them back. Say it right before
        `report`. Raises CheckpointError for what cannot be saved.
        """
        from trainer.checkpoint import copied  # and with it nothing heavy; the store has torch

        staged = self._scratch / f"saved-{os.urandom(4).hex()}"
        for name, path in copied.found(files).items():
            copied.stage(path, staged / name)
        self._staged = staged

    def resume(self) -> Path | None:
        """The directory with the files of the last checkpoint, a copy; None where the trial begins. Sets `epoch` and
        `step` to those of that checkpoint. What was to be done about its report, such as to stop, is done now."""
        if self._resumed is not None:
            return self._resumed
        found = self._checkpoints.load_latest()
        if found is None:
            return None
        state, ref = found
        self._resumed = self._scratch / "resumed"
        self._resumed.mkdir()
        self._checkpoints.copy_files(ref, self._resumed)
        self.epoch, self.step, told = ref.epoch, ref.step, state["report"]
        if self._checkpoints.owns(ref):  # its report may have a verdict that was never obeyed
            self.reported = True
            epoch = ref.epoch if told["closes"] else None
            verdict = self._reporter.report(ref.step, told["metrics"], epoch=epoch)
            if ended := ENDS.get(verdict.kind):
                self.ended = ended
                raise Ended
        return self._resumed

    def tag(self, key: str, value: str | float | bool) -> None:
        """Give the trial a tag, in place of one of that name: `hpo show`, MLflow and reports show it, and reports group
        trials by it. Raises TrainerError for a name that is the platform's, or a value that is no text or number."""
        try:
            self._reporter.tag(*tags.checked(key, value))
        except UserError as error:
            raise TrainerError(f"trial.tag(): {error}") from error

    @property
    def preempted(self) -> bool:
        """Whether somebody waits for the function to return: after a Ctrl-C, or where its node is needed. A function of
        long epochs looks at it; what was not saved is trained again."""
        return self._reporter.preempted

    def _check_obeyed(self, what: str, place: int | None) -> None:
        if self._told in ENDS:
            raise TrainerError(
                f"trial.report() gave True at {what} {getattr(self, what)}, and the function went on to {what} "
                f"{place}: return then, `if trial.report(...): return`."
            )

    def _place(self, epoch: int | None, step: int | None) -> tuple[int, int | None]:
        """The report's step, and the epoch that it closes."""
        if (epoch is None) == (step is None):
            raise TrainerError(
                "trial.report() takes an epoch or a step: trial.report(epoch, {...}) or report(step=...)."
            )
        for what, given, last in (("epoch", epoch, self.epoch), ("step", step, self.step)):
            if given is not None and (isinstance(given, bool) or int(given) != given or given <= last):
                said = f"after {what} {last}: report {what}s as they grow"
                if not self.reported:
                    said = f"first: {what}s count from 1, as in `for {what} in range(1, n + 1)`"
                raise TrainerError(f"trial.report({what}={given!r}) comes {said}.")
        if epoch is not None:
            each = self._steps_per_epoch or 1
            return int(epoch) * each, int(epoch)
        assert step is not None
        if self._steps_per_epoch is None:
            return int(step), None
        closed = int(step) // self._steps_per_epoch
        return int(step), closed if closed > self.epoch else None


def _values(config: Frozen, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and the value of each field, those of sections below their names."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Frozen):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Ended(BaseException):
    """The function is to train no more: an attempt before this one was told so. No Exception, so that nobody takes it
    for an error."""


class FunctionTask:
    """The task of a study that a function declares; each such study has a class of its own."""

    function: ClassVar[FunctionType]
    steps_per_epoch: ClassVar[int | None] = None
    metrics: ClassVar[tuple[str, ...]] = ()

    number = 0  # set by the worker
    shared: Path  # set by the worker

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def source(cls) -> str:
        """The function's text, by which a study of a notebook is told from another one; at a prompt its code."""
        try:
            return inspect.getsource(cls.function)
        except OSError:  # Python keeps no text of what is typed
            return marshal.dumps(cls.function.__code__).hex()

    def fit(self, reporter: Reporter, checkpoints: CheckpointStore) -> Outcome:
        """Call the function; how the trial has ended."""
        checkpoints.sweep()  # saves that were never committed
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

    def _report_returned(self, trial: Trial, returned: Any) -> None:
        """A function may return its one value instead of reporting it."""
        name = type(self).__name__
        if returned is not None and trial.reported:
            raise TrainerError(
                f"{name}() reported epochs and returned {returned!r:.80}: report it, and return nothing."
            )
        if returned is None and not trial.reported and not trial.ended:
            given = ", ".join(f"'{metric}': ..." for metric in self.metrics)
            raise TrainerError(f"{name}() ended without a report: call trial.report(epoch, {{{given}}}) in it.")
        if returned is not None:
            if not isinstance(returned, Mapping):
                values = returned if isinstance(returned, tuple | list) else [returned]
                if len(values) != len(self.metrics):
                    raise TrainerError(
                        f"{name}() returned {returned!r:.80}: return {', '.join(self.metrics)}, in this order."
                    )
                returned = dict(zip(self.metrics, values, strict=True))
            trial.report(1, returned)


def hand_over_files(directory: Path, reporter: Reporter) -> None:
    """Give all files below a directory to the reporter, under their names there."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            reporter.artifact(path, path.relative_to(directory).as_posix())
