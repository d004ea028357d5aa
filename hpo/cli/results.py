"""Commands about a study's results: report, plot, importance, confirm, ablate."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli import completion, options
from hpo.cli.driving import drive, starting
from hpo.cli.facts import notes, print_json
from hpo.cli.options import (
    ConfigOption,
    ExecutorOption,
    HomeOption,
    JsonOption,
    OverrideOption,
    StorageOption,
    StudyOption,
    TrackingOption,
    WorkersOption,
)
from hpo.cli.targets import ForceOption, OutOption, SaveOption, target, to_option
from hpo.errors import UserError
from hpo.terminal import print

if TYPE_CHECKING:
    from hpo.analysis.follow_up.derived_study import RunDefaults, SourceStudy
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

app = typer.Typer()
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="Which of several objectives.  [default: the first]",
        autocompletion=completion.objectives,
    ),
]
AblatedOption = Annotated[
    int | None,
    typer.Option(
        "--trial",
        min=0,
        max=options.MOST,
        help="Another complete trial.  [default: the best]",
        autocompletion=completion.trials,
    ),
]


def _opened(home: str, storage: str | None, study: str | None, metric: str | None) -> tuple[Ledger, str, Home, Any]:
    """The ledger, the study's name, its home, and the study as Optuna's."""
    from hpo.analysis.models.checkpoints import searched
    from hpo.analysis.plots.optuna_study import to_optuna
    from hpo.storage.lookup import open_study

    ledger, name, at = open_study(home, storage, study)
    with ledger.read() as connection:
        declaration = searched(connection, name)
    curve = metric or declaration.objectives[0].metric
    return ledger, name, at, to_optuna(declaration, at, name, ledger.url, curve)


@app.command()
def plot(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="history, curves, importances, slice, contour, rank, parallel, edf, timeline, pareto; by default all.",
            autocompletion=completion.among(completion.KINDS),
        ),
    ] = None,
    study: StudyOption = None,
    metric: MetricOption = None,
    to: Annotated[
        str | None,
        to_option(
            "DIRECTORY|FILE",
            "Write the files there, the page alone as FILE.html or one picture as FILE.png, and leave MLflow as it is.",
        ),
    ] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Draw a study: PNG files, and all on one page. They are left with the study and shown in its MLflow run."""
    from hpo.analysis.plots import figures
    from hpo.storage import artifacts
    from hpo.tracking import mirror_process

    wanted = figures.chosen(kinds or ())
    path = target(to, save, endings=(".html", ".png"), directory=True, force=force)
    ending = path.suffix.lower() if path and not path.is_dir() else ""
    alone = ending in (".html", ".png")
    if ending == ".png" and len(wanted) > 1:
        raise UserError(f"--to {to}: a picture holds one plot: name one of {', '.join(wanted)}, or write a directory.")
    ledger, name, at, found = _opened(home, storage, study, metric)
    of = figures.subject(found, metric)
    missing = {kind: why for kind in wanted if (why := figures.lacking(kind, of))}
    for kind, why in missing.items():
        if kinds or kind != "pareto":
            print(f"no {kind}: {why}.", file=sys.stderr)
    drawn = [kind for kind in wanted if kind not in missing]
    if not drawn:
        raise typer.Exit(1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) if path is None or alone else path
        with starting(f"drawing {', '.join(drawn)} ...", sys.stderr):
            files, failed = figures.draw(of, drawn, directory)
        drawn = _say_failed(drawn, failed)
        if path is None:
            artifacts.leave_in_home(ledger, at, name, files, "--to DIRECTORY", below="plots/")
            files = {file: at.plots(name) / file for file in files}
        elif alone:
            figures.copy(next(file for file in files.values() if file.suffix == ending), path)
            files = {path.name: path}
    with notes(as_json):
        print(f"drawn in {path}: {', '.join(drawn if alone else files)}" if path else f"drawn: {', '.join(drawn)}")
        if path is None:
            print(f"page: {files[figures.PAGE]}")
            print(
                mirror_process.send(ledger, at, name, tracking_uri) or "the study's MLflow run shows them below plots/."
            )
    if as_json:
        print_json({"study": name, "drawn": drawn, "missing": missing | failed, "files": [*files.values()]})


def _say_failed(kinds: list[str], failed: dict[str, str]) -> list[str]:
    """Say why the plots that failed are not there; those that are. Exits with 1 where none is."""
    for kind, why in failed.items():
        print(f"no {kind}: {why}.", file=sys.stderr)
    if len(failed) == len(kinds):
        raise typer.Exit(1)
    return [kind for kind in kinds if kind not in failed]


