"""Studies from Python: `run`, `resume`, `open` and what they give, against the commands and the ledger."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer.main
from places import HARNESS, ROOT
from sqlalchemy import select
from typer.testing import CliRunner

import hpo
from hpo.cli.main import app
from hpo.declaration.references import load
from hpo.errors import DriftError, UserError
from hpo.ledger import Ledger
from hpo.ledger.database.tables import events
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

STUDY = f"{HARNESS / 'function_study.py'}:tiny"
QUICK = {"executor": "inline", "progress": False, "overrides": {"pause": 0.0}}
SCRIPT = """
import hpo

@hpo.study(space={{"x": hpo.Float(-1.0, 1.0)}}, minimize="loss")
def parabola(trial):
    import time
    for epoch in range(1, 4):
        time.sleep({pause})
        if trial.report(epoch, {{"loss": trial.params.x ** 2 / epoch}}):
            return

{guard}
    found = hpo.run(parabola, trials={trials}, workers=2, home={home!r}, progress=False)
    print(found.state, found.digest)
"""
GUARD = 'if __name__ == "__main__":'


def command(*arguments: str, home: Path) -> str:
    ran = CliRunner().invoke(app, [*arguments, "--home", str(home)])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory, process):
    """A study of ten trials, the last four by a resume."""
    home = tmp_path_factory.mktemp("found") / "home"
    assert hpo.run(STUDY, trials=6, seed=1, home=home, **QUICK).state == "complete"
    return hpo.resume("tiny", trials=10, home=home, executor="inline", progress=False)


def options(name: str) -> set[str]:
    """Of a command, as Python would call them."""
    params = typer.main.get_command(app).commands[name].params  # type: ignore[attr-defined]
    several = {"-o": "overrides", "--alert": "alerts", "--tracker": "trackers", "--tag": "tags"}
    return {several.get(one.opts[0], one.opts[0].lstrip("-").replace("-", "_")) for one in params}


@pytest.mark.parametrize("name", ["run", "resume"])
def test_every_option_of_the_command_is_an_argument(name):
    of_the_command = options(name) - {"help", "json", "log_format", "declaration"}  # these are of the command line
    assert {*inspect.signature(getattr(hpo, name)).parameters} == of_the_command | {"progress"}


def test_the_handle_says_what_the_commands_say(found):
    assert found.best == json.loads(command("best", "--json", home=found.home))
    status = json.loads(command("status", "--json", home=found.home))
    assert (found.digest, found.status().trials) == (status["digest"], status["trials"])
    assert found.trial(3) == json.loads(command("show", "3", "--json", home=found.home))
    assert found.importance().keys() == {"lr", "momentum"} and sum(found.importance().values()) == pytest.approx(1.0)
    assert repr(found).startswith("tiny: complete, 10 of 10 trials ended; best: trial")


def test_trials_are_a_frame_of_what_each_came_to(found):
    frame = found.trials()
    assert [*frame.columns] == [
        *("number", "state", "value", "params.lr", "params.momentum", "metrics.train/error", "metrics.val/loss"),
        *("judged_epoch", "epoch", "step", "seconds", "reason", "checkpoint", "checkpoint_epoch"),
    ]
    assert [*frame["number"]] == [*range(10)]
    for row in frame.to_dict("records"):
        trial = found.trial(row["number"])
        assert row["state"] == trial["state"] and row["params.lr"] == trial["params"]["lr"]
        assert row["value"] == trial["values"]["val/loss"] == row["metrics.val/loss"]
        assert row["seconds"] == trial["seconds"] > 0
        assert Path(row["checkpoint"]).is_dir()
        assert row["checkpoint_epoch"] in [one["epoch"] for one in trial["checkpoints"] if one["state"] == "kept"]
        assert bool(row["reason"]) == (row["state"] == "pruned")
    assert {*frame["state"]} == {"complete", "pruned"}


def test_curves_are_a_frame_of_every_value(found):
    frame = found.curves("val/loss")
    for number, curve in frame.groupby("number"):
        assert [[*row] for row in curve[["step", "epoch", "value"]].itertuples(index=False)] == found.trial(number)[
            "curves"
        ]["val/loss"]
    pd.testing.assert_frame_equal(found.curves(), frame, obj="the first objective's, where none is named")
    with pytest.raises(UserError, match=r"study 'tiny' has reported 'val/los'; did you mean 'val/loss'"):
        found.curves("val/los")


def test_two_studies_are_compared_in_one_frame(found, tmp_path):
    other = hpo.run(STUDY, trials=2, name="other", home=tmp_path / "home", **QUICK)
    both = found.compare(other)
    assert isinstance(both, pd.DataFrame) and [*both["study"]] == ["tiny"] * 10 + ["other"] * 2


def test_its_pictures_are_plotly_figures_and_optuna_has_it_too(found):
    from plotly.graph_objects import Figure

    assert isinstance(found.plot("history"), Figure)
    assert len(found.to_optuna().trials) == 10
    with pytest.raises(UserError, match="plot 'histry' does not exist: choose of history"):
        found.plot("histry")
    assert "<table" in (shown := found._repr_html_()) and "tiny: complete" in shown
    assert 'src="http' not in shown, "a page that asks nothing of the network"


def test_a_model_is_loaded_in_eval_mode_with_its_weights(tmp_path):
    import torch

    small = {"train.num_epochs": 1, "model.num_layers": 1, "model.hidden_size": 16}
    ran = hpo.run("mlp", trials=1, home=tmp_path / "home", executor="inline", progress=False, overrides=small)
    model, again = ran.load_model(), ran.load_model(0)
    assert not model.training
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(UserError, match="study 'mlp' has no trial 7"):
        ran.load_model(7)


def test_a_function_has_no_model_that_anybody_else_knows(found):
    number = found.best["number"]
    lie = found.best["checkpoint"] or "the trial has saved no files: have the code call trial.save(files) before"
    with pytest.raises(UserError, match="study 'tiny' trains in a loop of its own, so only its code knows the") as said:
        found.load_model()
    assert lie in str(said.value)
    for words in (("soup",), ("soup", "--trial", str(number)), ("export", str(number), "--to", "model.safetensors")):
        ran = CliRunner().invoke(app, [*words, "--home", str(found._home.root)])
        assert ran.exit_code == 2 and "only its code knows the model" in ran.stderr, ran.output


def test_a_study_that_keeps_no_checkpoint_says_what_would_make_one(tmp_path):
    small = {"train.num_epochs": 1, "model.num_layers": 1, "train.checkpoint.every_epochs": None}
    ran = hpo.run("mlp", trials=1, home=tmp_path / "home", executor="inline", progress=False, overrides=small)
    with pytest.raises(UserError, match=r"keeps no checkpoint, since train\.checkpoint\.every_epochs and"):
        ran.load_model()
    told = CliRunner().invoke(app, ["soup", "--home", str(tmp_path / "home")]).stderr
    assert "-o train.checkpoint.every_epochs=1" in told and "train it again" not in told


def test_it_runs_within_a_running_event_loop(tmp_path):
    async def cell():
        return hpo.run(STUDY, trials=1, home=tmp_path / "home", **QUICK)

    assert asyncio.run(cell()).state == "complete"


def test_a_study_in_hand_is_the_study_of_its_file(tmp_path):
    by_name = hpo.run(STUDY, trials=3, seed=2, home=tmp_path / "a", **QUICK)
    in_hand = hpo.run(load(STUDY), trials=3, seed=2, home=tmp_path / "b", **QUICK)
    assert by_name.digest == in_hand.digest


EDITED = """import hpo

