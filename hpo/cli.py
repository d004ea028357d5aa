"""The commands. Each imports what it needs when it runs: `hpo --help` must not wait for torch, MLflow or Optuna."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hpo.errors import HpoError, UserError

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.run import Request

INTERRUPTED = 130


class _Commands(TyperGroup):
    """Errors raised on purpose become one sentence and an exit code; anything else is a bug, and shown whole."""

    def invoke(self, ctx: Any) -> Any:
        from trainer.errors import ConfigError, DataError, TrainerError

        try:
            return super().invoke(ctx)
        except (HpoError, TrainerError) as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2 if isinstance(error, ConfigError | DataError) else getattr(error, "exit_code", 1)
        except KeyboardInterrupt:
            print("interrupted.", file=sys.stderr)
            code = INTERRUPTED
        raise typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Hyperparameter search and experiment tracking for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

HomeOption = Annotated[str, typer.Option("--home", envvar="HPO_HOME", help="Where everything is written.")]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage", envvar="HPO_STORAGE", help="The ledger's URL: sqlite:///PATH or postgresql+psycopg://..."
    ),
]
TrackingOption = Annotated[
    str | None, typer.Option("--tracking-uri", envvar="HPO_TRACKING_URI", help="MLflow's URI; by default in the home.")
]
StudyOption = Annotated[
    str | None, typer.Option("--study", help="The study's name; may be left out where the home holds only one.")
]
AllStudiesOption = Annotated[str | None, typer.Option("--study", help="The study's name; by default every one.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Worker processes.  [default: 2]")]
ExecutorOption = Annotated[str, typer.Option("--executor", help="Where trials run: inline or local.")]
TrialsOption = Annotated[
    int | None,
    typer.Option("--trials", min=1, max=2**31 - 1, help="How many trials in total, over all resumptions."),
]
EpochsOption = Annotated[
    int | None, typer.Option("--epochs", min=1, max=2**31 - 1, help="How many epochs in total, over all trials.")
]
TimeOption = Annotated[
    str | None, typer.Option("--time", metavar="90m|2h|SECONDS", help="How long in total, over all resumptions.")
]
DriftOption = Annotated[
    bool, typer.Option("--allow-drift", help="Continue although the space, the data, the seed or the code has changed.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="PATH=VALUE", help="Set a field, or pin a dimension; the last one given counts."),
]
ConfigOption = Annotated[str | None, typer.Option("--config", metavar="FILE.yaml", help="Fields to set, as YAML.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    study: Annotated[str, typer.Option("--study", help="A study's name, or FILE.py[:NAME].")],
    trials: TrialsOption = None,
    epochs: EpochsOption = None,
    time: TimeOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it; by default the declaration's name.")
    ] = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    sampler: Annotated[str | None, typer.Option("--sampler", help="random, grid, qmc or tpe.")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="What stops trials: none, median or asha.")] = None,
    order: Annotated[str | None, typer.Option("--order", help="ordered (reproducible) or async.")] = None,
    window: Annotated[
        int | None,
        typer.Option("--window", min=1, max=100_000, help="Trials open at a time.  [default: twice the workers]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="The study's seed.  [default: 0]")
    ] = None,
    override: OverrideOption = None,
    config: ConfigOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    allow_drift: DriftOption = False,
) -> None:
    """Search until the trials, the epochs or the time are used up; a study that exists is continued."""
    from hpo.budget import parse_time
    from hpo.home import Home
    from hpo.run import Request

    _drive(
        Request(
            home=Home.at(home),
            reference=study,
            name=name,
            trials=trials,
            epochs=epochs,
            seconds=None if time is None else parse_time(time),
            executor=executor,
            workers=workers,
            sampler=sampler,
            strategy=strategy,
            order=order,
            window=window,
            seed=seed,
            overrides=_overrides(config, override),
            storage=storage,
            tracking_uri=tracking_uri,
            allow_drift=allow_drift,
        )
    )


@app.command()
def resume(
    study: StudyOption = None,
    trials: TrialsOption = None,
    epochs: EpochsOption = None,
    time: TimeOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = "local",
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    allow_drift: DriftOption = False,
) -> None:
    """Continue a study that was interrupted, from its last committed checkpoints; more may be asked for."""
    from hpo.budget import parse_time
    from hpo.home import Home
    from hpo.lookup import open_study, tracking_uri_of
    from hpo.run import Request

    ledger, name, at = open_study(home, storage, study)
    request = Request(
        home=Home.at(home),
        name=name,
        trials=trials,
        epochs=epochs,
        seconds=None if time is None else parse_time(time),
        executor=executor,
        workers=workers,
        storage=storage,
        tracking_uri=tracking_uri_of(ledger, name, at, tracking_uri),
        allow_drift=allow_drift,
    )
    ledger.close()
    _drive(request)


@app.command()
def status(
    study: StudyOption = None, as_json: JsonOption = False, home: HomeOption = ".hpo", storage: StorageOption = None
) -> None:
    """How far a study is."""
    from hpo.budget import spelled
    from hpo.ledger import reads
    from hpo.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    with ledger.read() as connection:
        found = reads.status(connection, name)
        if as_json:
            digest = reads.digest(connection, reads.study_row(connection, name))
            print(json.dumps(asdict(found) | {"digest": digest}))
            return
    ended = sum(count for state, count in found.trials.items() if state not in ("waiting", "running", "paused"))
    print(f"{name}: {found.state}, {ended}{_of(found.requested)} trials ended")
    print("  " + (", ".join(f"{count} {state}" for state, count in found.trials.items() if count) or "no trials yet"))
    epochs = f"{found.epochs_trained}{_of(found.max_epochs)} epochs trained in {found.attempts} attempts"
    print(f"  {epochs}, {spelled(found.seconds_used)}{_of(found.max_seconds and spelled(found.max_seconds))} used")
    if found.best:
        print(f"  best: trial {found.best.number}, {found.best.value:.6g}")


@app.command()
def best(
    study: StudyOption = None,
    as_json: JsonOption = False,
    save: Annotated[
        str | None, typer.Option("--save", metavar="FILE.yaml", help="Write its configuration for `--config`.")
    ] = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """The best trial: its parameters, its checkpoint, and how to train it."""
    from hpo.analysis.detail import best_trial, describe_best, save_overrides
    from hpo.lookup import open_study

    ledger, name, at = open_study(home, storage, study)
    with ledger.read() as connection:
        found = best_trial(connection, at, name)
    if save:
        save_overrides(found["overrides"], Path(save))
    print(json.dumps(found) if as_json else describe_best(found))


@app.command()
def show(
    number: Annotated[int, typer.Argument(help="The trial's number.", min=0)],
    study: StudyOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """One trial in full: parameters, curves, attempts, checkpoints, events, error."""
    from hpo.analysis.detail import base_config, describe, detail
    from hpo.lookup import open_study

    ledger, name, at = open_study(home, storage, study)
    with ledger.read() as connection:
        trial = detail(connection, at, name, number)
        if as_json:
            print(json.dumps(trial))
            return
        try:
            base: Any = base_config(connection, name)
        except UserError as error:
            base = f"the study's own configuration cannot be read: {error}"
    print(describe(trial, base))


@app.command()
def compare(
    study: StudyOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many trials, best first.")] = 10,
    as_json: JsonOption = False,
    csv: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write a CSV file.")] = None,
    parquet: Annotated[str | None, typer.Option("--parquet", metavar="FILE", help="Write a Parquet file.")] = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Trials side by side, best first."""
    from hpo.analysis import compare as tables
    from hpo.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    with ledger.read() as connection:
        found = tables.compare(connection, name, top)
    if csv:
        tables.write_csv(found, Path(csv))
    if parquet:
        tables.write_parquet(found, Path(parquet))
    if as_json:
        print(tables.to_json(found))
    elif csv or parquet:
        print(f"{len(found.rows)} trials written to {' and '.join(filter(None, (csv, parquet)))}")
    else:
        from rich.console import Console

        from hpo.render import comparison

        console = Console() if sys.stdout.isatty() else Console(width=10_000)
        console.print(comparison(found, console.width if console.is_terminal else None))


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open a browser too.")] = False,
    home: HomeOption = ".hpo",
    tracking_uri: TrackingOption = None,
) -> None:
    """Serve MLflow's pages on this machine."""
    from hpo.home import Home
    from hpo.ui import serve

    raise typer.Exit(serve(Home.at(home), tracking_uri, port, open_browser=browser))


