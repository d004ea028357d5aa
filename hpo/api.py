"""Runs, resumes, opens and imports studies from Python: `hpo.run`, `hpo.resume`, `hpo.open`, `hpo.import_study`.

Each option has the name and the meaning of the command's option. Errors use that name, and next steps that have a
function are shown as calls.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from hpo import door, text
from hpo.declaration import loading
from hpo.declaration.references import reference_of
from hpo.declaration.study import Study
from hpo.driver.request import RunRequest, request_of, waiting
from hpo.errors import StudyStopped, UserError
from hpo.space import optuna_names
from hpo.space.assignments import as_typed
from hpo.space.values import plain
from hpo.storage.home import Home
from hpo.terminal import print
from trainer.errors import Interrupted

if TYPE_CHECKING:
    from hpo.analysis.study_handle import StudyHandle

_UNEXPECTED = re.compile(r"(?P<function>run|resume)\(\) got an unexpected keyword argument '(?P<argument>\w+)'")
_NAMED_APART = ("study", "home", "outage_wait", "progress")
PathLike = str | os.PathLike[str]


@contextmanager
def _spoken() -> Iterator[None]:
    """Makes errors and notices within the block name the arguments of `run`, and explains arguments that Optuna has."""
    try:
        with door.of_python(inspect.signature(run).parameters):
            yield
    except TypeError as error:
        name = _UNEXPECTED.fullmatch(str(error))
        if name is None or name["argument"] not in optuna_names.ARGUMENTS:
            raise
        raise UserError(optuna_names.argument(f"hpo.{name['function']}()", name["argument"])) from None


@_spoken()
def run(
    study: Study | str,
    *,
    trials: int | None = None,
    epochs: int | None = None,
    time: str | float | None = None,
    target: float | str | None = None,
    patience: int | str | None = None,
    stop_when: str | None = None,
    name: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    scheduler: str | None = None,
    sampler: str | Mapping[str, object] | None = None,
    strategy: str | Mapping[str, object] | None = None,
    order: str | None = None,
    window: int | None = None,
    seed: int | None = None,
    finish: str | None = None,
    confirm: str | None = None,
    tier: int | None = None,
    enqueue: Sequence[Mapping[str, Any] | PathLike] | None = None,
    learn_from: str | Sequence[str] | None = None,
    warm_start: str | None = None,
    overrides: Mapping[str, object] | None = None,
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
    outage_wait: str | float | None = None,
    progress: bool = True,
) -> StudyHandle:
    """Searches until trials, epochs or time are used up or a goal is reached. An existing study continues.

    study      a function decorated with `hpo.study`, a `Study`, or as for `--study` a name or a file
    time       seconds, or text such as "90m"
    target     the value with which a complete trial ends the study; "none" removes an earlier one
    patience   the number of trials without improvement that ends it; "none" removes an earlier one
    stop_when  "gain<0.002" ends it once the next 20 trials are expected to improve the best value by less; or "none"
    enqueue    configurations to try first: mappings of paths to values, or YAML files
    learn_from the names of earlier studies, "none", or by default "auto"; `warm_start` is another name of it
    max_bytes  the size that the study's checkpoints may have: bytes, or text such as "20GB"
    sampler, strategy   a name, or as in a declaration {"name": ..., option: value}
    finish     "none" trains no stopped trial to its end after the search; by default "auto"
    confirm    "5x3" trains the five best trials and the default again under three other seeds, "5x3folds" also on three
               other folds; by default "none"
    trackers, alerts   as for `--tracker` and `--alert`
    tags       name -> value; added to the study's tags
    overrides, progress   path -> value, as in `-o path=value`; whether to show the progress
    outage_wait  how long to wait for a ledger or a bucket that does not answer: seconds, or text; by default "15m"

    The other options are those of `hpo run --help`. Ctrl-C, or a notebook's stop button, ends it gracefully: trials are
    saved, `resume` continues them, and the handle's `state` is `interrupted`. A second one raises KeyboardInterrupt.
    A study in a notebook's cell trains in this process, one trial at a time, since no other process can import it.
    Raises HpoError, in one sentence, for options that do not fit, and where the study had to stop.

    >>> import hpo
    >>> found = hpo.run("mlp", trials=2, overrides={"train.num_epochs": 1}, executor="inline", progress=False)
    >>> found.state, len(found.trials())
    ('complete', 2)
    """
    options = _options(locals())
    _check_guarded("run")
    reference, options["executor"] = _placed(study, executor, workers)
    with waiting(outage_wait):
        return _drive(request_of(home, reference, **options), progress)


@_spoken()
def resume(
    study: str | Study | None = None,
    *,
    trials: int | None = None,
    epochs: int | None = None,
    time: str | float | None = None,
    target: float | str | None = None,
    patience: int | str | None = None,
    stop_when: str | None = None,
    workers: int | None = None,
    executor: str | None = None,
    cpus_per_worker: int | None = None,
    gpus_per_worker: float | None = None,
    scheduler: str | None = None,
    finish: str | None = None,
    confirm: str | None = None,
    home: PathLike | None = None,
    storage: str | None = None,
    tracking_uri: str | None = None,
    trackers: Sequence[str] | None = None,
    alerts: Sequence[str] | None = None,
    max_bytes: int | str | None = None,
    allow_drift: bool = False,
    outage_wait: str | float | None = None,
    progress: bool = True,
) -> StudyHandle:
    """Continues an interrupted study from its last checkpoints, as `hpo resume` does; the budget may be raised.

    study   its name, or the declared study; it may be left out where the home holds only one

    Raises HpoError, in one sentence, as `run` does.

    >>> import hpo
    >>> hpo.resume("mlp", trials=3, progress=False).status().trials["complete"]
    3
    """
    options = _options(locals())
    _check_guarded("resume")
    from hpo.storage.lookup import open_study

    study_home = Home.at(home)
    with waiting(outage_wait):
        ledger, name, _ = open_study(
            str(study_home.root), options["storage"], _name(study), upgrade=True, announced=False
        )
        ledger.close()
        return _drive(request_of(study_home, name=name, **options), progress)


@_spoken()
def open(study: str | Study | None = None, *, home: PathLike | None = None, storage: str | None = None) -> StudyHandle:
    """Opens a study of a home for reading, even while another process runs it.

    study   its name, or the declared study; it may be left out where the home holds only one
    home    by default HPO_HOME, else .hpo

    Raises HpoError if there is none.

    >>> import hpo
    >>> hpo.open("mlp").best["number"] in (0, 1, 2)
    True
    """
    from hpo.analysis.study_handle import StudyHandle
    from hpo.storage.lookup import open_study

    where = storage or os.environ.get("HPO_STORAGE")
    ledger, name, study_home = open_study(str(Home.at(home).root), where, _name(study), upgrade=True, announced=False)
    return StudyHandle(ledger, name, study_home)


def _name(study: str | Study | None) -> str | None:
    """Returns a study's name; for a declared study the name in its declaration."""
    return study if study is None or isinstance(study, str) else study.name


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
    """Imports a study of another tool into the home, as `hpo import` does; an existing import gets the new trials.

    tool       optuna, mlflow, wandb, ray or csv
    source     a URL, a directory or a file
    study      the tool's name of it, such as MLflow's experiment, where the source holds several
    metric     the objectives, where the source does not name them; `direction` has one for each, by default minimize
    params     the columns of a table that are parameters
    rename     the tool's name of a parameter or metric -> its name here
    name       the study's name here
    progress   whether to print what was imported, guessed and left out

    Raises HpoError, in one sentence, where nothing can be read; then nothing is written.

    >>> import hpo
    >>> hpo.import_study("csv", "trials.csv", metric="loss", progress=False).best["params"]
    {'lr': 0.1}
    """
    from hpo.analysis.study_handle import StudyHandle
    from hpo.interchange.sources import Request, bring
    from hpo.tracking import mirror_process

    study_home, uri = Home.at(home), tracking_uri or os.environ.get("HPO_TRACKING_URI")
    metrics, directions = ([names] if isinstance(names, str) else list(names) for names in (metric, direction))
    request = Request(tool, os.fspath(source), study, metrics, directions, params, rename, name)
    ledger, done = bring(request, study_home, storage or os.environ.get("HPO_STORAGE"), uri)
    missing = mirror_process.send(ledger, study_home, done.name, uri)
    if progress:
        print(done.describe(), missing, sep="\n" if missing else "")
    return StudyHandle(ledger, done.name, study_home, "complete")