RATE = 1.0  {comment}


@hpo.study(space={{"x": hpo.Float(-1.0, 1.0)}}, minimize="loss")
def train(trial):
    \"\"\"{docstring}\"\"\"
    return {number} * RATE * trial.params.x ** 2
"""
AS_BEGUN = {"comment": "", "docstring": "A parabola.", "number": "1.0"}


def test_an_edit_of_a_file_that_changes_nothing_is_no_drift(tmp_path):
    """Comments and docstrings of the file that declares a function; a number in it is named with the file."""
    file, home = tmp_path / "train.py", tmp_path / "home"

    def run(trials: int, **edit: str) -> hpo.StudyHandle:
        file.write_text(EDITED.format(**AS_BEGUN | edit))
        return hpo.run(str(file), trials=trials, home=home, executor="inline", progress=False)

    run(1)
    run(2, comment="# of the parabola", docstring="A parabola,\n\n    and nothing else.")
    with pytest.raises(DriftError, match=rf"study 'train' is in the ledger already, and the code of {file} changed: "):
        run(3, number="2.0")
    found = run(3, comment="# as it was begun")
    assert found.status().trials["complete"] == 3
    with closing(Ledger(f"sqlite:///{home / 'ledger.db'}", create=False)) as ledger, ledger.read() as connection:
        assert not connection.execute(select(events).where(events.c.kind == "drift")).all()


def test_functions_of_one_name_in_two_files_are_two_studies(tmp_path):
    """Also while the first has no value yet, when an edit of its own file would begin it anew; a name tells them apart,
    and a file that has moved is the same study."""
    home, files = tmp_path / "home", [tmp_path / "a" / "train.py", tmp_path / "b" / "train.py"]
    for number, file in zip(("1.0", "2.0"), files, strict=True):
        file.parent.mkdir()
        file.write_text(EDITED.format(**AS_BEGUN | {"number": number}))
    again = {"home": home, "executor": "inline", "progress": False}
    begun = hpo.run(str(files[0]), trials=1, **again).digest
    both = rf"study 'train' of this ledger is that of {files[0]}:train, and {files[1]}:train declares another one "
    with pytest.raises(
        DriftError, match=rf"{both}\(the code of {files[1]} changed\): .* by name='NAME', or .* allow_drift"
    ):
        hpo.run(str(files[1]), trials=2, **again)
    other = hpo.run(load(str(files[1])), trials=1, name="twice", **again)
    assert other.name == "twice" and other.digest != hpo.open("train", home=home).digest == begun
    files[0].rename(files[0].with_name("moved.py"))
    assert hpo.run(str(files[0].with_name("moved.py")), trials=2, **again).status().trials["complete"] == 2


def test_options_of_a_study_of_the_same_name_are_not_blamed_on_another(tmp_path):
    """The stored options of the first do not fit the second, whose dimensions have other names."""
    home, files = tmp_path / "home", [tmp_path / "a" / "train.py", tmp_path / "b" / "train.py"]
    for file, text in zip(files, (EDITED, EDITED.replace("x", "z")), strict=True):
        file.parent.mkdir()
        file.write_text(text.format(**AS_BEGUN))
    again = {"home": home, "executor": "inline", "progress": False}
    hpo.run(str(files[0]), trials=1, enqueue=[{"x": 0.5}], **again)
    with pytest.raises(
        DriftError, match=rf"is that of {files[0]}:train, and {files[1]}:train declares another one: give"
    ):
        hpo.run(str(files[1]), trials=2, **again)


def script(tmp_path: Path, *, guard: str = GUARD, pause: float = 0.0, trials: int = 4) -> list[str]:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(guard=guard, pause=pause, trials=trials, home=str(tmp_path / "home")))
    return [sys.executable, str(file)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def ended(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, **options)


def test_a_script_runs_the_study_it_declares_in_other_processes(tmp_path):
    ran = ended(script(tmp_path))
    assert ran.returncode == 0, ran.stderr
    state, digest = ran.stdout.split()
    assert state == "complete" and digest == hpo.open(home=tmp_path / "home").digest


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path):
    ran = subprocess.run(
        script(tmp_path, guard="if True:"), env=environment(), capture_output=True, text=True, timeout=200
    )
    assert ran.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`.' in ran.stderr


def test_a_resume_at_module_level_is_told_the_same(tmp_path):
    """Each import would resume the study, which imports its file, for ever."""
    words = script(tmp_path)
    assert ended(words).returncode == 0
    file = Path(words[-1])
    file.write_text(file.read_text().partition(GUARD)[0] + f"hpo.resume(home={str(tmp_path / 'home')!r}, trials=9)\n")
    ran = ended(words)
    assert ran.returncode != 0
    assert "hpo.resume is called while the study's file is imported" in ran.stderr


def test_ctrl_c_ends_a_script_gracefully_and_resume_goes_on(tmp_path):
    running = subprocess.Popen(
        script(tmp_path, pause=0.2, trials=6),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    home, deadline = tmp_path / "home", time.monotonic() + 120
    while not ((home / "ledger.db").exists() and _reported(home)):
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    output, error = running.communicate(timeout=120)
    assert running.returncode == 0 and output.startswith("interrupted "), error
    again = hpo.resume(home=home, progress=False)
    assert again.state == "complete"
    assert ended(script(other := _made(tmp_path / "other"), trials=6)).returncode == 0
    assert again.digest == hpo.open(home=other / "home").digest


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _reported(home: Path) -> bool:
    try:
        return hpo.open(home=home).status().epochs_trained > 0
    except Exception:
        return False


NOTEBOOK = """
import hpo

