"""Makes a study of a training function: `@hpo.study(space={...}, maximize="val/accuracy")`.

The function takes one argument, a `Trial`, and trains with any library. It is declared like any other study: its
parameters become a configuration, and its task is its own loop.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, create_model

from hpo.declaration.function_trial import FunctionTask
from hpo.declaration.study import Study
from hpo.errors import StudyError
from hpo.space import optuna_names
from hpo.space.dimensions import Choice, Dimension, Float, Int
from hpo.space.objective import Constraint, Objective
from hpo.space.space import Space
from trainer.config import CheckpointConfig
from trainer.config.fields import Frozen

TRAIN = "train"  # the section of the configuration that is not a parameter of the function
_JSON = (bool, int, float, str, type(None))


class FunctionTrainConfig(Frozen):
    """The options of a function's training that the platform needs; no option of the shared trainer applies."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_epochs: Annotated[int, Field(ge=1)] | None = None  # the last epoch of a trial; None if only the function knows
    num_threads: Annotated[int, Field(ge=1)] = 1  # intra-op, of the libraries that torch and numpy compute with
    checkpoint: CheckpointConfig = CheckpointConfig()  # how many are kept; the function decides when it saves


def study(
    bare: object = None,
    /,
    *,
    space: Mapping[str, Dimension] | None = None,
    minimize: str | Sequence[str] = (),
    maximize: str | Sequence[str] = (),
    objectives: Sequence[Objective] = (),
    constants: Mapping[str, object] | None = None,
    rules: Sequence[str] = (),
    read_when: Mapping[str, str] | None = None,
    constraints: Sequence[Constraint] = (),
    metrics: Sequence[str] = ("val/*",),
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    name: str | None = None,
    sampler: str | Mapping[str, Any] = "auto",
    strategy: str | Mapping[str, Any] | None = None,
    finish: str = "auto",
    confirm: str = "none",
    enqueue: Sequence[Mapping[str, Any]] = (),
    **others: object,
) -> Callable[[Callable[[Any], Any]], Study]:
    """Declares the function below as a study, named after it: `hpo run --study FILE.py:FUNCTION`.

    space            parameter -> dimension; in the function `trial.params.lr`
    minimize         the metric or metrics to minimize, as `trial.report` names them; `maximize` those to maximize
    objectives       instead of both, in full: `Objective("val/loss", "minimize", select="best")`
    constants        parameter -> value of what is not searched, but may be set by `-o`
    read_when        parameter -> the condition under which the function reads it, such as {"momentum": "optimizer ==
                     'sgd'"}; setting or searching it otherwise is an error
    rules            relations that the parameters keep to, such as "low <= high" (hpo.space.rules)
    constraints      Constraints on reported metrics
    metrics          names and patterns of metrics that belong to the study's digest, besides the objectives
    num_epochs       the last epoch of a trial, for strategies that divide it: hyperband, freeze-thaw
    steps_per_epoch  for a function that counts steps: the steps of an epoch
    name             the study's name; by default the function's

    Raises StudyError or SpaceError in one sentence if something does not fit.

    >>> import hpo
    >>> @hpo.study(space={"x": hpo.Float(-1.0, 1.0)}, minimize="loss")
    ... def parabola(trial):
    ...     return trial.params.x ** 2
    >>> parabola.name, list(parabola.space.paths)
    ('parabola', ['x'])
    """
    for name in others:
        raise StudyError(optuna_names.argument("@hpo.study", name))
    if bare is not None or space is None:
        raise StudyError("@hpo.study needs a space and a metric: write @hpo.study(space={...}, minimize='val/loss').")

    def declare(function: Callable[[Any], object]) -> Study:
        called = getattr(function, "__name__", repr(function))
        where = f"study {called}()"
        task = _task(where, called, function, steps_per_epoch)
        declared = make(
            where,
            name or called,
            task,
            space,
            judged=(minimize, maximize, objectives),
            constants=constants or {},
            num_epochs=num_epochs,
            rules=rules,
            read_when=read_when,
            constraints=constraints,
            metrics=metrics,
            sampler=sampler,
            strategy=strategy,
            finish=finish,
            confirm=confirm,
            enqueue=enqueue,
        )
        task.metrics = tuple(objective.metric for objective in declared.objectives)
        return declared

    return declare


def make(
    where: str,
    name: str,
    task: type,
    space: Mapping[str, Dimension],
    *,
    judged: tuple[str | Sequence[str], str | Sequence[str], Sequence[Objective]],
    constants: Mapping[str, object],
    num_epochs: int | None,
    sections: bool = False,
    **declared: Any,
) -> Study:
    """Returns the study of a task that gets parameters by name.

    `judged` holds the metrics to minimize, those to maximize, or Objectives. With `sections` names may have dots, such
    as `optim.lr`. `declared` is passed to `Study`. Raises StudyError and SpaceError, which begin with `where`.
    """
    objectives = _objectives(where, *judged)
    return Study(
        name=name,
        config=_config(where, space, constants, num_epochs, sections),
        task=task,
        space=space,
        objectives=objectives,
        **declared,
    )


def _task(where: str, name: str, function: Callable[[Any], object], steps_per_epoch: int | None) -> type[FunctionTask]:
    """Returns the task whose training is the function."""
    _check_callable(where, function)
    if steps_per_epoch is not None and (not isinstance(steps_per_epoch, int) or steps_per_epoch < 1):
        raise StudyError(f"{where}: steps_per_epoch={steps_per_epoch!r} must be a whole number from 1.")
    task = type(name, (FunctionTask,), {"function": staticmethod(function), "__module__": function.__module__})
    task.steps_per_epoch = steps_per_epoch
    return task


