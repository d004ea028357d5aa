"""Trains a trial by a command: parameters in, reports and files out, stopped and resumed as any other trial."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpo.declaration.command.attempt import Attempt
from hpo.declaration.command.command import Command
from hpo.declaration.function_trial import SCRATCH, Ended, Trial, hand_over_files
from hpo.declaration.loading import source_parts
from hpo.errors import StudyError
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
        """Raise StudyError where the command cannot run here: no such program, directory or file."""
        command, where = cls.command, cls.command.file
        if not command.directory.is_dir():
            raise StudyError(
                f"{where}: directory={str(command.directory)!r} is no directory: make it, or name another."
            )
        for path in command.code:
            if not path.exists():
                raise StudyError(f"{where}: code names {path}, which is not there: correct its path.")
        program = command.words[0].replace("{python}", sys.executable)
        if "{" in program:
            return  # which one it is depends on the trial
        named = str(command.directory / program) if os.sep in program else program
        if shutil.which(named, path=command.environ.get("PATH")) is None:
            raise StudyError(
                f"{where}: command: there is no program {program!r} here that can be run: correct its name, or write "
                "{python} for the Python that runs hpo."
            )

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
