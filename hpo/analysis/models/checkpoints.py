"""Loads the trained models of a study's trials from their kept checkpoints, for soups and exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.results.trial import detail, kept_checkpoints
from hpo.declaration import imported
from hpo.declaration.imported import ImportedDeclaration
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import queries, removed
from hpo.ledger.finished import trained_as
from hpo.ledger.rows import Connection
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.text import command
from trainer.checkpoint.location import Disk
from trainer.checkpoint.manifest import weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class KeptCheckpoint:
    """A kept checkpoint of a trial, with the trial's configuration as JSON."""

    study: str
    number: int
    step: int
    epoch: int
    path: Path
    sha256: str
    location: Disk
    config: Mapping[str, Any]
    config_hash: str

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights that the trial was evaluated with: the average's if an average was trained."""
        from trainer.checkpoint.store import load as load_state

        with self.location.opened(self.path, self.sha256, weights_only=True) as directory:
            shown = self.location.shown(self.path)
            state = load_state(directory, weights_only=True, shown=shown)
        if not state:
            raise UserError(f"checkpoint {shown} holds no model: study {self.study!r} trains in a loop of its own.")
        return weights(state)

    def task(self, study: Study) -> Any:
        """Returns the task under the trial's configuration."""
        return study.task_class()(study.rebuild(self.config, self.config_hash))


def trained(connection: Connection, home: Home, name: str, number: int) -> KeptCheckpoint | None:
    """Returns a trial's best kept checkpoint, else its newest; None if none is kept.

    Raises UserError if the study has no trial of this number.
    """
    return next(iter(all_trained(connection, home, name, number)), None)


def all_trained(connection: Connection, home: Home, name: str, number: int) -> list[KeptCheckpoint]:
    """Returns all kept checkpoints of a trial: the best, then from the newest to the oldest.

    If the trial was stopped and later trained to its end, they are the later training's. Raises UserError as `trained`
    does.
    """
    source, source_number = trained_as(connection, queries.study_row(connection, name), number)
    trial, root = detail(connection, home, source, source_number), home.checkpoints(source, source_number)
    location = locations.of(home, queries.study_row(connection, source))
    config = trial["config"], trial["config_hash"]
    return [
        KeptCheckpoint(
            name, number, row["step"], row["epoch"], root / Path(row["path"]).name, row["sha256"], location, *config
        )
        for row in kept_checkpoints(trial)
    ]


def declared(connection: Connection, name: str) -> Study:
    """Returns the study as its trials were configured; loads the declaration."""
    return ResolvedStudy.stored(queries.study_row(connection, name).spec.json).study


def searched(connection: Connection, name: str) -> Study | ImportedDeclaration:
    """Returns the study with its space and objectives, as `declared` does, or as it was read if it was imported."""
    spec = StudySpec.from_json(queries.study_row(connection, name).spec.json)
    return imported.declaration(spec) if spec.imported else declared(connection, name)


@contextmanager
def evaluating(config: Any, step: int) -> Iterator[torch.device]:
    """Provides the runtime of an evaluation at `step`, seeded as the trainer does, on the device of `config.train`."""
    import torch

    from trainer.model.precision import autocast
    from trainer.runtime.seeding import derive, seed_all
    from trainer.settings import runtime

    with runtime(config.train) as device:
        seed_all(derive(config.train.seed, "evaluate", step))
        with torch.no_grad(), autocast(config.train.precision, device):
            yield device


def evaluator(study: Study, kept: KeptCheckpoint) -> Callable[[Mapping[str, Tensor]], dict[str, float]]:
    """Returns a function that evaluates weights as the run of the checkpoint's trial did."""
    from trainer.task import built

    task = kept.task(study)
    task.progress, model, config = 1.0, built(task), task.config

    def evaluate(weights: Mapping[str, Tensor]) -> dict[str, float]:
        with evaluating(config, kept.step) as device:
            model.load_state_dict(weights)
            return {key: float(value) for key, value in task.evaluate(model.to(device).eval()).items()}

    return evaluate


def model_of(connection: Connection, home: Home, name: str, number: int) -> tuple[Study, KeptCheckpoint]:
    """Returns the study and the trial's best kept checkpoint, from which its model is loaded.

    Raises UserError if none is kept, which says why and how to get one.
    """
    trial = detail(connection, home, name, number)
    if trial["imported"]:
        raise imported.refuse(name)
    gone = "its checkpoints are gone, so name another, or train it again"
    removed.check_shown(connection, queries.study_row(connection, name), number, gone)
    study, kept = declared(connection, name), trained(connection, home, name, number)
    if study.trains_itself:
        raise _no_model(study, name, trial, kept)
    if kept is None:
        raise nothing_kept(study, trial)
    return study, kept


def nothing_kept(study: Study, trial: Mapping[str, Any]) -> UserError:
    """Returns the error about a trial without a kept checkpoint: why there is none, and how to get one."""
    if study.trains_itself:
        return _no_model(study, trial["study"], trial, None)
    return UserError(f"trial {trial['number']} of study {trial['study']!r} {_why_nothing(trial)}")


def _no_model(study: Study, name: str, trial: Mapping[str, Any], kept: KeptCheckpoint | None) -> UserError:
    """Returns the error about a model that only the study's code can load: it says where its files are, or how to save
    some."""
    files = sorted({event["fields"]["path"] for event in trial["events"] if event["kind"] == "artifact"})
    if kept is not None:
        lie = f"the files that it has saved lie in {kept.location.shown(kept.path)}: load them as they were written"
    elif any(checkpoint["state"] == "deleted" for checkpoint in trial["checkpoints"]):
        lie = "its saved files were deleted, by what the study keeps or by `hpo gc`: train it again, or name another"
    else:
        lie = "the trial has saved no files: have the code call trial.save(files) before trial.report"
    handed = f"; its artifacts are {', '.join(files[:5])}{' ...' if files[5:] else ''}, in `{command('ui')}`"
    return UserError(
        f"study {name!r} trains in a loop of its own, so only its code knows the model; {lie}{handed if files else ''}."
    )


def _why_nothing(trial: Mapping[str, Any]) -> str:
    saves = trial["config"]["train"]["checkpoint"]
    if {checkpoint["state"] for checkpoint in trial["checkpoints"]} >= {"deleted"}:
        why = "has no checkpoint any more: what the study keeps, or `hpo gc`, has deleted it"
    elif trial["checkpoints"]:
        why = "has no checkpoint that can be used: its files were damaged"
    elif trial["state"] not in TERMINAL_STATES:
        return f"has no checkpoint yet, as it is {trial['state']}: wait for one."
    elif saves["every_epochs"] is None and saves["every_steps"] is None:
        return (
            "keeps no checkpoint, since train.checkpoint.every_epochs and every_steps are null: run a study with "
            f"`{option('overrides', 'train.checkpoint.every_epochs=1')}`, which saves each epoch."
        )
    else:
        why = f"has no checkpoint: it was {trial['state']} at epoch {trial['epoch']}, before one was saved"
    shows_best = command(f"best --study {trial['study']} --trial {trial['number']}")
    return f"{why}; train it again, as `{shows_best}` shows, or name another."
