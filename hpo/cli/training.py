"""Holds the commands that examine training in this process: schedule, lr-find, batch-find, plan, diagnose."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli import completion, options
from hpo.cli.json_output import notes, print_json
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
        int | None,
        typer.Option(
            "--steps-per-epoch", min=1, help="Optimizer steps per epoch.  [default: counted in the study's data]"
        ),
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
    rates = curve(*declaration(study, home, storage, options.overrides(config, override)), steps_per_epoch)
    if path:
        draw(rates, path)
    if as_json:
        print_json(rates)
    else:
        print(f"{rates.settings}: drawn in {path}" if path else describe(rates))


@app.command("lr-find")
def lr_find(
    study: KnownStudyOption,
    override: OverrideOption = None,
    config: ConfigOption = None,
    low: Annotated[float, typer.Option("--low", help="First learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option("--high", help="Last learning rate.")] = 10.0,
    steps: Annotated[int, typer.Option("--steps", min=20, max=100_000, help="Number of optimizer steps.")] = 100,
    to: Annotated[str | None, to_option("FILE.png|.pdf|.svg", "Draw a picture too.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Find a learning rate by a range test. The rate rises from step to step, to see where the loss falls fastest."""
    from hpo.analysis.training import lr_find as tests
    from hpo.storage.lookup import declaration

    path = target(to, save, endings=PICTURES, force=force)
    declared = declaration(study, home, storage, options.overrides(config, override))
    range_test = tests.lr_find(*declared, low, high, steps)
    print_json(range_test) if as_json else print(tests.describe(range_test))
    if path:
        tests.draw(range_test, f"{study}: learning-rate range test", path)
        with notes(as_json):
            print(f"drawn in {path}")


@app.command()
def diagnose(
    trial: Annotated[
        int | None,
        typer.Argument(
            help="Number of a trial.  [default: the configuration of --study]",
            min=0,
            max=MOST,
            autocompletion=completion.trials,
        ),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option(
            "--study", help="The study's name; without a trial also FILE.py[:NAME].", autocompletion=completion.known
        ),
    ] = None,
    override: OverrideOption = None,
    config: ConfigOption = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=100_000, help="Number of optimizer steps to measure.")
    ] = 20,
    points: Annotated[
        int,
        typer.Option("--points", min=0, max=201, help="Points of the loss landscape in each direction; 0 draws none."),
    ] = 13,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile five more steps and write a Chrome trace.")
    ] = False,
    print_only: Annotated[bool, typer.Option("--print-only", help="Print only; draw and record nothing.")] = False,
    to: Annotated[str | None, to_option("DIRECTORY", "Write all files there too.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Find what is wrong with a training, and how to fix it.

    It looks at gradients, updates, dead units, landscape, data loading, fit and plateau. A trial's diagnosis is
    stored with its files and shown in its MLflow run.
    """
    from hpo.analysis.training import diagnose as doctor
    from hpo.errors import UserError
    from hpo.storage.lookup import declaration, open_study

    overrides = options.overrides(config, override)
    look = doctor.Look(steps=steps, points=points, profile=profile, pictures=not print_only)
    path = target(to, save, directory=True, force=force)
    if profile and not path and (trial is None or print_only):
        raise UserError("--profile writes a trace: name a directory for it by --to, or a trial to leave it with.")
    if trial is None:
        if study is None:
            raise UserError("give a trial's number, or by --study a study whose own configuration is meant.")
        _show(doctor.of_configuration(*declaration(study, home, storage, overrides)), look, path, as_json)
        return
    if overrides:
        raise UserError("a trial is what it was: leave out -o and --config, or its number.")
    ledger, name, study_home = open_study(home, storage, study)
    recorder = None if print_only else doctor.Recorder(ledger, study_home, name, trial, tracking_uri)
    _show(doctor.of_trial(ledger, study_home, name, trial), look, path, as_json, recorder)


def _show(subject: Subject, look: Look, path: Path | None, as_json: bool, recorder: Recorder | None = None) -> None:
    from hpo.analysis.training import diagnose as doctor

    with doctor.diagnosis(subject, look) as diagnosis:
        print_json(diagnosis.facts()) if as_json else print(doctor.describe(diagnosis))
        if path:
            doctor.save(diagnosis, path)
            print(f"written to {path}: {', '.join(diagnosis.files)}", file=sys.stderr)
        if recorder is not None:
            print(recorder.record(diagnosis), file=sys.stderr)


@app.command()
def plan(
    study: KnownStudyOption,
    memory: Annotated[str, typer.Option("--memory", help="Memory of the device, such as 6GB or 16GiB.")],
    override: OverrideOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show which configurations fit a memory, by estimate. Needs neither device nor weights."""
    from hpo.analysis.training import memory_plan as plans
    from hpo.storage.lookup import declaration

    def show_progress(known: int, count: int) -> None:
        if sys.stderr.isatty():
            text = f"of {known} of {count} configurations it is known whether they fit ..." if known < count else ""
            rewrite(text, sys.stderr)

    declared = declaration(study, home, storage, options.overrides(config, override))
    fits = plans.plan(*declared, plans.size_of(memory), show_progress)
    print_json(fits) if as_json else print(plans.describe(fits))


@app.command("batch-find")
def batch_find(
    study: KnownStudyOption,
    override: OverrideOption = None,
    config: ConfigOption = None,
    steps: Annotated[
        int, typer.Option("--steps", min=10, max=100_000, help="Number of optimizer steps to train.")
    ] = 100,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Find a batch size by the noise of the gradients. Also shows the memory of some batch sizes."""
    from hpo.analysis.training import batch_find as sizes
    from hpo.storage.lookup import declaration

    declared = declaration(study, home, storage, options.overrides(config, override))
    suggestion = sizes.batch_find(*declared, steps)
    print_json(suggestion) if as_json else print(sizes.describe(suggestion))
