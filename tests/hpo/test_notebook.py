"""Studies in a real notebook kernel: a function of a cell, shown while it trains, stopped, resumed, looked at."""

from __future__ import annotations

import json
import re
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
