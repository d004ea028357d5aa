"""Implements `hpo diagnose`, which finds faults of a trial or a configuration."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from hpo.analysis.results.trial import detail, kept_checkpoint
from hpo.analysis.training.single_process import for_one_process
from hpo.declaration.references import load
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.search_preset import as_new
from hpo.declaration.study import Study
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger import queries
from hpo.ledger.claims import changes_of
from hpo.ledger.database.json import plain
from hpo.ledger.views import trial as trial_queries
from hpo.space.config import apply
from hpo.storage import artifacts, locations
from trainer.checkpoint.location import DISK, Disk
from trainer.diagnose import curves, targets
from trainer.finding import Finding, unmeasured

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home
    from trainer.diagnose.profile import Cost
    from trainer.diagnose.trial import Examined

PROFILED = 5  # optimizer steps in a profile
TRACE, FINDINGS = "trace.json.gz", "findings.json"
_ORDER = (
    "gradient flow",
    "update ratio",
    "dead units",
    "loss landscape",
    "data loading",
    *curves.CHECKS,
    *targets.CHECKS,
)
_CURVES = ("train/loss", "val/loss", "time/data_share", *targets.REPORTED.values())


@dataclass(frozen=True)
class Subject:
    """The subject of a diagnosis: a configuration of a study or, for a trial, also its checkpoint and its reports.

    curves   `curves[name][epoch]`, the reports by epoch
    error    why the trial failed or is infeasible
    claim    the id of the trial and the fence it had; None for a configuration
    place    the place of the checkpoint
    sha256   the digest of the checkpoint's manifest
    """

    title: str
    study: Study
    config: Any
    checkpoint: Path | None = None
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    error: str | None = None
    claim: tuple[int, int] | None = None
    location: Disk = DISK
    sha256: str | None = None

    @property
    def of_trial(self) -> bool:
        return self.claim is not None

    @property
    def losses(self) -> tuple[list[int], list[float], list[float]]:
        """Returns the epochs that have reported both losses, and their training and validation loss."""
        train, validation = (self.curves.get(key, {}) for key in _CURVES[:2])
        epochs = sorted(train.keys() & validation)
        return epochs, [train[epoch] for epoch in epochs], [validation[epoch] for epoch in epochs]


@dataclass(frozen=True)
class Diagnosis:
    """A diagnosis; `files` maps names to pictures, the trace and the findings, which exist while it is open."""

    subject: Subject
    findings: list[Finding]
    seen: Examined | None
    files: dict[str, Path]

    def facts(self) -> dict[str, Any]:
        """Returns JSON values, except for floats that are not finite."""
        seen = self.seen
        body: dict[str, Any] = {"of": self.subject.title, "findings": [asdict(entry) for entry in self.findings]}
        body |= {"error": self.subject.error or None}
        body |= {key: getattr(seen, key, None) for key in ("step", "epoch", "lr")}
        body |= {key: [asdict(entry) for entry in getattr(seen, key, ())] for key in ("layers", "costs")}
        return body


def of_configuration(reference: str, overrides: Mapping[str, object]) -> Subject:
    """Returns the study's own configuration under `overrides`."""
    study = as_new(load(reference), overrides)
    return Subject(study.name, study, for_one_process(study.config))


def of_trial(ledger: Ledger, home: Home, name: str, number: int) -> Subject:
    """Returns a trial from the ledger: its configuration and its best checkpoint still kept, else the newest."""
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        trial = detail(connection, home, name, number)
        claim = trial_queries.held(connection, row.id, number)
        changes = changes_of(connection, claim[0])
        rows = list(queries.curves(connection, row.id, _CURVES, [number]))
    study = ResolvedStudy.stored(row.spec.json).study
    config = for_one_process(apply(study.rebuild(trial["config"], trial["config_hash"]), changes))
    kept = kept_checkpoint(trial)
    by_name: dict[str, dict[int, float]] = {}
    for _, key, _, epoch, value in rows:
        if epoch is not None:
            by_name.setdefault(key, {})[epoch] = value
    checkpoint = home.checkpoints(name, number) / Path(kept["path"]).name if kept else None
    location, sha256 = locations.of(home, row), kept["sha256"] if kept else None
    error = trial["error"] and f"{trial['state']}: {trial['error']}"
    return Subject(f"{name}, trial {number}", study, config, checkpoint, by_name, error, claim, location, sha256)


