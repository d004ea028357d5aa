"""Trains a trial by a command: parameters in, reports and files out, stopped and resumed as any other trial."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.declaration.command import ready
from hpo.declaration.command.attempt import Attempt
from hpo.declaration.command.command import Command
from hpo.declaration.function_trial import SCRATCH, Ended, Trial, hand_over_files
from hpo.declaration.loading import source_parts
from trainer.files import scratch
from trainer.report import Outcome, Reporter

if TYPE_CHECKING:
    from trainer.checkpoint.store import CheckpointStore


class CommandTask:
    """The task of a study that a file declares; each such study has a class of its own."""

    command: ClassVar[Command]

    number = 0  # set by the worker
    shared: Path  # set by the worker

    def __init__(self, config: Any) -> None:
        self.config = config

    # --- What it is

    @classmethod
    def file(cls) -> Path:
        return cls.command.file

    @classmethod
    def source(cls) -> str:
        """The meaning of the study's file, by which it is told from another one."""
        return cls.command.meaning

    @classmethod
    def code(cls) -> dict[str, Path]:
        """Label -> place of the files that the command names, and of what those of Python import from beside them."""
        found: dict[str, Path] = {}
        for path in [*cls.command.files(), *cls.command.code]:
            label = os.path.relpath(path, cls.command.file.parent)
            parts = source_parts(path) if path.suffix == ".py" else {"": path}
            found |= {label if part == "" else f"{part} beside {label}": place for part, place in parts.items()}
        return found

    @classmethod
    def check_ready(cls) -> None:
        """Raise StudyError where the command cannot run here: no such program, directory, script or module."""
        ready.check(cls.command)

    # --- An attempt

    def fit(self, reporter: Reporter, checkpoints: CheckpointStore) -> Outcome:
        """Run the command; how the trial has ended."""
        checkpoints.sweep()  # saves that were never committed
        with scratch.temporary(SCRATCH) as directory:
            trial = Trial(self.config, self.number, self.command.steps_per_epoch, reporter, checkpoints, directory)
            output = self._output(checkpoints)
            try:
                return Attempt(self.command, trial, reporter, directory, output).run()
            except Ended:
                return Outcome(trial.ended or "complete", trial.step, trial.epoch)
            finally:
                hand_over_files(trial.directory, reporter)
                for path in sorted(output.parent.iterdir()):  # those of killed workers too
                    reporter.artifact(path)
                    path.unlink()

    def _output(self, checkpoints: CheckpointStore) -> Path:
        """The file for this attempt's output, where it outlives a worker that is killed."""
        of_study = self.shared / "output" / checkpoints.directory.parent.name
        path = of_study / checkpoints.directory.name / f"output.f{checkpoints.fence}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path
