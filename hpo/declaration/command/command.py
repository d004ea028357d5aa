"""Holds the command of a study as its file declares it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import regex

from hpo.declaration.command import placeholders
from hpo.declaration.command.output import Several
from trainer.report import OutcomeKind

_READS_PARAMETERS = re.compile(rb"HPO_|\bhpo\b")  # by an environment variable, or hpo.client


@dataclass(frozen=True)
class Command:
    """A command as its file declares it; times are in seconds.

    file         the file that it was read from
    words        the program and its arguments, with placeholders
    resume       arguments that are added if the trial goes on from a checkpoint
    environ      environment variables, with placeholders
    directory    the working directory
    code         further files that decide what is trained
    output       name of a metric, epoch or step -> the pattern that finds it in the program's output
    several      which value counts if one epoch or step prints several of a metric
    timeout      the longest time of an attempt, not counting waits for other trials
    silence      the longest time without a report
    grace        from the request to stop to SIGTERM, and from that to SIGKILL
    exit_codes   exit code -> the outcome of a trial that ends with it
    metrics      those that the study is judged by
    steps_per_epoch  for a program that counts steps
    meaning      the digest of the file's content, which identifies the study
    """

    file: Path
    words: Sequence[str]
    directory: Path
    resume: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    code: Sequence[Path] = ()
    output: Mapping[str, regex.Pattern[str]] = field(default_factory=dict[str, regex.Pattern[str]])
    several: Several = "last"
    timeout: float | None = None
    silence: float | None = None
    grace: float = 10.0
    exit_codes: Mapping[int, OutcomeKind] = field(default_factory=dict[int, OutcomeKind])
    metrics: Sequence[str] = ()
    steps_per_epoch: int | None = None
    meaning: str = ""

    @property
    def program(self) -> str:
        """Returns the name of the program for errors: its script, if it has one, else the first word."""
        files = self.files()
        return files[0].name if files else Path(self.words[0]).name.strip("{}")

    def unseen(self, names: Sequence[str]) -> list[str]:
        """Returns the parameters that the program does not get.

        No placeholder passes them and, as far as its files show, the program does not read them from the environment.
        """
        for path in (*self.files(), *self.code):
            if path.is_file() and _READS_PARAMETERS.search(path.read_bytes()):
                return []
        placed = placeholders.used_names([*self.words, *self.resume, *self.environ.values()], names)
        return [name for name in names if name not in placed]

    def files(self) -> list[Path]:
        """Returns the files that its words name; the first word counts only if it is a script beside the file."""
        beside = self.words[1:] if os.path.isabs(self.words[0]) or os.sep not in self.words[0] else self.words
        named = [self.directory / word for word in beside if "{" not in word and "\0" not in word]
        return [path for path in named if path.is_file()]
