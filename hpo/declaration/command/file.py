"""Reads a study from its YAML file: a command, a space, and what is judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
from pydantic import Field

from hpo.declaration import function
from hpo.declaration.budget import parse_time
from hpo.declaration.command import dimensions, placeholders, wandb_sweep
from hpo.declaration.command.command import Command
from hpo.declaration.command.output import Several
from hpo.declaration.command.reports import POSITIONS
from hpo.declaration.command.task import CommandTask
from hpo.declaration.study import Study
from hpo.errors import HpoError, SpaceError, StudyError
from hpo.search.strategies.registry import DEFAULT
from hpo.space.config import from_json, load_yaml
from hpo.space.hashing import json_sha256
from hpo.space.objective import Constraint, Objective
from hpo.text import near
from trainer.config.fields import Frozen
from trainer.files.paths import expanded

SUFFIXES = (".yaml", ".yml")
_Seconds = str | Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Exit = Annotated[int, Field(ge=0, le=255)]


class ObjectiveSection(Frozen):
    """The fields of hpo.Objective."""

    metric: str
    direction: Literal["minimize", "maximize"] = "minimize"
    select: Literal["last", "best"] = "last"


class ConstraintSection(Frozen):
    """The fields of hpo.Constraint."""

    metric: str
    lower: float | None = None
    upper: float | None = None


class ExitCodes(Frozen):
    """The exit codes by which a program reports the outcome of its trial."""

    complete: tuple[_Exit, ...] = ()
    infeasible: tuple[_Exit, ...] = ()
    nonfinite: tuple[_Exit, ...] = ()
    out_of_memory: tuple[_Exit, ...] = ()
    bad_config: tuple[_Exit, ...] = ()
    lost: tuple[_Exit, ...] = ()


class CommandFile(Frozen):
    """The keys of a study's file; docs/reference/command-file.md describes each."""

    command: str | tuple[str, ...]
    space: dict[str, Any]
    name: str | None = None
    minimize: str | tuple[str, ...] = ()
    maximize: str | tuple[str, ...] = ()
    objectives: tuple[ObjectiveSection, ...] = ()
    constraints: tuple[ConstraintSection, ...] = ()
    rules: tuple[str, ...] = ()
    read_when: dict[str, str] = Field(default_factory=dict[str, str])
    metrics: tuple[str, ...] = ("val/*",)
    constants: dict[str, Any] = Field(default_factory=dict)
    enqueue: tuple[dict[str, Any], ...] = ()
    sampler: str | dict[str, Any] = "auto"
    strategy: str | dict[str, Any] | None = None
    finish: str = "auto"
    confirm: str = "none"
    num_epochs: int | None = None
    steps_per_epoch: Annotated[int, Field(ge=1)] | None = None
    directory: str = "."
    environment: dict[str, str | int | float] = Field(default_factory=dict)
    code: tuple[str, ...] = ()
    resume: str | tuple[str, ...] = ()
    output: dict[str, str] = Field(default_factory=dict)
    several: Several = "last"
    timeout: _Seconds | None = None
    silence: _Seconds | None = None
    grace: _Seconds = 10.0
    exit_codes: ExitCodes = ExitCodes()


def load(path: Path) -> Study:
    """Returns the study that a file declares. Raises UserError, in one sentence that begins with the file."""
    document = load_yaml(path)
    try:
        if wandb_sweep.is_sweep(document):
            document = wandb_sweep.converted(document)
        if unknown := [key for key in document if key not in CommandFile.model_fields]:
            known = CommandFile.model_fields
            hint = near(unknown[0], known) or f"; known: {', '.join(known)}."
            raise StudyError(f"unknown key {unknown[0]!r}{hint}")
        return _study(path, from_json(CommandFile, json.loads(json.dumps(document))))
    except HpoError as error:
        raise type(error)(f"{path}: {error}") from error


def _study(path: Path, file: CommandFile) -> Study:
    if taken := [name for name in (*file.space, *file.constants) if name in placeholders.OWN_PLACEHOLDERS]:
        raise SpaceError(f"a parameter cannot be called {taken[0]!r}, which the platform gives each trial: rename it.")
    command = _command(path, file)
    task = type(path.stem, (CommandTask,), {"command": command, "__module__": CommandTask.__module__})
    return function.make(
        "the study",
        file.name or path.stem,
        task,
        dimensions.read("space", file.space),
        judged=(file.minimize, file.maximize, [Objective(**dict(objective)) for objective in file.objectives]),
        constants=file.constants,
        sections=True,
        num_epochs=file.num_epochs,
        rules=file.rules,
        read_when=file.read_when,
        constraints=[Constraint(**dict(constraint)) for constraint in file.constraints],
        metrics=file.metrics,
        sampler=file.sampler,
        strategy=file.strategy,
        finish=file.finish,
        confirm=file.confirm,
        enqueue=file.enqueue,
    )