@hpo.study(space={{"x": hpo.Float(-1.0, 1.0)}}, minimize="loss")
def parabola(trial):
    return trial.params.x ** 2

try:
    hpo.run(parabola, trials=2, workers=2, home={home!r}, progress=False)
except hpo.errors.UserError as error:
    print(error)
print(hpo.run(parabola, trials=2, home={home!r}, progress=False).state)
print(hpo.resume(home={home!r}, trials=3, progress=False).status().trials["complete"])
print(hpo.resume(parabola, home={home!r}, trials=4, progress=False).status().trials["complete"])
print(hpo.open(parabola, home={home!r}).status().trials["complete"])
"""


def test_a_function_of_a_prompt_trains_in_its_process(tmp_path):
    """Which has no file, as a notebook's cell has none."""
    code = NOTEBOOK.format(home=str(tmp_path / "home")).replace("import hpo\n", "import hpo, hpo.errors\n", 1)
    ran = subprocess.run(
        [sys.executable, "-"], input=code, env=environment(), capture_output=True, text=True, timeout=200
    )
    refused, state, *counts = ran.stdout.splitlines()
    assert "is defined in a notebook, which other processes cannot import: write it to a file" in refused
    assert (state, *counts) == ("complete", "3", "4", "4"), ran.stderr
    with pytest.raises(UserError, match="defined in a notebook"):
        hpo.resume(home=tmp_path / "home", trials=5, progress=False)


def test_what_is_no_study_is_refused(tmp_path):
    def train(trial):
        pass

    with pytest.raises(UserError, match=r"train is not a study: put @hpo.study\(space=..., minimize=...\) above it"):
        hpo.run(train, trials=1, home=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="trials='six': give a whole number from 1"):
        hpo.run(STUDY, trials="six", home=tmp_path / "home")  # type: ignore[arg-type]
    with pytest.raises(
        UserError,
        match=r"is new: say how far it is to go, by trials=, epochs=, time=, target=, patience= or stop_when=\.",
    ):
        hpo.run(STUDY, home=Home.at(tmp_path / "home").root, progress=False)
