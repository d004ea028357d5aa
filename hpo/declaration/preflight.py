"""Rejects known mistakes before anything is written: a missing checkpoint, device or metric."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import RESUME_FROM, Study
from hpo.declaration.user_code import own_code
from hpo.door import option
from hpo.errors import NO_TORCH, StudyError, UserError
from hpo.search.samplers import auto
from hpo.search.samplers.registry import Kind
from hpo.search.strategies.registry import check_several
from hpo.space import read_when
from hpo.space.config import as_json, flatten
from hpo.space.dimensions import Choice, Int
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
# The metrics that the trainer and the reporter add to a task's.
_TRAINERS_OWN = ("train/*", "time/*")


def check(resolved: ResolvedStudy, *, options: Collection[str] = (), here: bool = True, begun: bool = False) -> None:
    """Raises UserError or trainer.errors.ConfigError in one sentence if no trial could be trained.

    Also raises it if no trial reads one of `options`, the paths that were set one by one. `here`: the workers use this
    host's devices. `begun`: an existing study continues whatever it searches.
    """
    study, spec = resolved.study, resolved.spec
    check_several(resolved.strategy, len(spec.objectives))
    if len(spec.objectives) > 1 and not Kind.of(spec.sampler).several:
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
    _check_read_when(study, values, options, searched=not begun)
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
        from trainer.runtime.device import pick_device  # imports torch, which alone knows the devices

        pick_device(str(device))


def check_torch(study: Study) -> None:
    """Raises StudyError if the study trains by the shared trainer and this installation has no PyTorch."""
    if not find_spec("torch") and not study.trains_itself:
        raise StudyError(f"study {study.name!r} trains with {NO_TORCH}.")


def _check_torch_of_search(resolved: ResolvedStudy) -> None:
    """Raises UserError if the choice of trials needs PyTorch and this installation has none."""
    spec = resolved.spec
    chosen = auto.choice(len(spec.objectives), auto.QUICK, planned=spec.planned)
    if (chosen if spec.sampler == "auto" else spec.sampler) in _WITH_TORCH and not find_spec("torch"):
        raise UserError(f"sampler {spec.sampler!r} of study {spec.name!r} computes with {NO_TORCH}.")


def check_one_by_one(shape: TrialShape, door: str) -> None:
    """Raises UserError if several trials are to train as lanes and `door` trains each alone."""
    if shape.lanes > 1:
        raise UserError(
            f"{door}: it trains each trial on its own, and train.lanes is {shape.lanes}: leave that out, or choose "
            "another executor."
        )


def lacking(task: object, shape: TrialShape) -> str:
    """Returns a sentence about what a trial of this shape needs and a task with its own loop lacks; else an empty text.

    The task may be a class or an instance, which may have a loop that the class lacks.
    """
    if not trains_itself(task):
        return ""
    requests = {
        "train.lanes": (shape.lanes > 1, "which has no lanes"),
        "train.parallel": (shape.ranks > 1, "which is one process"),
        "train.folds": (shape.folds > 1, "which trains no folds"),
        "train.seeds": (shape.seeds > 1, "which trains under one seed"),
    }
    name = (task if isinstance(task, type) else type(task)).__name__
    for path, (is_asked, why) in requests.items():
        if is_asked:
            return f"{name} has a fit() of its own, {why}: leave {path}."
    return ""


# Limits for any study: path -> the maximum, and why.
_MOST = {
    "train.num_epochs": (2**31 - 1, "the ledger counts epochs in 32 bits"),
    "train.folds": (1000, "each fold trains a model from the beginning"),
    "train.seeds": (1000, "each seed trains a model from the beginning"),
}


def _check_sizes(values: Mapping[str, object]) -> None:
    for path, (most, why) in _MOST.items():
        if isinstance(value := values.get(path), int) and value > most:
            raise UserError(f"{path}={value}: {why}, so give {most} or less.")


def _check_own(train: TrainConfig) -> None:
    """Checks that a user's own optimizer and schedule exist and accept their arguments."""
    with own_code():
        if train.schedule.name not in OWN_FIELDS:
            from trainer.optim.schedule import users_own

            users_own(train.schedule.name)
        if (name := train.optim.name) not in OPTIMIZERS:
            field = "train.optim.name"
            arguments = train.optim.arguments
            fix = f"let it take {', '.join(arguments)}, or change train.optim.options"
            check_call(named(name, field), f"{field}={name!r}", fix, [], **arguments)


def _check_bound(train: TrainConfig, here: bool) -> None:
    if train.micro_batch_size == "auto" and (here or train.device == "cpu"):
        from trainer.memory.bound import check_bound
        from trainer.runtime.device import pick_device

        check_bound(train, pick_device(train.device))


_TRAIN = "train."
_FEW = 64  # values of a dimension that are checked one by one
_TWICE = {"train.optim.name": "ranger", "train.optim.wrap": "lookahead"}


