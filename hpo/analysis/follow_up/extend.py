"""`hpo extend`: continues a trial from its newest checkpoint, or trains it again, as a trial of a derived study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.follow_up.derived_study import SourceStudy
from hpo.analysis.results.extended import is_extension
from hpo.declaration.study import RESUME_FROM
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import Ledger, queries, removed
from hpo.ledger.finished import label
from hpo.ledger.rows import ConfiguredTrial, NewestCheckpoint, StudyRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import trial as trial_queries
from hpo.space.config import as_json, flatten
from hpo.space.trial_config import TrialShape
from hpo.storage import locations
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home

NUM_EPOCHS = "train.num_epochs"
_SCHEDULE = "train.schedule"
_BY_LENGTH = ("cosine", "cosine_restarts", "one_cycle", "polynomial", "linear", "wsd", "cyclical")


def entry(
    ledger: Ledger, home: Home, of: SourceStudy, number: int, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Returns the configuration by which a derived study continues trial `number`, and a sentence about its start.

    By default the trial continues to its configured number of epochs. It starts again if it has no checkpoint from
    which training can continue. Raises UserError if the trial has not ended with a value, or already has that many
    epochs.
    """
    with ledger.read() as connection:
        study = queries.study_row(connection, of.name)
        trial = _trial(connection, study, number)
        checkpoint = driver_queries.newest_checkpoint(connection, study.id, number)
        [config] = queries.configs(connection, [trial.id]).values()
    before, set_values = flatten(config), _values(of, overrides)
    epochs = set_values.get(NUM_EPOCHS, before.get(NUM_EPOCHS))
    parts = TrialShape.of(config).parts > 1
    epochs_trained = trial.epoch if checkpoint is None else checkpoint.epoch
    epochs_trained = 0 if parts and trial.state != "complete" else epochs_trained  # its epochs are folds
    if (trial.state == "complete" or epochs is not None) and (not isinstance(epochs, int) or epochs <= epochs_trained):
        value = set_values.get(NUM_EPOCHS)
        refused = f"{option('overrides', f'{NUM_EPOCHS}={value}')}: " if NUM_EPOCHS in set_values else ""
        raise UserError(
            f"{refused}trial {number} of study {of.name!r} has trained {epochs_trained} epochs: say how many it is to "
            f"have in all, such as {option('overrides', f'{NUM_EPOCHS}={2 * max(epochs_trained, 1)}')}."
        )
    params = {**trial.params, **set_values}
    sets = _sets(before, set_values)
    why = not_resumable(config, study) if checkpoint else "it keeps no checkpoint to go on from"
    if checkpoint is None or why:
        length = "" if epochs is None or parts else f" to epoch {epochs}"
        return {"label": label(number), "params": params}, f"trial {number} begins again{length}: {why}{sets}"
    path = home.checkpoints(of.name, number) / checkpoint.path
    if not path.is_dir():
        raise UserError(f"the checkpoint of trial {number}, {path}, is not there any more: put it back.")
    clause = _where_from(number, path, checkpoint, before | set_values, before[NUM_EPOCHS])
    return {"label": label(number), "params": {**params, RESUME_FROM: str(path)}}, clause + sets


def not_resumable(config: Mapping[str, Any], study: StudyRow) -> str:
    """Returns the reason why another study cannot continue from a checkpoint of a trial with this whole configuration.

    The reason is empty if it can.
    """
    if TrialShape.of(config).parts > 1:
        return "each of its folds or seeds trains a model of its own"
    if RESUME_FROM not in flatten(config):
        return "only trials of the shared trainer go on in another study"
    if locations.url(study):
        return f"the study keeps its checkpoints in a bucket, and {RESUME_FROM} takes a directory"
    return ""


def grown(ledger: Ledger, name: str, new: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the configurations of study `name` after it has taken in `new`: the stored ones, then the new one.

    Raises UserError if the study exists and does not extend trials.
    """
    with ledger.read() as connection:
        if name not in queries.study_names(connection):
            return [new]
        stored: Sequence[Mapping[str, Any]] = queries.study_row(connection, name).spec.listed
    if not is_extension([listed["label"] for listed in stored]):
        raise UserError(f"study {name!r} is there already and has trained others: name a new one by {option('name')}.")
    return stored if new in stored else [*stored, new]


def _trial(connection: Connection, study: StudyRow, number: int) -> ConfiguredTrial:
    """Returns the trial's row. Raises UserError if there is none, or if it has not ended with a value."""
    trial, name = trial_queries.find_trial(connection, study.id, number), study.name
    if trial is None:
        raise UserError(f"study {name!r} has no trial {number}: {trial_queries.there(connection, study.id)}.")
    removed.check_shown(connection, study, number, "its checkpoints are gone, so extend another")
    if trial.state not in ("complete", "pruned") and (trial.state != "paused" or study.state == "open"):
        raise UserError(
            f"trial {number} of study {name!r} is {trial.state}: only one that is complete or pruned is extended; "
            f"`{command(f'show {number} --study {name}')}` shows it."
        )
    return trial


def _values(of: SourceStudy, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the overridden fields, in the fields' types. Raises UserError as a run does."""
    for path in ("preset", RESUME_FROM):
        if path in overrides:
            raise UserError(
                f"{option('overrides')} {path}: a trial that goes on keeps it; set single fields, such as {NUM_EPOCHS}."
            )
    config = flatten(as_json(of.study.configure({**of.spec.overrides, **overrides}).config))
    return {path: config[path] for path in flatten(overrides)}


def _sets(before: Mapping[str, object], values: Mapping[str, object]) -> str:
    """Returns a clause about the overridden fields except the number of epochs, with the trial's earlier values."""
    others = {path: value for path, value in values.items() if path != NUM_EPOCHS}
    named = [f"{path}={json.dumps(value)} (was {json.dumps(before.get(path))})" for path, value in others.items()]
    return f"; it also takes {', '.join(named)}" if named else ""


def _where_from(number: int, path: Path, checkpoint: NewestCheckpoint, config: Mapping[str, Any], before: int) -> str:
    """Returns a clause about where the trial continues and, if its schedule depends on the epochs, on the schedule."""
    step, now = checkpoint.step, config[NUM_EPOCHS]
    clause = f"trial {number} goes on from epoch {checkpoint.epoch}, step {step}, to epoch {now} ({path.name})"
    schedule = config.get(f"{_SCHEDULE}.name")
    if schedule in _BY_LENGTH or config.get(f"{_SCHEDULE}.warmup_ratio") is not None:
        clause += (
            f"; its schedule {schedule} depends on {NUM_EPOCHS}: from step {step} it goes on as that of {now} epochs, "
            f"and up to there it was that of {before}"
        )
    return clause
