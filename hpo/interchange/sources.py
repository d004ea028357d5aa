"""Names the tools whose studies can be imported, and imports a study from any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from hpo.door import option
from hpo.errors import UserError
from hpo.interchange.record import ImportedStudy
from hpo.interchange.study import Imported, checked, import_study, renamed
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.tracking.uri import check_uri
from trainer.redaction import redacted_url

# tool -> the module that reads it, which imports the tool's library only when needed
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
    """A request for an import.

    tool        one of READERS
    source      a URL, a directory or a file, as the tool's users name it
    study       the tool's name for the study, if the source holds several
    metrics     the objectives, if the source does not name them
    directions  one for each metric, by default minimize
    params      the columns of a table that are parameters
    rename      the tool's name of a parameter or metric -> its name here
    name        the study's name here
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
    """Reads the source and writes its trials into the home's ledger; returns the ledger and a summary.

    If it raises UserError, nothing was written.
    """
    if tracking_uri:
        check_uri(tracking_uri)
    name, foreign = checked(read(request), request.name)
    with home.keeping():
        ledger = Ledger(storage or home.create().storage)
        return ledger, import_study(foreign, ledger, home, tracking_uri or home.tracking_uri, name)


def read(request: Request) -> ImportedStudy:
    """Returns the study in the source, with names as the request wants them. Raises UserError."""
    if request.tool not in READERS:
        raise UserError(f"import {request.tool!r}: no such tool can be read; give {', '.join(READERS)}.")
    for direction in request.directions:
        if direction not in DIRECTIONS:
            raise UserError(f"{option('direction', direction)}: give {' or '.join(DIRECTIONS)}.")
    module = import_module(f"hpo.interchange.{READERS[request.tool]}")
    reader: Callable[..., ImportedStudy] = module.read
    if request.tool in ("wandb", "csv"):
        reader = partial(reader, params=request.params)
    try:
        foreign = reader(request.source, request.study, request.metrics, request.directions)
    except (OSError, ValueError) as error:  # ValueError for a path that the system does not allow
        raise UserError(
            f"{redacted_url(request.source)} cannot be read ({getattr(error, 'strerror', None) or error}): "
            "name another file or directory."
        ) from error
    return renamed(foreign, request.rename or {})
