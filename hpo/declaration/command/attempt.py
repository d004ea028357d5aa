"""One attempt at a trial by a command: the program's run, and what passes between it and the trial."""

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
from hpo.declaration.command import words
from hpo.declaration.command.command import Command
from hpo.declaration.command.program import Program, ending, from_outside
from hpo.declaration.command.reports import Lines, Output, Reports, Said
from hpo.declaration.function_trial import Trial
from trainer.errors import CheckpointError, Fenced, TrainerError
from trainer.quote import in_one_line, shortened
from trainer.redaction import redacted
from trainer.report import Outcome, Reporter

_OWN = "HPO_"  # begins the names of the platform's variables, of which a program sees its own alone
_SHORTEST, _LONGEST = 0.002, 0.1  # seconds between two looks at what the program says
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "DefaultCPUAllocator: can't allocate")


class Attempt:
    """One run of the program, and what passes between it and the trial."""

    def __init__(self, command: Command, trial: Trial, reporter: Reporter, directory: Path, output: Path) -> None:
        self._command = command
        self._trial, self._reporter, self._directory, self._output = trial, reporter, directory, output
        self._answers = directory / "answers.jsonl"
        self._fault = ""  # why it was ended, where that is its own doing
        self._leaving = False
        self._end_at: float | None = None  # when the next, harder word to end is due
        self._asked = False
        self._begun = self._heard_at = time.monotonic()

    def run(self) -> Outcome:
        trial, command = self._trial, self._command
        resumed = trial.resume()  # which raises Ended where an attempt before this one was told to end
        self._stands = {"epoch": trial.epoch, "step": trial.step} if resumed else {}
        reports = self._directory / "reports.jsonl"
        for file in (reports, self._answers):
            file.touch()
        checkpoint = resumed or self._directory / "resumed"
        checkpoint.mkdir(exist_ok=True)
        values = self._values(checkpoint)
        arguments = words.filled([*command.words, *(command.resume if resumed else ())], values, dict(trial.params))
        if command.output:
            self._channel: Reports | Output = Output(Lines(self._output), command.output, trial.epoch)
        else:
            self._channel = Reports(Lines(reports))
        environ = self._environ(values, reports, resumed is not None)
        self._ran = shortened(in_one_line(redacted(shlex.join(arguments))), 500)
        with Program(arguments, command.directory, environ, self._output) as program:
            code = self._follow(program)
        return self._outcome(code, *program.last_words())

    # --- What the program is given

    def _values(self, checkpoint: Path) -> dict[str, Any]:
        trial = self._trial
        own = {"python": sys.executable, "checkpoint": str(checkpoint), "directory": str(trial.directory)}
        counts = {name: getattr(trial, name) for name in ("seed", "number", "epoch", "step", "num_epochs")}
        return dict(trial.params) | own | counts

    def _environ(self, values: Mapping[str, Any], reports: Path, resumed: bool) -> dict[str, str]:
        """The worker's environment without what is the platform's own, such as the ledger's password."""
        trial, command = self._trial, self._command
        told = {name: values[name] for name in words.OWN_PLACES if name != "python"}
        told |= {"params": dict(trial.params), "resumed": resumed, "steps_per_epoch": command.steps_per_epoch}
        file = self._directory / "trial.json"
        file.write_text(json.dumps(told, indent=1), encoding="utf-8")
        own = {TRIAL: str(file)}
        own |= {f"{_OWN}PARAM_{path.replace('.', '__')}": words.as_text(value) for path, value in trial.params.items()}
        own |= {
            f"{_OWN}{name.upper()}": words.as_text(told[name])
            for name in words.OWN_PLACES
            if told.get(name) is not None
        }
        if not command.output:
            own |= {REPORTS: str(reports), ANSWERS: str(self._answers)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        declared = {name: words.filled([value], values, {})[0] for name, value in command.environ.items()}
        return inherited | {"PYTHONUNBUFFERED": "1"} | own | declared

    # --- While it runs

    def _follow(self, program: Program) -> int:
        """Hear the program out, and have it end where it must; its exit code."""
        while (code := program.code()) is None:
            self._listen(ended=False)
            self._hurry(program)
            quiet = time.monotonic() - self._heard_at
            time.sleep(min(max(quiet / 20, _SHORTEST), _LONGEST))
        self._listen(ended=code == 0)
        return code

    def _listen(self, *, ended: bool) -> None:
        try:
            for said in self._channel.new(ended=ended):
                if not self._over:
                    self._hear(said)
                if said.id is not None or self._channel.answered:
                    self._answer(said)
        except (Fenced, CheckpointError):
            raise
        except TrainerError as error:
            raise TrainerError(f"{self._command.program}: {error}") from error

    @property
    def _over(self) -> bool:
        """Whether nothing more counts."""
        return self._trial.ended is not None or bool(self._fault)

    def _hear(self, said: Said) -> None:
        trial, began = self._trial, time.monotonic()
        places = {"epoch": said.epoch, "step": said.step}
        if any((place := places[key]) is not None and place <= at for key, at in self._stands.items()):
            self._heard_at = began
            return  # up to the checkpoint that it went on from, what was reported before it stands
        if said.tags is not None:
            self._tag(said.tags)
            if said.metrics is None:
                return  # a line of tags alone
        if said.checkpoint is not None:
            trial.save(self._files(said.checkpoint))
        trial.report(said.epoch, said.metrics, step=said.step)
        self._heard_at = time.monotonic()
        self._begun += self._heard_at - began  # others may have been waited for
        if trial.ended:
            self._end_at = self._heard_at + (self._command.grace if self._channel.answered else 0.0)

    def _tag(self, given: Any) -> None:
        if not isinstance(given, dict):
            raise TrainerError(f"tags {given!r:.80} are no names with values: give such as {{'team': 'vision'}}.")
        for key, value in given.items():
            self._trial.tag(key, value)

    def _files(self, given: Any) -> Any:
        if isinstance(given, str):
            return self._command.directory / given
        if isinstance(given, dict) and all(isinstance(one, str) for one in given.values()):
            return {name: self._command.directory / one for name, one in given.items()}
        raise TrainerError(f"checkpoint {given!r:.80} is neither a path nor names with paths: give such as 'out'.")

    def _answer(self, said: Said) -> None:
        answer = {"id": said.id, "epoch": said.epoch, "step": said.step, "stop": self._over}
        with self._answers.open("ab", buffering=0) as file:
            file.write((json.dumps(answer) + "\n").encode())

    def _hurry(self, program: Program) -> None:
        """Ask a program to end that has run for too long, or is to leave; and harder, where it was asked before."""
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
            (program.kill if self._asked else program.ask_to_end)()
            self._asked, self._end_at = True, now + command.grace

    # --- How it has ended

    def _outcome(self, code: int, said: str, trace: str) -> Outcome:
        trial, command, at = self._trial, self._command, (self._trial.step, self._trial.epoch)
        last = f"; last: {said or 'nothing, it has printed nothing'}; run as: {self._ran}"
        kept = f"{last} (its whole output is the artifact {self._output.name})."
        if self._fault:
            raise TrainerError(f"{command.program} {self._fault}: raise that in {command.file.name}, or see why{kept}")
        if trial.ended or (self._leaving and (self._asked or from_outside(code))):
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
        given = ", ".join(f"'{metric}': ..." for metric in self._command.metrics)
        how = f"call trial.report(epoch, {{{given}}}) of hpo.client in it, or name patterns in output"
        if self._command.output:
            how = f"correct the patterns in output ({', '.join(self._command.output)}), all of which have to be found"
        return f"{self._command.program} ended without a report: {how}{last}."
