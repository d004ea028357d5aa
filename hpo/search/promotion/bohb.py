"""BOHB (Falkner et al. 2018, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale", ICML): Hyperband whose
configurations a model proposes, the sampler `bohb`."""

from __future__ import annotations

from typing import Literal

from hpo.search.promotion.hyperband import HyperbandPromote


class Bohb(HyperbandPromote):
    """`hyperband-promote` with the sampler `bohb`, which it brings.

    By promotion, since the paper's brackets are those of successive halving, where a configuration waits at its rung
    for the others. There one bracket runs after the other; here all are open at once, each with its share of trials.
    """

    name: Literal["bohb"] = "bohb"  # pyright: ignore[reportIncompatibleVariableOverride]
