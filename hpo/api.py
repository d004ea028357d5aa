"""Runs, resumes, opens and imports studies from Python: `hpo.run`, `hpo.resume`, `hpo.open`, `hpo.import_study`.

Each option has the name and the meaning of the command's, and errors name it so; what is printed to be typed next names
commands.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hpo import text
from hpo.cli.arguments import named
from hpo.declaration import enqueue as enqueued
from hpo.declaration import loading
from hpo.declaration.budget import parse_time
from hpo.declaration.references import reference_of
from hpo.declaration.study import Study
from hpo.driver.request import RunRequest
from hpo.errors import HpoError, UserError
from hpo.space.tags import checked
from hpo.space.values import plain
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.workers.executors.resources import Resources
from trainer.errors import Interrupted

if TYPE_CHECKING:
    from hpo.analysis.study_handle import StudyHandle

PathLike = str | os.PathLike[str]


def _arguments() -> Collection[str]:
    return inspect.signature(run).parameters


@named(_arguments)
def run(
    study: Study | str,
    *,
    trials: int | None = None,
    epochs: int | None = None,
    time: str | float | None = None,
    name: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    scheduler: str | None = None,
    sampler: str | Mapping[str, Any] | None = None,
    strategy: str | Mapping[str, Any] | None = None,
    order: str | None = None,
    window: int | None = None,
    seed: int | None = None,
    tier: int | None = None,
    enqueue: Sequence[Mapping[str, Any] | PathLike] | None = None,
    warm_start: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    config: PathLike | None = None,
    home: PathLike | None = None,
    storage: str | None = None,
    checkpoints: str | None = None,
    tracking_uri: str | None = None,
    trackers: Sequence[str] | None = None,
    alerts: Sequence[str] | None = None,
    tags: Mapping[str, str | float | bool] | None = None,
    max_bytes: int | str | None = None,
    allow_drift: bool = False,
    progress: bool = True,
) -> StudyHandle:
    """Search until trials, epochs or time are used up, as `hpo run` does; a study that exists is continued.

    study      what `hpo.study` has made of a function, a `Study`, or what `--study` takes: a name or a file
    time       seconds, or text such as "90m"
    enqueue    configurations to be tried first: mappings of paths to values, or YAML files
    max_bytes  what the study's checkpoints may take: bytes, or text such as "20GB"
    sampler, strategy   a name, or as in a declaration {"name": ..., option: value}
    trackers, alerts   as `--tracker` and `--alert` take them
    tags       name -> value, of the study, beside those that it has
    overrides, progress   path -> value, as `-o` sets them; show how it is getting on

    The other options are those of `hpo run --help`. Ctrl-C, or a notebook's stop button, ends it gracefully: trials are
    saved, `resume` goes on, and the handle's `state` says `interrupted`. A second one raises KeyboardInterrupt.
    A study of a notebook's cell trains in this process, one trial at a time, since no other process can import it.
    Raises HpoError, in one sentence, for whatever does not fit, and where the study had to stop.

    >>> import hpo
    >>> found = hpo.run("mlp", trials=2, overrides={"train.num_epochs": 1}, executor="inline", progress=False)
    >>> found.state, len(found.trials())
    ('complete', 2)
    """
    _check_guarded()
    reference, executor = _placed(study, executor, workers)
    request = RunRequest(
        Home.at(home),
        reference,
        name=name,
        **_extent(trials, epochs, time, max_bytes),
        executor=executor,
        workers=workers,
        resources=Resources(cpus_per_worker, gpus_per_worker),
        scheduler=scheduler,
        sampler=_specification("sampler", sampler),
        strategy=_specification("strategy", strategy),
        order=order,
        window=window,
        seed=seed,
        tier=tier,
        enqueue=None if enqueue is None else _entries(enqueue),
        warm_start=warm_start,
        **_overrides(config, overrides),
        **_given(storage=storage, checkpoints=checkpoints, tracking_uri=tracking_uri),
        trackers=trackers,
        alerts=alerts,
        tags=dict(checked(key, value) for key, value in (tags or {}).items()),
        allow_drift=allow_drift,
    )
    return _drive(request, progress)


@named(_arguments)
def resume(
    study: str | None = None,
    *,
    trials: int | None = None,
    epochs: int | None = None,
    time: str | float | None = None,
    workers: int | None = None,
    executor: str | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    scheduler: str | None = None,
    home: PathLike | None = None,
    storage: str | None = None,
    tracking_uri: str | None = None,
    trackers: Sequence[str] | None = None,
    alerts: Sequence[str] | None = None,
    max_bytes: int | str | None = None,
    allow_drift: bool = False,
    progress: bool = True,
) -> StudyHandle:
    """Continue an interrupted study from its last checkpoints, as `hpo resume` does; more may be asked for.

    study   its name; may be left out where the home holds one

    Raises HpoError, in one sentence, as `run` does.

    >>> import hpo
    >>> hpo.resume("mlp", trials=3, progress=False).status().trials["complete"]
    3
    """
    from hpo.storage.lookup import open_study
    from hpo.tracking.uri import tracking_uri_of

    storage = storage or os.environ.get("HPO_STORAGE")
    ledger, name, at = open_study(str(Home.at(home).root), storage, study, upgrade=True, told=False)
    with closing(ledger):
        tracking_uri = tracking_uri_of(ledger, name, at, tracking_uri or os.environ.get("HPO_TRACKING_URI"))
    request = RunRequest(
        home=at,
        name=name,
        **_extent(trials, epochs, time, max_bytes),
        executor=executor,
        workers=workers,
        resources=Resources(cpus_per_worker, gpus_per_worker),
        scheduler=scheduler,
        storage=storage,
        tracking_uri=tracking_uri,
        trackers=trackers,
        alerts=alerts,
        allow_drift=allow_drift,
    )
    return _drive(request, progress)


@named(_arguments)
def open(study: str | None = None, *, home: PathLike | None = None, storage: str | None = None) -> StudyHandle:
    """A study of a home, to be read; also while another process runs it.

    study   its name; may be left out where the home holds one
    home    by default HPO_HOME, else .hpo

    Raises HpoError where there is none.

    >>> import hpo
    >>> hpo.open("mlp").best["number"] in (0, 1, 2)
    True
    """
    from hpo.analysis.study_handle import StudyHandle
    from hpo.storage.lookup import open_study

    where = storage or os.environ.get("HPO_STORAGE")
    ledger, name, at = open_study(str(Home.at(home).root), where, study, upgrade=True, told=False)
    return StudyHandle(ledger, name, at)


def import_study(
    tool: str,
    source: PathLike,
    *,
    study: str | None = None,
    metric: str | Sequence[str] = (),
    direction: str | Sequence[str] = (),
    params: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    name: str | None = None,
    home: PathLike | None = None,
    storage: str | None = None,
    tracking_uri: str | None = None,
    progress: bool = True,
) -> StudyHandle:
    """Bring a study of another tool into the home, as `hpo import` does; what is there already gets what is new.

    tool       optuna, mlflow, wandb, ray or csv
    source     a URL, a directory or a file
    study      the tool's own name of it, such as MLflow's experiment, where the source holds several
    metric     what its trials are judged by, where the source does not say; `direction` is of each, else minimize
    params     the columns of a table that are parameters
    rename     the tool's name of a parameter or metric -> its name here
    name       what to call the study here
    progress   print what was done, guessed and not carried

    Raises HpoError, in one sentence, where nothing can be read; then nothing is written.

    >>> import hpo
    >>> hpo.import_study("csv", "trials.csv", metric="loss", progress=False).best["params"]
    {'lr': 0.1}
    """
    from hpo.analysis.study_handle import StudyHandle
    from hpo.interchange.sources import Request, bring
    from hpo.tracking import mirror_process

    at, uri = Home.at(home), tracking_uri or os.environ.get("HPO_TRACKING_URI")
    metrics, directions = ([one] if isinstance(one, str) else list(one) for one in (metric, direction))
    request = Request(tool, os.fspath(source), study, metrics, directions, params, rename, name)
    ledger, done = bring(request, at, storage or os.environ.get("HPO_STORAGE"), uri)
    missing = mirror_process.send(ledger, at, done.name, uri)
    if progress:
        print(done.describe(), missing, sep="\n" if missing else "")
    return StudyHandle(ledger, done.name, at, "complete")


def _drive(request: RunRequest, progress: bool) -> StudyHandle:
    for name in ("trials", "epochs", "workers", "window"):
        if (value := getattr(request, name)) is not None and (type(value) is not int or value < 1):
            raise UserError(f"{name}={value!r}: give a whole number from 1.")
    from hpo.analysis.study_handle import StudyHandle
    from hpo.cli.console import Console
    from hpo.cli.live import summary
    from hpo.cli.watch import watched
    from hpo.ledger import Ledger

    console = Console(quiet=not progress)
    if str(request.home.root) != str(Home.at().root):
        text.given("--home", str(request.home.root))  # for the commands that are named next
    try:
        result, view = watched(request, console, at_once=_raise)
        console.print(summary(view.progress, result), markup=False, highlight=False, soft_wrap=True)
    finally:
        text.forget()
    if result.state == "stopped":
        raise HpoError(result.reason)
    ledger = Ledger(request.storage or request.home.storage, create=False)
    return StudyHandle(ledger, result.study, request.home, "interrupted" if result.signal else result.state)


def _check_guarded() -> None:
    if loading.importing():
        raise UserError(
            "hpo.run is called while the study's file is imported, as each worker imports it: put the call under "
            '`if __name__ == "__main__":`.'
        )


def _given(**places: str | None) -> dict[str, Any]:
    """As they were given, else as the environment has them."""
    return {name: place or os.environ.get(f"HPO_{name.upper()}") for name, place in places.items()}


def _extent(
    trials: int | None, epochs: int | None, time: str | float | None, max_bytes: int | str | None
) -> dict[str, Any]:
    """How far a study may go and what its checkpoints may take, as a request has it."""
    return {"trials": trials, "epochs": epochs, "seconds": _seconds(time), "max_bytes": _size(max_bytes)}


def _raise(number: int) -> NoReturn:
    raise Interrupted


def _placed(study: Study | str, executor: str | None, workers: int | None) -> tuple[str, str | None]:
    """The study's reference, and where its trials run: of one that no file holds in this process."""
    if not isinstance(study, Study):
        if callable(study):
            name = getattr(study, "__name__", repr(study))
            raise UserError(f"hpo.run({name}): {name} is no study: put @hpo.study(space=..., minimize=...) above it.")
        return str(study), executor
    reference, everywhere = reference_of(study)
    if everywhere:
        return reference, executor
    if (workers or 1) > 1 or executor not in (None, "inline"):
        raise UserError(
            f"study {study.name!r} is defined in a notebook, which other processes cannot import: write it to a file "
            f"and give hpo.run('FILE.py:{study.name}'), or leave workers and executor out."
        )
    return reference, "inline"