def _command(path: Path, file: CommandFile) -> Command:
    own_placeholders = [
        name for name in placeholders.OWN_PLACEHOLDERS if name != "num_epochs" or file.num_epochs is not None
    ]
    known = [*file.space, *file.constants, *own_placeholders]
    texts = {
        "command": placeholders.split(file.command, "command"),
        "resume": placeholders.split(file.resume, "resume") if file.resume else [],
    }
    environ = {name: str(value) for name, value in file.environment.items()}
    texts |= {f"environment.{name}": [value] for name, value in environ.items()}
    for where, texts_of_key in texts.items():
        placeholders.check(texts_of_key, known, where)
    directory = (path.parent / expanded(file.directory)).absolute()
    return Command(
        file=path,
        words=texts["command"],
        resume=texts["resume"],
        environ=environ,
        directory=directory,
        code=[directory / expanded(file_name) for file_name in file.code],
        output=_patterns(file),
        several=file.several,
        timeout=_seconds("timeout", file.timeout),
        silence=_seconds("silence", file.silence),
        grace=_seconds("grace", file.grace) or 0.0,
        exit_codes=_exit_codes(file.exit_codes),
        metrics=[*_judged(file)],
        steps_per_epoch=file.steps_per_epoch,
        meaning=_meaning(file),
    )


def _meaning(file: CommandFile) -> str:
    """Returns the digest of a file's declaration.

    A file that names no strategy has `asha`, as when it was the default of all studies, so that studies of that time
    continue.
    """
    named = file.model_copy(update={"strategy": file.strategy or dict(DEFAULT)})
    return json_sha256(named.model_dump(mode="json", exclude=_meaningless(file)))


# The keys that decide how a study is run, not what it finds: changing them is not drift.
_WORDING = ("timeout", "silence", "grace", "finish", "confirm")


def _meaningless(file: CommandFile) -> set[str]:
    """Returns the keys outside of a file's meaning: a later key at its default leaves earlier files as they were."""
    later = {"several": file.several == "last", "read_when": not file.read_when}
    return {"name", *_WORDING, *(key for key, is_default in later.items() if is_default)}


def _judged(file: CommandFile) -> Sequence[str]:
    lists = ([judged] if isinstance(judged, str) else judged for judged in (file.minimize, file.maximize))
    return [name for names in lists for name in names] + [objective.metric for objective in file.objectives]


def _seconds(where: str, given: str | float | None) -> float | None:
    if not isinstance(given, str):
        return given
    try:
        return parse_time(given)
    except HpoError as error:
        raise StudyError(f"{where}={given!r} is not a duration: give seconds, or such as 90m, 2h or 1d12h.") from error


def _exit_codes(given: ExitCodes) -> Mapping[int, Any]:
    kinds: dict[int, str] = {}
    for kind, codes in given.model_dump().items():
        for code in codes:
            if code in kinds:
                raise StudyError(f"exit_codes: {code} is {kinds[code]} and {kind}: leave it in one of them.")
            kinds[code] = kind
    return kinds


def _patterns(file: CommandFile) -> Mapping[str, regex.Pattern[str]]:
    patterns: dict[str, regex.Pattern[str]] = {}
    for name, text in file.output.items():
        where = f"output.{name}={text!r}"
        try:
            patterns[name] = regex.compile(text)
        except regex.error as error:
            raise StudyError(f"{where} is not a regular expression: {error}.") from error
        if patterns[name].groups != 1:
            raise StudyError(
                f"{where} has {patterns[name].groups} groups: put the number, and it alone, in (parentheses)."
            )
    if len(POSITIONS) == sum(name in patterns for name in POSITIONS):
        raise StudyError("output has epoch and step: leave one of them, since a report stands at one place.")
    if patterns and (missing := [name for name in _judged(file) if name not in patterns]):
        raise StudyError(f"output has no pattern for {missing[0]!r}, by which the study judges: add one.")
    return patterns
