"""Refuses before anything is written what can be seen by then: a missing checkpoint, device or metric."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import RESUME_FROM, Study
from hpo.declaration.user_code import own_code
from hpo.errors import NO_TORCH, StudyError, UserError
from hpo.search.samplers import auto
from hpo.search.samplers.registry import ONE_OBJECTIVE
from hpo.search.strategies.base import check_several
from hpo.space.config import as_json, flatten
from hpo.space.dimensions import Choice
from hpo.space.trial_config import TrialShape
from hpo.text import near
from trainer.checkpoint import manifest
from trainer.config import TrainConfig
from trainer.config.idle import Idle, rows_unread
from trainer.config.optim import OPTIMIZERS
from trainer.config.schedule import OWN_FIELDS
from trainer.files.paths import expanded
from trainer.report import trains_itself
from trainer.runtime.dotted import check_call, named

_WITH_TORCH = ("gp", "freeze-thaw")  # samplers
# What the trainer and the reporter add to what a task reports.
_TRAINERS_OWN = ("train/*", "time/*")


def check(resolved: ResolvedStudy, *, options: Collection[str] = (), here: bool = True) -> None:
    """Raise UserError or trainer.errors.ConfigError in one sentence for what no trial could be trained with, and where
    no trial reads what one of `options`, the paths that were set one by one, sets. `here`: this host's devices are
    those of the workers."""
    study, spec = resolved.study, resolved.spec
    check_several(resolved.strategy, len(spec.objectives))
    if len(spec.objectives) > 1 and spec.sampler in ONE_OBJECTIVE:
        raise UserError(
            f"sampler {spec.sampler!r} takes one objective and the study has {len(spec.objectives)}: choose nsga2, "
            "nsga3, tpe or auto."
        )
    _check_torch_of_search(resolved)
    if here:
        check_torch(study)
    study.check_task()
    if not isinstance(study.task, str) and (lack := lacking(study.task, study.shape)):
        raise UserError(lack)
    values = flatten(as_json(study.config))
    _check_sizes(values)
    _check_unread(study, values, options)
    for config in study.tried():
        if isinstance(train := getattr(config, "train", None), TrainConfig):
            _check_own(train)
            _check_bound(train, here)
    if values.get("train.precision") == "fp8" and find_spec("torchao") is None:
        raise UserError("train.precision 'fp8' needs torchao: pip install 'hpo[fp8]'.")
    monitors = {path: value for path, value in values.items() if path.endswith(".monitor")}
    _check_metrics(study, {path: name for path, name in monitors.items() if isinstance(name, str) and name})
    if path := values.get(RESUME_FROM):
        _check_checkpoint(expanded(path), study)
    if str(device := values.get("train.device")).startswith("cuda"):
        from trainer.runtime.device import pick_device  # and with it torch, which alone knows

        pick_device(str(device))


def check_torch(study: Study) -> None:
    """Raise StudyError where the study trains by the shared trainer and this installation has no PyTorch."""
    if not find_spec("torch") and not study.trains_itself:
        raise StudyError(f"study {study.name!r} trains with {NO_TORCH}.")


def _check_torch_of_search(resolved: ResolvedStudy) -> None:
    """Raise UserError where what chooses the trials computes with PyTorch and this installation has none."""
    spec = resolved.spec
    chosen = auto.choice(len(spec.objectives), auto.QUICK, planned=spec.planned)
    if (chosen if spec.sampler == "auto" else spec.sampler) in _WITH_TORCH and not find_spec("torch"):
        raise UserError(f"sampler {spec.sampler!r} of study {spec.name!r} computes with {NO_TORCH}.")


def lacking(task: Any, shape: TrialShape) -> str:
    """What a trial of this shape asks of a task that has a loop of its own, and that has not, in a sentence; else
    empty. A task's class or an instance, which may have a loop that the class has not."""
    if not trains_itself(task):
        return ""
    asked = {
        "train.lanes": (shape.lanes > 1, "which has no lanes"),
        "train.parallel": (shape.ranks > 1, "which is one process"),
        "train.folds": (shape.folds > 1, "which trains no folds"),
        "train.seeds": (shape.seeds > 1, "which trains under one seed"),
    }
    name = (task if isinstance(task, type) else type(task)).__name__
    for path, (is_asked, why) in asked.items():
        if is_asked:
            return f"{name} has a fit() of its own, {why}: leave {path}."
    return ""


