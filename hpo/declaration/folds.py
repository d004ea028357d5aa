"""Checks whether the folds that a study declares can confirm its trials."""

from __future__ import annotations

from hpo.declaration.study import Study
from hpo.errors import SpaceError
from trainer.errors import DataError


def unfit(study: Study) -> str:
    """Returns a sentence where the trials may have been selected by the folds, or where no trial can train on the first
    one, which trains on the least; else an empty text."""
    if (several := study.shape.folds) > 1:
        return f"train.folds={several} judges every trial by all folds, and none is left that selected nothing."
    try:
        study.configure(study.folds[0]).check_data()
    except (DataError, SpaceError) as error:
        settings = ", ".join(f"{path}={value}" for path, value in study.folds[0].items())
        return f"the fold of {settings} cannot be trained: {error}"
    if both := [path for path in study.folds[0] if path in study.overrides]:
        return f"{both[0]} is set for the search and by the folds, which may thus have selected the trials."
    return ""
