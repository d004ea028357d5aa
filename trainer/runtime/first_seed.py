"""Seeds a process before a trial's own code has seeded anything; torch-free, for trials that do not use torch."""

from __future__ import annotations

import random
import sys
from hashlib import blake2b
from operator import index

import numpy as np


def derive(seed: int, stream: str, *counters: int) -> int:
    """Returns 63 bits that depend on all arguments: blake2b of their text. Torch's CPU generator uses the low 32."""
    text = f"{index(seed)}/{stream}/{tuple(map(index, counters))}".encode()  # accepts numpy's integers too
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_attempt(seed: int) -> None:
    """Seeds the global generators of python, numpy and, if torch is loaded, of every device that torch has."""
    value = derive(seed, "attempt")
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
