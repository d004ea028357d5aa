"""Trains a trial by a command: parameters in, reports and files out, stopped and resumed like any other trial."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpo.declaration.command import host_checks
from hpo.declaration.command.attempt import Attempt
from hpo.declaration.command.command import Command
from hpo.declaration.function_trial import SCRATCH, Ended, Trial, hand_over_files
from hpo.declaration.loading import source_parts
from trainer.files import scratch
from trainer.report import LoopReporter, Outcome

if TYPE_CHECKING:
    from trainer.checkpoint.store import CheckpointStore


class CommandTask:
    """The task of a study that a file declares; each such study has its own class."""

    command: ClassVar[Command]

    number = 0  # set by the worker
    shared: Path  # set by the worker

    def __init__(self, config: object) -> None:
        self.config = config

    # --- Identity

    @classmethod
    def file(cls) -> Path:
        return cls.command.file

    @classmethod
    def source(cls) -> str:
        """Returns the meaning of the study's file, which identifies the study."""
        return cls.command.meaning

    @classmethod
    def code(cls) -> dict[str, Path]:
        """Returns label -> path of the files that the command names, and of the modules that they import from their
        directory."""
        sources: dict[str, Path] = {}
        for path in [*cls.command.files(), *cls.command.code]:
            label = os.path.relpath(path, cls.command.file.parent)
            parts = source_parts(path) if path.suffix == ".py" else {"": path}
            sources |= {label if part == "" else f"{part} beside {label}": source for part, source in parts.items()}
        return sources

    @classmethod
    def check_ready(cls) -> None:
        """Raises StudyError if the command cannot run here: its program, directory, script or module is missing."""
        host_checks.check(cls.command)

    # --- An attempt

    def fit(self, reporter: LoopReporter, checkpoints: CheckpointStore) -> Outcome:
        """Runs the command; returns how the trial has ended."""
        checkpoints.sweep()  # removes saves that were never committed
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
        """Returns the file for this attempt's output, which outlives a killed worker."""
        of_study = self.shared / "output" / checkpoints.directory.parent.name
        path = of_study / checkpoints.directory.name / f"output.f{checkpoints.fence}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path
