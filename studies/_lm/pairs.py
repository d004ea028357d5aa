"""Generates preferences whose true reward is known. Torch-free.

A prompt is a word; the tiny model, as it was made, answers it with any other. An answer is worth one point for each of
its letters in the alphabet's first half. The first of two answers is preferred with the probability sigmoid(r1 - r2)
(Bradley & Terry 1952), so preferences are noisy.
"""

from __future__ import annotations

import math

import numpy as np

from studies._lm.words import FREE, LENGTH, LETTERS, word

LIKED = LETTERS[: len(LETTERS) // 2]


def true_reward(answer: str) -> float:
    """Returns how many of its letters are LIKED; 0 for an answer of another length. A random word has 2 on average."""
    return float(sum(letter in LIKED for letter in answer)) if len(answer) == LENGTH else 0.0


def preferences(count: int, seed: int) -> list[dict[str, str]]:
    """Returns records with a prompt, `deab?`, a chosen and a rejected answer; no prompt occurs twice."""
    rng = np.random.default_rng(seed)
    records: dict[str, dict[str, str]] = {}
    while len(records) < count:
        prompt, first, second = word(rng) + FREE, word(rng), word(rng)
        better = true_reward(first) - true_reward(second)
        if rng.random() > 1 / (1 + math.exp(-better)):
            first, second = second, first
        records[prompt] = {"prompt": prompt, "chosen": first, "rejected": second}
    return list(records.values())
