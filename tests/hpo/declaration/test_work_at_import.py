"""A file that does its work while it is imported is refused in one sentence, with the fix."""

from __future__ import annotations

import argparse

import pytest

from hpo.declaration.loading import load_module
from hpo.errors import StudyError

STUDY = """
import hpo
@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss")
def train(trial):
    return trial.params.x
"""
GUARD = 'if __name__ == "__main__":'
OPTUNA = "import optuna\nstudy = optuna.create_study()\n"
REFUSED = {
    "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('data')\nparser.parse_args()\n": (
        ":4: the file reads a command line while it is imported"
    ),
    "import sys\nif sys.argv[3:] != [1]:\n    sys.exit('usage: me DATA.')\n": (
        ":3: SystemExit: usage: me DATA: the file leaves Python while it is imported"
    ),
    "raise SystemExit\n": ":1: SystemExit: the file leaves Python while it is imported",
    OPTUNA + "study.optimize(lambda trial: 0.0, n_trials=10**9)\n": (
        ":3: study.optimize() begins a search while the file is imported"
    ),
    OPTUNA + "def main():\n    for _ in range(2):\n        study.optimize(print)\nif True:\n    main()\n": (
        ":5: study.optimize() begins a search"
    ),
    "from hyperopt import fmin\nbest = fmin(print, {})\n": ":2: fmin() begins a search",
    "import asyncio\nraise asyncio.CancelledError('odd')\n": ":2: CancelledError: odd.",
}
TAKEN = {
    "guarded": OPTUNA + f"def main():\n    study.optimize(print)\n{GUARD}\n    main()\n",
    "declared alone": OPTUNA
    + "def main():\n    study.optimize(print)\nclass A:\n    run = lambda: study.optimize(print)\n",
    "another optimize": "class Graph:\n    def optimize(self): pass\nGraph().optimize()\n",
    "arguments that are its own": "import argparse\nargparse.ArgumentParser().parse_args([])\n",
    "arguments refused and caught": (
        "import argparse\ntry:\n    argparse.ArgumentParser().parse_args(['x'])\nexcept SystemExit:\n    pass\n"
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_work_at_import_is_refused_with_the_guard_that_it_lacks(tmp_path, capsys, text):
    file = tmp_path / "script.py"
    file.write_text(text + STUDY)
    with pytest.raises(StudyError) as refused:
        load_module(f"{file}:train")
    said = str(refused.value)
    assert said.startswith(f"{file}{REFUSED[text]}") and "\n" not in said
    assert GUARD in said or "CancelledError" in said
    assert capsys.readouterr() == ("", ""), "no usage of the study's is printed"


@pytest.mark.parametrize("text", TAKEN.values(), ids=TAKEN)
def test_a_file_that_only_declares_is_taken(tmp_path, text):
    file = tmp_path / "script.py"
    file.write_text(text + STUDY)
    before = argparse.ArgumentParser.error
    assert load_module(f"{file}:train")[0].train.name == "train"
    assert argparse.ArgumentParser.error is before
