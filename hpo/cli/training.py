"""Commands that look at training in this process: schedule, lr-find, batch-find, plan, diagnose."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli import completion, options
from hpo.cli.facts import notes, print_json
from hpo.cli.options import (
    MOST,
    ConfigOption,
    HomeOption,
    JsonOption,
    KnownStudyOption,
    OverrideOption,
    StorageOption,
    TrackingOption,
)
from hpo.cli.targets import PICTURES, ForceOption, SaveOption, target, to_option
from hpo.terminal import print, rewrite

if TYPE_CHECKING:
    from pathlib import Path

    from hpo.analysis.training.diagnose import Look, Recorder, Subject

app = typer.Typer()


@app.command()
def schedule(
    study: KnownStudyOption,
    override: OverrideOption = None,
    config: ConfigOption = None,
    steps_per_epoch: Annotated[
        int | None, typer.Option("--steps-per-epoch", min=1, help="Instead of counting them in the study's data.")
    ] = None,
    to: Annotated[str | None, to_option("FILE.png|.pdf|.svg", "Draw a picture instead.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show the learning rate over the steps of a run. `-o train.schedule.name=wsd` shows another schedule."""
    from hpo.analysis.training.schedule import curve, describe, draw
    from hpo.storage.lookup import declaration

    path = target(to, save, endings=PICTURES, force=force)
    found = curve(*declaration(study, home, storage, options.overrides(config, override)), steps_per_epoch)
    if path:
        draw(found, path)
    if as_json:
        print_json(found)
    else:
        print(f"{found.settings}: drawn in {path}" if path else describe(found))


@app.command("lr-find")
def lr_find(
    study: KnownStudyOption,
    override: OverrideOption = None,
    config: ConfigOption = None,
    low: Annotated[float, typer.Option("--low", help="The first learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option("--high", help="The last one.")] = 10.0,
    steps: Annotated[int, typer.Option("--steps", min=20, max=100_000, help="Optimizer steps between them.")] = 100,
    to: Annotated[str | None, to_option("FILE.png|.pdf|.svg", "Draw a picture too.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Find a learning rate by a range test. It rises from step to step, to see where the loss falls fastest."""
    from hpo.analysis.training import lr_find as tests
    from hpo.storage.lookup import declaration

    path = target(to, save, endings=PICTURES, force=force)
    of = declaration(study, home, storage, options.overrides(config, override))
    found = tests.lr_find(*of, low, high, steps)
    print_json(found) if as_json else print(tests.describe(found))
    if path:
        tests.draw(found, f"{study}: learning-rate range test", path)
        with notes(as_json):
            print(f"drawn in {path}")


@app.command()
def diagnose(
    trial: Annotated[
        int | None,
        typer.Argument(
            help="A trial's number; without one, --study's own configuration.",
            min=0,
            max=MOST,
            autocompletion=completion.trials,
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study", help="The study's name; without a trial, FILE.py[:NAME] too.", autocompletion=completion.known
        ),
    ] = None,
    override: OverrideOption = None,
    config: ConfigOption = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100_000, help="Optimizer steps to measure.")] = 20,
    points: Annotated[
        int, typer.Option("--points", min=0, max=201, help="Of the loss landscape, along each direction; 0: none.")
    ] = 13,
    profile: Annotated[bool, typer.Option("--profile", help="Profile five steps more, with a Chrome trace.")] = False,
    print_only: Annotated[bool, typer.Option("--print-only", help="Draw and record nothing.")] = False,
    to: Annotated[str | None, to_option("DIRECTORY", "Write all files there too.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Find what is wrong with a training, and what to do.

    It looks at gradients, updates, dead units, landscape, data loading, fit and plateau. A trial's diagnosis is
    left with its files and shown in its MLflow run.
    """
    from hpo.analysis.training import diagnose as doctor
    from hpo.errors import UserError
    from hpo.storage.lookup import declaration, open_study

    given = options.overrides(config, override)
    look = doctor.Look(steps=steps, points=points, profile=profile, pictures=not print_only)
    path = target(to, save, directory=True, force=force)
    if profile and not path and (trial is None or print_only):
        raise UserError("--profile writes a trace: name a directory for it by --to, or a trial to leave it with.")
    if trial is None:
        if study is None:
            raise UserError("give a trial's number, or by --study a study whose own configuration is meant.")
        _show(doctor.of_configuration(*declaration(study, home, storage, given)), look, path, as_json)
        return
    if given:
        raise UserError("a trial is what it was: leave out -o and --config, or its number.")
    ledger, name, at = open_study(home, storage, study)
    recorder = None if print_only else doctor.Recorder(ledger, at, name, trial, tracking_uri)
    _show(doctor.of_trial(ledger, at, name, trial), look, path, as_json, recorder)


def _show(subject: Subject, look: Look, path: Path | None, as_json: bool, recorder: Recorder | None = None) -> None:
    from hpo.analysis.training import diagnose as doctor

    with doctor.diagnosis(subject, look) as found:
        print_json(found.facts()) if as_json else print(doctor.describe(found))
        if path:
            doctor.save(found, path)
            print(f"written to {path}: {', '.join(found.files)}", file=sys.stderr)
        if recorder is not None:
            print(recorder.record(found), file=sys.stderr)


@app.command()
def plan(
    study: KnownStudyOption,
    memory: Annotated[str, typer.Option("--memory", help="Of the device: 6GB, 16GiB.")],
    override: OverrideOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show what of a study fits a memory, by the estimate. No device is needed, and no weights."""
    from hpo.analysis.training import memory_plan as plans
    from hpo.storage.lookup import declaration

    def told(known: int, count: int) -> None:
        if sys.stderr.isatty():
            text = f"of {known} of {count} configurations it is known whether they fit ..." if known < count else ""
            rewrite(text, sys.stderr)

    of = declaration(study, home, storage, options.overrides(config, override))
    found = plans.plan(*of, plans.size_of(memory), told)
    print_json(found) if as_json else print(plans.describe(found))


@app.command("batch-find")
def batch_find(
    study: KnownStudyOption,
    override: OverrideOption = None,
    config: ConfigOption = None,
    steps: Annotated[int, typer.Option("--steps", min=10, max=100_000, help="Optimizer steps to train.")] = 100,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Find a batch size by the noise of the gradients. What batches take of memory is shown too."""
    from hpo.analysis.training import batch_find as sizes
    from hpo.storage.lookup import declaration

    of = declaration(study, home, storage, options.overrides(config, override))
    found = sizes.batch_find(*of, steps)
    print_json(found) if as_json else print(sizes.describe(found))
