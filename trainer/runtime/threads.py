"""Chooses how many threads may compute a number: over another number of threads a sum differs in its last bits.
Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ONE = dict.fromkeys(VARIABLES, "1")  # the environment of a process that is to start with one thread


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Give torch, if installed, and every BLAS and OpenMP pool of this process `count` threads, and back what they had.

    A library that the block loads reads the environment, which says the same until the block ends.
    """
    torch = import_module("torch") if find_spec("torch") else None
    threads = torch.get_num_threads() if torch else 0
    environ = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    try:
        with _pools(len(sys.modules)).limit(limits=count):
            if torch:
                torch.set_num_threads(count)
            yield
    finally:
        if torch:
            torch.set_num_threads(threads)
        for name, value in environ.items():
            if value is None:
                os.environ.pop(name, None)  # which the block may have removed
            else:
                os.environ[name] = value


@lru_cache(maxsize=1)
def _pools(modules: int) -> ThreadpoolController:
    """The pools of this process. Looking for them takes milliseconds: it is done again once more `modules` are there,
    as it is by imports that libraries come."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
