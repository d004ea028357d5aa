"""Limits the number of threads of numerical libraries, since a sum differs in its last bits with another number.

Torch-free.
"""

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
ONE = dict.fromkeys(VARIABLES, "1")  # the environment for a process with one thread


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Gives torch, if installed, and every BLAS and OpenMP pool of this process `count` threads within the block.

    A library loaded in the block reads the environment, which has the same limit until the block ends.
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
                os.environ.pop(name, None)  # the block may have removed it
            else:
                os.environ[name] = value


@lru_cache(maxsize=1)
def _pools(modules: int) -> ThreadpoolController:
    """Returns the pools of this process.

    The search takes milliseconds, so it is repeated only once more `modules` are loaded: libraries come with imports.
    """
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