def _drive(request: RunRequest, progress: bool) -> StudyHandle:
    from hpo.analysis.study_handle import StudyHandle
    from hpo.display.console import Console
    from hpo.display.summary import summary
    from hpo.display.watch import watched
    from hpo.ledger import Ledger

    console = Console(quiet=not progress)
    if str(request.home.root) != str(Home.at().root):
        text.given("home", str(request.home.root))  # for the commands that the messages name
    try:
        result, view = watched(request, console, at_once=_raise)
        console.print(summary(view.progress, result, view.seconds), markup=False, highlight=False, soft_wrap=True)
    finally:
        text.forget()
    if result.state == "stopped":
        raise StudyStopped(result.reason)
    ledger = Ledger(request.storage.url, create=False)
    return StudyHandle(ledger, result.study, request.home, "interrupted" if result.signal else result.state)


def _check_guarded(function: str) -> None:
    if loading.importing():
        raise UserError(
            f"hpo.{function} is called while the study's file is imported, as each worker imports it: put the call "
            'under `if __name__ == "__main__":`.'
        )


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a call; those that are not given come from the environment."""
    options = {name: value for name, value in given.items() if name not in _NAMED_APART}
    for name in [name for name in ("storage", "checkpoints", "tracking_uri") if name in options]:
        options[name] = options[name] or os.environ.get(f"HPO_{name.upper()}")
    if not isinstance(values := options.get("overrides"), Mapping | None):
        raise UserError(f"overrides={values!r}: give a mapping of paths to values, {{'train.num_epochs': 5}}.")
    if values is not None:
        options["overrides"] = as_typed(values)
    for name in [name for name in ("sampler", "strategy") if name in options]:
        options[name] = _specification(name, options[name])
    return options


def _raise(number: int) -> NoReturn:
    raise Interrupted


def _placed(study: Study | str, executor: str | None, workers: int | None) -> tuple[str, str | None]:
    """Returns the study's reference and its placement: this process for a study that no file declares."""
    if not isinstance(study, Study):
        if callable(study):
            name = getattr(study, "__name__", repr(study))
            raise UserError(
                f"hpo.run({name}): {name} is not a study: put @hpo.study(space=..., minimize=...) above it."
            )
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


def _specification(option: str, value: object) -> str | dict[str, Any] | None:
    """Returns the name, or the mapping with Python's numbers in it. Raises UserError for an unknown name."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return plain(value)
    raise UserError(optuna_names.specification(option, value))
