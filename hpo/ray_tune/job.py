"""Holds the data about a study that its Ray Tune trainable needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpo.storage.home import Home

ALIAS = "hpo/key"  # in a configuration: the key of its proposed trial


@dataclass(frozen=True)
class Job:
    """The data that a process started by Tune needs; `who` is recorded with each decision."""

    storage: str
    home: Home
    study_id: int
    name: str
    uid: str
    who: str
    directory: Path
    carried: Path | None = None
    gpus_asked: bool = True  # whether the user chose the GPUs that Tune gives a trial
