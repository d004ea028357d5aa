"""Studies in a real notebook kernel: a function of a cell, shown while it trains, stopped, resumed, looked at."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

DECLARED = """
import asyncio, json
import hpo

@hpo.study(space={"x": hpo.Float(-1.0, 1.0)}, minimize="loss", num_epochs=3)
def parabola(trial):
    import time
    if saved := trial.resume():
        assert json.loads((saved / "state.json").read_text()) == trial.epoch
    for epoch in range(trial.epoch + 1, 4):
        time.sleep(PAUSE)
        state = trial.directory / "state.json"
        state.write_text(json.dumps(epoch))
        trial.save(state)
        if trial.report(epoch, {"loss": trial.params.x ** 2 / epoch}):
            return
"""
TRIALS = 6


@dataclass
class Output:
    """What a cell came to: the text it wrote, the pages it showed, those that took another's place, and its error."""

    text: str = ""
    pages: list[dict[str, Any]] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)
    error: str = ""


class Kernel:
    """A kernel as a notebook has it."""

    def __init__(self, directory: Path) -> None:
        self._manager = KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=str(directory))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=240)

    def run(self, code: str, each: Callable[[Output], None] = lambda output: None) -> Output:
        """A cell's output; `each` is called whenever there is more of it."""
        asked, output, deadline = self._client.execute(code), Output(), time.monotonic() + 240
        while True:
            message = self._client.get_iopub_msg(timeout=deadline - time.monotonic())
            content = message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return output
            if message["msg_type"] == "stream":
                output.text += content["text"]
            elif message["msg_type"] in ("display_data", "execute_result"):
                output.pages.append(content["data"])
            elif message["msg_type"] == "update_display_data":
                output.updates.append(content["data"].get("text/html", ""))
            elif message["msg_type"] == "error":
                output.error = f"{content['ename']}: {content['evalue']}"
            each(output)

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory, process) -> Iterator[Kernel]:
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    declared = made.run(DECLARED)
    assert not declared.error
    yield made
    made.close()


def test_a_cell_is_stopped_and_a_later_one_ends_as_if_it_was_not(kernel, tmp_path):
    """By the stop button, after trials have ended; what ended is kept, within the loop that the kernel runs."""
    home, whole = str(tmp_path / "home"), str(tmp_path / "whole")
    stopped: list[int] = []

    def stop(output: Output) -> None:
        if not stopped and any(re.search("complete", page) for page in output.updates):
            stopped.append(len(output.updates))
            kernel.interrupt()

    begun = kernel.run(
        f"PAUSE = 0.4\nassert asyncio.get_running_loop().is_running()\n"
        f"found = hpo.run(parabola, trials={TRIALS}, home={home!r})\n"
        "print(json.dumps([found.state, found.status().trials]))",
        stop,
    )
    assert not begun.error and stopped
    assert "stopping: trials are saved" in begun.text + json.dumps(begun.pages)
    live = [page for page in begun.updates if page]
    assert "parabola" in live[0] and "trial" in live[0] and "loss" in live[0], "the table, in place of the last one"
    assert begun.updates[-1] == "", "which is taken away"
    state, trials = json.loads(begun.text.splitlines()[-1])
    assert state == "interrupted" and 1 <= trials["complete"] < TRIALS
    again = kernel.run(
        f"PAUSE = 0.0\nagain = hpo.resume(home={home!r}, progress=False)\n"
        f"whole = hpo.run(parabola, trials={TRIALS}, home={whole!r}, progress=False)\n"
        "print(again.state, again.digest == whole.digest)"
    )
    assert not again.error and again.text.split() == ["complete", "True"]
    assert not again.updates and not again.pages, "progress=False shows nothing"
    shown = kernel.run("again").pages[0]
    assert shown["text/plain"].startswith("parabola") and shown["text/html"].count("<tr") == 1 + TRIALS
    assert 'alt="history"' in shown["text/html"] and "data:image/png;base64," in shown["text/html"]


def test_workers_are_answered_in_a_sentence(kernel, tmp_path):
    found = kernel.run(f"hpo.run(parabola, trials=2, workers=2, home={str(tmp_path / 'home')!r})")
    assert found.error == (
        "UserError: study 'parabola' is defined in a notebook, which other processes cannot import: write it to a file "
        "and give hpo.run('FILE.py:parabola'), or leave workers and executor out."
    )
    assert not (tmp_path / "home").exists()


def test_an_edited_cell_is_a_new_version_and_the_earlier_one_goes_on(kernel, tmp_path):
    """What a study has learnt by one code stays apart from another's; the code, not the name, tells them apart."""
    home = repr(str(tmp_path / "home"))
    edited = DECLARED.replace("trial.params.x ** 2 / epoch", "1 + trial.params.x ** 2 / epoch")
    run = f"PAUSE = 0.0\nfound = hpo.run(parabola, trials=TRIALS, home={home}, progress=False)\nprint(found.name)"
    runs = []
    for cell, trials in ((DECLARED, 2), (edited, 2), (edited, 3), (DECLARED, 3)):
        assert not kernel.run(cell).error
        runs.append(kernel.run(run.replace("TRIALS", str(trials))))
        assert not runs[-1].error, runs[-1].error
    names = [one.text.splitlines()[-1].split()[0] for one in runs]
    assert names == ["parabola", "parabola.2", "parabola.2", "parabola"]
    notice = (
        "the code of parabola is not that of study 'parabola', so this is a new study, 'parabola.2': to go on with "
        "'parabola', run its earlier cell again, or give name='parabola' and allow_drift=True."
    )
    assert [notice in one.text for one in runs] == [False, True, False, False]
    studies = kernel.run(
        f"print([hpo.open(name, home={home}).status().trials['complete'] for name in ('parabola', 'parabola.2')])"
    )
    assert studies.text.strip() == "[3, 3]"
    kernel.run(edited)
    refused = kernel.run(run.replace("TRIALS", "4").replace("trials=4", "trials=4, name='parabola'"))
    assert "DriftError" in refused.error, "a name that is given is that of one study, as for files"
    kernel.run(DECLARED)