@app.command()
def verify(
    study: AllStudiesOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Check a home against itself: ledger, MLflow, checkpoints. Exits 1 on any difference."""
    from hpo.home import Home
    from hpo.verify import verify as check

    at = Home.at(home)
    report = check(at, storage or at.storage, tracking_uri, study)
    counts = ", ".join(f"{count} {what}" for what, count in report.counts.items())
    print(f"{len(report.differences)} differences; looked at {counts or 'no study'}")
    if report.behind:
        print(f"  MLflow is behind by {report.behind} transactions: `hpo sync` sends them.")
    for difference in report.differences:
        print(f"  differs: {difference}")
    raise typer.Exit(1 if report.differences else 0)


@app.command()
def sync(
    study: Annotated[
        str | None, typer.Option("--study", help="The study's name; by default all of the home's.")
    ] = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Send MLflow what it has not got, after it was away."""
    from hpo import mirror
    from hpo.lookup import open_ledger, study_names, tracking_uri_of
    from hpo.tracking.mlflow import MlflowTracker

    ledger, at = open_ledger(home, storage)
    behind = 0
    for name in study_names(ledger, study):
        uri = tracking_uri_of(ledger, name, at, tracking_uri)
        tracker = MlflowTracker(uri, at.artifacts)
        result = mirror.drain(ledger, tracker, name, at)
        behind += result.behind
        print(
            f"{name}: " + (mirror.lag(result, tracker.name) or f"MLflow has everything ({result.sent} batches sent).")
        )
    if behind:
        raise typer.Exit(1)


@app.command()
def worker(
    storage: Annotated[str, typer.Option("--storage", envvar="HPO_STORAGE", help="The ledger's URL.")],
    home: HomeOption = ".hpo",
) -> None:
    """Train trials beside a study's driver, from another process or a host that sees the same home."""
    from hpo.driver import LEASE_SECONDS
    from hpo.executors.base import WorkerContext
    from hpo.home import Home
    from hpo.worker import serve

    context = WorkerContext(storage, Home.at(home).create(), 0, LEASE_SECONDS)
    raise typer.Exit(serve(context, "joined"))


@app.command()
def schedule(
    study: Annotated[str, typer.Option("--study", help="A study's name, or FILE.py[:NAME].")],
    override: OverrideOption = None,
    config: ConfigOption = None,
    steps_per_epoch: Annotated[
        int | None, typer.Option("--steps-per-epoch", min=1, help="Instead of counting them in the study's data.")
    ] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE.png", help="Draw a picture instead.")] = None,
) -> None:
    """The learning rate over the steps of a run: `-o train.schedule.name=wsd` shows another schedule."""
    from hpo.analysis.schedule import curve, describe, draw

    found = curve(study, _overrides(config, override), steps_per_epoch)
    if save:
        draw(found, Path(save))
    print(f"{found.settings}: drawn in {save}" if save else describe(found))


def _overrides(config: str | None, override: list[str] | None) -> dict[str, Any]:
    """What a file and `-o` set; where both do, `-o`."""
    from hpo.config import flatten, load_yaml, parse_override

    overrides = flatten(load_yaml(config)) if config else {}
    for path, value in map(parse_override, override or ()):
        if not value:
            raise UserError(f"-o {path}= gives no value: write {path}=null for none, or {path}='\"\"' for empty text.")
        overrides[path] = value
    return overrides


def _of(bound: object) -> str:
    """What follows a count that has a bound."""
    return f" of {bound}" if bound else ""


def _drive(request: Request) -> None:
    from rich.console import Console

    from hpo.render import View, summary
    from hpo.run import run as drive

    console = Console()
    workers = request.workers or (1 if request.executor == "inline" else 2)
    views: list[View] = []

    def watch(ledger: Ledger, name: str) -> Any:
        views.append(View(ledger, name, console, workers=workers).start())
        return views[0].tick

    try:
        result = drive(request, watch)
    finally:
        for view in views:
            view.stop()
    console.print(summary(views[0].progress, result), markup=False, highlight=False, soft_wrap=True)
    if result.signal:
        raise typer.Exit(128 + result.signal)
    if result.state == "stopped":
        raise HpoError(result.reason)
    if result.reason:
        console.print(result.reason, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    app()
