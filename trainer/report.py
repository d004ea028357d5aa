"""Defines the interface between a training loop and its observer: reports, verdicts, outcomes. Torch-free.

The loop calls `Reporter.report` and obeys the `Verdict` that it returns; when it
ends it returns an `Outcome`. Nothing else crosses this border.

    Step   the optimizer steps done so far (int >= 0); the key of a report.
    Epoch  the passes over the training data completed, given when the report
           closes one. Strategies compare trials by epoch, since the batch
           size may differ between them.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.quote import quoted

# JSON values, and tuples, which JSON turns into lists. Readers know the contents.
Json = Mapping[str, Any] | list[Any] | tuple[Any, ...] | str | float | bool | None

VerdictKind = Literal["continue", "stop", "pause", "restart_from", "leave"]

OutcomeKind = Literal[
    "complete",  # ran to its end, or stopped early by its own rule
    "pruned",  # obeyed a `stop`
    "paused",  # obeyed a `pause`; its last checkpoint is committed
    "restarted",  # obeyed a `restart_from`; the next attempt starts there
    "nonfinite",  # NaN, Inf or divergence: an infeasible configuration
    "out_of_memory",  # does not fit: an infeasible configuration
    "infeasible",  # a declared constraint does not hold
    "preempted",  # asked to leave; checkpointed; costs no budget
    "lost",  # worker, rank or node gone; retried
    "user_error",  # a bug in the study's code, with its traceback
    "unreported",  # the study's objective is not among the task's metrics
    "bad_config",  # the configuration cannot be trained at all
]


# The outcome of a fit that obeys a verdict; after `continue` it goes on.
ENDS: Mapping[VerdictKind, OutcomeKind] = {
    "stop": "pruned",
    "pause": "paused",
    "restart_from": "restarted",
    "leave": "preempted",  # the decision is not known yet, and not waited for here: the next attempt asks again
}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as plain floats.

    Raises TypeError for a name that is not text and for a value that is not a number, such as the text of one, and
    ValueError for a value that is too large.
    """
    values: dict[str, float] = {}
    for key, value in metrics.items():
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metric {quoted(key, 80)} has a name that is not text: write {{{str(key)!r}: ...}}.")
        try:
            values[key] = number(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {key!r} is not a number but {quoted(value, 80)}: give a float of it.") from error
        except OverflowError as error:
            raise ValueError(f"metric {key!r} is {quoted(value, 80)}, which is too large for a float.") from error
    return values


def number(value: Any) -> float:
    """Returns the value as a float. Raises as `float` does, and TypeError for text, which `float` would parse."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("it is text")
    return float(value)


def _make_counts_plain(counted: Outcome | CheckpointRef) -> None:
    """Converts `step` and `epoch` to Python integers, also from numpy's; raises TypeError for anything else."""
    for name in ("step", "epoch"):
        object.__setattr__(counted, name, operator.index(getattr(counted, name)))


@dataclass(frozen=True)
class Verdict:
    """The answer to one report, decided at `step` and obeyed there by every rank.

    `checkpoint` (`<trial number>/<its directory>`, of this step or a later one)
    and `params` (dotted path -> value) belong to `restart_from` alone: train on
    from that checkpoint with those parameters on top of the trial's own.
    """

    kind: VerdictKind = "continue"
    step: int | None = None
    reason: str = ""
    checkpoint: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])


CONTINUE = Verdict()


