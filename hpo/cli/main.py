"""Defines `hpo` and its commands about a whole study: init, run, resume, status, best, show, compare.

Each imports what it needs when it runs: `hpo --help` must not wait for torch, MLflow or Optuna.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hpo import text
from hpo.cli import (
    alerts,
    backup,
    commands,
    follow_up,
    interchange,
    log,
    models,
    options,
    read_only,
    removal,
    results,
    tags,
    targets,
    tracking,
    training,
)
from hpo.cli import workers as cli_workers
from hpo.cli.driving import drive, preparing
from hpo.cli.json_output import print_json
from hpo.cli.options import (
    MOST,
    AlertOption,
    AllOption,
    BestTrialOption,
    BytesOption,
    CheckpointsOption,
    ConfigOption,
    ConfirmOption,
    CpusOption,
    DeclarationArgument,
    DeclarationOption,
    DriftOption,
    EnqueueOption,
    EpochsOption,
    ExecutorOption,
    FinishOption,
    GpusOption,
    HomeOption,
    JsonOption,
    LearnFromOption,
    OrderOption,
    OverrideOption,
    PatienceOption,
    SamplerOption,
    SchedulerOption,
    StopWhenOption,
    StorageOption,
    StrategyOption,
    StudyOption,
    TagOption,
    TargetOption,
    TimeOption,
    TrackerOption,
    TrackingOption,
    TrialArgument,
    TrialsOption,
    WarmStartOption,
    WindowOption,
    WorkersOption,
)
from hpo.cli.overview import ByHeading
from hpo.cli.service_options import LogFormatOption, OutageOption
from hpo.cli.targets import CsvOption, ForceOption, ParquetOption, SaveOption, to_option
from hpo.errors import UserError
from hpo.terminal import print

_NAMED_APART = ("declaration", "study", "home", "outage_wait", "log_format", "as_json")

app = typer.Typer(
    cls=commands.Commands,
    help="Hyperparameter search and experiment tracking for PyTorch.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from hpo.declaration.environment import release

        print(f"hpo {release()}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def init(name: Annotated[str, typer.Argument(help="Name of the study; the file is NAME.py.")]) -> None:
    """Write a study to start from, NAME.py. It runs unchanged; edit it freely."""
    from hpo.declaration.template import write

    file = write(name, Path.cwd()).name
    print(f"{file} is written: open it and change what is yours; as it is, it runs by")
    print(f"  {text.command(f'run --study {file} --trials 5')}")


@app.command(cls=ByHeading)
def run(
    declaration: DeclarationArgument = None,
    study: DeclarationOption = None,
    trials: TrialsOption = None,
    epochs: EpochsOption = None,
    time: TimeOption = None,
    target: TargetOption = None,
    patience: PatienceOption = None,
    stop_when: StopWhenOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the study.  [default: the declaration's name]")
    ] = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    cpus_per_worker: CpusOption = None,
    gpus_per_worker: GpusOption = None,
    scheduler: SchedulerOption = None,
    sampler: SamplerOption = None,
    strategy: StrategyOption = None,
    order: OrderOption = None,
    window: WindowOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the study.  [default: 0]")
    ] = None,
    tier: Annotated[
        int | None, typer.Option("--tier", min=1, help="Search only dimensions up to this tier.  [default: all]")
    ] = None,
    finish: FinishOption = None,
    confirm: ConfirmOption = None,
    enqueue: EnqueueOption = None,
    learn_from: LearnFromOption = None,
    warm_start: WarmStartOption = None,
    overrides: OverrideOption = None,
    config: ConfigOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    checkpoints: CheckpointsOption = None,
    max_bytes: BytesOption = None,
    tracking_uri: TrackingOption = None,
    trackers: TrackerOption = None,
    alerts: AlertOption = None,
    tags: TagOption = None,
    allow_drift: DriftOption = False,
    outage_wait: OutageOption = None,
    log_format: LogFormatOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Search until trials, epochs or time are used up. Continues an existing study."""
    settings = _options(locals())
    reference = options.declared(declaration, study)
    with preparing(executor) as prepared:
        from hpo.driver.request import request_of, waiting

        with waiting(outage_wait):
            drive(request_of(home, reference, **settings), prepared, as_json=as_json)


