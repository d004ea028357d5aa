"""Declares a study: what is searched, how it is judged, and how a worker process finds it again.

Torch-free, and free of Optuna: a declaration names its task by a string, imported where it is trained.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from hpo.declaration import bundled, code_digest, place
from hpo.declaration.enqueue import fitting, within
from hpo.declaration.loading import file_of, source_parts
from hpo.declaration.naming import check_name
from hpo.errors import SpaceError, StudyError, UserError
from hpo.search.samplers.registry import sampler_spec
from hpo.search.strategies.base import DEFAULT, make_strategy
from hpo.space import fit
from hpo.space.config import as_json, assign, check_path, config_hash, flatten, from_json, holds, resolve
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice
from hpo.space.hashing import json_sha256, tree_sha256
from hpo.space.objective import Constraint, Objective, check_judged
from hpo.space.space import Space
from hpo.space.trial_config import TrialShape
from hpo.space.values import plain
from hpo.text import near
from trainer.checkpoint.manifest import MANIFEST
from trainer.files.paths import expanded
from trainer.report import trains_itself
from trainer.runtime.dotted import named

if TYPE_CHECKING:
    import optuna
    from torch import nn

_TO_OPTUNA = "hpo.analysis.plots.optuna_study:to_optuna"  # by name: the ledger and Optuna lie on floors above
RESUME_FROM = "train.resume_from"  # a field every study may have


@dataclass(frozen=True, init=False)
class Study:
    """A search: a configuration, the task it configures, the space around it and what is judged.

    name         the study's name where --name gives no other
    config       a frozen pydantic model, the base every trial changes; JSON must hold it exactly
    task         the task's class, or "package.module:Class", or ".module:Class" beside the declaration
    space        dotted path -> dimension
    rules        relations that every trial's fields keep to, such as "model.low <= model.high" (hpo.space.rules)
    objectives   a list of Objectives, one or several; the first one's `select` chooses the epoch for all
    constraints  a list of Constraints: a trial that breaks one is infeasible, and never the best
    metrics      names and patterns (fnmatch) of the metrics that enter the digest, besides the objectives; those that
                 are names are shown first
    presets      name -> {path: value}, chosen by `-o preset=name`
    plan         {path: values}: what `hpo plan` may change to save memory, what is dearest to you first; of each the
                 values as you would rather have them, none needing more memory than the one before
    data_paths   fields that name data files; their contents belong to the study's identity
    sampler      a name in search.samplers.registry.SAMPLERS, or {"name": ..., option: value}
    strategy     a name in search.strategies.base.STRATEGIES, or {"name": ..., option: value}; "none" lets no trial stop
    enqueue      configurations to be tried first, path -> value; what one leaves open is drawn at random
    hold_out     {path: value} under which the task also measures, as `test/...`, what no trial is selected by
    check        "package.module:function" (or ".module:function"), called with the configuration before anything is
                 written: it looks at the data and raises UserError or trainer.errors.DataError; it imports no torch

    Raises StudyError or SpaceError in one sentence where something does not fit. `configure` gives the study that
    is run: overrides applied, what they name taken out of the space.
    """

    name: str
    config: BaseModel
    task: type | str
    space: Space
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    metrics: tuple[str, ...]
    presets: Mapping[str, Mapping[str, Any]]
    plan: Mapping[str, tuple[Any, ...]]
    data_paths: tuple[str, ...]
    sampler: Mapping[str, Any]
    strategy: Mapping[str, Any]
    enqueue: tuple[Mapping[str, Any], ...]
    hold_out: Mapping[str, Any]
    check: str | None
    overrides: Mapping[str, Any]  # set by `configure`, as JSON values
    reference: str  # set by `load`: by this string any process loads the study again
    module: str  # set by `load`: the name of the declaring module

    def __init__(
        self,
        name: str,
        config: BaseModel,
        task: type | str,
        space: Space | Mapping[str, Dimension],
        objectives: Sequence[Objective],
        *,
        rules: Sequence[str] = (),
        constraints: Sequence[Constraint] = (),
        metrics: Sequence[str] = ("train/loss", "val/*"),
        presets: Mapping[str, Mapping[str, Any]] | None = None,
        plan: Mapping[str, Sequence[Any]] | None = None,
        data_paths: Sequence[str] = (),
        sampler: str | Mapping[str, Any] = "auto",
        strategy: str | Mapping[str, Any] = DEFAULT,
        enqueue: Sequence[Mapping[str, Any]] = (),
        hold_out: Mapping[str, Any] | None = None,
        check: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        reference: str = "",
        module: str = "",
    ) -> None:
        where = f"study {check_name(name)!r}"
        if not isinstance(config, BaseModel):
            raise StudyError(f"{where}: config={config!r} must be an instance of a pydantic model.")
        if not isinstance(task, type | str):
            raise StudyError(f"{where}: task={task!r} must be a class, or its name as 'package.module:name'.")
        lists = {
            "rules": rules,
            "objectives": objectives,
            "constraints": constraints,
            "metrics": metrics,
            "data_paths": data_paths,
            "enqueue": enqueue,
        }
        for field, value in lists.items():
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise StudyError(f"{where}: {field}={value!r} must be a list.")
        for one in enqueue:
            if not isinstance(one, Mapping):
                raise StudyError(f"{where}: {one!r} in enqueue must be a mapping of paths to values.")
        check_judged(where, objectives, constraints)
        if from_json(type(config), as_json(config)) != config:
            raise StudyError(f"{where}: {type(config).__name__} does not survive JSON; use fields that do.")
        vars(self).update(
            name=name,
            config=config,
            task=task,
            space=_ruled(space if isinstance(space, Space) else Space(dict(space)), rules),
            objectives=tuple(objectives),
            constraints=tuple(constraints),
            metrics=tuple(metrics),
            presets=plain(dict(presets or {})),
            plan={path: tuple(plain(values)) for path, values in (plan or {}).items()},
            data_paths=tuple(data_paths),
            sampler=sampler_spec(plain(sampler)),
            strategy=make_strategy(plain(strategy)).model_dump(exclude_unset=True),
            enqueue=tuple(plain(dict(one)) for one in enqueue),
            hold_out=flatten(plain(hold_out or {})),
            check=check,
            overrides=plain(dict(overrides or {})),
            reference=reference,
            module=module,
        )
        for path in [
            *data_paths,
            *self.plan,
            *self.hold_out,
            *(path for preset in self.presets.values() for path in flatten(preset)),
        ]:
            check_path(type(config), path)
        fit.check(self.space, config)

    # --- What is run

    def upto(self, tier: int) -> Study:
        """The study that searches the dimensions up to a tier. Raises SpaceError where that is none."""
        space = self.space.upto(tier)
        return replace(self, space=space, enqueue=within(self.enqueue, self.space, space))

    def configure(self, overrides: Mapping[str, Any], enqueue: Sequence[Mapping[str, Any]] | None = None) -> Study:
        """The study with `overrides` applied: path -> JSON value, or text read by the field's type.

        `enqueue`, if given, takes the place of what the declaration enqueues. The key `preset` names a preset, applied
        before everything else. Dimensions that overrides name are no longer searched. Relative paths in `data_paths`
        become absolute. Raises SpaceError for whatever does not fit.
        """
        given = plain(dict(overrides))
        preset = None if (preset := given.pop("preset", None)) in (None, "null") else str(preset)
        if preset is not None and preset not in self.presets:
            known = f"this study has {', '.join(self.presets) or 'none'}{near(preset, self.presets) or '.'}"
            raise SpaceError(f"unknown preset {preset!r}: {known}")
        values = flatten(self.presets[preset]) if preset is not None else {}
        values |= flatten(given)
        config_type = type(self.config)
        values = {path: resolve(config_type, path, value) for path, value in values.items()}
        for path in (*self.data_paths, RESUME_FROM):
            if isinstance(value := values.get(path), str) and value:
                values[path] = str(expanded(value).absolute())
        config = from_json(config_type, assign(config_type, as_json(self.config), values))
        space = self.space.pinned(values)
        fit.check(space, config)
        bound = space.bound(config)
        entries = self.enqueue if enqueue is None else enqueue
        study = replace(
            self,
            config=config,
            space=bound,
            objectives=self._judged(config),
            enqueue=fitting(entries, self.space, bound, flatten(as_json(config))) if entries else (),
            overrides={**({} if preset is None else {"preset": preset}), **values},
        )
        list(study.tried())
        return study

    def _judged(self, config: BaseModel) -> tuple[Objective, ...]:
        """The objectives, of folds and seeds by their means over all of them: the last ones that are reported."""
        for parts in ("folds", "seeds"):
            if f"train.{parts}" in self.space.paths:
                raise SpaceError(
                    f"train.{parts} cannot be searched, since trials of other {parts} cannot be compared: set it."
                )
        if TrialShape.of(as_json(config)).parts == 1:
            return self.objectives
        return tuple(replace(objective, select="last") for objective in self.objectives)

    def tried(self) -> Iterator[BaseModel]:
        """Some configurations of the space: its ends, its middle, and there each option of each choice, but for those
        that break a rule of the space.

        Raises SpaceError where the configuration's own rules refuse one, so that few trials have to meet it.
        """
        space, size = self.space, len(self.space)
        low, middle, high = (space.from_unit([u] * size) for u in (0.0, 0.5, 1.0))
        choices = {path: one for path, one in space.dimensions.items() if isinstance(one, Choice)}
        options = [{**middle, path: i} for path, one in choices.items() for i in range(len(one.options))]
        entries = [space.encode(entry, middle) for entry in self.enqueue]
        for coordinates in (low, middle, high, *options, *entries):
            params = space.decode(coordinates)
            if not space.fault(params):
                yield self.build(params)
            elif coordinates in entries:
                raise SpaceError(f"study {self.name!r}: of what is enqueued, {space.fault(params)}.")

    def fixed(self) -> Mapping[str, Any]:
        """Values of the fields that conditions and divisors of the space name and that are not searched."""
        return self.space.fixed

    @cached_property
    def _base(self) -> dict[str, Any]:
        return as_json(self.config)

    @cached_property
    def shape(self) -> TrialShape:
        """How its trials are trained, where none is searched."""
        return TrialShape.of(self._base)

    def build(self, params: Mapping[str, Any]) -> BaseModel:
        """The whole configuration of a trial. Raises SpaceError where the configuration's own rules refuse it."""
        try:
            return from_json(type(self.config), assign(type(self.config), self._base, params))
        except SpaceError as error:
            raise SpaceError(
                f"the space of study {self.name!r} leads to a refused configuration: {error} Narrow the space, or "
                "state how its fields are related, as in rules=['model.low <= model.high']."
            ) from error

    def resolved(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The whole configuration of a trial as JSON and, where none can be trained with it, why, in a sentence."""
        if fault := self.space.fault(params):
            why = f"{fault}, and nothing was drawn in its place at which all rules hold."
        else:
            try:
                return as_json(self.build(params)), ""
            except SpaceError as error:
                why = str(error.__cause__)
        return assign(type(self.config), self._base, params), why

    def rebuild(self, config: Mapping[str, Any], expected_hash: str) -> BaseModel:
        """The configuration stored with a trial, in which fields that its type has gained since have their defaults.
        Raises StudyError where it is no longer the same."""
        rebuilt = from_json(type(self.config), config)
        if (found := config_hash(rebuilt)) == expected_hash:
            return rebuilt
        if json_sha256(config) != expected_hash or not holds(as_json(rebuilt), config):
            raise StudyError(
                f"study {self.name!r}: a stored configuration reads back as {found[:12]}, not {expected_hash[:12]}; "
                "its type has changed since."
            )
        return rebuilt

    def task_class(self) -> type:
        """The class of the task, imported now. Raises StudyError where the name leads nowhere."""
        return place.load(self.name, self.module, "task", self.task, type) if isinstance(self.task, str) else self.task

    @cached_property
    def trains_itself(self) -> bool:
        """Whether its task has a loop of its own; imports the task."""
        return trains_itself(self.task_class())

    def check_data(self) -> Mapping[str, Any] | None:
        """Have the study look at its data, before anything is written; its report, plain JSON, if it gives one."""
        if self.check is None:
            return None
        return place.load(self.name, self.module, "check", self.check, FunctionType)(self.config)

    def check_task(self) -> None:
        """Raise StudyError if no module of the task's name can be found, of which nothing is imported but its packages,
        or where the task, given as a class, lacks a method that the trainer calls."""
        if isinstance(self.task, str):
            place.check_module(self.name, self.module, "task", self.task)
        else:
            self._check_written(self.task)

    def _check_written(self, task: type) -> None:
        if ready := getattr(task, "check_ready", None):
            ready()
        if self.trains_itself:
            return
        from trainer.task import Task

        for name in ("model", "train_set", "loss"):
            if getattr(task, name, None) in (None, getattr(Task, name)):
                raise StudyError(
                    f"study {self.name!r}: task {task.__name__} needs a method {name}(), as trainer.task.Task has it, "
                    "or a loop of its own, fit()."
                )

    # --- What it is

    def directory(self) -> Path:
        """The directory of the declaration; the working directory where it was not loaded from a file."""
        own = getattr(self.task, "file", None)
        file = own() if own else file_of(sys.modules.get(self.module))
        return file.parent if file else Path.cwd()

    def identity(self) -> dict[str, Any]:
        """Component -> what decides the study's results, by path or as a sha256; see hpo.declaration.identity."""
        return {
            "space": json.loads(json.dumps(self.space.describe())),  # plain: lists, no tuples
            "objectives": json_sha256([one.to_json() for one in (*self.objectives, *self.constraints)]),
            "config": flatten(as_json(self.config)),
            "data": self.data_sha256(),
            "code": self.code_sha256(),
        } | ({"rules": dict.fromkeys(self.space.rules, True)} if self.space.rules else {})

    def data_sha256(self) -> dict[str, str]:
        """Path -> sha256 of the files it names; of a checkpoint to start from, its manifest's, which names the rest."""
        values, found = flatten(as_json(self.config)), {}
        for path in (*self.data_paths, RESUME_FROM):
            if value := values.get(path):
                place = expanded(value)
                try:
                    found[path] = tree_sha256(place / MANIFEST if path == RESUME_FROM else place, "*")
                except OSError as error:
                    raise UserError(f"{path}={value!r} cannot be read: {error.strerror}.") from error
        return found

    def code(self) -> dict[str, Path]:
        """Label -> place of the declaration, under no label, and of all that it imports from beside it; of a task that
        knows its own code, that."""
        if own := getattr(self.task, "code", None):
            return own()
        module = sys.modules.get(self.module) or sys.modules.get(getattr(self.task, "__module__", ""))
        if (file := file_of(module)) is None:
            return {}
        own = self.task.partition(":")[0] if isinstance(self.task, str) else ""
        return source_parts(file, own)

    def code_sha256(self) -> dict[str, str]:
        """Returns the digest of each part of the user's own code, by label; a bundled study's code has a version."""
        parts = self.code()
        if not isinstance(self.task, str) and hasattr(self.task, "code"):  # a program's
            written = {label: code_digest.of_study(place, program=True) for label, place in parts.items()}
            return written | {"": code_digest.of_text(self.task.source())}
        if not parts and (source := getattr(self.task, "source", None)):
            return {"": code_digest.of_text(source())}
        counted = {label: place for label, place in parts.items() if bundled.package_of(place) is None}
        return {label: code_digest.of_study(place) for label, place in counted.items()}

    def bundled(self) -> list[str]:
        """Returns the bundled studies whose code this one is or imports; a program's code is its own."""
        return [] if hasattr(self.task, "code") else bundled.studies_in(self.code().values())

    def to_optuna(
        self, home: str | os.PathLike[str] | None = None, name: str | None = None, *, storage: str | None = None
    ) -> optuna.Study:
        """What the ledger of `home`, or at `storage`, knows of study `name` (by default this), as an Optuna study."""
        return named(_TO_OPTUNA, "Study.to_optuna")(self, home, name or self.name, storage)

    def load_model(self, path: str | Path, config: BaseModel | None = None) -> nn.Module:
        """The model in a checkpoint directory, as `mlflow.artifacts.download_artifacts` gives one, in eval mode.

        It has the weights that its metrics were measured with: the average's, where `train.average` made one.

        Built from the `config.json` that stands there, or from `config`. Raises CheckpointError for a directory that
        holds no such model, UserError where the configuration is missing.
        """
        from hpo.declaration.load_model import load_model

        return load_model(self.name, self.task_class, Path(path), config or self.rebuild)


def _ruled(space: Space, rules: Sequence[str]) -> Space:
    return replace(space, rules=(*space.rules, *rules)) if rules else space
