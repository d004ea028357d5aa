"""The trackers besides MLflow, by the names that `--tracker` takes, and how each is opened."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path

from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.rows import RowMapping
from hpo.storage.home import Home
from hpo.tracking.base import Tracker
from hpo.tracking.mlflow import MlflowTracker
from hpo.tracking.mlflow_sqlite import open_mlflow
from hpo.tracking.uri import tracker_name, tracking_uri_of
from trainer.quote import quoted

# Name -> the class, opened by its directory; the package that it needs; the extra that has it.
TRACKERS = {
    "tensorboard": ("hpo.tracking.tensorboard:TensorBoardTracker", "tensorboard", "tensorboard"),
    "wandb": ("hpo.tracking.wandb_offline:WandbTracker", "wandb", "wandb"),
}
OPTUNA = "optuna+"  # begins the name of Optuna's storage, which is kept while its pages are open


def settled(text: str) -> str:
    """What `--tracker` names, with its directory as an absolute path; UserError where it cannot be used."""
    name, colon, directory = text.partition(":")
    if name not in TRACKERS or not colon or not directory:
        forms = " or ".join(f"{one}:DIR" for one in TRACKERS)
        raise UserError(f"--tracker {quoted(text)} is not known: give {forms}; MLflow is set by --tracking-uri.")
    _, package, extra = TRACKERS[name]
    if importlib.util.find_spec(package) is None:
        raise UserError(f"--tracker {name} needs {package}: pip install 'hpo[{extra}]'.")
    path = Path(directory).expanduser().absolute()
    taken = next((one for one in (path, *path.parents) if one.exists()), path)
    if not taken.is_dir():
        raise UserError(f"--tracker {quoted(text)} cannot be used, {taken} is a file: name a directory.")
    if tracker_name(found := f"{name}:{path}") != found:
        raise UserError(
            f"--tracker {name}: its path has {len(str(path))} characters, more than the ledger keeps: name another."
        )
    return found


def open_tracker(uri: str, artifacts: Path, *, create: bool = True) -> Tracker:
    """The tracker at `uri`, of those above or MLflow. Raises Unreachable."""
    name, _, place = uri.partition(":")
    if name not in TRACKERS:
        return open_mlflow(uri, artifacts) if create else MlflowTracker(uri, artifacts, create=False)
    module, _, kind = TRACKERS[name][0].partition(":")
    return getattr(importlib.import_module(module), kind)(Path(place))


def trackers_of(ledger: Ledger, study: str, home: Home, tracking_uri: str | None) -> list[str]:
    """The URIs of MLflow, of which `tracking_uri` goes before the study's own, and of the study's other trackers."""
    row = ledger.look(lambda connection: queries.study_row(connection, study))
    return [tracking_uri_of(ledger, study, home, tracking_uri), *row["environment"].get("trackers", [])]


def lease_of(study_id: int, uri: str) -> str:
    """The name of the lease of whoever mirrors a study to a tracker: one process at a time for each."""
    if uri.startswith(OPTUNA):
        return f"mirror:{study_id}:optuna"
    if uri.partition(":")[0] not in TRACKERS:
        return f"mirror:{study_id}"
    return f"mirror:{study_id}:{hashlib.sha256(tracker_name(uri).encode()).hexdigest()[:16]}"


def leases_of(study: RowMapping) -> list[str]:
    """The names of the leases of all that may mirror a study or send its alerts."""
    others = [OPTUNA, *study["environment"].get("trackers", [])]
    alerts = [f"alerts:{study['id']}"] if study["environment"].get("alerts") else []
    return [f"mirror:{study['id']}", *(lease_of(study["id"], one) for one in others), *alerts]


def called(tracker: str) -> str:
    """A tracker by its name in the ledger, as messages have it."""
    if tracker.startswith(OPTUNA):
        return tracker.removeprefix(OPTUNA)
    return tracker if tracker.partition(":")[0] in TRACKERS else f"MLflow at {tracker}"
