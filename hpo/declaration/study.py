"""Declares a study: what is searched, how it is judged, and how a worker process finds it again.

Imports neither torch nor Optuna: a declaration names its task by a string, imported where it is trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from hpo.declaration import named_objects
from hpo.declaration import search_preset as search_preset_of
from hpo.declaration.content import RESUME_FROM
from hpo.declaration.enqueue import fitting, within
from hpo.declaration.naming import check_name
from hpo.errors import SpaceError, StudyError
from hpo.search import confirming
from hpo.search.finishing import FINISHES, Finish
from hpo.search.samplers.registry import sampler_spec
from hpo.search.strategies.registry import make_strategy
from hpo.space import config_check, optuna_names
from hpo.space.assignments import NO_PRESET
from hpo.space.config import as_json, assign, config_hash, flatten, from_json, holds, reads_as, resolve
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice
from hpo.space.hashing import json_sha256
from hpo.space.objective import Constraint, Objective, check_judged
from hpo.space.paths import check_path
from hpo.space.read_when import check as check_read_when
from hpo.space.space import Space
from hpo.space.trial_config import TrialShape
from hpo.space.values import plain
from trainer.files.paths import absolute
from trainer.report import trains_itself
from trainer.runtime.dotted import named

if TYPE_CHECKING:
    import optuna
    from torch import nn

_TO_OPTUNA = "hpo.analysis.plots.optuna_study:to_optuna"  # by name: the ledger and Optuna are higher layers


@dataclass(frozen=True, init=False)
class Study:
    """A search: a configuration, the task it configures, the space around it and what is judged.

    name         the study's name unless --name gives another
    config       a frozen pydantic model, the base every trial changes; JSON must hold it exactly
    task         the task's class, or "package.module:Class", or ".module:Class" beside the declaration
    space        dotted path -> dimension
    rules        relations that every trial's fields keep to, such as "model.low <= model.high" (hpo.space.rules)
    objectives   a list of Objectives, one or several; the first one's `select` chooses the epoch for all
    constraints  a list of Constraints: a trial that breaks one is infeasible, and never the best
    metrics      names and patterns (fnmatch) of the metrics that enter the digest, besides the objectives; those that
                 are names are shown first
    presets      name -> {path: value}, chosen by `-o preset=name`
    search_preset  the preset of a new study whose overrides name none; it sets nothing that is searched
    plan         {path: values}: what `hpo plan` may change to save memory, the most valued first; of each the values in
                 your order of preference, none needing more memory than the one before
    data_paths   fields that name data files; their contents belong to the study's identity
    sampler      a name in search.samplers.registry.SAMPLERS, or {"name": ..., option: value}
    strategy     a name in search.strategies.registry.STRATEGIES, or {"name": ..., option: value}; "none" stops no
                 trial; None is the default for the trials (`registry.default`)
    finish       auto: once the search is complete, stopped trials that rank above the best are trained to their end;
                 none
    confirm      such as "5x3": the five best trials and the default configuration then train again under three other
                 seeds, and their means decide which is the best; "5x3folds" trains them under each seed on another
                 of `folds`; none
    folds        [{path: value}]: settings that divide the data in another way; no trial may be selected by their
                 validation data
    read_when    {field: condition}, such as {"data.limit": "data.path != ''"}: the field, or by `data.graph.*` all
                 below it, is read only under the condition; setting or searching it otherwise is an error
    enqueue      configurations to be tried first, path -> value; the missing values are drawn at random
    hold_out     {path: value} under which the task also measures, as `test/...`, what no trial is selected by
    check        "package.module:function" (or ".module:function"), called with the configuration before anything is
                 written: it checks the data and raises UserError or trainer.errors.DataError; it imports no torch

    Raises StudyError or SpaceError in one sentence if something does not fit. `configure` returns the study that is
    run: overrides applied, and their fields removed from the space.
    """

    name: str
    config: BaseModel
    task: type | str
    space: Space
    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...]
    metrics: tuple[str, ...]
    presets: Mapping[str, Mapping[str, Any]]
    search_preset: str | None
    plan: Mapping[str, tuple[Any, ...]]
    data_paths: tuple[str, ...]
    sampler: Mapping[str, Any]
    strategy: Mapping[str, Any]
    finish: Finish
    confirm: str
    folds: tuple[Mapping[str, object], ...]
    enqueue: tuple[Mapping[str, Any], ...]
    hold_out: Mapping[str, Any]
    check: str | None
    read_when: Mapping[str, str]
    overrides: Mapping[str, Any]  # set by `configure`, as JSON values
    pinned: tuple[str, ...]  # set by `configure`: the dimensions that overrides have removed from the space
    reference: str  # set by `load`: any process loads the study again by this string
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
        presets: Mapping[str, Mapping[str, object]] | None = None,
        search_preset: str | None = None,
        plan: Mapping[str, Sequence[object]] | None = None,
        data_paths: Sequence[str] = (),
        sampler: str | Mapping[str, Any] = "auto",
        strategy: str | Mapping[str, Any] | None = None,
        finish: str = "auto",
        confirm: str = "none",
        folds: Sequence[Mapping[str, object]] = (),
        enqueue: Sequence[Mapping[str, Any]] = (),
        hold_out: Mapping[str, Any] | None = None,
        check: str | None = None,
        read_when: Mapping[str, str] | None = None,
        overrides: Mapping[str, object] | None = None,
        pinned: Sequence[str] = (),
        reference: str = "",
        module: str = "",
    ) -> None:
        where = f"study {check_name(name)!r}"
        if not isinstance(config, BaseModel):
            raise StudyError(f"{where}: config={config!r} must be an instance of a pydantic model.")
        if not isinstance(task, type | str):
            raise StudyError(f"{where}: task={task!r} must be a class, or its name as 'package.module:name'.")
        lists = {"rules": rules, "objectives": objectives, "constraints": constraints}
        lists |= {"metrics": metrics, "data_paths": data_paths, "enqueue": enqueue, "folds": folds}
        _check_lists(where, lists)
        _check_choices(where, finish, confirm, enqueue=enqueue, folds=folds)
        check_judged(where, objectives, constraints)
        check_read_when(where, read_when or {}, type(config))
        if from_json(type(config), as_json(config)) != config:
            raise StudyError(f"{where}: {type(config).__name__} does not survive JSON; use fields that do.")
        whole = space if isinstance(space, Space) else Space(dict(space))
        vars(self).update(
            name=name,
            config=config,
            task=task,
            space=replace(whole, rules=(*whole.rules, *rules)) if rules else whole,
            objectives=tuple(objectives),
            constraints=tuple(constraints),
            metrics=tuple(metrics),
            presets=plain(dict(presets or {})),
            search_preset=search_preset,
            plan={path: tuple(plain(values)) for path, values in (plan or {}).items()},
            data_paths=tuple(data_paths),
            sampler=sampler_spec(plain(sampler)),
            strategy={} if strategy in (None, {}) else make_strategy(plain(strategy)).model_dump(exclude_unset=True),
            finish=finish,
            confirm=confirm,
            folds=tuple(flatten(plain(dict(fold))) for fold in folds),
            enqueue=tuple(plain(dict(entry)) for entry in enqueue),
            hold_out=flatten(plain(hold_out or {})),
            check=check,
            read_when=dict(read_when or {}),
            overrides=plain(dict(overrides or {})),
            pinned=tuple(pinned),
            reference=reference,
            module=module,
        )
        for path in [
            *data_paths,
            *self.plan,
            *self.hold_out,
            *chain.from_iterable(self.folds),
            *(path for preset in self.presets.values() for path in flatten(preset)),
        ]:
            check_path(type(config), path)
        config_check.check(self.space, config)
        search_preset_of.check(self, where)

    def __getattr__(self, name: str) -> Any:
        raise optuna_names.missing("a study", name, optuna_names.OF_STUDY)

    def upto(self, tier: int) -> Study:
        """Returns the study that searches the dimensions up to a tier. Raises SpaceError if there are none."""
        space = self.space.upto(tier)
        return replace(self, space=space, enqueue=within(self.enqueue, self.space, space))

    def configure(
        self, overrides: Mapping[str, object], enqueue: Sequence[Mapping[str, object]] | None = None
    ) -> Study:
        """Returns the study with `overrides` applied: path -> JSON value, or text read by the field's type.

        `enqueue`, if given, replaces what the declaration enqueues. The key `preset` names a preset, applied before
        everything else, or none. Dimensions that overrides name are no longer searched. Relative paths in `data_paths`
        become absolute. Raises SpaceError for whatever does not fit.
        """
        settings = plain(dict(overrides))
        is_named, requested = "preset" in settings, settings.pop("preset", None)
        preset = None if requested in (None, "null") else str(requested)
        if preset not in (None, NO_PRESET, *self.presets):
            raise search_preset_of.unknown(self, preset)
        if preset not in self.presets:
            preset = NO_PRESET if is_named and self.search_preset else None
        values = flatten(self.presets.get(preset, {}) if preset else {}) | flatten(settings)
        config_type = type(self.config)
        values = {path: resolve(config_type, path, value) for path, value in values.items()}
        for path in (*self.data_paths, RESUME_FROM):
            if isinstance(value := values.get(path), str) and value:
                values[path] = absolute(value)
        config = from_json(config_type, assign(config_type, as_json(self.config), values))
        space = self.space.pinned(values)
        config_check.check(space, config)
        bound = space.bound(config)
        entries = self.enqueue if enqueue is None else enqueue
        study = replace(
            self,
            config=config,
            space=bound,
            objectives=self._judged(config),
            enqueue=fitting(entries, self.space, bound, flatten(as_json(config))) if entries else (),
            overrides={**({"preset": preset} if preset else {}), **values},
            pinned=[path for path in self.space.paths if path in values],
        )
        list(study.tried())
        return study

    def _judged(self, config: BaseModel) -> tuple[Objective, ...]:
        """Returns the objectives; with folds or seeds, of the means in the last reports."""
        for parts in ("folds", "seeds"):
            if f"train.{parts}" in self.space.paths:
                raise SpaceError(
                    f"train.{parts} cannot be searched, since trials of other {parts} cannot be compared: set it."
                )
        if TrialShape.of(as_json(config)).parts == 1:
            return self.objectives
        return tuple(replace(objective, select="last") for objective in self.objectives)

    def tried(self) -> Iterator[BaseModel]:
        """Yields some configurations of the space: its ends, its middle, and the middle with each option of each
        choice.

        Skips those that break a rule of the space. Raises SpaceError if the configuration's own rules refuse one, so
        that few trials have to meet it.
        """
        space, size = self.space, len(self.space)
        low, middle, high = (space.from_unit([u] * size) for u in (0.0, 0.5, 1.0))
        choices = {path: choice for path, choice in space.dimensions.items() if isinstance(choice, Choice)}
        options = [{**middle, path: i} for path, choice in choices.items() for i in range(len(choice.options))]
        entries = [space.encode(entry, middle) for entry in self.enqueue]
        for coordinates in (low, middle, high, *options, *entries):
            params = space.decode(coordinates)
            if not space.fault(params):
                yield self.build(params)
            elif coordinates in entries:
                raise SpaceError(f"study {self.name!r}: of what is enqueued, {space.fault(params)}.")

    def fixed(self) -> Mapping[str, Any]:
        """Returns values of the fields that conditions and divisors of the space name and that are not searched."""
        return self.space.fixed

    @cached_property
    def _base(self) -> dict[str, Any]:
        return as_json(self.config)

    @cached_property
    def shape(self) -> TrialShape:
        """Returns how the study's trials are trained, if no field of that is searched."""
        return TrialShape.of(self._base)

    def build(self, params: Mapping[str, object]) -> BaseModel:
        """Returns the whole configuration of a trial. Raises SpaceError if the configuration's own rules refuse it."""
        try:
            return from_json(type(self.config), assign(type(self.config), self._base, params))
        except SpaceError as error:
            raise SpaceError(
                f"the space of study {self.name!r} leads to a refused configuration: {error} Narrow the space, or "
                "state how its fields are related, as in rules=['model.low <= model.high']."
            ) from error

    def resolved(self, params: Mapping[str, object]) -> tuple[dict[str, Any], str]:
        """Returns the whole configuration of a trial as JSON and, if it cannot be trained, a sentence on why."""
        if fault := self.space.fault(params):
            why = f"{fault}, and nothing was drawn in its place at which all rules hold."
        else:
            try:
                return as_json(self.build(params)), ""
            except SpaceError as error:
                why = str(error.__cause__)
        return assign(type(self.config), self._base, params), why

    def rebuild(self, config: Mapping[str, object], expected_hash: str) -> BaseModel:
        """Returns the configuration stored with a trial; fields that its type has gained since have their defaults.

        Raises StudyError if it is no longer the same.
        """
        rebuilt = from_json(type(self.config), config)
        if (unchanged := json_sha256(config) == expected_hash) and reads_as(rebuilt, config):  # the usual case
            return rebuilt
        if (now := config_hash(rebuilt)) != expected_hash and not (unchanged and holds(as_json(rebuilt), config)):
            raise StudyError(
                f"study {self.name!r}: a stored configuration reads back as {now[:12]}, not {expected_hash[:12]}; "
                "its type has changed since."
            )
        return rebuilt

    def task_class(self) -> type:
        """Imports and returns the class of the task. Raises StudyError if the name leads nowhere."""
        return (
            named_objects.load(self.name, self.module, "task", self.task, type)
            if isinstance(self.task, str)
            else self.task
        )

    @cached_property
    def trains_itself(self) -> bool:
        """Returns whether its task has its own loop; imports the task."""
        return trains_itself(self.task_class())

    def check_data(self) -> Mapping[str, Any] | None:
        """Lets the study check its data before anything is written; returns its report, plain JSON, if it gives one."""
        if self.check is None:
            return None
        return named_objects.load(self.name, self.module, "check", self.check, FunctionType)(self.config)

    def check_task(self) -> None:
        """Raises StudyError if the task's module does not exist, importing only its packages.

        Also raises it if the task, given as a class, lacks a method that the trainer calls.
        """
        if isinstance(self.task, str):
            named_objects.check_module(self.name, self.module, "task", self.task)
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

    def to_optuna(
        self, home: str | os.PathLike[str] | None = None, name: str | None = None, *, storage: str | None = None
    ) -> optuna.Study:
        """Returns the ledger's study `name` (by default this one) in `home`, or at `storage`, as an Optuna study."""
        return named(_TO_OPTUNA, "Study.to_optuna")(self, home, name or self.name, storage)

    def load_model(self, path: str | Path, config: BaseModel | None = None) -> nn.Module:
        """Returns the model in a checkpoint directory, such as `mlflow.artifacts.download_artifacts` returns, in eval
        mode.

        It has the weights with which its metrics were measured: the average's, if `train.average` made one.

        It is built from the `config.json` there, or from `config`. Raises CheckpointError for a directory without such
        a model, UserError if the configuration is missing.
        """
        from hpo.declaration.load_model import load_model

        return load_model(self.name, self.task_class, Path(path), config or self.rebuild)


def _check_lists(where: str, lists: Mapping[str, object]) -> None:
    for field, value in lists.items():
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise StudyError(f"{where}: {field}={value!r} must be a list.")


def _check_choices(where: str, finish: str, confirm: str, **lists: Sequence[object]) -> None:
    for field, entries in lists.items():
        for entry in entries:
            if not isinstance(entry, Mapping):
                raise StudyError(f"{where}: {entry!r} in {field} must be a mapping of paths to values.")
    if finish not in FINISHES:
        raise StudyError(f"{where}: finish={finish!r} is not known: give {' or '.join(map(repr, FINISHES))}.")
    if not confirming.is_form(confirm):
        raise StudyError(f"{where}: confirm={confirm!r}: {confirming.FORM}.")
