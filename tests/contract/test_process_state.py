"""What a trial changes of its process no later trial sees: each part of the table, for functions, tasks, folds and
lanes in a warm worker, against a study that changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from places import HARNESS, ROOT
from study_runs import drive

from hpo.declaration.loading import load_module
from hpo.storage.home import Home
from hpo.workers.executors.inline import Inline
from hpo.workers.executors.local import Local
from trainer.runtime.process_state import ENTRIES, kept

FILE = str(HARNESS / "process_study.py")
study: Any = load_module(FILE)[0]
NAMES: list[str] = study.NAMES
KINDS: dict[str, dict[str, Any]] = {
    "functions": {"reference": f"{FILE}:functions"},
    "tasks": {"reference": f"{FILE}:TASKS"},
    "folds": {"reference": f"{FILE}:TASKS", "overrides": {"train.folds": 2}},
    "lanes": {"reference": f"{FILE}:TASKS", "overrides": {"train.lanes": 2}},
}
AT_ONCE = ("folds", "lanes")  # which go on in the process, so that no fresh worker can help
LIBRARIES = {"matplotlib": "matplotlib", "pandas": "pandas", "scikit": "sklearn", "XGBoost": "xgboost"}
LIBRARIES |= {"the threads of Arrow": "pyarrow", "Keras": "keras", "torch's opt_einsum": "opt_einsum"}
Seen = Mapping[str, str]


def _run(directory: Path, kind: str, *, quiet: bool) -> Seen:
    record = directory / ("quiet" if quiet else "loud")
    record.mkdir()
    asked = KINDS[kind]
    overrides = {"record": str(record), "quiet": quiet} | asked.get("overrides", {})
    home, request = Home(directory / f"{record.name}.home"), {**asked, "overrides": overrides}
    drive(home, Local(1), trials=len(NAMES) + 1, **request)
    return {file.name: file.read_text() for file in record.iterdir()}


@pytest.fixture(scope="session")
def seen(tmp_path_factory) -> Callable[[str], tuple[Seen, Seen]]:
    """Gives what trials of a kind see where none changes anything, and where each changes a part."""

    @cache
    def of(kind: str) -> tuple[Seen, Seen]:
        directory = tmp_path_factory.mktemp(kind)
        return _run(directory, kind, quiet=True), _run(directory, kind, quiet=False)

    return of


def test_each_part_of_the_table_is_changed_by_a_trial_of_this_test():
    assert [
        entry.name for entry in ENTRIES if entry.name not in ("torch's default tensor type", "torch's GPU")
    ] == NAMES


def _cases() -> list[Any]:
    return [
        pytest.param(kind, name, marks=() if kind == "functions" else pytest.mark.slow)
        for kind in KINDS
        for name in NAMES
        if kind not in AT_ONCE or name not in study.UNDONE_BY_A_FRESH_WORKER
        if kind != "lanes" or name != "torch's compiled code"  # which lanes share
    ]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("kind", "name"), _cases())
def test_a_trial_sees_nothing_of_what_another_one_has_changed(seen, kind, name):
    library = next((library for begin, library in LIBRARIES.items() if name.startswith(begin)), "torch")
    if find_spec(library) is None:
        pytest.skip(f"runs where {library} is installed")
    number = NAMES.index(name)
    quiet, loud = seen(kind)
    assert loud[f"seen-{number}"] == quiet[f"seen-{number}"]
    if kind == "functions":
        assert loud[f"changed-{number}"] != quiet[f"seen-{number}"], "a change that changes nothing shows nothing"


@pytest.mark.usefixtures("process")
def test_what_cannot_be_undone_inline_is_said_once(seen, tmp_path):
    """Inline there is no fresh worker: a sentence names what later trials see, and how they would not."""
    from hpo.analysis.results.progress import Progress
    from hpo.clock import SystemClock
    from hpo.ledger import Ledger

    home = Home(tmp_path / "home")
    record = tmp_path / "record"
    record.mkdir()
    number = NAMES.index("torch's modes")
    overrides = {"record": str(record), "turn": number}
    request = {"reference": f"{FILE}:functions", "overrides": overrides}
    with kept() as process:
        drive(home, Inline(), trials=2, **request)
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    assert "torch's modes" in process.lasting
    said = [*Progress(Ledger(home.storage), "functions", SystemClock()).remarks()]
    assert len(said) == 1 and "trial 0 changed torch's modes" in said[0] and "--executor local" in said[0]


RATIO = """
import json
from time import process_time

import numpy, pandas, torch, yaml

from trainer.runtime.process_state import kept


def keep():
    with kept():
        pass


def spent(run):
    begun = process_time()
    run()
    return process_time() - begun


numbers = [*range(10_000)]
times = [(spent(keep), spent(lambda: json.dumps(numbers))) for _ in range(100)]
keeping, writing = (min(column) for column in zip(*times))
print(keeping / writing)
"""


def test_restoring_what_has_not_changed_costs_a_trial_nothing():
    """About twice what it takes to write ten thousand numbers as JSON, half a millisecond on an EPYC.

    The cost grows with the modules and loggers of the process, so a process of its own is measured.
    """
    ratio = subprocess.run([sys.executable, "-c", RATIO], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert float(ratio) < 3.5


def test_what_an_import_sets_stays_and_what_the_trial_sets_goes(tmp_path, monkeypatch):
    import os

    (tmp_path / "sets_on_import.py").write_text("import os, sys; os.environ['BY_IMPORT'] = 'a'; sys.path.append('by')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("BY_IMPORT", raising=False)
    path, finders = [*sys.path], [*sys.meta_path]
    with kept() as process:
        os.environ["BY_TRIAL"] = "b"
        sys.path.insert(0, "trial")
        import sets_on_import  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert (os.environ.get("BY_IMPORT"), os.environ.get("BY_TRIAL"), sys.path) == ("a", None, [*path, "by"])
    assert process.lasting == []
    assert sys.meta_path == finders
    del os.environ["BY_IMPORT"]
    sys.path[:] = path


def test_an_import_that_changes_how_numbers_come_about_lasts(tmp_path, monkeypatch):
    (tmp_path / "doubles.py").write_text("import torch; torch.set_default_dtype(torch.float64)")
    monkeypatch.syspath_prepend(tmp_path)
    with kept() as outer:
        with kept() as process:
            import doubles  # noqa: F401  # pyright: ignore[reportMissingImports]
        assert process.lasting == ["torch's default dtype"]
        assert torch.get_default_dtype() == torch.float64, "a later trial that imports it again has it too"
    torch.set_default_dtype(torch.float32)
    assert outer.lasting == process.lasting
