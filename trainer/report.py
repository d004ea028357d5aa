"""Defines the interface between a training loop and whoever watches it: reports, verdicts, outcomes. Torch-free.

The loop calls `Reporter.report` and obeys the `Verdict` it gets back; when it
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

# Values as JSON has them, and tuples, which it makes lists of. What is in them is for whoever reads them to know.
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
    "unreported",  # what the study judges by is not among what the task reports
    "bad_config",  # the configuration cannot be trained at all
]


# What a fit that obeys a verdict ends as; after `continue` it goes on.
ENDS: Mapping[VerdictKind, OutcomeKind] = {
    "stop": "pruned",
    "pause": "paused",
    "restart_from": "restarted",
    "leave": "preempted",  # what decides is not known yet, and not to be waited for here: the next attempt asks again
}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns metrics as plain floats. Raises TypeError for a name that is not text and for a value that is no number,
    text of one among them, and ValueError for a value that is too large."""
    values: dict[str, float] = {}
    for key, value in metrics.items():
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"metric {quoted(key, 80)} has a name that is not text: write {{{str(key)!r}: ...}}.")
        try:
            values[key] = number(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {key!r} is no number but {quoted(value, 80)}: give a float of it.") from error
        except OverflowError as error:
            raise ValueError(f"metric {key!r} is {quoted(value, 80)}, which is too large for a float.") from error
    return values


def number(value: Any) -> float:
    """Returns the value as a float. Raises what `float` raises, and TypeError for text, of which `float` reads one."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("it is text")
    return float(value)


def _make_counts_plain(counted: Outcome | CheckpointRef) -> None:
    """Have `step` and `epoch` as Python's whole numbers; TypeError for what is none, a numpy integer being one."""
    for name in ("step", "epoch"):
        object.__setattr__(counted, name, operator.index(getattr(counted, name)))


@dataclass(frozen=True)
class Verdict:
    """The answer to one report, taken at `step` and obeyed there by every rank.

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
    """How a fit ended.

    `step` and `epoch` are where it ended; `error` is one sentence;
    `traceback` is set for `user_error`.
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
    report has committed it, of its own step or a later one.
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
    """What a fit has to say at `step`: its metrics, possibly none, the epoch that this closes, and the checkpoint that
    has become durable."""

    step: int
    metrics: Mapping[str, float]
    epoch: int | None = None
    checkpoint: CheckpointRef | None = None


class Reporter(Protocol):
    """Where a fit reports. Every method raises `trainer.errors.Fenced` once the trial belongs to another attempt."""

    @property
    def preempted(self) -> bool:
        """True once the fit should checkpoint, report and return `preempted`. Cheap: read at every step."""
        ...

    def report(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        epoch: int | None = None,
        fold: int = 0,
        checkpoint: CheckpointRef | None = None,
    ) -> Verdict:
        """Commit metrics (possibly none) and a durable checkpoint in one transaction; return what to do next, which may
        have to be waited for.

        The first value given for a (step, fold, key) stands; a replay after a
        resume gets the verdict that was stored the first time, until an attempt
        has ended by it.
        """
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened, such as `skipped_step` or `checkpoint_damaged`; fields are JSON values.

        One with a field `step` is recorded once, however often a replay after a resume tells it.
        """
        ...

    def artifact(self, path: Path, name: str | None = None) -> None:
        """Hand over a finished file that belongs to the trial; it is copied, `name` defaults to the file's.

        Of several given for a name the last one is shown, so a replay after a resume may hand over the same again.
        """
        ...

    def tag(self, key: str, value: str) -> None:
        """Give the trial a tag, in place of one of that name."""
        ...


class CustomLoop(Protocol):
    """A task that trains by a loop of its own; docs/guide/own-loop.md has the rules such a loop keeps."""

    def fit(self, reporter: Reporter, checkpoints: Any) -> Outcome:
        """Train from the newest of `checkpoints`, a `trainer.checkpoint.store.CheckpointStore`; how that has ended."""
        ...


def trains_itself(task: Any) -> bool:
    """Whether a task, or its class, has a loop of its own, as `CustomLoop` says."""
    return callable(getattr(task, "fit", None))


class Silent:
    """A reporter that nobody hears: every fit runs to its end."""

    preempted = False

    def report(self, step: int, metrics: Mapping[str, float], **given: Any) -> Verdict:
        return CONTINUE

    def event(self, kind: str, **fields: Any) -> None:
        pass

    def artifact(self, path: Path, name: str | None = None) -> None:
        pass

    def tag(self, key: str, value: str) -> None:
        pass


def hand_over(reporter: Reporter, name: str, text: str) -> None:
    """Give `text` to the reporter as the file `name`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "text"
        path.write_text(text, encoding="utf-8")
        reporter.artifact(path, name)
