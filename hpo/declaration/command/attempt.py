"""Runs one attempt at a trial by a command: the program, and its exchange with the trial."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpo.client import ANSWERS, REPORTS, TRIAL
from hpo.declaration.command import placeholders
from hpo.declaration.command.command import Command
from hpo.declaration.command.output import Output
from hpo.declaration.command.program import Program, ending, from_outside
from hpo.declaration.command.reports import Lines, Reports, Said
from hpo.declaration.function_trial import Trial
from trainer.errors import CheckpointError, Fenced, TrainerError
from trainer.quote import in_one_line, shortened
from trainer.redaction import redacted
from trainer.report import LoopReporter, Outcome

_OWN = "HPO_"  # prefix of the platform's variables; a program gets only its own
_SHORTEST, _LONGEST = 0.002, 0.1  # seconds between looks at the program's reports
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "DefaultCPUAllocator: can't allocate")


class Attempt:
    """One run of the program, and its exchange with the trial."""

    def __init__(self, command: Command, trial: Trial, reporter: LoopReporter, directory: Path, output: Path) -> None:
        self._command = command
        self._trial, self._reporter, self._directory, self._output = trial, reporter, directory, output
        self._answers = directory / "answers.jsonl"
        self._fault = ""  # why the program was ended, if that is its own fault
        self._leaving = False
        self._end_at: float | None = None  # when it is ended by the next stronger means
        self._asked_to_end = False
        self._begun = self._heard_at = time.monotonic()

    def run(self) -> Outcome:
        trial, command = self._trial, self._command
        resumed = trial.resume()  # raises Ended if an earlier attempt was told to end
        self._stands = {"epoch": trial.epoch, "step": trial.step} if resumed else {}
        reports = self._directory / "reports.jsonl"
        for file in (reports, self._answers):
            file.touch()
        checkpoint = resumed or self._directory / "resumed"
        checkpoint.mkdir(exist_ok=True)
        values = self._values(checkpoint)
        arguments = placeholders.filled(
            [*command.words, *(command.resume if resumed else ())], values, dict(trial.params)
        )
        if command.output:
            self._channel: Reports | Output = Output(Lines(self._output), command.output, command.several)
        else:
            self._channel = Reports(Lines(reports))
        environ = self._environ(values, reports, resumed is not None)
        self._ran = shortened(in_one_line(redacted(shlex.join(arguments))), 500)
        with Program(arguments, command.directory, environ, self._output) as program:
            code = self._follow(program)
        return self._outcome(code, *program.last_words())

    # --- The program's inputs

    def _values(self, checkpoint: Path) -> dict[str, Any]:
        trial = self._trial
        paths = {"python": sys.executable, "checkpoint": str(checkpoint), "directory": str(trial.directory)}
        counts = {name: getattr(trial, name) for name in ("seed", "number", "epoch", "step", "num_epochs")}
        return dict(trial.params) | paths | counts

    def _environ(self, values: Mapping[str, object], reports: Path, resumed: bool) -> dict[str, str]:
        """Returns the worker's environment without the platform's own variables, such as the ledger's password."""
        trial, command = self._trial, self._command
        inputs = {name: values[name] for name in placeholders.OWN_PLACEHOLDERS if name != "python"}
        inputs |= {"params": dict(trial.params), "resumed": resumed, "steps_per_epoch": command.steps_per_epoch}
        file = self._directory / "trial.json"
        file.write_text(json.dumps(inputs, indent=1), encoding="utf-8")
        environ = {TRIAL: str(file)}
        environ |= {
            f"{_OWN}PARAM_{path.replace('.', '__')}": placeholders.as_text(value)
            for path, value in trial.params.items()
        }
        environ |= {
            f"{_OWN}{name.upper()}": placeholders.as_text(inputs[name])
            for name in placeholders.OWN_PLACEHOLDERS
            if inputs.get(name) is not None
        }
        if not command.output:
            environ |= {REPORTS: str(reports), ANSWERS: str(self._answers)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        declared = {name: placeholders.filled([value], values, {})[0] for name, value in command.environ.items()}
        return inherited | {"PYTHONUNBUFFERED": "1"} | environ | declared

    # --- While it runs

    def _follow(self, program: Program) -> int:
        """Follows the program until it ends, ending it if it must; returns its exit code."""
        while (code := program.code()) is None:
            self._listen()
            self._hurry(program)
            quiet = time.monotonic() - self._heard_at
            time.sleep(min(max(quiet / 20, _SHORTEST), _LONGEST))
        self._listen(code)
        return code

    def _listen(self, code: int | None = None) -> None:
        try:
            for report in self._channel.new(code):
                if not self._over:
                    self._hear(report)
                if report.id is not None or self._channel.answered:
                    self._answer(report)
        except (Fenced, CheckpointError):
            raise
        except TrainerError as error:
            raise TrainerError(f"{self._command.program}: {error}") from error

    @property
    def _over(self) -> bool:
        """Returns whether further reports are ignored."""
        return self._trial.ended is not None or bool(self._fault)

    def _hear(self, said: Said) -> None:
        trial, began = self._trial, time.monotonic()
        positions = {"epoch": said.epoch, "step": said.step}
        if any((position := positions[key]) is not None and position <= at for key, at in self._stands.items()):
            self._heard_at = began
            return  # reports up to the checkpoint that it went on from still count
        if said.tags is not None:
            self._tag(said.tags)
            if said.metrics is None:
                return  # a line with only tags
        if said.checkpoint is not None:
            trial.save(self._files(said.checkpoint))
        trial.report(said.epoch, said.metrics, step=said.step)
        self._heard_at = time.monotonic()
        self._begun += self._heard_at - began  # the report may have waited for other trials
        if trial.ended:
            self._end_at = self._heard_at + (self._command.grace if self._channel.answered else 0.0)

    def _tag(self, given: object) -> None:
        if not isinstance(given, dict):
            raise TrainerError(f"tags {given!r:.80} are no names with values: give such as {{'team': 'vision'}}.")
        for key, value in given.items():
            self._trial.tag(key, value)

    def _files(self, given: object) -> Any:
        if isinstance(given, str):
            return self._command.directory / given
        if isinstance(given, dict) and all(isinstance(path, str) for path in given.values()):
            return {name: self._command.directory / path for name, path in given.items()}
        raise TrainerError(f"checkpoint {given!r:.80} is neither a path nor names with paths: give such as 'out'.")

    def _answer(self, said: Said) -> None:
        answer = {"id": said.id, "epoch": said.epoch, "step": said.step, "stop": self._over}
        with self._answers.open("ab", buffering=0) as file:
            file.write((json.dumps(answer) + "\n").encode())

    def _hurry(self, program: Program) -> None:
        """Asks a program to end that has run too long or must leave, and kills it if it was asked before."""
        now, command = time.monotonic(), self._command
        if self._end_at is None:
            if self._reporter.preempted:
                self._leaving, self._end_at = True, now + command.grace  # until then its next report is its last
            elif command.timeout is not None and now - self._begun > command.timeout:
                self._fault = f"has run for {command.timeout:g} s, its timeout, and not ended"
            elif command.silence is not None and now - self._heard_at > command.silence:
                self._fault = f"has reported nothing for {command.silence:g} s, its silence"
            if self._fault:
                self._end_at = now
        if self._end_at is not None and now >= self._end_at:
            (program.kill if self._asked_to_end else program.ask_to_end)()
            self._asked_to_end, self._end_at = True, now + command.grace

    # --- The result

    def _outcome(self, code: int, said: str, trace: str) -> Outcome:
        trial, command, at = self._trial, self._command, (self._trial.step, self._trial.epoch)
        last = f"; last: {said or 'nothing, it has printed nothing'}; run as: {self._ran}"
        kept = f"{last} (its whole output is the artifact {self._output.name})."
        if self._fault:
            raise TrainerError(f"{command.program} {self._fault}: raise that in {command.file.name}, or see why{kept}")
        if trial.ended or (self._leaving and (self._asked_to_end or from_outside(code))):
            return Outcome(trial.ended or "preempted", *at)
        error = f"{command.program} {ending(code)}{kept}"
        if (kind := command.exit_codes.get(code)) is not None:
            return Outcome(kind, *at, error="" if kind == "complete" else error)
        if from_outside(code):
            return Outcome("lost", *at, error=error)
        if code != 0:
            no_memory = any(word in said for word in _OUT_OF_MEMORY)
            return Outcome("out_of_memory" if no_memory else "user_error", *at, error=error, traceback=trace)
        if not trial.reported:
            raise TrainerError(self._unreported(last))
        return Outcome("complete", *at)

    def _unreported(self, last: str) -> str:
        metrics = ", ".join(f"'{metric}': ..." for metric in self._command.metrics)
        how = f"call trial.report(epoch, {{{metrics}}}) of hpo.client in it, or name patterns in output"
        if self._command.output:
            how = f"correct the patterns in output ({', '.join(self._command.output)}), all of which have to be found"
        return f"{self._command.program} ended without a report: {how}{last}."
