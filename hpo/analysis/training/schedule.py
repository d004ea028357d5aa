"""Implements `hpo schedule`, which shows the learning rates of a study's configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.declaration.references import load
from hpo.declaration.search_preset import as_new
from hpo.declaration.user_code import own_code
from hpo.errors import UserError
from hpo.text import counted

if TYPE_CHECKING:
    from trainer.runtime.epochs import Epochs

BARS = "▁▂▃▄▅▆▇█"
WIDTH, ROWS = 72, 11


@dataclass(frozen=True)
class Curve:
    """A schedule: `rates[s]` is the learning rate of update s; `settings` names its settings, `notes` holds remarks."""

    settings: str
    rates: list[float]
    epochs: Epochs
    notes: Sequence[str] = ()


def curve(reference: str, overrides: Mapping[str, object], steps_per_epoch: int | None = None) -> Curve:
    """Returns the schedule of a study's configuration under `overrides`; by default the data determine an epoch's
    length."""
    from trainer.config import TrainConfig
    from trainer.optim import build as optim
    from trainer.optim.schedule import never_warm, scaled_lr, schedule
    from trainer.runtime.epochs import Epochs

    study = as_new(load(reference), overrides)
    config: Any = study.config
    if not isinstance(getattr(config, "train", None), TrainConfig):
        raise UserError(f"study {study.name!r} has no TrainConfig in its field train, so no schedule of ours.")
    train = config.train
    if study.trains_itself:
        raise UserError(f"the task of study {study.name!r} trains itself, so no schedule of ours.")
    task = study.task_class()(config)
    samples = steps_per_epoch * train.batch_size if steps_per_epoch else len(task.train_set())
    epochs = Epochs.of(samples, train)
    lr = scaled_lr(train.schedule, optim.learning_rate(train.optim), train.batch_size)
    total = int(epochs.step(train.num_epochs))
    with own_code():
        lr_at = schedule(train.schedule, lr, total, epochs)
        rates = [lr_at(step) * task.lr_scale(step / total) for step in range(total)]
    changed = train.schedule.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    settings = " ".join([train.schedule.name, *(f"{field}={value}" for field, value in changed.items())])
    notes = filter(None, [never_warm(train.schedule, total, epochs)])
    if train.schedule.name == "plateau":
        plateau = train.schedule.plateau
        notes = [
            *notes,
            f"falls to {plateau.factor:g} of itself at each plateau of {plateau.monitor}, which only a run knows",
        ]
    return Curve(f"{study.name}: {settings}", rates, epochs, [*notes])


def describe(found: Curve) -> str:
    """Returns the schedule as text: its settings, a line of bars, and some of its steps."""
    rates, last = found.rates, len(found.rates) - 1
    width, top = min(WIDTH, len(rates)), max(rates) or 1.0
    line = (rates[round(i * last / max(width - 1, 1))] for i in range(width))
    shown = sorted({round(i * last / (ROWS - 1)) for i in range(ROWS)})
    rows = [f"{step:>8}  {found.epochs.epoch(step):>8.2f}  {rates[step]:.4g}" for step in shown]
    bars = "".join(BARS[min(int(rate / top * len(BARS)), len(BARS) - 1)] for rate in line)
    later = [f", {steps} from epoch {epoch} on" for epoch, steps in found.epochs.later]
    counts = "".join([f"{counted(len(rates), 'step')} of {found.epochs.steps} an epoch", *later])
    return "\n".join([f"{found.settings} ({counts})", *found.notes, bars, f"{'step':>8}  {'epoch':>8}  lr", *rows])


def draw(found: Curve, path: Path) -> None:
    """Writes a picture of the schedule."""
    from trainer.diagnose import figures

    title = "\n".join([found.settings, *(line for note in found.notes for line in textwrap.wrap(note, 80))])
    figures.save(figures.learning_rates(title, found.rates, found.epochs), path)
