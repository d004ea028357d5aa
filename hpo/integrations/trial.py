"""The trial as a callback sees it, and what all callbacks do with one."""

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
    """What a callback needs of a trial: a function's has it, and so has that of `hpo.client`."""

    seed: int
    epoch: int  # the last one reported, or of the checkpoint that `resume` gave
    step: int
    directory: Path  # for files of its own

    def report(
        self, epoch: int | None = None, metrics: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> bool: ...

    def save(self, files: Any, /) -> None: ...

    def resume(self) -> Path | None: ...


def resumed(trial: Trial, name: str = "") -> Path | None:
    """What the trial goes on from: the file or directory `name` of its last checkpoint; None where it begins. Raises
    TrainerError for what is no trial."""
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
    """Report those of the metrics that are numbers, with what `write` puts into the directory it is given; whether the
    training is to stop. Raises TrainerError where there are none."""
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
    """Whether it is one, also as a tensor or an array without dimensions."""
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0


def check_begins(unit: str, done: int, begins: int, fix: str) -> None:
    """Raise TrainerError unless a training that has `begins` epochs, steps or rounds behind it is the trial's."""
    if begins != done:
        raise TrainerError(f"the trial goes on after {unit} {done}, and this training after {unit} {begins}: {fix}.")


def seed_at(trial: Trial, done: int) -> int:
    """31 bits for the random numbers after `done` epochs or rounds: with them no generator's state has to be saved."""
    return random.Random(f"{trial.seed}/{done}").getrandbits(31)


def lacking(error: ModuleNotFoundError, package: str, extra: str) -> Exception:
    """The sentence that names the extra of a package that is not installed; of one that it needs itself, `error`."""
    if (error.name or "").partition(".")[0] != package:
        return error
    return UserError(f"hpo.integrations needs {package}: pip install 'hpo[{extra}]'.")


def rounds_of_epoch(every: int) -> int:
    """`every`, the boosting rounds of an epoch; raises TrainerError unless it is a whole number from 1."""
    if not isinstance(every, int) or every < 1:
        raise TrainerError(f"TrialCallback(every={every!r}) must be a whole number of rounds from 1.")
    return every


def rounds_left(trial: Trial, every: int, total: int) -> int:
    """The boosting rounds that a trial of `total` has before it. Raises TrainerError where they are no whole epochs."""
    if total % every:
        raise TrainerError(f"{total} rounds are no whole epochs of every={every}: the last ones would not be reported.")
    return total - trial.epoch * every