@dataclass(frozen=True)
class Look:
    """The extent of a diagnosis: `steps` optimizer steps, and a landscape of `points` by `points`, 0 for none."""

    steps: int
    points: int
    profile: bool
    pictures: bool

    def __post_init__(self) -> None:
        if self.points and (self.points < 5 or self.points % 2 == 0):
            raise UserError(
                f"{option('points', self.points)}: give an odd number from 5, so that the model is one, or 0 for none."
            )


@contextmanager
def diagnosis(subject: Subject, look: Look) -> Iterator[Diagnosis]:
    """Examines `subject`; its files exist while the block runs."""
    from trainer.diagnose import figures

    if look.pictures:
        figures.figure("")  # raises before the training if pictures cannot be drawn
    with tempfile.TemporaryDirectory() as directory:
        seen, findings = _examined(subject, look, Path(directory) / TRACE)
        findings |= {finding.check: finding for finding in _reported(subject)}
        checks = [*_ORDER, *(check for check in findings if check not in _ORDER)]  # the task's own come last
        diagnosed = Diagnosis(subject, [findings[check] for check in checks], seen, {})
        diagnosed.files[FINDINGS] = Path(directory) / FINDINGS
        diagnosed.files[FINDINGS].write_text(json.dumps(plain(diagnosed.facts()), indent=2) + "\n", encoding="utf-8")
        for name, drawn in _pictures(subject, seen) if look.pictures else ():
            diagnosed.files[name] = Path(directory) / name
            figures.save(drawn, diagnosed.files[name])
        if (Path(directory) / TRACE).is_file():
            diagnosed.files[TRACE] = Path(directory) / TRACE
        yield diagnosed


def _examined(subject: Subject, look: Look, trace: Path) -> tuple[Examined | None, dict[str, Finding]]:
    """Returns what an examination of the model shows, if it can be examined here, and the findings by check."""
    from trainer.diagnose.trial import examine

    if subject.study.trains_itself:
        why = f"study {subject.study.name!r} trains in a loop of its own, which cannot be stepped through"
        if not subject.of_trial:
            raise UserError(f"{why}: name a trial, to judge what it has reported.")
        return None, {check: unmeasured(check, why) for check in _ORDER}
    if subject.of_trial and subject.checkpoint is None:
        return None, {check: unmeasured(check, "no checkpoint of the trial is kept") for check in _ORDER}
    checkpoint = subject.checkpoint
    with nullcontext() if checkpoint is None else subject.location.opened(checkpoint, subject.sha256) as directory:
        seen = examine(
            subject.study.task_class()(subject.config),
            subject.config.train,
            directory,
            shown="" if checkpoint is None else subject.location.shown(checkpoint),
            steps=look.steps,
            points=look.points,
            trace=trace if look.profile else None,
            profile_steps=PROFILED,
        )
    return seen, {finding.check: finding for finding in seen.findings}


def _reported(subject: Subject) -> list[Finding]:
    """Returns the findings from the trial's own reports."""
    if not subject.of_trial:
        checks = (*curves.CHECKS, *targets.CHECKS)
        return [unmeasured(check, "nothing was reported: name a trial") for check in checks]
    by_epoch = subject.curves
    findings = targets.findings({key: [values[epoch] for epoch in sorted(values)] for key, values in by_epoch.items()})
    if missing := [key for key in _CURVES[:2] if key not in by_epoch]:
        return findings + [unmeasured(check, f"no {' and no '.join(missing)} was reported") for check in curves.CHECKS]
    epochs, train, validation = subject.losses
    findings += curves.findings(train, validation, epochs)
    if shares := by_epoch.get("time/data_share"):
        from trainer.diagnose.trial import loading

        findings.append(loading(fmean(shares.values()), subject.config.train))
    return findings


