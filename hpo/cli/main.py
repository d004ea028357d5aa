"""Defines `hpo` and its commands about a whole study: init, run, resume, status, best, show, compare.

Each imports what it needs when it runs: `hpo --help` must not wait for torch, MLflow or Optuna.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hpo import text
from hpo.cli import alerts, interchange, looking, models, options, removal, results, tags, tracking, training
from hpo.cli import workers as cli_workers
from hpo.cli.driving import drive, preparing
from hpo.cli.facts import print_json
from hpo.cli.options import (
    MOST,
    AlertOption,
    AllOption,
    BestTrialOption,
    BytesOption,
    CheckpointsOption,
    ConfigOption,
    CpusOption,
    DeclarationOption,
    DriftOption,
    EnqueueOption,
    EpochsOption,
    ExecutorOption,
    GpusOption,
    HomeOption,
    JsonOption,
    OrderOption,
    OverrideOption,
    SamplerOption,
    SchedulerOption,
    StorageOption,
    StrategyOption,
    StudyOption,
    TagOption,
    TimeOption,
    TrackerOption,
    TrackingOption,
    TrialArgument,
    TrialsOption,
    WarmStartOption,
    WindowOption,
    WorkersOption,
)
from hpo.cli.targets import CsvOption, ForceOption, ParquetOption, SaveOption, target, to_option
from hpo.errors import UserError
from hpo.terminal import print

app = typer.Typer(
    cls=options.Commands,
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
def init(name: Annotated[str, typer.Argument(help="Of the study and, with .py, of its file.")]) -> None:
    """Write a study to begin with, NAME.py. It runs as it is, and is there to be changed."""
    from hpo.declaration.template import write

    file = write(name, Path.cwd()).name
    print(f"{file} is written: open it and change what is yours; as it is, it runs by")
    print(f"  {text.command(f'run --study {file} --trials 5')}")


@app.command()
def run(
    study: DeclarationOption,
    trials: TrialsOption = None,
    epochs: EpochsOption = None,
    time: TimeOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it; by default the declaration's name.")
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
        int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="The study's seed.  [default: 0]")
    ] = None,
    tier: Annotated[
        int | None, typer.Option("--tier", min=1, help="Search the dimensions up to this tier.  [default: all]")
    ] = None,
    enqueue: EnqueueOption = None,
    warm_start: WarmStartOption = None,
    override: OverrideOption = None,
    config: ConfigOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    checkpoints: CheckpointsOption = None,
    max_bytes: BytesOption = None,
    tracking_uri: TrackingOption = None,
    tracker: TrackerOption = None,
    alert: AlertOption = None,
    tag: TagOption = None,
    allow_drift: DriftOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search until trials, epochs or time are used up. A study that exists is continued."""
    with preparing(executor) as prepared:
        from hpo.declaration import enqueue as enqueued
        from hpo.declaration.budget import parse_time
        from hpo.driver.request import RunRequest
        from hpo.space.tags import parsed
        from hpo.storage.home import Home
        from hpo.workers.executors.resources import Resources

        drive(
            RunRequest(
                home=Home.at(home),
                reference=study,
                name=name,
                trials=trials,
                epochs=epochs,
                seconds=None if time is None else parse_time(time),
                executor=executor,
                workers=workers,
                resources=Resources(cpus_per_worker, gpus_per_worker),
                scheduler=scheduler,
                sampler=sampler,
                strategy=strategy,
                order=order,
                window=window,
                seed=seed,
                tier=tier,
                enqueue=enqueued.read(enqueue) if enqueue else None,
                warm_start=warm_start,
                overrides=options.overrides(config, override),
                one_by_one=options.one_by_one(override),
                storage=storage,
                checkpoints=checkpoints,
                max_bytes=options.size(max_bytes),
                tracking_uri=tracking_uri,
                trackers=tracker,
                alerts=alert,
                tags=parsed(tag or ()),
                allow_drift=allow_drift,
            ),
            prepared,
            as_json=as_json,
        )


