"""Picks the best of n: the answer that a reward model scores highest (Stiennon et al. 2020, arXiv 2009.01325)."""

from __future__ import annotations

import math

from torch import Tensor


def kl_bound(n: int) -> float:
    """Returns log n - (n - 1)/n nats, a bound of the Kullback-Leibler divergence of the best of n from their source.

    Gao et al. 2023, arXiv 2210.10760, section 2; equality if no two answers are alike: Beirami et al. 2024, arXiv
    2401.01879.
    """
    return math.log(n) - (n - 1) / n


def best_of(scores: Tensor, worth: Tensor, n: int) -> float:
    """Returns the mean worth of the answers that the scores pick, of n answers at a time.

    scores, worth: [prompts, answers]; each prompt's answers are taken in groups of n, and a rest is left out.
    """
    groups = scores.shape[1] // n
    scores, worth = (x[:, : groups * n].reshape(-1, n) for x in (scores, worth))
    return float(worth.gather(1, scores.argmax(dim=1, keepdim=True)).mean())


def sizes(most: int) -> list[int]:
    """Returns 1, 2, 4, ... and `most` itself."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})
