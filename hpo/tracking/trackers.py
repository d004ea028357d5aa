"""Opens the trackers besides MLflow: built-in ones by the names that `--tracker` takes, a user's by `module:Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from pathlib import Path

from hpo.declaration.loading import make_importable
from hpo.declaration.references import reference_file
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.rows import StudyRow
from hpo.search.own_part import own_part
from hpo.storage.home import Home
from hpo.tracking.base import Tracker, Unreachable
from hpo.tracking.mlflow.sqlite import open_mlflow
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.run_folders import FolderTracker
from hpo.tracking.uri import tracker_name, tracking_uri_of
from trainer.errors import is_stop
from trainer.quote import quoted
from trainer.redaction import redacted

# Name -> the class, opened by its directory; the package that it needs; the extra that installs that.
TRACKERS = {
    "tensorboard": ("hpo.tracking.tensorboard:TensorBoardTracker", "tensorboard", "tensorboard"),
    "wandb": ("hpo.tracking.wandb_offline:WandbTracker", "wandb", "wandb"),
}
OPTUNA = "optuna+"  # prefix of the name of a copy for optuna-dashboard in the ledgers of release 0.1
_OWN = re.compile(r"(?P<path>[A-Za-z_][\w.]*:[A-Za-z_]\w*)(:(?P<place>.*))?", re.DOTALL)
_METHODS = tuple(name for name in vars(Tracker) if not name.startswith("_") and callable(getattr(Tracker, name)))


def resolved(text: str) -> str:
    """Returns the tracker that an option names, with its directory as an absolute path.

    Raises UserError if it cannot be used.
    """
    name, colon, target = text.partition(":")
    if name in TRACKERS and colon and target:
        _, package, extra = TRACKERS[name]
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{option('trackers', name)} needs {package}: pip install 'hpo[{extra}]'.")
        return _kept(name, _directory(text, target))
    if not (class_and_place := _own(text)):
        forms = ", ".join(f"{name}:DIR" for name in TRACKERS)
        raise UserError(
            f"{option('trackers', quoted(text))} is not known: give {forms} or one of your own, as in "
            f"my_module:MyTracker:PLACE; MLflow is set by {option('tracking_uri')}."
        )
    path, target = class_and_place
    if issubclass(own_part("tracker", path, Tracker, _METHODS), FolderTracker):
        if not target:
            raise UserError(f"{option('trackers', quoted(text))} keeps its runs in a directory: give {path}:DIR.")
        target = _directory(text, target)
    if redacted(target) != target:
        raise UserError(
            f"{option('trackers', path)} would be stored with a secret: let the tracker read it from the environment, "
            "and leave it out."
        )
    return _kept(path, target)


def _own(uri: str) -> tuple[str, str] | None:
    """Returns the `module:Class` of a user's own tracker and its argument; None for any other tracker."""
    match = None if uri.partition(":")[0] in TRACKERS else _OWN.fullmatch(uri)
    return match and (match["path"], match["place"] or "")


def _directory(text: str, target: str) -> str:
    path = Path(target).expanduser().absolute()
    present = next((above for above in (path, *path.parents) if above.exists()), path)
    if not present.is_dir():
        raise UserError(f"{option('trackers', quoted(text))} cannot be used, {present} is a file: name a directory.")
    return str(path)


def _kept(name: str, target: str) -> str:
    uri = f"{name}:{target}" if target else name
    if tracker_name(uri) != uri:
        raise UserError(
            f"{option('trackers', name)}: its path has {len(target)} characters, more than the ledger keeps: name "
            "another."
        )
    return uri


def open_tracker(uri: str, artifacts: Path, *, create: bool = True, reference: str = "") -> Tracker:
    """Opens the tracker at `uri`: a built-in one, MLflow, or a user's own, which may lie beside the study that
    `reference` names. Raises Unreachable."""
    name, _, directory = uri.partition(":")
    if class_and_place := _own(uri):
        tracker = _opened(*class_and_place, reference)
    elif name in TRACKERS:
        module, _, kind = TRACKERS[name][0].partition(":")
        tracker = getattr(importlib.import_module(module), kind)(Path(directory))
    else:
        return open_mlflow(uri, artifacts) if create else MlflowTracker(uri, artifacts, create=False)
    tracker.name = uri
    return tracker


def _opened(path: str, target: str, reference: str) -> Tracker:
    if file := reference_file(reference):
        make_importable(str(file.parent))
    try:
        kind = own_part("tracker", path, Tracker, _METHODS)
        return kind(Path(target) if issubclass(kind, FolderTracker) else target)
    except UserError as error:
        raise Unreachable(str(error)) from error
    except Exception as error:
        if is_stop(error) or isinstance(error, Unreachable):
            raise
        raise Unreachable(f"the tracker {path} cannot be opened ({type(error).__name__}: {error})") from error


def trackers_of(ledger: Ledger, study: str, home: Home, tracking_uri: str | None) -> list[str]:
    """Returns the URIs of MLflow, where `tracking_uri` precedes the study's own, and of the study's other trackers."""
    row = ledger.look(lambda connection: queries.study_row(connection, study))
    return [tracking_uri_of(ledger, study, home, tracking_uri), *row.environment.get("trackers", [])]


def lease_of(study_id: int, uri: str) -> str:
    """Returns the name of the lease under which one process at a time mirrors a study to a tracker."""
    if not kind_of(uri):
        return f"mirror:{study_id}"
    return f"mirror:{study_id}:{hashlib.sha256(tracker_name(uri).encode()).hexdigest()[:16]}"


def leases_of(study: StudyRow) -> list[str]:
    """Returns the names of the leases of all processes that may mirror a study or send its alerts."""
    uris = study.environment.get("trackers", [])
    alerts = [f"alerts:{study.id}"] if study.environment.get("alerts") else []
    return [f"mirror:{study.id}", *(lease_of(study.id, uri) for uri in uris), *alerts]


def kind_of(uri: str) -> str:
    """Returns the kind of a tracker, from its URI or name; empty for MLflow."""
    name, _, _ = uri.partition(":")
    class_and_place = _own(uri)
    return class_and_place[0] if class_and_place else name if name in TRACKERS or uri.startswith(OPTUNA) else ""


def called(tracker: str) -> str:
    """Returns the name that messages use for a tracker, from its name in the ledger."""
    return tracker.removeprefix(OPTUNA) if kind_of(tracker) else f"MLflow at {tracker}"