def _seconds(time: str | float | None) -> float | None:
    return None if time is None else parse_time(time if isinstance(time, str) else str(time))


def _size(given: int | str | None) -> int | None:
    from hpo.cli.options import size

    return given if given is None or isinstance(given, int) else size(given)


def _entries(given: Sequence[Mapping[str, Any] | PathLike]) -> list[Mapping[str, Any]]:
    return [entry for one in given for entry in ([one] if isinstance(one, Mapping) else enqueued.read([Path(one)]))]


def _specification(option: str, value: Any) -> str | dict[str, Any] | None:
    """Returns the name, or the mapping with Python's numbers in it. Raises UserError for what names nothing."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return plain(value)
    raise UserError(f"{option}={value!r}: give a name, or a mapping with one, {{'name': NAME, OPTION: VALUE}}.")


def _overrides(config: PathLike | None, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what a file and `overrides` set, as a request has it. Raises UserError where that is not a mapping."""
    from hpo.space.config import flatten, load_yaml

    if not isinstance(overrides, Mapping | None):
        raise UserError(f"overrides={overrides!r}: give a mapping of paths to values, {{'train.num_epochs': 5}}.")
    values = flatten(overrides or {})
    return {
        "overrides": (flatten(load_yaml(os.fspath(config))) if config else {}) | values,
        "one_by_one": tuple(values),
    }
