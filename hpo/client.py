"""The side of a program that a command's study runs: `from hpo.client import trial`.

It needs Python 3.8 and nothing else, so that this file may also be copied beside a script whose environment has no hpo.
Where no study runs the script, there are no parameters, reports are printed, and nobody says stop.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRIAL, REPORTS, ANSWERS = "HPO_TRIAL", "HPO_REPORTS", "HPO_ANSWERS"  # the environment's names of three files
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two looks at the answers


class Params(dict):
    """A trial's parameters and constants, by attribute (`params.lr`) or by key (`params["lr"]`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self) or "none, since no study runs this script: write params.get(name, default)"
            raise AttributeError(f"there is no parameter {name!r}: there are {known}.") from None


class Trial:
    """The trial that this program trains; as the Trial of a function that is a study.

    number       its number in its study, from 0
    params       its parameters and constants
    seed         for every random number: the same in each attempt at the trial
    num_epochs   the last epoch, as the study declares it; None where it does not
    epoch        the last one that was reported, or that the checkpoint is of; 0 at the beginning
    step         the same, in steps
    checkpoint   a directory: the files of the last checkpoint, or empty; kept is what `save` is given
    directory    an empty directory for files of its own, which become the trial's artifacts when the program ends
    runs         whether a study runs this program
    """

    def __init__(self) -> None:
        self.runs = TRIAL in os.environ
        given: dict[str, Any] = {}
        if self.runs:
            given = json.loads(Path(os.environ[TRIAL]).read_text(encoding="utf-8"))
        self.params = Params(given.get("params", {}))
        self.number: int = given.get("number", 0)
        self.seed: int = given.get("seed", 0)
        self.num_epochs: int | None = given.get("num_epochs")
        self.epoch: int = given.get("epoch", 0)
        self.step: int = given.get("step", 0)
        self.checkpoint = Path(given.get("checkpoint") or ".")
        self.directory = Path(given.get("directory") or ".")
        self._resumed: bool = given.get("resumed", False)
        self._each: int | None = given.get("steps_per_epoch")
        self._saved: Any = None
        self._stopped = False
        self._count = 0

    def resume(self) -> Path | None:
        """The directory with the files of the last checkpoint; None where the trial begins."""
        return self.checkpoint if self._resumed else None

    def save(self, files: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]) -> None:
        """Save files with the next report, as the trial's checkpoint: a directory, a file, or names with files.

        They are copied whole before that report is answered, and come back in `resume()`."""
        if isinstance(files, Mapping):
            self._saved = {name: os.path.abspath(path) for name, path in files.items()}
        else:
            self._saved = os.path.abspath(files)

    def tag(self, key: str, value: str | float | bool) -> None:
        """Give the trial a tag, in place of one of that name."""
        if REPORTS not in os.environ:
            print(f"tag: {key}={value}", flush=True)
            return
        with open(os.environ[REPORTS], "ab", buffering=0) as file:
            file.write((json.dumps({"tags": {key: value}}) + "\n").encode())

    def report(
        self, epoch: int | None = None, metrics: Mapping[str, Any] | None = None, *, step: int | None = None
    ) -> bool:
        """Report what an epoch came to, with what was saved since the last report; True: save nothing more and end.

        A program that counts steps gives `step` instead, and its study says how many make an epoch. Values given for an
        epoch once stand. Returns once the report is committed, which may have to wait for other trials.
        """
        if self._stopped:
            return True
        report: dict[str, Any] = {"metrics": {key: self._number(key, value) for key, value in (metrics or {}).items()}}
        report.update({key: int(value) for key, value in (("epoch", epoch), ("step", step)) if value is not None})
        self._note(epoch, step)
        if REPORTS not in os.environ:
            print("report: " + json.dumps(report), flush=True)
            self._saved = None
            return False
        self._count += 1
        report["id"] = f"{os.getpid()}-{self._count}"
        if self._saved is not None:
            report["checkpoint"], self._saved = self._saved, None
        line = (json.dumps(report) + "\n").encode()
        with open(os.environ[REPORTS], "ab", buffering=0) as file:
            file.write(line)
        self._stopped = self._answer(report["id"])
        return self._stopped

    @staticmethod
    def _number(key: Any, value: Any) -> float:
        if not isinstance(key, str) or isinstance(value, (str, bytes)):
            raise TypeError(f"metric {key!r} is {value!r}: name it by text, and give a float of its value.")
        return float(value)

    def _note(self, epoch: int | None, step: int | None) -> None:
        each = self._each or 1
        if epoch is not None:
            self.epoch, self.step = max(self.epoch, int(epoch)), max(self.step, int(epoch) * each)
        elif step is not None:
            closed = int(step) // self._each if self._each else 0
            self.epoch, self.step = max(self.epoch, closed), max(self.step, int(step))

    @staticmethod
    def _answer(report: str) -> bool:
        """Wait for the answer to a report: whether to stop. Whoever answers ends this program when it dies itself."""
        pause, path = _SHORTEST, os.environ[ANSWERS]
        while True:
            with open(path, "rb") as file:
                for line in file:
                    if line.endswith(b"\n") and (answer := json.loads(line)).get("id") == report:
                        return bool(answer["stop"])
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)


trial = Trial()
