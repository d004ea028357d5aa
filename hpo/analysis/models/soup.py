"""Implements `hpo soup`, which averages weights and compares the averages with the best checkpoint.

The weights are of the best trials, or of one trial's checkpoints (trainer/model/soup.py).
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.models.checkpoints import KeptCheckpoint, all_trained, declared, evaluator, model_of, trained
from hpo.analysis.results.compare import headline
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import HomeError, HpoError, UserError
from hpo.ledger import Ledger, queries, transactions
from hpo.ledger.rows import Connection
from hpo.space.objective import Objective
from hpo.storage.home import Home
from hpo.text import aligned, counted
from trainer.checkpoint.manifest import MANIFEST

if TYPE_CHECKING:
    from torch import Tensor

EVENT = "soup"


@dataclass(frozen=True)
class Mixture:
    """A mixture: the checkpoints whose weights are averaged, and the metrics of the mean."""

    name: str
    members: Sequence[KeptCheckpoint]
    metrics: dict[str, float]
    weights: Mapping[str, Tensor] = field(repr=False)

    @property
    def trials(self) -> list[int]:
        return [member.number for member in self.members]

    @property
    def steps(self) -> list[int]:
        return [member.step for member in self.members]

    def to_json(self) -> dict[str, Any]:
        return {"trials": self.trials, "steps": self.steps, "metrics": self.metrics}


@dataclass(frozen=True)
class Soup:
    """The best checkpoint alone, and the soups of trials or of one trial's checkpoints.

    `left_out` has a sentence about each group of trials that no soup contains.
    """

    study: str
    objectives: Sequence[Objective]
    mixtures: list[Mixture]
    left_out: list[str]

    def facts(self) -> dict[str, Any]:
        """Returns JSON values: the mixtures, and the name of the better soup."""
        mixtures = [{"name": mixture.name, **mixture.to_json()} for mixture in self.mixtures]
        return {"study": self.study, "mixtures": mixtures, "better": self.best.name, "left_out": self.left_out}

    @property
    def best_alone(self) -> KeptCheckpoint:
        return self.mixtures[0].members[0]

    @property
    def best(self) -> Mixture:
        """Returns the greedy soup, unless the uniform one is better by the first objective in which they differ."""
        return max(self.mixtures[1:], key=lambda mixture: _scores(self.objectives, mixture.metrics))


def soup(ledger: Ledger, home: Home, name: str, top: int) -> Soup:
    """Averages the weights of the `top` best complete trials, uniformly and greedily.

    Trials whose checkpoint is gone, or has another architecture than the best one's, are left out. Each mean is
    evaluated by the task of the best trial's configuration. Raises UserError if fewer than two are left.
    """
    from trainer.model import soup as mixing

    with ledger.read() as connection:
        study = declared(connection, name)
        ranks = queries.ranked(connection, queries.study_row(connection, name))
        if not ranks:
            raise HpoError(f"study {name!r} has no complete trial, and a soup is made of at least two.")
        numbers = ranks[:top]
        kept = [checkpoint for number in numbers if (checkpoint := trained(connection, home, name, number)) is not None]
        if study.trains_itself or not kept:
            model_of(connection, home, name, numbers[0])  # raises with the reason
    without_checkpoint = [number for number in numbers if number not in {checkpoint.number for checkpoint in kept}]
    weights = {checkpoint.number: checkpoint.weights() for checkpoint in kept}
    members = [
        checkpoint
        for checkpoint in kept
        if mixing.same_architecture(weights[checkpoint.number], weights[kept[0].number])
    ]
    others = [checkpoint.number for checkpoint in kept if checkpoint not in members]
    left_out = [f"without a checkpoint: {_trials(without_checkpoint)}"] if without_checkpoint else []
    left_out += [f"of another architecture than trial {kept[0].number}: {_trials(others)}"] if others else []
    if len(members) < 2:
        raise_top = f"raise {option('top')}, or "
        raise UserError(
            f"a soup is made of at least two trials of one architecture, and of the best "
            f"{counted(len(numbers), 'trial')} of study {name!r} {len(members)} can be used "
            f"({'; '.join(left_out) or 'there are no more'}): {raise_top if len(ranks) > top else ''}"
            f"{_remedy(without_checkpoint, others)}."
        )
    return _mixed(study, members, [weights[checkpoint.number] for checkpoint in members], "best trial", left_out)


def _remedy(gone: Sequence[int], others: Sequence[int]) -> str:
    """Returns how to give a soup more than one trial."""
    if others:
        return f"run a study whose model is the same in every trial (pin its dimensions with {option('overrides')})"
    return "train those whose checkpoint is gone again" if gone else "have the study complete more trials"


def of_one_trial(ledger: Ledger, home: Home, name: str, number: int, top: int) -> Soup:
    """Averages the weights of a trial's best checkpoint and its newest others, `top` in all, uniformly and greedily.

    Vaswani et al. 2017, arXiv 1706.03762, section 6.1, average the last. Raises UserError for fewer than two.
    """
    with ledger.read() as connection:
        study = model_of(connection, home, name, number)[0]
        kept = all_trained(connection, home, name, number)
    if len(kept) < 2:
        raise UserError(
            f"an average is made of at least two checkpoints, and trial {number} of study {name!r} keeps {len(kept)}: "
            f"raise train.checkpoint.keep_last, or leave {option('trial')} out to average trials."
        )
    members = kept[:top]
    return _mixed(study, members, [checkpoint.weights() for checkpoint in members], "best checkpoint", [])


def _mixed(
    study: Study,
    members: Sequence[KeptCheckpoint],
    weights: Sequence[Mapping[str, Tensor]],
    first_name: str,
    left_out: list[str],
) -> Soup:
    from trainer.model import soup as mixing

    objectives = study.objectives
    evaluate = evaluator(study, members[0])
    chosen = mixing.greedy(weights, lambda mean: _scores(objectives, evaluate(mean)))
    mixtures = []
    for name, of in ((first_name, [0]), ("greedy soup", chosen), ("uniform soup", range(len(members)))):
        mean = mixing.mean([weights[i] for i in of])
        mixtures.append(Mixture(name, [members[i] for i in of], evaluate(mean), mean))
    return Soup(members[0].study, objectives, mixtures, left_out)


def _scores(objectives: Sequence[Objective], metrics: Mapping[str, float]) -> tuple[float, ...]:
    """Returns a value per objective, negated if it is minimized, so that larger is better."""
    for objective in objectives:
        if objective.metric not in metrics:
            raise UserError(
                f"the objective {objective.metric!r} is not among what the task's evaluate gives "
                f"({', '.join(metrics)}): without it soups cannot be compared."
            )
    return tuple(
        metrics[objective.metric] * (1 if objective.direction == "maximize" else -1) for objective in objectives
    )


def _trials(numbers: Sequence[int]) -> str:
    """Returns text such as `trial 3`, or `trials 3, 4`."""
    return f"trial{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def describe(found: Soup) -> str:
    """Returns each mixture with its metrics, the objectives first, and what was left out."""
    keys = headline(list(found.best.metrics), [objective.metric for objective in found.objectives])
    of_one = len(set(found.mixtures[-1].trials)) == 1
    rows = [["", *keys, "steps" if of_one else "trials"]]
    for mixture in found.mixtures:
        numbers = map(str, mixture.steps if of_one else mixture.trials)
        rows.append([mixture.name, *(f"{mixture.metrics[key]:.6g}" for key in keys), ", ".join(numbers)])
    lines = aligned(rows)
    members = f"checkpoints of trial {found.best_alone.number}" if of_one else "each trial by its best checkpoint"
    lines.append(f"{members}, all evaluated anew")
    return "\n".join([*lines, *([f"left out: {'; '.join(found.left_out)}."] if found.left_out else [])])


def save(found: Soup, directory: Path, *, replace: bool = False) -> None:
    """Writes the better soup as a checkpoint directory that `Study.load_model` opens.

    Raises UserError as `check_free` does.
    """
    from trainer.checkpoint import files

    best, trial = found.best, found.best_alone
    check_free(directory, replace=replace)
    header = {"step": trial.step, "epoch": trial.epoch, "config_hash": trial.config_hash}
    header |= {"study": found.study, "soup": best.to_json()}
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=directory.parent) as scratch:
            checkpoint = Path(scratch) / directory.name
            checkpoint.mkdir()
            (checkpoint / "config.json").write_text(json.dumps(trial.config, indent=2, sort_keys=True) + "\n")
            files.write(checkpoint, {"model": dict(best.weights)}, header)
            if directory.exists():
                directory.rename(Path(scratch) / "replaced")
            checkpoint.rename(directory)
    except OSError as error:
        raise HomeError(f"{directory} cannot be written ({error.strerror}): name another directory.") from error


def check_free(directory: Path, *, replace: bool = False) -> None:
    """Raises UserError unless the directory is free: absent, empty or, with `replace`, a checkpoint."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() and not (replace and (directory / MANIFEST).is_file()):
        fault = "is not a checkpoint that could be replaced" if replace else "exists already"
        raise UserError(f"{directory} {fault}: name a directory that is not there yet.")


def record(ledger: Ledger, found: Soup, directory: Path) -> None:
    """Notes the saved soup in the ledger; the study's run in MLflow then shows it as soup.json."""
    fields = {mixture.name: mixture.to_json() for mixture in found.mixtures}
    fields |= {
        "objectives": [asdict(objective) for objective in found.objectives],
        "saved": found.best.name,
        "directory": str(directory.absolute()),
    }
    uid = uuid.uuid4().hex

    def body(connection: Connection) -> None:
        transactions.note(connection, queries.study_row(connection, found.study).id, EVENT, fields, uid)

    ledger.transact(body)