def _check_callable(where: str, function: object) -> None:
    if not inspect.isfunction(function):
        raise StudyError(f"{where}: @hpo.study stands above a function, not above a {type(function).__name__}.")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise StudyError(f"{where} is a coroutine or a generator: let it train and return.")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise StudyError(f"{where} must take one argument, the trial: def {function.__name__}(trial).") from error


def _objectives(
    where: str, minimize: str | Sequence[str], maximize: str | Sequence[str], given: Sequence[Objective]
) -> Sequence[Objective]:
    least, most = ([names] if isinstance(names, str) else list(names) for names in (minimize, maximize))
    if bool(given) == bool(least or most):
        raise StudyError(f"{where}: say what it is judged by: minimize='val/loss', maximize='val/accuracy' or both.")
    return given or [
        *(Objective(metric, "minimize") for metric in least),
        *(Objective(metric, "maximize") for metric in most),
    ]


def _config(
    where: str, space: Mapping[str, Dimension], constants: Mapping[str, object], num_epochs: int | None, sections: bool
) -> Frozen:
    """Returns the configuration of the parameters: the middle of each searched one, and the constants."""
    if not isinstance(space, Mapping) or not isinstance(constants, Mapping):
        raise StudyError(f"{where}: space and constants map names of parameters to dimensions and values.")
    _check_names(where, [*space, *constants], sections)
    if both := sorted(space.keys() & constants.keys()):
        raise StudyError(f"{where}: {both[0]!r} is searched and a constant: leave it out of one of them.")
    for name, dimension in space.items():
        if not isinstance(dimension, Dimension):
            raise StudyError(
                f"{where}: space[{name!r}]={dimension!r} is not a dimension: write {_suggested(dimension)}."
            )
    Space(dict(space))  # reports what is wrong with a dimension
    fields: dict[str, Any] = {name: (_type(dimension), _middle(dimension)) for name, dimension in space.items()}
    for name, value in constants.items():
        fields[name] = (type(value) if type(value) in _JSON and value is not None else Any, value)
    try:
        train = FunctionTrainConfig(num_epochs=num_epochs)
    except ValueError as error:
        raise StudyError(f"{where}: num_epochs={num_epochs!r} must be a whole number from 1.") from error
    fields[TRAIN] = (FunctionTrainConfig, train)
    return _model(fields)


def _check_names(where: str, names: Sequence[Any], sections: bool) -> None:
    """Raises StudyError for a name that no attribute can have; with `sections`, for one with such a part."""
    for name in names:
        parts = name.split(".") if isinstance(name, str) and sections else [name]
        if not all(isinstance(part, str) and part.isidentifier() and part[0] != "_" for part in parts) or any(
            map(keyword.iskeyword, parts)
        ):
            fix = f"call it '{name}_'" if keyword.iskeyword(parts[-1]) else "take letters, digits and underscores"
            why = "such as 'lr' or 'optim.lr'" if sections else "such as 'lr', since it is trial.params.lr"
            raise StudyError(f"{where}: parameter {name!r} must be a name {why}: {fix}.")
        if parts[0] == TRAIN or any(hasattr(Frozen, part) or hasattr(Mapping, part) for part in parts):
            raise StudyError(f"{where}: a parameter cannot be called {name!r}, which the configuration has: rename it.")
        if section := next((parent for parent in names if name.startswith(f"{parent}.")), None):
            raise StudyError(
                f"{where}: {section!r} cannot be a parameter beside {name!r}, which is below it: rename one."
            )


def _model(fields: Mapping[str, tuple[object, object]]) -> Frozen:
    """Returns the configuration of these fields, path -> type and default, with a section for the part before a dot."""
    parts: dict[str, dict[str, tuple[Any, Any]]] = {}
    for path, field in fields.items():
        name, _, rest = path.partition(".")
        parts.setdefault(name, {})[rest] = field
    fields_of: dict[str, Any] = {}
    for name, inner in parts.items():
        fields_of[name] = inner[""] if "" in inner else (type(section := _model(inner)), section)
    return create_model("Parameters", __base__=Frozen, **fields_of)()


def _middle(dimension: Dimension) -> Any:
    return dimension.value(dimension.from_unit(0.0 if isinstance(dimension, Choice) else 0.5))


def _suggested(one: object) -> str:
    """Returns the dimension that a pair of bounds probably means, else an example."""
    match one:
        case (bool(), _) | (_, bool()):
            return f"hpo.Choice({[*one]!r})"
        case (int(low), int(high)):
            return f"hpo.Int({low}, {high})"
        case (int() | float() as low, int() | float() as high):
            return f"hpo.Float({low}, {high})"
        case [_, *_]:
            return f"hpo.Choice({[*one]!r})"
    return "hpo.Float(0.0, 1.0)"


def _type(dimension: Dimension) -> Any:
    """Returns the type of a parameter's values; Any for options that are not all plain values of one type."""
    if isinstance(dimension, Float | Int):
        return float if isinstance(dimension, Float) else int
    kinds = {type(option) for option in getattr(dimension, "options", ())}
    if len(kinds) != 1 or not kinds <= {bool, int, float, str}:
        return Any
    return kinds.pop()
