"""What a study's file says of its command."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.report import OutcomeKind


@dataclass(frozen=True)
class Command:
    """A command as its file declares it; times are in seconds.

    file         that it was read from
    words        the program and its arguments, with places
    resume       arguments that are added where the trial goes on from a checkpoint
    environ      variables of the environment, with places
    directory    the working directory
    code         further files that decide what is trained
    output       name of a metric, epoch or step -> the pattern that finds it in the program's output
    timeout      for which an attempt may run, waiting for others apart
    silence      for which it may report nothing
    grace        from the word to stop to SIGTERM, and from that to SIGKILL
    exit_codes   exit code -> what a trial that ends by it has come to
    metrics      those that the study judges by
    steps_per_epoch  of a program that counts steps
    meaning      the file's content, by which one study is told from another
    """

    file: Path
    words: Sequence[str]
    directory: Path
    resume: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    code: Sequence[Path] = ()
    output: Mapping[str, re.Pattern[str]] = field(default_factory=dict[str, re.Pattern[str]])
    timeout: float | None = None
    silence: float | None = None
    grace: float = 10.0
    exit_codes: Mapping[int, OutcomeKind] = field(default_factory=dict[int, OutcomeKind])
    metrics: Sequence[str] = ()
    steps_per_epoch: int | None = None
    meaning: str = ""

    @property
    def program(self) -> str:
        """What errors call it: its script, if it has one, which says more than the interpreter."""
        files = self.files()
        return files[0].name if files else Path(self.words[0]).name.strip("{}")

    def files(self) -> list[Path]:
        """The files that its words name; of the first word only a script that lies beside, not an interpreter."""
        beside = self.words[1:] if os.path.isabs(self.words[0]) or os.sep not in self.words[0] else self.words
        named = [self.directory / word for word in beside if "{" not in word and "\0" not in word]
        return [path for path in named if path.is_file()]