def _pictures(subject: Subject, seen: Examined | None) -> Iterator[tuple[str, Any]]:
    from trainer.diagnose import pictures

    title = subject.title
    if seen is not None:
        title = f"{subject.title}, step {seen.step}"
        if seen.layers:
            yield "gradient_flow.png", pictures.flow(title, seen.layers)
        if seen.landscape is not None and np.isfinite(seen.landscape.losses).any():
            yield "landscape.png", pictures.landscape(title, seen.landscape)
            yield "landscape_lines.png", pictures.lines(title, seen.landscape)
    epochs, train, validation = subject.losses
    if any(map(math.isfinite, validation)):
        best = epochs[curves.best(validation)]
        yield "curves.png", pictures.curves(subject.title, epochs, train, validation, best)


def describe(found: Diagnosis) -> str:
    """Returns each finding with its figure and, below, its advice, then the most expensive operations."""
    seen, lines = found.seen, [found.subject.title]
    if seen is not None:
        at = f"the checkpoint of step {seen.step} (epoch {seen.epoch})" if seen.step else "an untrained model"
        lines[0] += f": {at}, trained on at a learning rate of {seen.lr:.3g}"
    if found.subject.error:
        lines.append(f"  {found.subject.error}")
    width = max(len(finding.check) for finding in found.findings)
    state = max(len(finding.verdict) for finding in found.findings)
    for finding in found.findings:
        lines.append(f"  {finding.check:<{width}}  {finding.verdict:<{state}}  {finding.figure}")
        if finding.advice:
            lines += textwrap.wrap(
                f"-> {finding.advice}", 110, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 7)
            )
    return "\n".join([*lines, *(costs(seen.costs) if seen is not None and seen.costs else [])])


def costs(found: list[Cost]) -> list[str]:
    """Returns a table of the most expensive operations."""
    width = max(len(cost.name[:60]) for cost in found)
    rows = [
        f"  {cost.name[:60]:<{width}}  {cost.calls / PROFILED:>7.5g}  {cost.ms:>9.3f}  {cost.share:>6.1%}"
        for cost in found
    ]
    return [
        f"  {'operation':<{width}}  {'calls':>7}  {'ms':>9}  {'share':>6}   (of a step, each without what it calls)",
        *rows,
    ]


def save(found: Diagnosis, directory: Path) -> None:
    """Writes the findings and the files into `directory`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in found.files.items():
            shutil.copyfile(path, directory / name)
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}): name another directory.") from error


@dataclass(frozen=True)
class Recorder:
    """Stores diagnoses with a trial's files, each replacing the previous one, and sends them to MLflow."""

    ledger: Ledger
    home: Home
    name: str
    number: int
    tracking_uri: str | None

    def record(self, found: Diagnosis) -> str:
        """Stores the diagnosis; returns a sentence about where it is now."""
        from hpo.tracking import mirror_process

        claim, root = found.subject.claim, self.home.files(self.name, self.number)
        location = found.subject.location
        assert claim is not None, "a trial's"
        files = {f"diagnosis/{name}": path for name, path in found.files.items()}
        try:
            artifacts.attach(self.ledger, root, *claim, files, location)
        except OSError as error:
            why = error.strerror or error
            raise UserError(
                f"{location.shown(root)} cannot be written ({why}): {option('print_only')} records nothing."
            ) from error
        sent = mirror_process.send(self.ledger, self.home, self.name, self.tracking_uri) or "its MLflow run shows them."
        return f"left with the trial: files/diagnosis ({', '.join(found.files)}); {sent}"
