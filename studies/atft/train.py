"""The study with nothing left to search: one trial trains its own configuration (`make train-atft`)."""

from dataclasses import replace

from hpo.space.space import Space
from studies.atft import STUDY as SEARCH

STUDY = replace(
    SEARCH, name="atft-train", space=Space({}), search_preset=None, sampler="random", strategy={"name": "none"}
)