# What no study can mean: path -> the most there may be, and why.
_MOST = {
    "train.num_epochs": (2**31 - 1, "the ledger counts epochs in 32 bits"),
    "train.folds": (1000, "each fold trains a model from the beginning"),
    "train.seeds": (1000, "each seed trains a model from the beginning"),
}


def _check_sizes(values: Mapping[str, Any]) -> None:
    for path, (most, why) in _MOST.items():
        if isinstance(given := values.get(path), int) and given > most:
            raise UserError(f"{path}={given}: {why}, so give {most} or less.")


def _check_own(train: TrainConfig) -> None:
    """An optimizer and a schedule of the user's own are there and take what they will be given."""
    with own_code():
        if train.schedule.name not in OWN_FIELDS:
            from trainer.optim.schedule import users_own

            users_own(train.schedule.name)
        if (name := train.optim.name) not in OPTIMIZERS:
            field = "train.optim.name"
            given = train.optim.arguments
            fix = f"let it take {', '.join(given)}, or change train.optim.options"
            check_call(named(name, field), f"{field}={name!r}", fix, [], **given)


def _check_bound(train: TrainConfig, here: bool) -> None:
    if train.micro_batch_size == "auto" and (here or train.device == "cpu"):
        from trainer.memory.bound import check_bound
        from trainer.runtime.device import pick_device

        check_bound(train, pick_device(train.device))


_TRAIN = "train."
_TWICE = {"train.optim.name": "ranger", "train.optim.wrap": "lookahead"}


def _check_unread(study: Study, values: Mapping[str, Any], options: Collection[str]) -> None:
    """What an option sets is read by some trial, and nothing is asked for twice. A file may hold a whole configuration,
    as that of the best trial, of which nothing reads some fields."""
    for path, row in _unread(options, lambda other: _possible(study, values, other)):
        switch, other = row.switches[0], _TRAIN + row.switches[0].path
        raise UserError(
            f"{path} is set, and {other} is {values.get(other)!r}, which does not read it: set {other} to "
            f"{switch.values}, or leave {path} out."
        )
    of_a_file = _TWICE.keys() & study.overrides.keys() and not _TWICE.keys() & set(options)
    if not of_a_file and all([*(_possible(study, values, path) or ())] == [value] for path, value in _TWICE.items()):
        raise UserError(
            "train.optim.wrap is 'lookahead', and train.optim.name is 'ranger', which is RAdam within Lookahead: leave "
            "wrap out (train.optim.lookahead.k is ranger's too), or choose another optimizer."
        )


def unread(paths: Collection[str], values: Mapping[str, Any]) -> list[str]:
    """Those of `paths` that the configuration `values`, by path, does not read."""
    found = [path for path, _ in _unread(paths, lambda other: (values.get(other),))]
    return found + ["train.optim.wrap"] * all(values.get(path) == value for path, value in _TWICE.items())


def _unread(paths: Collection[str], possible: Callable[[str], Sequence[Any] | None]) -> Iterator[tuple[str, Idle]]:
    """Each path that is not read though a space might have it read, with its row of the table."""
    trained = (path.removeprefix(_TRAIN) for path in paths if path.startswith(_TRAIN))
    found = rows_unread(trained, lambda other: possible(_TRAIN + other), "option")
    return ((_TRAIN + path, row) for path, row in found)


def _possible(study: Study, values: Mapping[str, Any], path: str) -> Sequence[Any] | None:
    """What a field that chooses may be in a trial; None: anything."""
    if path not in study.space.dimensions:
        return (values.get(path),)
    return searched.options if isinstance(searched := study.space.dimensions[path], Choice) else None


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