@app.command()
def report(
    studies: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STUDY]...", help="The studies' names, more of them side by side; none where the home holds one."
        ),
    ] = None,
    study: StudyOption = None,
    to: Annotated[str | None, to_option("FILE.html", "Write the page there, and leave MLflow as it is.")] = None,
    force: ForceOption = False,
    out: OutOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Write one page that tells a study, as a file.

    The answer, how sure it is, curves, what mattered, what it cost; it needs no network. It is left with the study and
    shown in its MLflow run; of several studies it is a file alone.
    """
    from hpo.analysis.report import page, publish
    from hpo.analysis.report.data import read
    from hpo.storage.lookup import open_study
    from hpo.tracking import mirror_process

    page.check_installed()
    studies = list(dict.fromkeys([*([study] if study else ()), *(studies or ())]))
    if len(studies) > 1 and not (to or out):
        to = "-".join([*studies, "report.html"])
    file = target(to, out, endings=(".html", ".htm"), force=force)
    ledger, name, at = open_study(home, storage, studies[0] if studies else None)
    names = studies or [name]
    with starting(f"reading {', '.join(names)} ...", sys.stderr):
        reports = [read(ledger, at, study) for study in names]
        path = page.write(reports, file) if file else publish.leave(ledger, at, reports[0])
    with notes(as_json):
        print(f"page: {path}")
        if not file:
            print(mirror_process.send(ledger, at, name, tracking_uri) or "the study's MLflow run shows it too.")
    if as_json:
        print_json({"studies": names, "page": path})


@app.command()
def importance(
    study: StudyOption = None,
    metric: MetricOption = None,
    evaluator: Annotated[
        str,
        typer.Option(
            "--evaluator",
            help="ped-anova, fanova or mdi.",
            autocompletion=completion.among(completion.EVALUATORS),
        ),
    ] = "ped-anova",
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show how much of the results each parameter explains."""
    from hpo.analysis.plots import figures
    from hpo.analysis.plots import importance as judged

    *_, found = _opened(home, storage, study, metric)
    of = figures.subject(found, metric)
    shares = judged.importances(found, evaluator, of.loss)
    if as_json:
        print_json(judged.facts(found, shares, of.metric, evaluator))
    else:
        print(judged.describe(found, shares, of.metric, evaluator))


NameOption = Annotated[str | None, typer.Option("--name", help="What to call the study that it makes.")]


@app.command()
def confirm(
    study: StudyOption = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="Of how many trials, best first.")] = 5,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="How often each is trained again.")] = 3,
    hold_out: Annotated[
        str | None,
        typer.Option(
            "--hold-out",
            metavar="METRIC",
            help="Selected by nobody.  [default: test/x for val/x]",
            autocompletion=completion.metrics,
        ),
    ] = None,
    name: NameOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    override: OverrideOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Train the best trials again under other seeds: what was luck. Data that nobody selected by judge them too.

    They are trials of a study of its own, NAME-confirm, which goes on where it was interrupted.
    """
    from hpo.analysis.follow_up import confirm as confirming
    from hpo.analysis.follow_up.derived_study import repeats

    given = options.overrides(config, override)
    ledger, of, driven = _derived(home, storage, study, executor, workers, tracking_uri)
    driven = replace(driven, overrides={**of.study.hold_out, **given}, one_by_one=options.one_by_one(override))
    metrics = confirming.held_out(of, hold_out)
    own = name or f"{of.name}-confirm"
    confirming.check_measured(ledger, of, own, hold_out, driven.overrides)
    _drive(ledger, of, own, confirming.listed(of, top, seeds), driven, quiet=as_json)
    found = confirming.confirmations(of, own, metrics, repeats(ledger, own, metrics))
    print_json(confirming.facts(found)) if as_json else print(confirming.describe(found, hold_out))
    confirming.check_reported(ledger, found, hold_out)


@app.command()
def ablate(
    study: StudyOption = None,
    trial: AblatedOption = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="How often each is trained.")] = 1,
    name: NameOption = None,
    workers: WorkersOption = None,
    executor: ExecutorOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Train the best trial without each parameter: what each brings. One at a time goes back to its default.

    They are trials of a study of its own, NAME-ablate, which goes on where it was interrupted.
    """
    from hpo.analysis.follow_up import ablate as ablating
    from hpo.analysis.follow_up.derived_study import repeats

    ledger, of, driven = _derived(home, storage, study, executor, workers, tracking_uri)
    best = of.chosen(trial)
    tried, own = ablating.variants(of, best), name or f"{of.name}-ablate"
    _drive(ledger, of, own, ablating.listed(of, tried, seeds), driven, quiet=as_json)
    found = ablating.ablations(of, own, best, tried, repeats(ledger, own))
    print_json(ablating.facts(found)) if as_json else print(ablating.describe(found))


def _derived(
    home: str,
    storage: str | None,
    study: str | None,
    executor: str | None,
    workers: int | None,
    tracking_uri: str | None,
) -> tuple[Ledger, SourceStudy, RunDefaults]:
    """The study that is looked at, and how one made from it is driven: by default as it was."""
    from hpo.analysis.follow_up.derived_study import RunDefaults, found
    from hpo.storage.lookup import open_study
    from hpo.tracking.uri import tracking_uri_of
    from hpo.workers.executors.placement import PlacementRequest

    ledger, name, at = open_study(home, storage, study)
    uri = tracking_uri_of(ledger, name, at, tracking_uri)
    return ledger, found(ledger, name), RunDefaults(at, PlacementRequest(executor, workers), storage, uri)


def _drive(
    ledger: Ledger, of: SourceStudy, name: str, listed: Sequence[Mapping[str, Any]], driven: RunDefaults, *, quiet: bool
) -> None:
    """Run the derived study to its end, before the user's eyes or on standard error."""
    from hpo.analysis.follow_up.derived_study import grown, request

    drive(request(of, name, grown(ledger, name, listed), driven), None, quiet=quiet)