def test_an_edit_of_any_field_of_the_declaration_is_a_new_version(kernel, tmp_path):
    """The fields stand in another cell, so the text above the function does not show the edit."""
    home = repr(str(tmp_path / "home"))
    fields = "SPACE, GOAL, REST = {'x': hpo.Float(-1.0, 1.0)}, {'minimize': 'loss'}, {}"
    cell = """
@hpo.study(space=SPACE, **GOAL, **REST)
def bowl(trial):
    return trial.params.x ** 2
"""
    edits = {
        "space": ("1.0, 1.0", "2.0, 1.0"),
        "objectives": ("'minimize'", "'maximize'"),
        "strategy": ("{}", "{'strategy': 'median'}"),
        "sampler": ("{}", "{'sampler': 'random'}"),
        "configuration": ("{}", "{'constants': {'y': 1}}"),
        "constraints": ("{}", "{'constraints': [hpo.Constraint('loss', upper=9.0)]}"),
        "rules": ("{}", "{'rules': ['x <= 2']}"),
        "steps_per_epoch": ("{}", "{'steps_per_epoch': 3}"),
    }
    run = f"found = hpo.run(bowl, trials=2, home={home}, progress=False)\nprint(found.name)"
    names: list[str] = []
    for before, after in (("", ""), *edits.values(), ("", "")):
        ran = kernel.run(f"{fields.replace(before, after) if before else fields}\n{cell}\n{run}")
        assert not ran.error, ran.error
        names.append(ran.text.splitlines()[-1])
        if before:
            field, earlier = list(edits)[len(names) - 2], f"bowl.{len(names) - 1}".removesuffix(".1")
            assert re.search(rf"^the .*\b{field}\b.* of bowl", ran.text), ran.text
            assert f"go on with {earlier!r}, run its earlier cell again" in ran.text
    assert names == ["bowl", *(f"bowl.{number}" for number in range(2, len(edits) + 2)), "bowl"]


def test_an_edit_of_a_class_in_a_cell_is_a_new_version(kernel, tmp_path):
    home = repr(str(tmp_path / "home"))
    cell = """
from hpo import Float, Objective, Study
from trainer.config.fields import Frozen

class Config(Frozen):
    x: float = 0.0

class Loop:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        from trainer.report import Outcome
        reporter.report(1, {"loss": self.config.x ** 2}, epoch=1)
        return Outcome("complete", 1, 1)

loop = Study("loop", Config(), Loop, {"x": Float(-1.0, 1.0)}, [Objective("loss", "minimize")])
"""
    run = f"print(hpo.run(loop, trials=1, home={home}, progress=False).name)"
    names = []
    for written in (cell, cell.replace("x ** 2", "x ** 4"), cell):
        ran = kernel.run(written + run)
        assert not ran.error, ran.error
        names.append(ran.text.splitlines()[-1])
    assert names == ["loop", "loop.2", "loop"]


def test_messages_name_the_cell_and_the_version_that_can_be_run(kernel, tmp_path):
    """The line that repeats what was learned runs as it is printed; another process names the version that it is asked
    for."""
    home = str(tmp_path / "home")
    cell = """
@hpo.study(space={"x": hpo.Float(-1.0, 1.0)}, minimize="loss")
def dish(trial):
    return trial.params.x ** 2
"""
    run = f"found = hpo.run(dish, trials=4, learn_from='auto', home={home!r}, progress=False)\nprint(found.name)"
    assert not kernel.run(cell + run).error
    learned = kernel.run(cell.replace("** 2", "** 4") + run)
    again = re.search(r"`(hpo\.run\(.*?\))` repeats it", learned.text)
    assert again, learned
    assert again[1].startswith("hpo.run(dish, ") and learned.text.splitlines()[-1] == "dish.2"
    repeated = kernel.run(f"again = {again[1]}\nprint([*again.trials()['params.x']] == [*found.trials()['params.x']])")
    assert not repeated.error and repeated.text.splitlines()[-1] == "True", repeated.error
    refused = kernel.run(f"hpo.run(dish, trials=5, name='dish', home={home!r})")
    assert "start another study with `hpo.run(dish, name='NAME')`" in refused.error
    elsewhere = f"import hpo; hpo.resume('dish.2', home={home!r})"
    resumed = subprocess.run([sys.executable, "-c", elsewhere], capture_output=True, text=True)
    assert resumed.stderr.splitlines()[-1].endswith(
        "study 'dish.2' is defined in a notebook, which no other process can import: run the cells that declared dish "
        "when 'dish.2' began, then `hpo.run(dish)` goes on with it there."
    )
