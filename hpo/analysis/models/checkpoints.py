"""The trained models of a study's trials, from their kept checkpoints: for soups and exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from hpo.errors import UserError
from hpo.ledger import queries
from hpo.ledger.rows import Connection
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
    """A kept checkpoint of a trial, and the configuration it was trained with, as JSON."""

    study: str
    number: int
    step: int
    epoch: int
    path: Path
    sha256: str
    place: Disk
    config: Mapping[str, Any]
    config_hash: str

    def weights(self) -> dict[str, Tensor]:
        """The weights that the trial was evaluated with: where an average was trained, the average's."""
        from trainer.checkpoint.store import load as load_state

        with self.place.opened(self.path, self.sha256, weights_alone=True) as directory:
            at = self.place.shown(self.path)
            state = load_state(directory, weights_alone=True, shown=at)
        if not state:
            raise UserError(f"checkpoint {at} holds no model: study {self.study!r} trains in a loop of its own.")
        return weights(state)

    def task(self, study: Study) -> Any:
        """The task under the trial's configuration."""
        if study.trains_itself:
            raise UserError(f"study {self.study!r} trains in a loop of its own: only that knows its model.")
        return study.task_class()(study.rebuild(self.config, self.config_hash))


def trained(connection: Connection, home: Home, name: str, number: int) -> KeptCheckpoint | None:
    """A trial's best kept checkpoint, else its newest; None where there is none. Raises UserError where there is no
    such trial."""
    return next(iter(all_trained(connection, home, name, number)), None)


def all_trained(connection: Connection, home: Home, name: str, number: int) -> list[KeptCheckpoint]:
    """All that is kept of a trial: the best, then from the newest to the oldest. Raises UserError as `trained` does."""
    trial, root = detail(connection, home, name, number), home.checkpoints(name, number)
    place = locations.place(home, queries.study_row(connection, name))
    config = trial["config"], trial["config_hash"]
    return [
        KeptCheckpoint(
            name, number, one["step"], one["epoch"], root / Path(one["path"]).name, one["sha256"], place, *config
        )
        for one in kept_checkpoints(trial)
    ]


def declared(connection: Connection, name: str) -> Study:
    """The study as its trials were configured; loads the declaration."""
    return ResolvedStudy.stored(queries.study_row(connection, name)["spec"]).study


def searched(connection: Connection, name: str) -> Study | ImportedDeclaration:
    """What the study searched and is judged by: as `declared`, and of an imported one as it was read."""
    spec = StudySpec.from_json(queries.study_row(connection, name)["spec"])
    return imported.declaration(spec) if spec.imported else declared(connection, name)


@contextmanager
def evaluating(config: Any, step: int) -> Iterator[torch.device]:
    """The runtime of an evaluation at `step`, seeded as the trainer seeds it, on the device of `config.train`."""
    import torch

    from trainer.model.precision import autocast
    from trainer.runtime.seeding import derive, seed_all
    from trainer.settings import runtime

    with runtime(config.train) as device:
        seed_all(derive(config.train.seed, "evaluate", step))
        with torch.no_grad(), autocast(config.train.precision, device):
            yield device


def nothing_kept(name: str, number: int) -> UserError:
    return UserError(
        f"trial {number} of study {name!r} has no checkpoint any more: train it again, as "
        f"`{command('best')}` shows, or name another."
    )
