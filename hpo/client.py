"""Connects a program to the study that runs it as a command: `from hpo.client import trial`.

It needs only Python 3.8, so this file may also be copied beside a script whose environment lacks hpo. If no study runs
the script, there are no parameters, reports are printed, and nothing asks it to stop.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TRIAL, REPORTS, ANSWERS = "HPO_TRIAL", "HPO_REPORTS", "HPO_ANSWERS"  # environment variables that name three files
_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between looks at the answers


class Params(dict):
    """A trial's parameters and constants, by attribute (`params.lr`) or by key (`params["lr"]`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(self) or "none, since no study runs this script: write params.get(name, default)"
            raise AttributeError(f"unknown parameter {name!r}; known: {known}.") from None


class Trial:
    """The trial that this program trains, with the interface of a training function's Trial.

    number       its number in its study, from 0
    params       its parameters and constants
    seed         seeds every random number: the same in each attempt at the trial
    num_epochs   the last epoch, as the study declares it; None if it does not
    epoch        the last one that was reported or saved; 0 at the beginning
    step         the same, in steps
    checkpoint   a directory: the files of the last checkpoint, or empty; `save` keeps files
    directory    an empty directory for other files, which become the trial's artifacts when the program ends
    runs         whether a study runs this program
    """

    def __init__(self) -> None:
        self.runs = TRIAL in os.environ
        declared: dict[str, Any] = {}
        if self.runs:
            declared = json.loads(Path(os.environ[TRIAL]).read_text(encoding="utf-8"))
        self.params = Params(declared.get("params", {}))
        self.number: int = declared.get("number", 0)
        self.seed: int = declared.get("seed", 0)
        self.num_epochs: int | None = declared.get("num_epochs")
        self.epoch: int = declared.get("epoch", 0)
        self.step: int = declared.get("step", 0)
        self.checkpoint = Path(declared.get("checkpoint") or ".")
        self.directory = Path(declared.get("directory") or ".")
        self._resumed: bool = declared.get("resumed", False)
        self._each: int | None = declared.get("steps_per_epoch")
        self._saved: Any = None
        self._stopped = False
        self._count = 0

    def resume(self) -> Path | None:
        """Returns the directory with the files of the last checkpoint; None if there is none."""
        return self.checkpoint if self._resumed else None

    def save(self, files: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]) -> None:
        """Saves files with the next report as the trial's checkpoint: a directory, a file, or names with files.

        They are copied before that report is answered, and `resume()` returns them.
        """
        if isinstance(files, Mapping):
            self._saved = {name: os.path.abspath(path) for name, path in files.items()}
        else:
            self._saved = os.path.abspath(files)

    def tag(self, key: str, value: str | float | bool) -> None:
        """Sets a tag of the trial."""
        if REPORTS not in os.environ:
            print(f"tag: {key}={value}", flush=True)
            return
        with open(os.environ[REPORTS], "ab", buffering=0) as file:
            file.write((json.dumps({"tags": {key: value}}) + "\n").encode())

    def report(
        self, epoch: int | None = None, metrics: Mapping[str, object] | None = None, *, step: int | None = None
    ) -> bool:
        """Reports the metrics of an epoch, and what was saved since the last report.

        Returns True if the program must end now, without saving more. A program that counts steps gives `step` instead;
        its study says how many make an epoch. Later values for the same epoch are ignored. Returns once the report is
        committed, which may have to wait for other trials.
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
    def _number(key: object, value: Any) -> float:
        if not isinstance(key, str) or isinstance(value, (str, bytes)):
            raise TypeError(f"metric {key!r} is {value!r}: name it by text, and give a float of its value.")
        return float(value)

    def _note(self, epoch: int | None, step: int | None) -> None:
        steps_per_epoch = self._each or 1
        if epoch is not None:
            self.epoch, self.step = max(self.epoch, int(epoch)), max(self.step, int(epoch) * steps_per_epoch)
        elif step is not None:
            closed = int(step) // self._each if self._each else 0
            self.epoch, self.step = max(self.epoch, closed), max(self.step, int(step))

    @staticmethod
    def _answer(report: str) -> bool:
        """Waits for the answer to a report; returns whether to stop.

        The answering process ends this program if it dies.
        """
        pause, path = _SHORTEST, os.environ[ANSWERS]
        while True:
            with open(path, "rb") as file:
                for line in file:
                    if line.endswith(b"\n") and (answer := json.loads(line)).get("id") == report:
                        return bool(answer["stop"])
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST)


trial = Trial()
