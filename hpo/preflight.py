"""What can be told of a study before anything is written: a checkpoint, a device or a metric that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpo.config import as_json, flatten, near
from hpo.errors import UserError
from hpo.failures import own_code
from hpo.search.samplers import ONE_OBJECTIVE
from hpo.search.strategy import check_several, make_strategy
from hpo.spec import StudySpec
from hpo.study import RESUME_FROM, Study
from trainer import manifest
from trainer.dotted import named

# What the trainer and the reporter add to what a task reports.
_TRAINERS_OWN = ("train/*", "time/*")


def check(study: Study, spec: StudySpec) -> None:
    """Raise UserError or trainer.errors.ConfigError in one sentence for what no trial could be trained with."""
    check_several(make_strategy(spec.strategy), len(spec.objectives))
    if len(spec.objectives) > 1 and spec.sampler in ONE_OBJECTIVE:
        raise UserError(
            f"sampler {spec.sampler!r} takes one objective and the study has {len(spec.objectives)}: choose nsga2, "
            "nsga3, tpe or auto."
        )
    study.check_task()
    values = flatten(as_json(study.config))
    _check_sizes(values)
    _check_unread(study, values)
    for path in ("train.optim.name", "train.schedule.name"):
        if ":" in str(values.get(path)):
            with own_code():
                named(values[path], path)
    if values.get("train.precision") == "fp8" and find_spec("torchao") is None:
        raise UserError("train.precision 'fp8' needs torchao: pip install 'hpo[fp8]'.")
    monitors = {path: value for path, value in values.items() if path.endswith(".monitor")}
    _check_metrics(study, {path: name for path, name in monitors.items() if isinstance(name, str) and name})
    if path := values.get(RESUME_FROM):
        _check_checkpoint(Path(path).expanduser(), study)
    if str(device := values.get("train.device")).startswith("cuda"):
        from trainer.runtime import pick_device  # and with it torch, which alone knows

        pick_device(str(device))


# What no study can mean: path -> the most there may be, and why.
_MOST = {
    "train.num_epochs": (2**31 - 1, "the ledger counts epochs in 32 bits"),
    "train.folds": (1000, "each fold trains a model from the beginning"),
}


def _check_sizes(values: Mapping[str, Any]) -> None:
    for path, (most, why) in _MOST.items():
        if isinstance(given := values.get(path), int) and given > most:
            raise UserError(f"{path}={given}: {why}, so give {most} or less.")


# What is read only where another field says so: path -> that field, and its values which do.
_READ_WITH = {
    "train.optim.sam.rho": ("train.optim.wrap", ("sam",)),
    "train.optim.sam.adaptive": ("train.optim.wrap", ("sam",)),
    "train.average.decay": ("train.average.name", ("ema",)),
    "train.average.start": ("train.average.name", ("swa",)),
    "train.average.every_steps": ("train.average.name", ("ema", "swa")),
}


def _check_unread(study: Study, values: Mapping[str, Any]) -> None:
    """What was set by hand is read by some trial."""
    for path, (other, meant) in _READ_WITH.items():
        if path in study.overrides and values.get(other) not in meant and other not in study.space.paths:
            raise UserError(
                f"{path} is set, and {other} is {values.get(other)!r}, which does not read it: set {other} to "
                f"{' or '.join(meant)}, or leave {path} out."
            )


def _check_metrics(study: Study, monitors: dict[str, str]) -> None:
    """Every metric that something waits for is one that the study declares; a pattern may promise too much."""
    declared = [*study.metrics, *(one.metric for one in (*study.objectives, *study.constraints))]
    for path, name in monitors.items():
        if not any(fnmatchcase(name, pattern) for pattern in (*declared, *_TRAINERS_OWN)):
            known = list(dict.fromkeys(declared))
            raise UserError(
                f"{path}={name!r} is none of the metrics that study {study.name!r} declares ({', '.join(known)})"
                f"{near(name, known) or '.'}"
            )


def _check_checkpoint(path: Path, study: Study) -> None:
    if not path.is_dir():
        raise UserError(f"{RESUME_FROM}={str(path)!r} is no directory: give that of a checkpoint, as `hpo best` does.")
    try:
        found = manifest.check(path, None)
    except manifest.Damaged as damage:
        raise UserError(f"{RESUME_FROM}={str(path)!r} cannot be used: {damage}.") from damage
    epochs = flatten(as_json(study.config)).get("train.num_epochs")
    searched = "train.num_epochs" in study.space.paths
    if not searched and isinstance(epochs, int) and found.get("epoch", 0) >= epochs:
        raise UserError(
            f"{RESUME_FROM}={str(path)!r} has {found['epoch']} epochs behind it and train.num_epochs is {epochs}: "
            "raise num_epochs."
        )
