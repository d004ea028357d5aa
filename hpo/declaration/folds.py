"""Checks whether the folds that a study declares can confirm its trials."""

from __future__ import annotations

from hpo.declaration.study import Study
from hpo.errors import SpaceError
from hpo.space.config import flatten
from trainer.errors import DataError


def unfit(study: Study) -> str:
    """Returns a sentence where the trials may have been selected by the folds, or where no trial can train on the first
    one, which trains on the least; else an empty text.

    A preset is declared like the folds: what it sets has not selected trials by their validation data.
    """
    fold, preset = study.folds[0], flatten(study.presets.get(str(study.overrides.get("preset")), {}))
    if both := [path for path in fold if path in study.overrides and study.overrides[path] != preset.get(path)]:
        return f"{both[0]} is set for the search and by the folds, which may thus have selected the trials."
    try:
        inside = study.configure(fold)
        inside.check_data()
    except (DataError, SpaceError) as error:
        settings = ", ".join(f"{path}={value}" for path, value in fold.items())
        return f"the fold of {settings} cannot be trained: {error}"
    if (several := inside.shape.folds) > 1:
        return f"train.folds={several} judges every trial by all folds, and none is left that selected nothing."
    return ""
