"""Completes what is typed: names of studies, trials and metrics out of the ledger, files, and paths of `-o`.

A shell asks at each press of a key, so nothing here imports torch, Optuna or MLflow, runs a user's file or waits for a
server; and where there is nothing to know, such as without a home, nothing is offered and nothing is said.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpo.errors import HpoError

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

MOST = 200  # of what is offered
Offers = Iterable[str | tuple[str, str]]

# What stands in modules that take too long to import; a test holds them equal.
KINDS = ("history", "curves", "importances", "slice", "contour", "rank", "parallel", "edf", "timeline", "pareto")
EVALUATORS = ("ped-anova", "fanova", "mdi")
FORMATS = ("safetensors", "onnx", "torch", "csv", "parquet", "json", "optuna")
EXECUTORS = ("inline", "local", "ray", "ray-tune")
SCHEDULERS = ("asha", "bohb", "fifo", "hyperband", "median", "pb2", "pbt")
ORDERS = ("ordered", "async")

_STUDY_FILES = (".py", ".yaml", ".yml")


def _quiet(offers: Callable[[Any, str], Offers]) -> Callable[[typer.Context, str], list[str | tuple[str, str]]]:
    """Offers nothing where the ledger is missing, damaged or away, since the command itself says that, and no name that
    a shell would print as more than text."""

    def offered(ctx: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
        try:
            return list(islice((offer for offer in offers(ctx, incomplete) if "".join(offer).isprintable()), MOST))
        except Exception:
            return []

    return offered


def among(names: Iterable[str]) -> Callable[[typer.Context, str], list[str | tuple[str, str]]]:
    """Offers each of `names`."""
    return _quiet(lambda ctx, incomplete: names)


@_quiet
def samplers(ctx: typer.Context, incomplete: str) -> Offers:
    """The samplers."""
    from hpo.search.samplers.registry import SAMPLERS

    yield from ("auto", *SAMPLERS)


@_quiet
def strategies(ctx: typer.Context, incomplete: str) -> Offers:
    """The strategies."""
    from hpo.search.strategies.base import STRATEGIES

    return STRATEGIES


@_quiet
def studies(ctx: typer.Context, incomplete: str) -> Offers:
    """The studies of the home or the storage that was typed before, else of the environment's."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        yield from queries.study_names(connection)


@_quiet
def declarations(ctx: typer.Context, incomplete: str) -> Offers:
    """What a study can be begun from: those that come with the platform, and files."""
    from hpo.declaration.loading import shipped

    yield from shipped()
    yield from _files(incomplete, _STUDY_FILES)


def known(ctx: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
    """What can be looked at before it is begun: studies of the home, those that come with the platform, and files."""
    return [*dict.fromkeys([*studies(ctx, incomplete), *declarations(ctx, incomplete)])]


@_quiet
def yaml_files(ctx: typer.Context, incomplete: str) -> Offers:
    """YAML files."""
    return _files(incomplete, (".yaml", ".yml"))


@_quiet
def trials(ctx: typer.Context, incomplete: str) -> Offers:
    """The numbers of the study's trials, with what became of each."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        study = queries.study_row(connection, _study(ctx, connection))
        for trial in queries.trial_rows(connection, study["id"]):
            if str(trial["number"]).startswith(incomplete):
                values = " ".join(f"{value:.6g}" for value in trial["values"] or () if value is not None)
                yield str(trial["number"]), f"{trial['state']} {values}".rstrip()


@_quiet
def objectives(ctx: typer.Context, incomplete: str) -> Offers:
    """The metrics that the study is judged by."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        study = queries.study_row(connection, _study(ctx, connection))
        yield from (one["metric"] for one in study["spec"]["objectives"])


@_quiet
def metrics(ctx: typer.Context, incomplete: str) -> Offers:
    """Every metric that the study's first trials have reported."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        study = queries.study_row(connection, _study(ctx, connection))
        ids = [trial["id"] for trial in queries.trial_rows(connection, study["id"])[:8]]
        yield from dict.fromkeys(key for values in queries.last_values(connection, ids).values() for key in values)


@_quiet
def overrides(ctx: typer.Context, incomplete: str) -> Offers:
    """`path=` for each field of the configuration; of the last one left its default too, so that the shell sets no
    space after the `=`."""
    matching = {path: value for path, value in _fields(ctx).items() if f"{path}=".startswith(incomplete)}
    if "=" in incomplete:
        matching = {path: value for path, value in _fields(ctx).items() if incomplete.startswith(f"{path}=")}
    yield from (f"{path}=" for path in matching)
    if len(matching) == 1:
        [(path, value)] = matching.items()
        yield f"{path}={value if isinstance(value, str) else json.dumps(value)}"


def _fields(ctx: typer.Context) -> dict[str, Any]:
    """Path -> value of the study's configuration: declared where it comes with the platform, else as its first trial
    in the ledger had it, else what every TrainConfig has. A file of the user's is not run for it."""
    from hpo.declaration.loading import shipped
    from hpo.space.config import as_json, flatten

    study = ctx.params.get("study")
    if study in shipped():
        from hpo.declaration.references import load

        return flatten(as_json(load(study).config))
    try:
        from hpo.ledger import queries, trial_queries

        with _ledger(ctx) as connection:
            known = [queries.study_row(connection, name) for name in queries.study_names(connection)]
            [row, *_] = [one for one in known if study in (one["name"], one["spec"]["reference"])]
            return flatten(trial_queries.find_trial(connection, row["id"], 0)["config"])  # pyright: ignore
    except (HpoError, ValueError):  # there is no such study
        from trainer.config import TrainConfig

        return flatten({"train": as_json(TrainConfig())})


@contextmanager
def _ledger(ctx: typer.Context) -> Iterator[Connection]:
    from hpo.cli import secret_files
    from hpo.storage.lookup import open_ledger

    environ = dict(os.environ)
    secret_files.read_into(environ)
    home, storage = ctx.params.get("home"), ctx.params.get("storage") or environ.get("HPO_STORAGE")
    ledger, _ = open_ledger(os.path.expanduser(home or environ.get("HPO_HOME") or ".hpo"), storage)
    try:
        with ledger.read() as connection:
            yield connection
    finally:
        ledger.close()


def _study(ctx: typer.Context, connection: Connection) -> str:
    """The study that was typed, else the one that the command would take."""
    from hpo.ledger import queries

    derived = queries.derived(connection)
    names = [name for name in queries.study_names(connection) if name not in derived]
    return ctx.params.get("study") or names[0]


def _files(incomplete: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Files that begin as typed, also one directory further: a directory by itself would be followed by a space."""
    parent, name = os.path.split(incomplete)
    for path in sorted(Path(os.path.expanduser(parent) or ".").iterdir()):
        if not path.name.startswith(name) or (path.name.startswith(".") and not name):
            continue
        inside = sorted(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else [path]
        for file in inside:
            if file.suffix in endings and not file.name.startswith(("_", ".")) and file.is_file():
                below = os.path.join(path.name, file.name) if path.is_dir() else file.name
                yield os.path.join(parent, below)
