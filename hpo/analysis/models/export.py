"""Exports a trial's best model as a file, for `hpo export` (trainer/model/export.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.analysis.models.checkpoints import model_of
from hpo.door import option
from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.text import counted, megabytes

if TYPE_CHECKING:
    from trainer.model.export import Exported


_ENDINGS = {".safetensors": "safetensors", ".onnx": "onnx", ".pt2": "torch"}


def format_of(path: Path, given: str | None) -> str:
    """Returns the format that was given, else the one that the file's ending implies. Raises UserError."""
    format = given or _ENDINGS.get(path.suffix.lower())
    if format is None:
        raise UserError(
            f"{option('to', path)}: a trial's model is exported as {', '.join(_ENDINGS.values())}: give "
            f"{option('format')}, or a file "
            f"that ends in {', '.join(_ENDINGS)}."
        )
    return format


def export_trial(ledger: Ledger, home: Home, name: str, number: int, format: str, path: Path) -> Exported:
    """Writes the model of the trial's best kept checkpoint.

    Raises UserError if none is kept, and the errors of `trainer.model.export.export`.
    """
    from trainer.model.export import export
    from trainer.runtime.seeding import derive, seed_all
    from trainer.runtime.threads import limited
    from trainer.task import built

    with ledger.read() as connection:
        study, kept = model_of(connection, home, name, number)
    task = kept.task(study)
    config = task.config.train
    about = {"study": name, "trial": str(number), "step": str(kept.step), "config": json.dumps(kept.config)}
    with limited(config.num_threads):
        seed_all(derive(config.seed, "init"))
        model = built(task)
        model.load_state_dict(kept.weights())
        try:
            return export(task, config, model.eval(), format, path, about)
        except OSError as error:
            raise HomeError(f"{option('to', path)} cannot be written ({error.strerror}): name another file.") from error


def describe(done: Exported) -> str:
    batch = {None: "weights alone", True: "for any batch size", False: f"for batches of {done.samples} alone"}[
        done.free
    ]
    return (
        f"{done.path}: {done.format}, {megabytes(done.size)}, {batch}; loaded again, its outputs differ by "
        f"{done.difference:.3g} at most on {counted(done.samples, 'training sample')}."
    )
