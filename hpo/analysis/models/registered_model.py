"""What MLflow stores of a promoted checkpoint, laid out so that hpo.tracking.pyfunc opens it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpo.analysis.models.checkpoints import KeptCheckpoint
from hpo.declaration.study import Study
from hpo.errors import HpoError
from hpo.ledger.rows import RowMapping
from hpo.tracking import run_files
from hpo.tracking.base import PROMOTED, Model, Point
from hpo.tracking.mlflow_registry import Input, mlmodel
from hpo.tracking.pyfunc import CODE, SPEC, array
from trainer.checkpoint.manifest import MANIFEST
from trainer.errors import TrainerError

DATA = "checkpoint"
_NEEDED = ("torch", "numpy", "pydantic", "safetensors")  # of the versions that the study has recorded


def name_of(kept: KeptCheckpoint) -> str:
    """The name of its model, which is unique in the run of its trial."""
    return f"promoted-{run_files.model_name(kept.number, run_files.checkpoint_name(kept.step))}"


def tags_of(row: RowMapping, kept: KeptCheckpoint) -> dict[str, str]:
    """Which checkpoint it is."""
    return {
        PROMOTED: "true",
        "hpo.run_uid": f"{row['uid']}/{kept.number}",
        "hpo.study": row["name"],
        "hpo.trial": str(kept.number),
        "hpo.step": str(kept.step),
        "hpo.epoch": str(kept.epoch),
        "hpo.config_hash": kept.config_hash,
        "hpo.sha256": kept.sha256,
    }


@contextmanager
def registered(row: RowMapping, study: Study, kept: KeptCheckpoint, points: list[Point]) -> Iterator[tuple[Model, str]]:
    """The model, whose files are there while the block lasts, and what is to be told of it: why its inputs are not
    known, or that it has files alone, because the study trains in a loop of its own."""
    opens = not study.trains_itself
    texts = {f"{DATA}/config.json": run_files.config_text({"config": kept.config})}
    files: dict[str, Path] = {}
    told = "the study trains in a loop of its own: its files are registered, and no code that opens them"
    if opens:
        inputs, outputs, told = _signature(study, kept)
        versions = {name: version for name, version in row["environment"].get("versions", {}).items() if version}
        texts |= mlmodel(inputs, outputs, {name: versions[name] for name in _NEEDED if name in versions})
        spec, files = _code(row, study)
        texts[f"{DATA}/{SPEC}"] = json.dumps(spec, indent=2, sort_keys=True) + "\n"
    with kept.place.opened(kept.path, kept.sha256, weights_alone=opens) as directory:
        every = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        names = [*run_files.weights_of(directory), MANIFEST] if opens else every
        files |= {f"{DATA}/{name}": directory / name for name in names}
        yield Model(name_of(kept), kept.step, tags_of(row, kept), points, texts, files), told


def _code(row: RowMapping, study: Study) -> tuple[dict[str, Any], dict[str, Path]]:
    """The spec, and the files of a declaration in a file: itself and what it imports from beside it. Studies of the
    platform's are where the platform is."""
    spec = dict(row["spec"])
    where, colon, attribute = spec["reference"].rpartition(":")
    where, attribute = (where, colon + attribute) if where.endswith(".py") else (spec["reference"], "")
    if not where.endswith(".py"):
        return spec, {}
    root = Path(where).parent
    places = [place for place in study.code().values() if place.is_relative_to(root)]
    sources = {path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place])}
    spec["reference"] = Path(where).name + attribute
    return spec, {f"{DATA}/{CODE}/{path.relative_to(root)}": path for path in sorted(sources)}


def _signature(study: Study, kept: KeptCheckpoint) -> tuple[list[Input], list[Input], str]:
    """The tensors that the task's loss calls the model with, and what it gives; why they are not known, where not."""
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
            given = inputs(task, config, model.eval())
        except (HpoError, TrainerError, OSError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            return [], [], f"its inputs are not known here, so MLflow checks none ({why})"
        named = given.named(model)
        if any(value is not None and not isinstance(value, torch.Tensor) for value in named.values()):
            return [], [], "its inputs are no tensors alone, so MLflow checks none"
        output = model(*given.args, **given.kwargs)
    outputs = [_shape("output", output)] if isinstance(output, torch.Tensor) else []
    return [_shape(name, x) for name, x in named.items() if x is not None], outputs, ""


def _shape(name: str, value: Any) -> Input:
    """Any number of samples; of whole numbers, such as tokens, any size in the other dimensions too."""
    found = array(value)
    free = found.ndim if found.dtype.kind == "i" else 1
    return Input(name, str(found.dtype), tuple(-1 if i < free else n for i, n in enumerate(found.shape)))


def facts(row: RowMapping, values: Mapping[str, float | None], kept: KeptCheckpoint) -> str:
    """The description of a version."""
    shown = ", ".join(f"{metric} {value:.6g}" for metric, value in values.items() if value is not None)
    return f"Trial {kept.number} of study {row['name']}, epoch {kept.epoch}: {shown}"
