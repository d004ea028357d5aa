"""Holds what a trainable of Ray Tune needs to know of its study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpo.storage.home import Home

ALIAS = "hpo/key"  # in a configuration: the key of the trial that was proposed for it


@dataclass(frozen=True)
class Job:
    """What a process that Tune has started needs; `who` is named with each decision."""

    storage: str
    home: Home
    study_id: int
    name: str
    uid: str
    who: str
    directory: Path
    carried: Path | None = None
    gpus_asked: bool = True  # GPUs that Tune gives a trial are the user's own choice
