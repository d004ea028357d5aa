"""Defines BOHB (Falkner et al. 2018, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale", ICML):
Hyperband with configurations that a model, the sampler `bohb`, proposes."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpo.search.promotion.hyperband import HyperbandPromote


class Bohb(HyperbandPromote):
    """Runs `hyperband-promote` with its own sampler, `bohb`.

    Trials are promoted, since the paper's brackets are those of successive halving, where a configuration waits at its
    rung for the others. In the paper the brackets run one after the other; here all are open at once, each with its
    share of trials.
    """

    brings: ClassVar[str] = "bohb"

    name: Literal["bohb"] = "bohb"  # pyright: ignore[reportIncompatibleVariableOverride]
