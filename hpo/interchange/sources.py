"""The tools whose studies can be brought here, and the one way in which any of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy
from hpo.interchange.study import Imported, checked, import_study, renamed
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.tracking.uri import check_uri

# tool -> the module that reads it, which imports the tool's library where it needs it
READERS = {
    "optuna": "optuna_storage",
    "mlflow": "mlflow_runs",
    "wandb": "wandb_runs",
    "ray": "ray_results",
    "csv": "table",
}
DIRECTIONS = ("minimize", "maximize")


@dataclass(frozen=True)
class Request:
    """What is to be imported.

    tool        one of READERS
    source      a URL, a directory or a file, as the tool's users name it
    study       the tool's own name of the study, where the source holds several
    metrics     what the trials are judged by, where the source does not say
    directions  of each metric, minimize where none is given
    params      the columns of a table that are parameters
    rename      the tool's name of a parameter or metric -> what it is to be called here
    name        what the study is to be called here
    """

    tool: str
    source: str
    study: str | None = None
    metrics: Sequence[str] = ()
    directions: Sequence[str] = ()
    params: Sequence[str] = ()
    rename: Mapping[str, str] | None = None
    name: str | None = None


def bring(request: Request, home: Home, storage: str | None, tracking_uri: str | None) -> tuple[Ledger, Imported]:
    """Read the source and write its trials into the home's ledger: that ledger, and what was done.

    Raises UserError, and then nothing is written.
    """
    if tracking_uri:
        check_uri(tracking_uri)
    name, found = checked(read(request), request.name)
    with home.keeping():
        ledger = Ledger(storage or home.create().storage)
        return ledger, import_study(found, ledger, home, tracking_uri or home.tracking_uri, name)


def read(request: Request) -> ImportedStudy:
    """What the source holds, with its names as the request wants them. Raises UserError."""
    if request.tool not in READERS:
        raise UserError(f"import {request.tool!r}: there is no such reader; give {', '.join(READERS)}.")
    for direction in request.directions:
        if direction not in DIRECTIONS:
            raise UserError(f"--direction {direction}: give {' or '.join(DIRECTIONS)}.")
    module = import_module(f"hpo.interchange.{READERS[request.tool]}")
    reader: Callable[..., ImportedStudy] = module.read
    if request.tool in ("wandb", "csv"):
        reader = partial(reader, params=request.params)
    found = reader(request.source, request.study, request.metrics, request.directions)
    return renamed(found, request.rename or {})
