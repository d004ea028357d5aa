"""Holds the trial's interface for callbacks, and functions that all callbacks share."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from hpo.errors import UserError
from trainer.errors import TrainerError
from trainer.quote import quoted


class Trial(Protocol):
    """The part of a trial that callbacks use: both a function's trial and that of `hpo.client` have it."""

    seed: int
    epoch: int  # the last one reported, or that of the checkpoint from `resume`
    step: int
    directory: Path  # for files of its own

    def report(
        self, epoch: int | None = None, metrics: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> bool: ...

    def save(self, files: Any, /) -> None: ...

    def resume(self) -> Path | None: ...


def resumed(trial: Trial, name: str = "") -> Path | None:
    """Returns the file or directory `name` of the trial's last checkpoint; None for a new trial.

    Raises TrainerError if `trial` is not a trial.
    """
    if not all(callable(getattr(trial, method, None)) for method in ("report", "save", "resume")):
        raise TrainerError(
            f"TrialCallback needs the trial that the training function is given, or `trial` of hpo.client, not "
            f"{quoted(trial)}: write TrialCallback(trial)."
        )
    saved = trial.resume()
    return None if saved is None else saved / name


def report(
    trial: Trial,
    metrics: Mapping[str, Any],
    write: Callable[[Path], object] | None = None,
    *,
    epoch: int | None = None,
    step: int | None = None,
) -> bool:
    """Reports the numeric metrics, with the files that `write` puts into its directory; returns whether to stop.

    Raises TrainerError if no metric is a number.
    """
    values = {name: float(value) for name, value in metrics.items() if _is_number(value)}
    if not values:
        raise TrainerError(
            f"there is nothing to report after {'step' if epoch is None else 'epoch'} {step or epoch}: give the "
            "training data to evaluate on, or metrics."
        )
    if write is None:
        return trial.report(epoch, values, step=step)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=trial.directory) as directory:
        write(Path(directory))
        trial.save(directory)
        return trial.report(epoch, values, step=step)


def _is_number(value: Any) -> bool:
    """Returns whether the value is a number, possibly as a tensor or an array without dimensions."""
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0


def check_begins(unit: str, done: int, begins: int, fix: str) -> None:
    """Raises TrainerError unless a training that has completed `begins` epochs, steps or rounds is the trial's."""
    if begins != done:
        raise TrainerError(f"the trial goes on after {unit} {done}, and this training after {unit} {begins}: {fix}.")


def seed_at(trial: Trial, done: int) -> int:
    """Returns 31 bits to seed generators after `done` epochs or rounds, so that no generator's state need be saved."""
    return random.Random(f"{trial.seed}/{done}").getrandbits(31)


def lacking(error: ModuleNotFoundError, package: str, extra: str) -> Exception:
    """Returns the error that names the extra of a missing package; `error` itself if another module is missing."""
    if (error.name or "").partition(".")[0] != package:
        return error
    return UserError(f"hpo.integrations needs {package}: pip install 'hpo[{extra}]'.")


def rounds_of_epoch(every: int) -> int:
    """Returns `every`, the boosting rounds of an epoch. Raises TrainerError unless it is a whole number from 1."""
    if not isinstance(every, int) or every < 1:
        raise TrainerError(f"TrialCallback(every={every!r}) must be a whole number of rounds from 1.")
    return every


def rounds_left(trial: Trial, every: int, total: int) -> int:
    """Returns the boosting rounds left to a trial of `total`. Raises TrainerError if they are not whole epochs."""
    if total % every:
        raise TrainerError(f"{total} rounds are no whole epochs of every={every}: the last ones would not be reported.")
    return total - trial.epoch * every
