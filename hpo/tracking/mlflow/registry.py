"""Registers checkpoints in MLflow's model registry as versions of a model under an alias, and withdraws them.

Every step can be repeated: a model is found by its run and name, a version by the tags that identify its checkpoint,
and an alias can be set to the same version twice. So the next call completes or undoes the work of a killed one.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from hpo.errors import UserError
from hpo.tracking.base import PROMOTED, Model
from trainer.runtime.failpoint import failpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from hpo.tracking.mlflow.models import Models

FLAVOR, LOADER = "python_function", "hpo.tracking.pyfunc"


class Input(NamedTuple):
    """An input or output tensor of a model; `shape` has -1 for a dimension of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def mlmodel(inputs: list[Input], outputs: list[Input], versions: Mapping[str, str]) -> dict[str, str]:
    """Returns the texts beside a checkpoint with which MLflow opens it, and checks its inputs if they are known."""
    import platform

    from mlflow.models import Model as Description

    described = Description(signature=_signature(inputs, outputs))
    described.add_flavor(FLAVOR, loader_module=LOADER, data="checkpoint", python_version=platform.python_version())
    wanted = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    return {"MLmodel": described.to_yaml(), "requirements.txt": wanted}


def _signature(inputs: list[Input], outputs: list[Input]) -> Any:
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(of: list[Input]) -> Any:
        names = [tensor.name for tensor in of] if len(of) > 1 else [None] * len(of)
        return Schema([TensorSpec(np.dtype(x.dtype), x.shape, name) for x, name in zip(of, names, strict=True)])

    return ModelSignature(schema(inputs), schema(outputs) if outputs else None) if inputs else None


def check_names(name: str, alias: str) -> None:
    """Raises UserError for a name or an alias that MLflow rejects."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils import validation

    for option, value, checks in (
        ("--name", name, (validation._validate_model_name,)),
        ("--alias", alias, (validation._validate_model_alias_name, validation._validate_model_alias_name_reserved)),
    ):
        try:
            for check in checks:
                check(value)
        except MlflowException as error:
            why = " ".join(str(error.message).split()).rstrip(".")
            raise UserError(f"{option} {value!r} is refused by MLflow: {why}: choose another.") from error


class Registry:
    """The registry of one client. Raises Unreachable or Refused, to which `speaking` converts MLflow's exceptions."""

    def __init__(
        self,
        client: MlflowClient,
        models: Models,
        speaking: Callable[[], AbstractContextManager[None]],
        *,
        is_database: bool,
    ) -> None:
        self._client, self._models, self._speaking, self._is_database = client, models, speaking, is_database

    def find(self, name: str, tags: Mapping[str, str]) -> str | None:
        """Returns the newest version of a model that has these tags."""
        with self._speaking():
            versions = self._client.search_model_versions(_of(name))
            numbers = [
                int(version.version) for version in versions if all(version.tags.get(key) == tags[key] for key in tags)
            ]
        return str(max(numbers)) if numbers else None

    def aliased(self, name: str, alias: str) -> str | None:
        """Returns the version that an alias names now."""
        with self._speaking():
            registered = self._registered(name)
            return None if registered is None else (version := registered.aliases.get(alias)) and str(version)

    def register(self, name: str, run_id: str, model: Model, description: str) -> str:
        """Stores `model` under its run and makes it a version of the registered model `name`; returns that version."""
        with self._speaking():
            experiment = self._client.get_run(run_id).info.experiment_id
            self._models.send(experiment, run_id, [model])
            failpoint("promote.after_model")
            logged = self._models.named(experiment, run_id, model.name)
            if self._registered(name) is None:
                self._client.create_registered_model(name, {PROMOTED: "true"})
            version = self._client.create_model_version(
                name, logged.artifact_location, run_id, dict(model.tags), None, description, model_id=logged.model_id
            )
            if self._is_database:  # as a server does
                store = self._client._tracking_client.store
                store.set_model_versions_tags(name, version.version, logged.model_id)
        failpoint("promote.after_version")
        return str(version.version)

    def point(self, name: str, alias: str, version: str | None) -> None:
        """Sets the alias to a version, or removes it if that is None."""
        with self._speaking():
            if version is None:
                self._client.delete_registered_model_alias(name, alias)
            else:
                self._client.set_registered_model_alias(name, alias, version)

    def remove(self, name: str, version: str, run_id: str, model: str | None) -> None:
        """Removes a version and the `model` that was stored for it, unless something else needs the model.

        Also removes the registered model if it was created here and has no other version.
        """
        with self._speaking():
            if (registered := self._registered(name)) is not None:
                versions = {str(entry.version) for entry in self._client.search_model_versions(_of(name))}
                if version in versions:
                    self._client.delete_model_version(name, version)
                if not versions - {version} and PROMOTED in registered.tags:
                    self._client.delete_registered_model(name)
            if model is None:
                return
            try:
                experiment = self._client.get_run(run_id).info.experiment_id
            except Exception as error:
                if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return  # which keeps the model too
            self._models.send(experiment, run_id, [], [model])

    def has_version(self, name: str, version: str) -> bool:
        with self._speaking():
            return any(
                str(registered.version) == version for registered in self._client.search_model_versions(_of(name))
            )

    def _registered(self, name: str) -> Any:
        registered = self._client.search_registered_models(_of(name))
        return next(iter(registered), None)


def _of(name: str) -> str:
    """Returns the filter that finds a registered model and its versions."""
    quote = '"' if "'" in name else "'"
    return f"name = {quote}{name}{quote}"
