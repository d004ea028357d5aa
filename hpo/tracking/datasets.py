"""The data files of a study as MLflow's data sets, by the digests that its identity holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.ledger.rows import RowMapping
from hpo.tracking.base import Dataset

CONTEXT = "mlflow.data.context"  # a tag of an input: what the data is to the run
SHOWN = 16  # characters of a digest; MLflow takes 36 at most, `profile` has all 64


def of_study(study: RowMapping) -> list[Dataset]:
    """The files that the configuration names."""
    return _datasets(study, study["identity"].get("config", {}))


def of_trial(study: RowMapping, config: Mapping[str, Any]) -> list[Dataset]:
    """Those of them that the trial's own configuration names too."""
    return _datasets(study, {path: _at(config, path) for path in _digests(study)})


def _datasets(study: RowMapping, named: Mapping[str, Any]) -> list[Dataset]:
    declared, counted = study["identity"].get("config", {}), study["environment"].get("data", {})
    found = []
    for path, sha256 in _digests(study).items():
        value = named.get(path)
        if isinstance(value, str) and value == declared.get(path):
            profile = json.dumps({"sha256": sha256, **counted}, sort_keys=True)
            found.append(Dataset(Path(value).name or path, sha256[:SHOWN], path, value, profile))
    return found


def _digests(study: RowMapping) -> dict[str, str]:
    data = study["identity"].get("data", {})
    return data if isinstance(data, dict) else {}  # releases up to 0.1 have hashed all of it at once


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def source_of(one: Dataset) -> str:
    """Where it lay, as MLflow's sources of files have it."""
    return json.dumps({"uri": one.place})


def as_input(one: Dataset) -> Any:
    """What MLflow's client logs. Logged again it stands once: MLflow tells data sets apart by name and digest."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(one.name, one.digest, "local", source_of(one), profile=one.profile)
    return DatasetInput(entity, [InputTag(CONTEXT, one.field)])
