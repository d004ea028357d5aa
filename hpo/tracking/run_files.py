"""Lists the files that a trial's run shows: its checkpoints, its artifacts and, once it has ended, its models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.errors import StorageError
from hpo.ledger.rows import RowMapping
from hpo.storage.artifacts import shown
from hpo.storage.home import Home
from hpo.tracking.base import Model, Point
from trainer.checkpoint.location import Disk
from trainer.checkpoint.manifest import MANIFEST, MODEL, evaluated, files_of
from trainer.files.durable import sha256

PLACE = "place.json"


def config_text(trial: Mapping[Any, Any]) -> str:
    """The whole resolved configuration, as `config.json` has it."""
    return json.dumps(trial["config"], indent=2, sort_keys=True) + "\n"


def handed_over(home: Home, study: str, trial: RowMapping, events: Sequence[RowMapping]) -> dict[str, Path]:
    """What the task gave to `Reporter.artifact` since the run was sent last: where it is, or will be once it has been
    fetched from a bucket."""
    new = shown(row["fields"] for row in events if row["revision"] > trial["sent"])
    root = home.files(study, trial["number"])
    return {f"files/{name}": _inside(root, stored) for name, stored in new.items()}


def fetch(place: Disk, files: Mapping[str, Path]) -> None:
    """Have the files of a batch on this host. Raises StorageError where they cannot be had now."""
    try:
        for path in files.values():
            place.here(path)
    except OSError as error:
        raise StorageError(f"files that trials have handed over cannot be fetched: {error}") from error


def of_study(home: Home, study: str, stored: Mapping[str, str]) -> dict[str, Path]:
    """What has been left with the study itself, `stored` by name."""
    root = home.files(study, None)
    return {name: _inside(root, where) for name, where in stored.items()}


def checkpoint_changes(found: Sequence[RowMapping], sent: int, root: Path) -> tuple[dict[str, Path], list[str]]:
    """Artifacts to add and to take away: for each step touched since `sent`, its newest kept checkpoint or nothing."""
    kept = {row["step"]: row for row in found if row["state"] == "kept"}
    touched = sorted({row["step"] for row in found if row["revision"] > sent})
    files = {checkpoint_name(step): _inside(root, kept[step]["path"]) for step in touched if step in kept}
    return files, [checkpoint_name(step) for step in touched if step not in kept]


def places(place: Disk, files: Mapping[str, Path], found: Sequence[RowMapping]) -> dict[str, str]:
    """Of checkpoints that lie in a bucket, instead of a copy: where, and the sha256 of the manifest."""
    sha256 = {row["path"]: row["sha256"] for row in found}
    shown = {name: {"place": place.shown(path), "sha256": sha256[path.name]} for name, path in files.items()}
    return {f"{name}/{PLACE}": json.dumps(one, indent=2) + "\n" for name, one in shown.items()}


def checkpoint_tags(found: Sequence[RowMapping]) -> dict[str, str]:
    """Which of the checkpoints is the last and which the best; "none" where all have been dropped."""
    kept = [row for row in found if row["state"] == "kept"]
    if found and not kept:
        return {"hpo.checkpoint.last": "none", "hpo.checkpoint.best": "none"}
    named = {"hpo.checkpoint.last": kept[-1:], "hpo.checkpoint.best": [row for row in kept if row["best"]][-1:]}
    return {tag: checkpoint_name(rows[0]["step"]) for tag, rows in named.items() if rows}


def checkpoint_name(step: int) -> str:
    """The artifact directory of the checkpoint taken at `step`."""
    return f"checkpoints/step-{step:08d}"


def model_name(number: int, checkpoint: str) -> str:
    """What the model of a trial's checkpoint is called, by the name of its artifact directory."""
    return f"trial-{number:04d}-{checkpoint.rpartition('/')[2]}"


def models(
    study: RowMapping, trial: RowMapping, found: Sequence[RowMapping], points: Sequence[Point], root: Path
) -> list[Model]:
    """The kept checkpoints of an ended trial that hold weights. Nothing but `hpo gc` changes its rows, and so these.

    A model has the weights that were evaluated alone, not what only a resumption needs, and the configuration that
    builds it.
    """
    kept = {row["step"]: row for row in found if row["state"] == "kept"}
    roles = {tag.rpartition(".")[2]: name for tag, name in checkpoint_tags(found).items()}
    made = []
    for step, row in kept.items():
        source = _inside(root, row["path"])
        if not (weights := weights_of(source)):
            continue
        tags = {
            "hpo.run_uid": f"{study['uid']}/{trial['number']}",
            "hpo.study": study["name"],
            "hpo.reference": study["spec"].get("reference", ""),
            "hpo.trial": str(trial["number"]),
            "hpo.step": str(step),
            "hpo.epoch": str(row["epoch"]),
            "hpo.config_hash": trial["config_hash"],
            "hpo.sha256": row["sha256"],
        }
        tags |= {f"hpo.{role}": "true" for role, name in roles.items() if name == checkpoint_name(step)}
        made.append(
            Model(
                name=model_name(trial["number"], checkpoint_name(step)),
                step=step,
                tags=tags,
                points=[point for point in points if point.step == step],
                texts={"config.json": config_text(trial)},
                files={name: source / name for name in (*weights, MANIFEST)},
            )
        )
    return made


def weights_of(checkpoint: Path) -> list[str]:
    """The names of the files that hold the weights which were evaluated; none where a loop of its own saved it."""
    return files_of(_evaluated(checkpoint), sorted(path.name for path in checkpoint.glob("*.safetensors")))


def _evaluated(checkpoint: Path) -> str:
    """The item of a checkpoint that holds the weights which were evaluated; of one that is damaged, or gone, the
    model's: what has become of it is said by those who verify."""
    try:
        return evaluated(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return MODEL


def digests(texts: Mapping[str, str], files: Mapping[str, Path]) -> dict[str, str]:
    """Name -> sha256 of every artifact file that these make."""
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    for name, source in files.items():
        below = {path.relative_to(source): path for path in source.rglob("*")} if source.is_dir() else {Path(): source}
        found |= {str(Path(name) / relative): sha256(path) for relative, path in below.items() if path.is_file()}
    return found


def _inside(root: Path, relative: str) -> Path:
    """`root/relative`; ValueError if that leads outside of `root`."""
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{relative!r} leads outside of {root}.")
    return path