def _check_unread(study: Study, values: Mapping[str, object], options: Collection[str]) -> None:
    """Raises UserError if no trial reads a field that an option sets, or if anything is set twice.

    A file may hold a whole configuration, such as the best trial's, in which nothing reads some fields.
    """
    for path, row in _unread(options, lambda needed: _possible(study, values, needed)):
        switch, needed = row.switches[0], _TRAIN + row.switches[0].path
        raise UserError(
            f"{path} is set, and {needed} is {values.get(needed)!r}, which does not read it: set {needed} to "
            f"{switch.values}, or leave {path} out."
        )
    of_a_file = _TWICE.keys() & study.overrides.keys() and not _TWICE.keys() & set(options)
    if not of_a_file and all([*(_possible(study, values, path) or ())] == [value] for path, value in _TWICE.items()):
        raise UserError(
            "train.optim.wrap is 'lookahead', and train.optim.name is 'ranger', which is RAdam within Lookahead: leave "
            "wrap out (train.optim.lookahead.k is ranger's too), or choose another optimizer."
        )


def _check_read_when(study: Study, values: Mapping[str, object], options: Collection[str], *, searched: bool) -> None:
    """Raises UserError if no trial reads a field that an option sets or, if `searched`, that the space searches.

    An option may always remove a dimension from the space, whether the field is read or not.
    """
    declared = read_when.conditions(study.read_when)
    set_alone = [path for path in flatten(study.overrides) if path in options and path not in study.pinned]
    possible = partial(_possible, study, values, counted=True)
    for path, condition in read_when.unread(set_alone, declared, possible):
        why = condition.clause(values, study.overrides)
        raise UserError(f"{path}={values.get(path)!r} {why}: change that, or leave {path} out.")
    always = [path for path in study.space.paths if searched and not study.space.dimensions[path].conditions]
    for path, condition in read_when.unread(always, declared, possible):
        pin = option("overrides", f"{path}={json.dumps(values.get(path))}")
        why = condition.clause(values, study.overrides)
        raise UserError(f"the search varies {path}, which {why}: change that, or pin it by {pin}.")


def unread(paths: Collection[str], values: Mapping[str, object], declared: Mapping[str, str]) -> list[str]:
    """Returns those of `paths` that the configuration `values`, by path, does not read.

    `declared` is its study's `read_when`.
    """
    idle = [path for path, _ in _unread(paths, lambda other: (values.get(other),))]
    of_study = read_when.conditions(declared)
    idle += [path for path, _ in read_when.unread([*paths], of_study, lambda other: (values.get(other),))]
    return idle + ["train.optim.wrap"] * all(values.get(path) == value for path, value in _TWICE.items())


def _unread(paths: Collection[str], possible: Callable[[str], Sequence[object] | None]) -> Iterator[tuple[str, Idle]]:
    """Yields each unread path that a space could make read, with its row of the table."""
    train_fields = (path.removeprefix(_TRAIN) for path in paths if path.startswith(_TRAIN))
    idle_rows = rows_unread(train_fields, lambda other: possible(_TRAIN + other), "option")
    return ((_TRAIN + path, row) for path, row in idle_rows)


def _possible(study: Study, values: Mapping[str, object], path: str, *, counted: bool = False) -> Sequence[Any] | None:
    """Returns the values that a field may have in a trial, None for any.

    They are those of a choice and, with `counted`, those of any dimension with few values.
    """
    if path not in study.space.dimensions:
        return (values.get(path),)
    if isinstance(dimension := study.space.dimensions[path], Choice):
        return dimension.options
    if counted and isinstance(dimension, Int) and dimension.divisor is None and dimension.count <= _FEW:
        return dimension.allowed()
    return None


def _check_metrics(study: Study, monitors: dict[str, str]) -> None:
    """Raises UserError unless the study declares every metric that an option depends on; a pattern counts as all names
    that it matches."""
    declared = [*study.metrics, *(judged.metric for judged in (*study.objectives, *study.constraints))]
    for path, name in monitors.items():
        if not any(fnmatchcase(name, pattern) for pattern in (*declared, *_TRAINERS_OWN)):
            known = list(dict.fromkeys(declared))
            raise UserError(
                f"{path}={name!r} is none of the metrics that study {study.name!r} declares ({', '.join(known)})"
                f"{near(name, known) or '.'}"
            )


def _check_checkpoint(path: Path, study: Study) -> None:
    if not path.is_dir():
        raise UserError(
            f"{RESUME_FROM}={str(path)!r} is not a directory: give that of a checkpoint, as `hpo best` does."
        )
    try:
        state = manifest.check(path, None)
    except manifest.Damaged as damage:
        raise UserError(f"{RESUME_FROM}={str(path)!r} cannot be used: {damage}.") from damage
    epochs = flatten(as_json(study.config)).get("train.num_epochs")
    searches_epochs = "train.num_epochs" in study.space.paths
    if not searches_epochs and isinstance(epochs, int) and state.get("epoch", 0) >= epochs:
        raise UserError(
            f"{RESUME_FROM}={str(path)!r} has trained {state['epoch']} epochs and train.num_epochs is {epochs}: "
            "raise num_epochs."
        )
