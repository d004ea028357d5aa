"""Reads a study from its YAML file: a command, a space, what is judged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hpo.declaration import function
from hpo.declaration.budget import parse_time
from hpo.declaration.command import dimensions, wandb_sweep, words
from hpo.declaration.command.command import Command
from hpo.declaration.command.reports import POSITIONS
from hpo.declaration.command.task import CommandTask
from hpo.declaration.study import Study
from hpo.errors import HpoError, SpaceError, StudyError
from hpo.search.strategies.base import DEFAULT
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
    """As hpo.Objective."""

    metric: str
    direction: Literal["minimize", "maximize"] = "minimize"
    select: Literal["last", "best"] = "last"


class ConstraintSection(Frozen):
    """As hpo.Constraint."""

    metric: str
    lower: float | None = None
    upper: float | None = None


class ExitCodes(Frozen):
    """The exit codes by which a program says what became of its trial."""

    complete: tuple[_Exit, ...] = ()
    infeasible: tuple[_Exit, ...] = ()
    nonfinite: tuple[_Exit, ...] = ()
    out_of_memory: tuple[_Exit, ...] = ()
    bad_config: tuple[_Exit, ...] = ()
    lost: tuple[_Exit, ...] = ()


class CommandFile(Frozen):
    """The keys of a study's file; docs/guide/command.md says what each means."""

    command: str | tuple[str, ...]
    space: dict[str, Any]
    name: str | None = None
    minimize: str | tuple[str, ...] = ()
    maximize: str | tuple[str, ...] = ()
    objectives: tuple[ObjectiveSection, ...] = ()
    constraints: tuple[ConstraintSection, ...] = ()
    rules: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("val/*",)
    constants: dict[str, Any] = Field(default_factory=dict)
    enqueue: tuple[dict[str, Any], ...] = ()
    sampler: str | dict[str, Any] = "auto"
    strategy: str | dict[str, Any] = Field(default_factory=lambda: dict(DEFAULT))
    num_epochs: int | None = None
    steps_per_epoch: Annotated[int, Field(ge=1)] | None = None
    directory: str = "."
    environment: dict[str, str | int | float] = Field(default_factory=dict)
    code: tuple[str, ...] = ()
    resume: str | tuple[str, ...] = ()
    output: dict[str, str] = Field(default_factory=dict)
    timeout: _Seconds | None = None
    silence: _Seconds | None = None
    grace: _Seconds = 10.0
    exit_codes: ExitCodes = ExitCodes()


def load(path: Path) -> Study:
    """The study that a file declares. Raises UserError, in one sentence that begins with the file."""
    document = load_yaml(path)
    try:
        if wandb_sweep.is_sweep(document):
            document = wandb_sweep.converted(document)
        if unknown := [key for key in document if key not in CommandFile.model_fields]:
            known = CommandFile.model_fields
            hint = near(unknown[0], known) or f": there are {', '.join(known)}."
            raise StudyError(f"there is no key {unknown[0]!r}{hint}")
        return _study(path, from_json(CommandFile, json.loads(json.dumps(document))))
    except HpoError as error:
        raise type(error)(f"{path}: {error}") from error


def _study(path: Path, file: CommandFile) -> Study:
    if taken := [name for name in (*file.space, *file.constants) if name in words.OWN_PLACES]:
        raise SpaceError(f"a parameter cannot be called {taken[0]!r}, which the platform gives each trial: rename it.")
    command = _command(path, file)
    task = type(path.stem, (CommandTask,), {"command": command, "__module__": CommandTask.__module__})
    return function.make(
        "the study",
        file.name or path.stem,
        task,
        dimensions.read("space", file.space),
        judged=(file.minimize, file.maximize, [Objective(**dict(one)) for one in file.objectives]),
        constants=file.constants,
        sections=True,
        num_epochs=file.num_epochs,
        rules=file.rules,
        constraints=[Constraint(**dict(one)) for one in file.constraints],
        metrics=file.metrics,
        sampler=file.sampler,
        strategy=file.strategy,
        enqueue=file.enqueue,
    )


def _command(path: Path, file: CommandFile) -> Command:
    own = [name for name in words.OWN_PLACES if name != "num_epochs" or file.num_epochs is not None]
    known = [*file.space, *file.constants, *own]
    texts = {
        "command": words.split(file.command, "command"),
        "resume": words.split(file.resume, "resume") if file.resume else [],
    }
    environ = {name: str(value) for name, value in file.environment.items()}
    texts |= {f"environment.{name}": [value] for name, value in environ.items()}
    for where, one in texts.items():
        words.check(one, known, where)
    directory = (path.parent / expanded(file.directory)).absolute()
    return Command(
        file=path,
        words=texts["command"],
        resume=texts["resume"],
        environ=environ,
        directory=directory,
        code=[directory / expanded(one) for one in file.code],
        output=_patterns(file),
        timeout=_seconds("timeout", file.timeout),
        silence=_seconds("silence", file.silence),
        grace=_seconds("grace", file.grace) or 0.0,
        exit_codes=_exit_codes(file.exit_codes),
        metrics=[*_judged(file)],
        steps_per_epoch=file.steps_per_epoch,
        meaning=json_sha256(file.model_dump(mode="json", exclude={"name", *_WORDING})),
    )


# What decides how a study is run, and not what it finds: a change of it is no drift.
_WORDING = ("timeout", "silence", "grace")


def _judged(file: CommandFile) -> Sequence[str]:
    given = ([one] if isinstance(one, str) else one for one in (file.minimize, file.maximize))
    return [name for names in given for name in names] + [one.metric for one in file.objectives]


def _seconds(where: str, given: str | float | None) -> float | None:
    if not isinstance(given, str):
        return given
    try:
        return parse_time(given)
    except HpoError as error:
        raise StudyError(
            f"{where}={given!r} is no length of time: give seconds, or such as 90m, 2h or 1d12h."
        ) from error


def _exit_codes(given: ExitCodes) -> Mapping[int, Any]:
    found: dict[int, str] = {}
    for kind, codes in given.model_dump().items():
        for code in codes:
            if code in found:
                raise StudyError(f"exit_codes: {code} is {found[code]} and {kind}: leave it in one of them.")
            found[code] = kind
    return found


def _patterns(file: CommandFile) -> Mapping[str, re.Pattern[str]]:
    found: dict[str, re.Pattern[str]] = {}
    for name, text in file.output.items():
        where = f"output.{name}={text!r}"
        try:
            found[name] = re.compile(text)
        except re.error as error:
            raise StudyError(f"{where} is no regular expression: {error}.") from error
        if found[name].groups != 1:
            raise StudyError(
                f"{where} has {found[name].groups} groups: put the number, and it alone, in (parentheses)."
            )
    if len(POSITIONS) == sum(name in found for name in POSITIONS):
        raise StudyError("output has epoch and step: leave one of them, since a report stands at one place.")
    if found and (missing := [name for name in _judged(file) if name not in found]):
        raise StudyError(f"output has no pattern for {missing[0]!r}, by which the study judges: add one.")
    return found