@dataclass(frozen=True)
class Outcome:
    """The end of a fit.

    `step` and `epoch` are where it ended; `error` is one sentence; `traceback` is set for `user_error`.
    """

    kind: OutcomeKind
    step: int = 0
    epoch: int = 0
    error: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        _make_counts_plain(self)


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint that is durable on disk: all its files and its manifest are synced.

    `path` is its directory, `sha256` that of its manifest file, `size` its
    bytes, `metrics` those of its step. It becomes part of the trial once a
    report of its own step or a later one has committed it.
    """

    path: Path
    step: int
    epoch: int
    sha256: str
    size: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)

    def __post_init__(self) -> None:
        _make_counts_plain(self)


@dataclass(frozen=True)
class Report:
    """A fit's report at `step`: its metrics, possibly none, the epoch that it closes, and the newly durable checkpoint.

    `fold` counts from 1 if a trial trains several times, and is 0 for the trial itself.
    """

    step: int
    metrics: Mapping[str, float]
    epoch: int | None = None
    checkpoint: CheckpointRef | None = None
    fold: int = 0


class Reporter(Protocol):
    """The receiver of a fit's reports.

    Every method raises `trainer.errors.Fenced` once another attempt has the trial.
    """

    @property
    def preempted(self) -> bool:
        """Returns True once the fit should checkpoint, report and return `preempted`. Cheap: read at every step."""
        ...

    def report(self, report: Report, /) -> Verdict:
        """Commits the metrics and the checkpoint in one transaction. Returns the verdict, possibly after a wait.

        The first value for a (step, fold, key) stands; a replay after a resume gets the verdict that was stored the
        first time, until an attempt has ended by it.
        """
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """Records that something happened, such as `skipped_step` or `checkpoint_damaged`; fields are JSON values.

        An event with a field `step` is recorded once, even if a replay after a resume repeats it.
        """
        ...

    def artifact(self, path: Path, name: str | None = None) -> None:
        """Hands over a finished file that belongs to the trial; it is copied, `name` defaults to the file's.

        The last file given for a name is shown, so a replay after a resume may hand over the same one again.
        """
        ...

    def tag(self, key: str, value: str) -> None:
        """Gives the trial a tag, replacing one of the same name."""
        ...


def trains_itself(task: Any) -> bool:
    """Returns True if a task, or its class, has its own loop, as in `CustomLoop`."""
    return callable(getattr(task, "fit", None))


class Silent:
    """A reporter that drops all reports: every fit runs to its end."""

    preempted = False

    def report(self, report: Report) -> Verdict:
        return CONTINUE

    def event(self, kind: str, **fields: Any) -> None:
        pass

    def artifact(self, path: Path, name: str | None = None) -> None:
        pass

    def tag(self, key: str, value: str) -> None:
        pass


class Relay:
    """Forwards everything except reports to a reporter; a subclass handles the reports."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    @property
    def preempted(self) -> bool:
        return self.reporter.preempted

    def event(self, kind: str, **fields: Any) -> None:
        self.reporter.event(kind, **fields)

    def artifact(self, path: Path, name: str | None = None) -> None:
        self.reporter.artifact(path, name)

    def tag(self, key: str, value: str) -> None:
        self.reporter.tag(key, value)


class LoopReporter(Relay):
    """The reporter of a task with its own loop; its `report` takes the parts of a Report, or a Report.

    The latter comes from `trainer.loop.fit`, if the loop calls that. `step` and `epoch` are those of the trial's last
    report; `kind` is how the fit ends once a verdict has ended it.
    """

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(reporter)
        self.step = self.epoch = 0
        self.kind: OutcomeKind | None = None

    def report(
        self,
        step: int | Report,
        metrics: Mapping[str, float] = {},
        *,
        epoch: int | None = None,
        fold: int = 0,
        checkpoint: CheckpointRef | None = None,
    ) -> Verdict:
        """Reports as `Reporter.report` does."""
        report = step if isinstance(step, Report) else Report(step, metrics, epoch, checkpoint, fold)
        verdict = self.reporter.report(report)
        if report.fold == 0:
            self.step, self.epoch = report.step, report.epoch or self.epoch
        self.kind = ENDS.get(verdict.kind)
        return verdict


class CustomLoop(Protocol):
    """A task that trains by its own loop; docs/guide/own-loop.md has the rules for such a loop."""

    def fit(self, reporter: LoopReporter, checkpoints: Any) -> Outcome:
        """Trains from the newest of `checkpoints`, a `trainer.checkpoint.store.CheckpointStore`.

        Returns the outcome.
        """
        ...


def hand_over(reporter: Reporter, name: str, text: str) -> None:
    """Gives `text` to the reporter as the file `name`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "text"
        path.write_text(text, encoding="utf-8")
        reporter.artifact(path, name)
