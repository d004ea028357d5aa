"""`hpo diagnose`: finds what is wrong with a trial or a configuration."""

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
from hpo.analysis.training.single_process import alone
from hpo.declaration.references import load
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import Study
from hpo.errors import UserError
from hpo.ledger import queries, trial_queries
from hpo.ledger.claims import changes_of
from hpo.ledger.json import plain
from hpo.space.config import apply
from hpo.storage import artifacts, locations
from trainer.checkpoint.location import DISK, Disk
from trainer.diagnose import curves, targets
from trainer.diagnose.finding import Finding, unmeasured

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home
    from trainer.diagnose.profile import Cost
    from trainer.diagnose.trial import Examined

PROFILED = 5  # steps
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
    """What is looked at: a configuration of a study, and of a trial also its checkpoint and what it has reported by
    epoch, as `curves[name][epoch]`; `error` is why it failed or is infeasible."""

    title: str
    study: Study
    config: Any
    checkpoint: Path | None = None
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    error: str | None = None
    held: tuple[int, int] | None = None  # of a trial: its id, and the fence that it had
    place: Disk = DISK  # of the checkpoint
    sha256: str | None = None  # of its manifest

    @property
    def of_trial(self) -> bool:
        return self.held is not None

    @property
    def losses(self) -> tuple[list[int], list[float], list[float]]:
        """The epochs that have reported both, and their training and validation loss."""
        train, validation = (self.curves.get(key, {}) for key in _CURVES[:2])
        epochs = sorted(train.keys() & validation)
        return epochs, [train[epoch] for epoch in epochs], [validation[epoch] for epoch in epochs]


@dataclass(frozen=True)
class Diagnosis:
    """`files` are the pictures, the trace and the findings by name, there while the diagnosis is open."""

    subject: Subject
    findings: list[Finding]
    seen: Examined | None
    files: dict[str, Path]

    def facts(self) -> dict[str, Any]:
        """JSON values, but for floats that are not finite."""
        seen = self.seen
        body: dict[str, Any] = {"of": self.subject.title, "findings": [asdict(one) for one in self.findings]}
        body |= {"error": self.subject.error or None}
        body |= {key: getattr(seen, key, None) for key in ("step", "epoch", "lr")}
        body |= {key: [asdict(one) for one in getattr(seen, key, ())] for key in ("layers", "costs")}
        return body


def of_configuration(reference: str, overrides: Mapping[str, Any]) -> Subject:
    """The study's own configuration under `overrides`."""
    study = load(reference).configure(overrides)
    return Subject(study.name, study, alone(study.config))


def of_trial(ledger: Ledger, home: Home, name: str, number: int) -> Subject:
    """A trial as the ledger has it: its configuration, its best checkpoint still kept, else the newest."""
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        trial = detail(connection, home, name, number)
        held = trial_queries.held(connection, row["id"], number)
        changes = changes_of(connection, held[0])
        rows = list(queries.curves(connection, row["id"], _CURVES, [number]))
    study = ResolvedStudy.stored(row["spec"]).study
    config = alone(apply(study.rebuild(trial["config"], trial["config_hash"]), changes))
    kept = kept_checkpoint(trial)
    found: dict[str, dict[int, float]] = {}
    for _, key, _, epoch, value in rows:
        if epoch is not None:
            found.setdefault(key, {})[epoch] = value
    checkpoint = home.checkpoints(name, number) / Path(kept["path"]).name if kept else None
    at, sha256 = locations.place(home, row), kept["sha256"] if kept else None
    error = trial["error"] and f"{trial['state']}: {trial['error']}"
    return Subject(f"{name}, trial {number}", study, config, checkpoint, found, error, held, at, sha256)


@dataclass(frozen=True)
class Look:
    """How to look: over so many optimizer steps, at a landscape of `points` by `points`, 0 for none."""

    steps: int
    points: int
    profile: bool
    pictures: bool

    def __post_init__(self) -> None:
        if self.points and (self.points < 5 or self.points % 2 == 0):
            raise UserError(
                f"--points {self.points}: give an odd number from 5, so that the model is one, or 0 for none."
            )


@contextmanager
def diagnosis(subject: Subject, look: Look) -> Iterator[Diagnosis]:
    """Look at `subject`; what files it makes lie in a directory that is there while the block runs."""
    from trainer.diagnose import figures

    if look.pictures:
        figures.figure("")  # where none can be drawn, that is said before anything is trained
    with tempfile.TemporaryDirectory() as directory:
        seen, found = _examined(subject, look, Path(directory) / TRACE)
        found |= {one.check: one for one in _reported(subject)}
        done = Diagnosis(subject, [found[check] for check in _ORDER], seen, {})
        done.files[FINDINGS] = Path(directory) / FINDINGS
        done.files[FINDINGS].write_text(json.dumps(plain(done.facts()), indent=2) + "\n", encoding="utf-8")
        for name, drawn in _pictures(subject, seen) if look.pictures else ():
            done.files[name] = Path(directory) / name
            figures.save(drawn, done.files[name])
        if (Path(directory) / TRACE).is_file():
            done.files[TRACE] = Path(directory) / TRACE
        yield done