@app.command()
def resume(
    study: StudyOption = None,
    trials: TrialsOption = None,
    epochs: EpochsOption = None,
    time: TimeOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    cpus_per_worker: CpusOption = None,
    gpus_per_worker: GpusOption = None,
    scheduler: SchedulerOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    max_bytes: BytesOption = None,
    tracking_uri: TrackingOption = None,
    tracker: TrackerOption = None,
    alert: AlertOption = None,
    allow_drift: DriftOption = False,
    as_json: JsonOption = False,
) -> None:
    """Continue an interrupted study from its last checkpoints. More may be asked for."""
    with preparing(executor) as prepared:
        from hpo.declaration.budget import parse_time
        from hpo.driver.request import RunRequest
        from hpo.storage.home import Home
        from hpo.storage.lookup import open_study
        from hpo.tracking.uri import tracking_uri_of
        from hpo.workers.executors.resources import Resources

        ledger, name, at = open_study(home, storage, study, upgrade=True)
        request = RunRequest(
            home=Home.at(home),
            name=name,
            trials=trials,
            epochs=epochs,
            seconds=None if time is None else parse_time(time),
            executor=executor,
            workers=workers,
            resources=Resources(cpus_per_worker, gpus_per_worker),
            scheduler=scheduler,
            storage=storage,
            max_bytes=options.size(max_bytes),
            tracking_uri=tracking_uri_of(ledger, name, at, tracking_uri),
            trackers=tracker,
            alerts=alert,
            allow_drift=allow_drift,
        )
        ledger.close()
        drive(request, prepared, as_json=as_json)


@app.command()
def status(
    study: StudyOption = None, as_json: JsonOption = False, home: HomeOption = ".hpo", storage: StorageOption = None
) -> None:
    """Show how far a study is, or each of several in a line."""
    from hpo.analysis.results.idle import idle
    from hpo.analysis.results.status import after, describe, facts_of, line
    from hpo.ledger import queries, worker_queries
    from hpo.storage.lookup import open_studies

    ledger, names, at = open_studies(home, storage, study)
    with ledger.read() as connection:
        if as_json:
            derived = queries.derived(connection)
            rows = [facts_of(connection, name, at) for name in names if study or derived.get(name) not in names]
            print_json(rows if len(rows) > 1 else rows[0])
            return
        found = [queries.status(connection, name) for name in names]
        if len(found) == 1:
            study_id = queries.study_row(connection, names[0])["id"]
            waits = idle(connection, study_id, found[0].state == "running")
            print(describe(found[0], waits, worker_queries.fused(connection, study_id)))
            for text in after(connection, found[0], at):
                print(text)
            return
    print("\n".join(map(line, found)))


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
    """Show the best trial: parameters, checkpoint, how to train it. Of several objectives the front."""
    from hpo.analysis.results.best import best_trials, chosen_best, describe_best, describe_front, save_overrides
    from hpo.storage.lookup import open_study

    path = target(to, save, endings=(".yaml", ".yml"), force=force)
    ledger, name, at = open_study(home, storage, study)
    with ledger.read() as connection:
        front = best_trials(connection, at, name)
    several = len(front[0]["values"]) > 1
    if trial is None and not path and (len(front) > 1 or (several and as_json)):
        print_json(front) if as_json else print(describe_front(front))
        return
    found = chosen_best(front, trial)
    if path:
        save_overrides(found["overrides"], path)
        print(f"its configuration is written to {path}", file=sys.stderr)
    print_json(found) if as_json else print(describe_best(found, str(path) if path else None))


@app.command()
def show(
    number: TrialArgument,
    study: StudyOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show a trial in full: parameters, curves, checkpoints, error."""
    from hpo.analysis.results.trial import base_config, describe, detail
    from hpo.storage.lookup import open_study

    ledger, name, at = open_study(home, storage, study)
    with ledger.read() as connection:
        trial = detail(connection, at, name, number)
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
        typer.Option("--top", min=1, max=MOST, help="How many trials, in this order.  [default: 10, in files all]"),
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
    from hpo.storage.lookup import open_study

    writers = {".csv": tables.write_csv, ".parquet": tables.write_parquet}
    path = target(to, csv or parquet, endings=writers, force=force)
    files = {Path(old): writers[kind] for old, kind in ((csv, ".csv"), (parquet, ".parquet")) if old}
    if path and not files:
        files = {path: writers[path.suffix.lower()]}
    ledger, name, _ = open_study(home, storage, study)
    with ledger.read() as connection:
        found = tables.compare(connection, name, top or (MOST if files else 10))
    for file, write in files.items():
        write(found, file)
    if as_json:
        print_json(found.rows)
    elif files:
        print(f"{text.counted(len(found.rows), 'trial')} written to {' and '.join(map(str, files))}")
    else:
        from hpo.analysis.results.table import comparison
        from hpo.cli.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=10_000)
        console.print(comparison(found, console.width if console.is_terminal else None, every=every))


app.add_typer(looking.app)
app.add_typer(tracking.app)
app.add_typer(alerts.app)
app.add_typer(results.app)
app.add_typer(tags.app)
app.add_typer(models.app)
app.add_typer(interchange.app)
app.add_typer(removal.app)
app.add_typer(training.app)
app.add_typer(cli_workers.app)


def main() -> None:
    """Run the command that was typed."""
    options.main(app)
