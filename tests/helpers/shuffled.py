"""A plugin of pytest that finds tests which count on others: `PYTHONPATH=tests/helpers SEED=3 pytest -p shuffled`.

It runs the tests in a random order of the seed, and empties the caches of the packages before each."""

from __future__ import annotations

import os
import random
import sys
import warnings
from types import ModuleType

import pytest

PACKAGES = ("hpo", "studies", "trainer")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.nodeid)
    random.Random(os.environ["SEED"]).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a cache may hold the last name of a temporary directory
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES:
                empty_caches(module)


def empty_caches(owner: ModuleType | type) -> None:
    """Empty the caches of the functions of a module, and of its classes' methods."""
    for value in list(vars(owner).values()):
        function = getattr(value, "__func__", value)
        if hasattr(function, "cache_clear"):
            function.cache_clear()
        elif isinstance(value, type) and isinstance(owner, ModuleType) and value.__module__ == owner.__name__:
            empty_caches(value)
