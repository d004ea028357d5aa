"""Generated text about words, whose right continuations are known. Torch-free.

The tiny model reads statements when it is made, such as `deab^DEAB` and `deab<baed`; instructions ask for the same in
words it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LETTERS = "abcdefghij"
LENGTH = 4
FREE = "?"  # the sign that any word may follow

# name -> (the sign it has in statements, what it makes of a word)
OPERATIONS: dict[str, tuple[str, Callable[[str], str]]] = {
    "copy": ("=", lambda word: word),
    "upper": ("^", str.upper),
    "next": ("+", lambda word: "".join(chr(ord(letter) + 1) for letter in word)),
    "reverse": ("<", lambda word: word[::-1]),
}


def word(rng: np.random.Generator) -> str:
    """Any word of LENGTH letters, each as likely."""
    return "".join(rng.choice([*LETTERS], LENGTH))


def statements(count: int, seed: int) -> list[str]:
    """Texts `word sign result`, all of one length; of one sign the result is any word."""
    rng = np.random.default_rng(seed)
    signs = [*OPERATIONS.values(), (FREE, lambda _: word(rng))]
    drawn = [(word(rng), *signs[rng.integers(len(signs))]) for _ in range(count)]
    return [f"{given}{sign}{operate(given)}" for given, sign, operate in drawn]


def instructions(count: int, seed: int) -> list[dict[str, str]]:
    """Records with a prompt, `upper deab: `, and its only right response, `DEAB`; no prompt occurs twice."""
    rng = np.random.default_rng(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        name, given = [*OPERATIONS][rng.integers(len(OPERATIONS))], word(rng)
        found[f"{name} {given}: "] = OPERATIONS[name][1](given)
    return [{"prompt": prompt, "response": response} for prompt, response in found.items()]
