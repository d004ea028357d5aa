"""Converts the data files of a study to MLflow's data sets, by the digests in the study's identity."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.ledger.rows import StudyRow
from hpo.tracking.base import Dataset

CONTEXT = "mlflow.data.context"  # a tag of an input: the role of the data in the run
SHOWN = 16  # characters of a digest; MLflow stores 36 at most, `profile` has all 64


def of_study(study: StudyRow) -> list[Dataset]:
    """Returns the files that the configuration names."""
    return _datasets(study, study.identity.get("config", {}))


def of_trial(study: StudyRow, config: Mapping[str, object]) -> list[Dataset]:
    """Returns the study's files that the trial's own configuration names too."""
    return _datasets(study, {path: _at(config, path) for path in _digests(study)})


def _datasets(study: StudyRow, named: Mapping[str, Any]) -> list[Dataset]:
    declared, counted = study.identity.get("config", {}), study.environment.get("data", {})
    data_sets = []
    for path, sha256 in _digests(study).items():
        value = named.get(path)
        if isinstance(value, str) and value == declared.get(path):
            profile = json.dumps({"sha256": sha256, **counted}, sort_keys=True)
            data_sets.append(Dataset(Path(value).name or path, sha256[:SHOWN], path, value, profile))
    return data_sets


def _digests(study: StudyRow) -> dict[str, str]:
    data = study.identity.get("data", {})
    return data if isinstance(data, dict) else {}  # releases up to 0.1 hashed all of it at once


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def source_of(one: Dataset) -> str:
    """Returns the path of a data set in the form of MLflow's file source."""
    return json.dumps({"uri": one.place})


def as_input(one: Dataset) -> Any:
    """Returns the input for MLflow's client to log.

    Logging it again changes nothing: MLflow identifies data sets by name and digest.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    entity = Dataset(one.name, one.digest, "local", source_of(one), profile=one.profile)
    return DatasetInput(entity, [InputTag(CONTEXT, one.field)])
