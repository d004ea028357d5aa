"""Lays out a promoted checkpoint for MLflow, in the form that hpo.tracking.pyfunc opens."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpo.analysis.models.checkpoints import KeptCheckpoint
from hpo.declaration import content
from hpo.declaration.study import Study
from hpo.errors import HpoError
from hpo.ledger.rows import StudyRow
from hpo.tracking import run_files
from hpo.tracking.base import PROMOTED, Model, Point
from hpo.tracking.mlflow.registry import Input, mlmodel
from hpo.tracking.names import entry_name
from hpo.tracking.pyfunc import CODE, SPEC, array
from trainer.checkpoint.manifest import MANIFEST
from trainer.errors import TrainerError

DATA = "checkpoint"
_NEEDED = ("torch", "numpy", "pydantic", "safetensors")  # packages whose recorded versions the model states


def name_of(kept: KeptCheckpoint) -> str:
    """Returns the name of the checkpoint's model, which is unique in the run of its trial."""
    return f"promoted-{run_files.model_name(kept.number, run_files.checkpoint_name(kept.step))}"


def tags_of(row: StudyRow, kept: KeptCheckpoint) -> dict[str, str]:
    """Returns the tags that identify the checkpoint."""
    return {
        PROMOTED: "true",
        "hpo.run_uid": f"{row.uid}/{kept.number}",
        "hpo.study": row.name,
        "hpo.trial": str(kept.number),
        "hpo.step": str(kept.step),
        "hpo.epoch": str(kept.epoch),
        "hpo.config_hash": kept.config_hash,
        "hpo.sha256": kept.sha256,
    }


@contextmanager
def registered(row: StudyRow, study: Study, kept: KeptCheckpoint, points: list[Point]) -> Iterator[tuple[Model, str]]:
    """Yields the model, whose files exist during the block, and a remark.

    The remark says why its inputs are unknown, or that it has only files because the study trains in a loop of its own.
    """
    opens = not study.trains_itself
    texts = {f"{DATA}/config.json": run_files.config_text(kept.config)}
    files: dict[str, Path] = {}
    remark = "the study trains in a loop of its own: its files are registered, and no code that opens them"
    if opens:
        inputs, outputs, remark = _signature(study, kept)
        versions = {name: version for name, version in row.environment.get("versions", {}).items() if version}
        texts |= mlmodel(inputs, outputs, {name: versions[name] for name in _NEEDED if name in versions})
        spec, files = _code(row, study)
        texts[f"{DATA}/{SPEC}"] = json.dumps(spec, indent=2, sort_keys=True) + "\n"
    with kept.location.opened(kept.path, kept.sha256, weights_only=opens) as directory:
        every = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        names = [*run_files.weights_of(directory), MANIFEST] if opens else every
        files |= {f"{DATA}/{name}": directory / name for name in names}
        yield Model(name_of(kept), kept.step, tags_of(row, kept), points, texts, files), remark


def _code(row: StudyRow, study: Study) -> tuple[dict[str, Any], dict[str, Path]]:
    """Returns the spec, and the files of a declaration in a file: itself and its imports from the same directory.

    Studies of the platform are imported from the installed platform.
    """
    spec = dict(row.spec.json)
    file, colon, attribute = spec["reference"].rpartition(":")
    file, attribute = (file, colon + attribute) if file.endswith(".py") else (spec["reference"], "")
    if not file.endswith(".py"):
        return spec, {}
    root = Path(file).parent
    parts = [path for path in content.code(study).values() if path.is_relative_to(root)]
    sources = {path for source in parts for path in (source.rglob("*.py") if source.is_dir() else [source])}
    spec["reference"] = Path(file).name + attribute
    return spec, {f"{DATA}/{CODE}/{path.relative_to(root)}": path for path in sorted(sources)}


def _signature(study: Study, kept: KeptCheckpoint) -> tuple[list[Input], list[Input], str]:
    """Returns the model's inputs, as the task's loss passes them, its outputs, and why they are unknown if they are."""
    import torch

    from trainer.model.export import inputs
    from trainer.runtime.seeding import derive, seed_all
    from trainer.runtime.threads import limited
    from trainer.task import built

    task = kept.task(study)
    config = task.config.train
    with limited(config.num_threads), torch.no_grad():
        seed_all(derive(config.seed, "init"))
        model = built(task)
        model.load_state_dict(kept.weights())
        try:
            arguments = inputs(task, config, model.eval())
        except (HpoError, TrainerError, OSError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            return [], [], f"its inputs are not known here, so MLflow checks none ({why})"
        named = arguments.named(model)
        if any(value is not None and not isinstance(value, torch.Tensor) for value in named.values()):
            return [], [], "its inputs are no tensors alone, so MLflow checks none"
        output = model(*arguments.args, **arguments.kwargs)
    outputs = [_shape("output", output)] if isinstance(output, torch.Tensor) else []
    return [_shape(name, x) for name, x in named.items() if x is not None], outputs, ""


def _shape(name: str, value: object) -> Input:
    """Returns a tensor's shape with any number of samples; for whole numbers, such as tokens, all sizes are free."""
    values = array(value)
    free = values.ndim if values.dtype.kind == "i" else 1
    return Input(name, str(values.dtype), tuple(-1 if i < free else n for i, n in enumerate(values.shape)))


def facts(row: StudyRow, objectives: Collection[str], kept: KeptCheckpoint, points: Collection[Point]) -> str:
    """Returns the description of a version: the objectives' values at the checkpoint's step."""
    values = {point.key: point.value for point in points}
    shown = [f"{name} {values[key]:.6g}" for name in objectives if (key := entry_name(name)) in values]
    description = f"Trial {kept.number} of study {row.name}, epoch {kept.epoch}"
    return f"{description}: {', '.join(shown)}" if shown else description
