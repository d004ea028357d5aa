"""Lists the files that a trial's run shows: its checkpoints, its artifacts and, once it has ended, its models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpo.errors import StorageError
from hpo.ledger.rows import CheckpointRow, EventRow, StudyRow, UnsentTrial
from hpo.storage.artifacts import shown
from hpo.storage.home import Home
from hpo.tracking.base import Model, Point
from trainer.checkpoint.location import Disk
from trainer.checkpoint.manifest import MANIFEST, MODEL, evaluated, files_of
from trainer.files.durable import sha256

PLACE = "place.json"
_CHECKPOINT, _MODEL = re.compile(r"checkpoints/step-\d{8,}/"), re.compile(r"trial-\d{4,}-step-\d{8,}")


def config_text(config: Mapping[str, object]) -> str:
    """Returns the whole resolved configuration as `config.json` holds it."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def handed_over(home: Home, study: str, trial: UnsentTrial, events: Sequence[EventRow]) -> dict[str, Path]:
    """Returns the files that the task passed to `Reporter.artifact` since the run was last sent, by name.

    A file in a bucket has the path where it will be once it is fetched.
    """
    new = shown(row.fields for row in events if row.revision > trial.sent)
    root = home.files(study, trial.number)
    return {f"files/{name}": _inside(root, stored) for name, stored in new.items()}


def fetch(location: Disk, files: Mapping[str, Path]) -> None:
    """Fetches the files of a batch to this host. Raises StorageError if they are not available now."""
    try:
        for path in files.values():
            location.here(path)
    except OSError as error:
        raise StorageError(f"files that trials have handed over cannot be fetched: {error}") from error


def of_study(home: Home, study: str, stored: Mapping[str, str]) -> dict[str, Path]:
    """Returns the files that were stored with the study itself; `stored` holds their paths by name."""
    root = home.files(study, None)
    return {name: _inside(root, where) for name, where in stored.items()}


def checkpoint_changes(found: Sequence[CheckpointRow], sent: int, root: Path) -> tuple[dict[str, Path], list[str]]:
    """Returns artifacts to add and to remove: for each step changed since `sent`, its newest kept checkpoint or
    none."""
    kept = {row.step: row for row in found if row.state == "kept"}
    touched = sorted({row.step for row in found if row.revision > sent})
    files = {checkpoint_name(step): _inside(root, kept[step].path) for step in touched if step in kept}
    return files, [checkpoint_name(step) for step in touched if step not in kept]


def model_files(location: Disk, files: Mapping[str, Path], found: Sequence[CheckpointRow]) -> dict[str, str]:
    """Returns, instead of each checkpoint in a bucket, a text with its location and the sha256 of its manifest."""
    sha256 = {row.path: row.sha256 for row in found}
    shown = {name: {"place": location.shown(path), "sha256": sha256[path.name]} for name, path in files.items()}
    return {
        f"{name}/{PLACE}": json.dumps(place_and_sha256, indent=2) + "\n" for name, place_and_sha256 in shown.items()
    }


def checkpoint_tags(found: Sequence[CheckpointRow]) -> dict[str, str]:
    """Returns tags that name the last and the best checkpoint; "none" if all have been dropped."""
    kept = [row for row in found if row.state == "kept"]
    if found and not kept:
        return {"hpo.checkpoint.last": "none", "hpo.checkpoint.best": "none"}
    named = {"hpo.checkpoint.last": kept[-1:], "hpo.checkpoint.best": [row for row in kept if row.best][-1:]}
    return {tag: checkpoint_name(rows[0].step) for tag, rows in named.items() if rows}


def checkpoint_name(step: int) -> str:
    """Returns the artifact directory of the checkpoint taken at `step`."""
    return f"checkpoints/step-{step:08d}"


def model_name(number: int, checkpoint: str) -> str:
    """Returns the name of the model of a trial's checkpoint, given by its artifact directory."""
    return f"trial-{number:04d}-{checkpoint.rpartition('/')[2]}"


def is_checkpoint(artifact: str) -> bool:
    """Returns True for the name of a file in the artifact directory of a checkpoint."""
    return _CHECKPOINT.match(artifact) is not None


def is_model(name: str) -> bool:
    """Returns True for a name that `model_name` gives."""
    return _MODEL.fullmatch(name) is not None


def models(
    study: StudyRow, trial: UnsentTrial, found: Sequence[CheckpointRow], points: Sequence[Point], root: Path
) -> list[Model]:
    """Returns models of the kept checkpoints of an ended trial that hold weights.

    Only `hpo gc` and a repair change the rows of an ended trial, and so its models. A model holds only the weights that
    were evaluated and the configuration that builds it, without what a resumption needs.
    """
    kept = {row.step: row for row in found if row.state == "kept"}
    roles = {tag.rpartition(".")[2]: name for tag, name in checkpoint_tags(found).items()}
    listed: list[Model] = []
    for step, row in kept.items():
        source = _inside(root, row.path)
        if not (weights := weights_of(source)):
            continue
        tags = {
            "hpo.run_uid": f"{study.uid}/{trial.number}",
            "hpo.study": study.name,
            "hpo.reference": study.spec.reference,
            "hpo.trial": str(trial.number),
            "hpo.step": str(step),
            "hpo.epoch": str(row.epoch),
            "hpo.config_hash": trial.config_hash,
            "hpo.sha256": row.sha256,
        }
        tags |= {f"hpo.{role}": "true" for role, name in roles.items() if name == checkpoint_name(step)}
        listed.append(
            Model(
                name=model_name(trial.number, checkpoint_name(step)),
                step=step,
                tags=tags,
                points=[point for point in points if point.step == step],
                texts={"config.json": config_text(trial.config)},
                files={name: source / name for name in (*weights, MANIFEST)},
            )
        )
    return listed


def weights_of(checkpoint: Path) -> list[str]:
    """Returns the names of the files with the evaluated weights; none if a user's own loop saved the checkpoint."""
    return files_of(_evaluated(checkpoint), sorted(path.name for path in checkpoint.glob("*.safetensors")))


def _evaluated(checkpoint: Path) -> str:
    """Returns the item of a checkpoint that holds the evaluated weights.

    It is the model for a damaged or missing checkpoint, which verification reports.
    """
    try:
        return evaluated(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return MODEL


def digests(texts: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, str]:
    """Returns name -> sha256 of every artifact file made from these texts and files."""
    sha256_by_name = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    for name, source in files.items():
        below = {path.relative_to(source): path for path in source.rglob("*")} if source.is_dir() else {Path(): source}
        sha256_by_name |= {
            str(Path(name) / relative): sha256(path) for relative, path in below.items() if path.is_file()
        }
    return sha256_by_name


def _inside(root: Path, relative: str) -> Path:
    """Returns `root/relative`; raises ValueError if that leads outside of `root`."""
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{relative!r} leads outside of {root}.")
    return path
