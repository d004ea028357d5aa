"""Best-of-n: of n answers the one that a reward model scores best (Stiennon et al. 2020, arXiv 2009.01325)."""

from __future__ import annotations

import math

from torch import Tensor


def kl_bound(n: int) -> float:
    """log n - (n - 1)/n nats: a bound of the Kullback-Leibler divergence of the best of n from what they are drawn from
    (Gao et al. 2023, arXiv 2210.10760, section 2; equality where no two answers are alike: Beirami et al. 2024, arXiv
    2401.01879)."""
    return math.log(n) - (n - 1) / n


def best_of(scores: Tensor, worth: Tensor, n: int) -> float:
    """The mean worth of what the scores pick, of n answers at a time.

    scores, worth: [prompts, answers]; each prompt's answers are taken in groups of n, what is over is left out.
    """
    groups = scores.shape[1] // n
    scores, worth = (x[:, : groups * n].reshape(-1, n) for x in (scores, worth))
    return float(worth.gather(1, scores.argmax(dim=1, keepdim=True)).mean())


def sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})
