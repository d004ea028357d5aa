"""Completes typed words: names of studies, trials and metrics from the ledger, files, and paths of `-o`.

A shell asks at every key press, so nothing here imports torch, Optuna or MLflow, runs a user's file or waits for a
server. If nothing is known, for example without a home, it offers nothing and prints nothing.
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

MOST = 200  # offers
Offers = Iterable[str | tuple[str, str]]

# Copies from modules that take too long to import; a test keeps them equal.
KINDS = ("history", "curves", "importances", "slice", "contour", "rank", "parallel", "edf", "timeline", "pareto")
EVALUATORS = ("ped-anova", "fanova", "mdi")
QUANTIZED = ("int8", "nf4")
FORMATS = ("safetensors", "onnx", "torch", "gguf", "huggingface", "csv", "parquet", "json", "optuna")
EXECUTORS = ("inline", "local", "ray", "ray-tune")
SCHEDULERS = ("asha", "bohb", "fifo", "hyperband", "median", "pb2", "pbt")
ORDERS = ("ordered", "async")
FINISHES = ("auto", "none")

_STUDY_FILES = (".py", ".yaml", ".yml")


def _quiet(offers: Callable[[Any, str], Offers]) -> Callable[[typer.Context, str], list[str | tuple[str, str]]]:
    """Wraps a completion so that it offers nothing if the ledger is missing, damaged or unreachable, which the command
    itself reports, and no name with unprintable characters."""

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
    """Offers the samplers."""
    from hpo.search.samplers.registry import SAMPLERS

    yield from ("auto", *SAMPLERS)


@_quiet
def strategies(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers the strategies."""
    from hpo.search.strategies.registry import STRATEGIES

    return STRATEGIES


@_quiet
def studies(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers the studies of the home or storage that was typed before, else of those in the environment variables."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        yield from queries.study_names(connection)


@_quiet
def declarations(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers declarations from which a study can begin: those that come with the platform, and files."""
    from hpo.declaration.loading import shipped

    yield from shipped()
    yield from _files(incomplete, _STUDY_FILES)


def known(ctx: typer.Context, incomplete: str) -> list[str | tuple[str, str]]:
    """Offers studies of the home, and declarations: those that come with the platform, and files."""
    return [*dict.fromkeys([*studies(ctx, incomplete), *declarations(ctx, incomplete)])]


@_quiet
def yaml_files(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers YAML files."""
    return _files(incomplete, (".yaml", ".yml"))


@_quiet
def trials(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers the numbers of the study's trials, with the state and values of each."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        study = queries.study_row(connection, _study(ctx, connection))
        for trial in queries.trial_rows(connection, study.id):
            if str(trial.number).startswith(incomplete):
                values = " ".join(f"{value:.6g}" for value in trial.values or () if value is not None)
                yield str(trial.number), f"{trial.state} {values}".rstrip()


@_quiet
def objectives(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers the metrics of the study's objectives."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        study = queries.study_row(connection, _study(ctx, connection))
        yield from (objective["metric"] for objective in study.spec.objectives)


@_quiet
def metrics(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers every metric that the study's first trials have reported."""
    from hpo.ledger import queries

    with _ledger(ctx) as connection:
        study = queries.study_row(connection, _study(ctx, connection))
        ids = [trial.id for trial in queries.trial_rows(connection, study.id)[:8]]
        yield from dict.fromkeys(key for values in queries.last_values(connection, ids).values() for key in values)


@_quiet
def overrides(ctx: typer.Context, incomplete: str) -> Offers:
    """Offers `path=` for each field of the configuration.

    If one field is left, offers its default too, so that the shell adds no space after the `=`.
    """
    matching = {path: value for path, value in _fields(ctx).items() if f"{path}=".startswith(incomplete)}
    if "=" in incomplete:
        matching = {path: value for path, value in _fields(ctx).items() if incomplete.startswith(f"{path}=")}
    yield from (f"{path}=" for path in matching)
    if len(matching) == 1:
        [(path, value)] = matching.items()
        yield f"{path}={value if isinstance(value, str) else json.dumps(value)}"


def _fields(ctx: typer.Context) -> dict[str, Any]:
    """Returns path -> value of the study's configuration, without running a user's file.

    The values are those of the declaration if it comes with the platform, else of the study's first trial in the
    ledger, else of a default TrainConfig.
    """
    from hpo.declaration.loading import shipped
    from hpo.space.config import as_json, flatten

    study = ctx.params.get("study")
    if study in shipped():
        from hpo.declaration.references import load

        return flatten(as_json(load(study).config))
    try:
        from hpo.ledger import queries
        from hpo.ledger.views import trial as trial_queries

        with _ledger(ctx) as connection:
            rows = [queries.study_row(connection, name) for name in queries.study_names(connection)]
            [row, *_] = [stored for stored in rows if study in (stored.name, stored.spec.reference)]
            return flatten(trial_queries.find_trial(connection, row.id, 0).config)  # pyright: ignore
    except (HpoError, ValueError):  # the ledger does not have this study
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
    """Returns the typed study, or the one that the command would use by default."""
    from hpo.ledger import queries

    derived = queries.derived(connection)
    names = [name for name in queries.study_names(connection) if name not in derived]
    return ctx.params.get("study") or names[0]


def _files(incomplete: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yields files that begin as typed, and files one directory below: a shell adds a space after a directory."""
    parent, name = os.path.split(incomplete)
    for path in sorted(Path(os.path.expanduser(parent) or ".").iterdir()):
        if not path.name.startswith(name) or (path.name.startswith(".") and not name):
            continue
        inside = sorted(path.iterdir()) if path.is_dir() and os.access(path, os.R_OK | os.X_OK) else [path]
        for file in inside:
            if file.suffix in endings and not file.name.startswith(("_", ".")) and file.is_file():
                below = os.path.join(path.name, file.name) if path.is_dir() else file.name
                yield os.path.join(parent, below)
