"""Generates text about words, whose right continuations are known. Torch-free.

The tiny model reads statements when it is made, such as `deab^DEAB` and `deab<baed`; instructions request the same
in words that it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LETTERS = "abcdefghij"
LENGTH = 4
FREE = "?"  # the sign that any word may follow

# name -> (its sign in statements, its function of a word)
OPERATIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "copy": ("=", lambda word: word),
    "upper": ("^", str.upper),
    "next": ("+", lambda word: "".join(chr(ord(letter) + 1) for letter in word)),
    "reverse": ("<", lambda word: word[::-1]),
}


def word(rng: np.random.Generator) -> str:
    """Returns a word of LENGTH letters, each equally likely."""
    return "".join(rng.choice([*LETTERS], LENGTH))


def statements(count: int, seed: int) -> list[str]:
    """Returns texts `word sign result`, all of one length; for one sign the result is any word."""
    rng = np.random.default_rng(seed)
    signs = [*OPERATIONS.values(), (FREE, lambda _: word(rng))]
    drawn = [(word(rng), *signs[rng.integers(len(signs))]) for _ in range(count)]
    return [f"{operand}{sign}{operate(operand)}" for operand, sign, operate in drawn]


def instructions(count: int, seed: int) -> list[dict[str, str]]:
    """Returns records with a prompt, `upper deab: `, and its only right response, `DEAB`; no prompt occurs twice."""
    rng = np.random.default_rng(seed)
    responses: dict[str, str] = {}
    while len(responses) < count:
        name, operand = [*OPERATIONS][rng.integers(len(OPERATIONS))], word(rng)
        responses[f"{name} {operand}: "] = OPERATIONS[name][1](operand)
    return [{"prompt": prompt, "response": response} for prompt, response in responses.items()]