@app.command(cls=ByHeading)
def resume(
    study: StudyOption = None,
    trials: TrialsOption = None,
    epochs: EpochsOption = None,
    time: TimeOption = None,
    target: TargetOption = None,
    patience: PatienceOption = None,
    stop_when: StopWhenOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    cpus_per_worker: CpusOption = None,
    gpus_per_worker: GpusOption = None,
    scheduler: SchedulerOption = None,
    finish: FinishOption = None,
    confirm: ConfirmOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    max_bytes: BytesOption = None,
    tracking_uri: TrackingOption = None,
    trackers: TrackerOption = None,
    alerts: AlertOption = None,
    allow_drift: DriftOption = False,
    outage_wait: OutageOption = None,
    log_format: LogFormatOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Continue an interrupted study from its last checkpoints. A larger budget may be given."""
    settings = _options(locals())
    with preparing(executor) as prepared:
        from hpo.driver.request import request_of, waiting
        from hpo.storage.lookup import open_study

        with waiting(outage_wait):
            ledger, name, _ = open_study(home, storage, study, upgrade=True)
            ledger.close()
            drive(request_of(home, name=name, **settings), prepared, as_json=as_json)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a command by their names in Python."""
    return {name: value for name, value in given.items() if name not in _NAMED_APART}


@app.command()
def best(
    study: StudyOption = None,
    trial: BestTrialOption = None,
    as_json: JsonOption = False,
    to: Annotated[str | None, to_option("FILE.yaml", "Write its configuration for `--config`.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show the best trial, its checkpoint, and how to train it. With several objectives, shows the front."""
    from hpo.analysis.results.best import best_trials, chosen_best, describe_best, describe_front, save_overrides
    from hpo.analysis.results.status import removed_line
    from hpo.ledger import queries
    from hpo.storage.lookup import open_study

    path = targets.target(to, save, endings=(".yaml", ".yml"), force=force)
    ledger, name, study_home = open_study(home, storage, study)
    with ledger.read() as connection:
        front, removed = (
            best_trials(connection, study_home, name),
            removed_line(queries.status(connection, name).removed_cost),
        )
    several = len(front[0]["values"]) > 1
    if trial is None and not path and (len(front) > 1 or (several and as_json)):
        print_json(front) if as_json else print("\n".join(filter(None, [describe_front(front), removed])))
        return
    best_trial = chosen_best(front, trial)
    if path:
        save_overrides(best_trial["alone"], path)
        print(f"its configuration is written to {path}", file=sys.stderr)
    description = "\n".join(filter(None, [describe_best(best_trial, str(path) if path else None), removed]))
    print_json(best_trial) if as_json else print(description)


@app.command()
def show(
    number: TrialArgument,
    study: StudyOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show a trial in full: parameters, curves, files, error."""
    from hpo.analysis.results.trial import base_config, describe, detail
    from hpo.storage.lookup import open_study

    ledger, name, study_home = open_study(home, storage, study)
    with ledger.read() as connection:
        trial = detail(connection, study_home, name, number)
        if as_json:
            print_json(trial)
            return
        try:
            base: Any = "" if trial["imported"] else base_config(connection, name)
        except UserError as error:
            base = f"the study's own configuration cannot be read: {error}"
    print(describe(trial, base, every=every))


@app.command()
def compare(
    study: StudyOption = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, max=MOST, help="Show this many trials.  [default: 10, in files all]"),
    ] = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    to: Annotated[str | None, to_option("FILE.csv|.parquet", "Write a file instead.")] = None,
    force: ForceOption = False,
    csv: CsvOption = None,
    parquet: ParquetOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show trials side by side, complete ones best first."""
    from hpo.analysis.results import compare as tables
    from hpo.analysis.results.status import removed_line
    from hpo.ledger import queries
    from hpo.storage.lookup import open_study

    writers = {".csv": tables.write_csv, ".parquet": tables.write_parquet}
    path = targets.target(to, csv or parquet, endings=writers, force=force)
    files = {Path(old): writers[kind] for old, kind in ((csv, ".csv"), (parquet, ".parquet")) if old}
    if path and not files:
        files = {path: writers[path.suffix.lower()]}
    ledger, name, _ = open_study(home, storage, study)
    with ledger.read() as connection:
        table = tables.compare(connection, name, top or (MOST if files else 10))
        removed = removed_line(queries.status(connection, name).removed_cost)
    for file, write in files.items():
        write(table, file)
    if as_json:
        print_json(table.rows)
    elif files:
        print(f"{text.counted(len(table.rows), 'trial')} written to {' and '.join(map(str, files))}")
    else:
        from hpo.analysis.results.table import comparison
        from hpo.display.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=10_000)
        console.print(comparison(table, console.width if console.is_terminal else None, every=every))
        if removed:
            print(removed)


app.add_typer(read_only.app)
app.add_typer(tracking.app)
app.add_typer(backup.app)
app.add_typer(alerts.app)
app.add_typer(results.app)
app.add_typer(follow_up.app)
app.add_typer(tags.app)
app.add_typer(log.app)
app.add_typer(models.app)
app.add_typer(interchange.app)
app.add_typer(removal.app)
app.add_typer(training.app)
app.add_typer(cli_workers.app)


def main() -> None:
    """Run the command that was typed."""
    commands.main(app)