def _examined(subject: Subject, look: Look, trace: Path) -> tuple[Examined | None, dict[str, Finding]]:
    """What was seen of the model, if it can be looked at here."""
    from trainer.diagnose.trial import examine

    if subject.study.trains_itself:
        why = f"study {subject.study.name!r} trains in a loop of its own, which cannot be stepped through"
        if not subject.of_trial:
            raise UserError(f"{why}: name a trial, to judge what it has reported.")
        return None, {check: unmeasured(check, why) for check in _ORDER}
    if subject.of_trial and subject.checkpoint is None:
        return None, {check: unmeasured(check, "no checkpoint of the trial is kept") for check in _ORDER}
    checkpoint = subject.checkpoint
    with nullcontext() if checkpoint is None else subject.place.opened(checkpoint, subject.sha256) as directory:
        seen = examine(
            subject.study.task_class()(subject.config),
            subject.config.train,
            directory,
            shown="" if checkpoint is None else subject.place.shown(checkpoint),
            steps=look.steps,
            points=look.points,
            trace=trace if look.profile else None,
            profile_steps=PROFILED,
        )
    return seen, {one.check: one for one in seen.findings}


def _reported(subject: Subject) -> list[Finding]:
    """What the trial's own reports say."""
    if not subject.of_trial:
        checks = (*curves.CHECKS, *targets.CHECKS)
        return [unmeasured(check, "nothing was reported: name a trial") for check in checks]
    by_epoch = subject.curves
    found = targets.findings({key: [values[epoch] for epoch in sorted(values)] for key, values in by_epoch.items()})
    if missing := [key for key in _CURVES[:2] if key not in by_epoch]:
        return found + [unmeasured(check, f"no {' and no '.join(missing)} was reported") for check in curves.CHECKS]
    epochs, train, validation = subject.losses
    found += curves.findings(train, validation, epochs)
    if shares := by_epoch.get("time/data_share"):
        from trainer.diagnose.trial import loading

        found.append(loading(fmean(shares.values()), subject.config.train))
    return found


def _pictures(subject: Subject, seen: Examined | None) -> Iterator[tuple[str, Any]]:
    from trainer.diagnose import pictures

    at = subject.title
    if seen is not None:
        at = f"{subject.title}, step {seen.step}"
        if seen.layers:
            yield "gradient_flow.png", pictures.flow(at, seen.layers)
        if seen.landscape is not None and np.isfinite(seen.landscape.losses).any():
            yield "landscape.png", pictures.landscape(at, seen.landscape)
            yield "landscape_lines.png", pictures.lines(at, seen.landscape)
    epochs, train, validation = subject.losses
    if any(map(math.isfinite, validation)):
        best = epochs[curves.best(validation)]
        yield "curves.png", pictures.curves(subject.title, epochs, train, validation, best)


def describe(found: Diagnosis) -> str:
    """Each finding with its figure and, below, its advice; the dearest operations."""
    seen, lines = found.seen, [found.subject.title]
    if seen is not None:
        at = f"the checkpoint of step {seen.step} (epoch {seen.epoch})" if seen.step else "an untrained model"
        lines[0] += f": {at}, trained on at a learning rate of {seen.lr:.3g}"
    if found.subject.error:
        lines.append(f"  {found.subject.error}")
    width = max(len(one.check) for one in found.findings)
    state = max(len(one.verdict) for one in found.findings)
    for one in found.findings:
        lines.append(f"  {one.check:<{width}}  {one.verdict:<{state}}  {one.figure}")
        if one.advice:
            lines += textwrap.wrap(
                f"-> {one.advice}", 110, initial_indent=" " * (width + 4), subsequent_indent=" " * (width + 7)
            )
    return "\n".join([*lines, *(costs(seen.costs) if seen is not None and seen.costs else [])])


def costs(found: list[Cost]) -> list[str]:
    """A table of the dearest operations."""
    width = max(len(one.name[:60]) for one in found)
    rows = [
        f"  {one.name[:60]:<{width}}  {one.calls / PROFILED:>7.5g}  {one.ms:>9.3f}  {one.share:>6.1%}" for one in found
    ]
    return [
        f"  {'operation':<{width}}  {'calls':>7}  {'ms':>9}  {'share':>6}   (of a step, each without what it calls)",
        *rows,
    ]


def save(found: Diagnosis, directory: Path) -> None:
    """Write the findings and the files into `directory`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in found.files.items():
            shutil.copyfile(path, directory / name)
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}): name another directory.") from error


@dataclass(frozen=True)
class Recorder:
    """Leaves diagnoses with a trial's files, each in place of the one before, and sends them to MLflow."""

    ledger: Ledger
    home: Home
    name: str
    number: int
    tracking_uri: str | None

    def record(self, found: Diagnosis) -> str:
        """In words, where it is now."""
        from hpo.tracking import mirror_process

        held, root, place = found.subject.held, self.home.files(self.name, self.number), found.subject.place
        assert held is not None, "a trial's"
        files = {f"diagnosis/{name}": path for name, path in found.files.items()}
        try:
            artifacts.attach(self.ledger, root, *held, files, place)
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{place.shown(root)} cannot be written ({why}): --print-only records nothing.") from error
        sent = mirror_process.send(self.ledger, self.home, self.name, self.tracking_uri) or "its MLflow run shows them."
        return f"left with the trial: files/diagnosis ({', '.join(found.files)}); {sent}"
