"""A dear result that the processes of a test run make once between them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Returns what `make(directory)` returned, which is JSON, to every process of this run that asks for `name`.

    The first one makes it while the others wait. If it raises, each of them hears of it.
    """
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    directory.mkdir(exist_ok=True)
    result = directory / "result.json"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            try:
                made = {"value": make(directory)}
            except Exception as error:
                made = {"error": f"{type(error).__name__}: {error}"}
            result.write_text(json.dumps(made))
    made = json.loads(result.read_text())
    assert "error" not in made, made["error"]
    return made["value"]
