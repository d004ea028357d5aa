"""Finds what decides a study's results: its space, objectives and configuration, the data it names and its own code."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.declaration import bundled, code_digest
from hpo.declaration.function_trial import text_of
from hpo.declaration.loading import file_of, source_parts
from hpo.errors import UserError
from hpo.space.config import as_json, flatten
from hpo.space.hashing import json_sha256, tree_sha256
from trainer.checkpoint.manifest import MANIFEST
from trainer.files import shards
from trainer.files.paths import local

if TYPE_CHECKING:
    from hpo.declaration.study import Study

RESUME_FROM = "train.resume_from"  # a field every study may have
_FIELDS = ("objectives", "constraints", "metrics", "sampler", "strategy", "finish", "enqueue", "presets", "hold_out")
_FIELDS += ("read_when", "data_paths", "plan")


def directory(study: Study) -> Path:
    """Returns the directory of the declaration; the working directory if it was not loaded from a file."""
    file_of_task = getattr(study.task, "file", None)
    file = file_of_task() if file_of_task else file_of(sys.modules.get(study.module))
    return file.parent if file else Path.cwd()


def identity(study: Study) -> dict[str, Any]:
    """Returns component -> the values that decide the study's results, by path or as a sha256; see
    hpo.declaration.identity."""
    return {
        "space": json.loads(json.dumps(study.space.describe())),  # plain: lists, no tuples
        "objectives": json_sha256([goal.to_json() for goal in (*study.objectives, *study.constraints)]),
        "config": flatten(as_json(study.config)),
        "data": data_sha256(study),
        "code": code_sha256(study),
    } | ({"rules": dict.fromkeys(study.space.rules, True)} if study.space.rules else {})


def declared(study: Study) -> dict[str, str]:
    """Returns the digest of each field of a declaration, by its name; values count, not how they are written."""
    fields: dict[str, Any] = {name: getattr(study, name) for name in _FIELDS}
    for name in ("objectives", "constraints"):
        fields[name] = [bound.to_json() for bound in fields[name]]
    fields |= {"space": study.space.describe(), "rules": study.space.rules}
    values = flatten(as_json(study.config))
    fields["configuration"] = {path: value for path, value in values.items() if path not in study.space.paths}
    fields["steps_per_epoch"] = getattr(study.task, "steps_per_epoch", None)
    if isinstance(study.task, type) and not hasattr(study.task, "source"):
        methods = {name: value for name, value in vars(study.task).items() if inspect.isfunction(value)}
        fields["task"] = {name: code_digest.of_text(text_of(method)) for name, method in methods.items()}
    return {name: json_sha256(value) for name, value in fields.items()}


def data_sha256(study: Study) -> dict[str, str]:
    """Returns path -> sha256 of the files that the study names; for a starting checkpoint, that of its manifest."""
    values, digests = flatten(as_json(study.config)), dict[str, str]()
    for path in (*study.data_paths, RESUME_FROM):
        if value := values.get(path):
            if path != RESUME_FROM and shards.named(value):
                digests[path] = shards.digest(value)
                continue
            file = local(value)
            try:
                digests[path] = tree_sha256(file / MANIFEST if path == RESUME_FROM else file, "*")
            except OSError as error:
                raise UserError(f"{path}={value!r} cannot be read: {error.strerror}.") from error
    return digests


def code(study: Study) -> dict[str, Path]:
    """Returns label -> path of the declaration, with an empty label, and of the modules that it imports from its
    directory.

    A task that knows its own code returns that instead.
    """
    if code_of_task := getattr(study.task, "code", None):
        return code_of_task()
    module = sys.modules.get(study.module) or sys.modules.get(getattr(study.task, "__module__", ""))
    if (file := file_of(module)) is None:
        return {}
    module_of_task = study.task.partition(":")[0] if isinstance(study.task, str) else ""
    return source_parts(file, module_of_task)


def code_sha256(study: Study) -> dict[str, str]:
    """Returns the digest of each part of the user's own code, by label; a bundled study's code has a version."""
    parts = code(study)
    if not isinstance(study.task, str) and hasattr(study.task, "code"):  # a program
        written = {label: code_digest.of_study(path, program=True) for label, path in parts.items()}
        return written | {"": code_digest.of_text(study.task.source())}
    if not parts and (source := getattr(study.task, "source", None)):
        return {"": code_digest.of_text(source())}
    counted = {label: path for label, path in parts.items() if bundled.package_of(path) is None}
    return {label: code_digest.of_study(path) for label, path in counted.items()}


def bundled_studies(study: Study) -> list[str]:
    """Returns the bundled studies that this one is or imports; a program has its own code."""
    return [] if hasattr(study.task, "code") else bundled.studies_in(code(study).values())
