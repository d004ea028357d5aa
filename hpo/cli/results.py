"""Commands about a study's results: report, plot, importance, forecast."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli import completion
from hpo.cli.driving import starting
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import (
    MOST,
    HomeOption,
    JsonOption,
    StorageOption,
    StudyOption,
    TrackingOption,
)
from hpo.cli.targets import ForceOption, OutOption, SaveOption, target, to_option
from hpo.errors import UserError
from hpo.search.forecast import HORIZON
from hpo.terminal import print

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

app = typer.Typer()
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="The objective to show, of several.  [default: the first]",
        autocompletion=completion.objectives,
    ),
]


def _opened(home: str, storage: str | None, study: str | None, metric: str | None) -> tuple[Ledger, str, Home, Any]:
    """Returns the ledger, the study's name, its home, and the study as an Optuna study."""
    from hpo.analysis.models.checkpoints import searched
    from hpo.analysis.plots.optuna_study import to_optuna
    from hpo.storage.lookup import open_study

    ledger, name, study_home = open_study(home, storage, study)
    with ledger.read() as connection:
        declaration = searched(connection, name)
    curve = metric or declaration.objectives[0].metric
    return ledger, name, study_home, to_optuna(declaration, study_home, name, ledger.url, curve)


@app.command()
def plot(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="history, curves, importances, slice, contour, rank, parallel, edf, timeline or pareto.  "
            "[default: all]",
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
    """Draw a study: PNG files, and all on one page. They are stored with the study and shown in its MLflow run."""
    from hpo.analysis.plots import figures
    from hpo.storage import artifacts
    from hpo.tracking import mirror_process

    wanted = figures.chosen(kinds or ())
    path = target(to, save, endings=(".html", ".png"), directory=True, force=force)
    ending = path.suffix.lower() if path and not path.is_dir() else ""
    single_file = ending in (".html", ".png")
    if ending == ".png" and len(wanted) > 1:
        raise UserError(f"--to {to}: a picture holds one plot: name one of {', '.join(wanted)}, or write a directory.")
    ledger, name, study_home, optuna_study = _opened(home, storage, study, metric)
    subject = figures.subject(optuna_study, metric)
    missing = {kind: why for kind in wanted if (why := figures.lacking(kind, subject))}
    for kind, why in missing.items():
        if kinds or kind != "pareto":
            print(f"no {kind}: {why}.", file=sys.stderr)
    drawn = [kind for kind in wanted if kind not in missing]
    if not drawn:
        raise typer.Exit(1)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) if path is None or single_file else path
        with starting(f"drawing {', '.join(drawn)} ...", sys.stderr):
            files, failed = figures.draw(subject, drawn, directory)
        drawn = _say_failed(drawn, failed)
        if path is None:
            artifacts.leave_in_home(ledger, study_home, name, files, "--to DIRECTORY", below="plots/")
            files = {file: study_home.plots(name) / file for file in files}
        elif single_file:
            figures.copy(next(file for file in files.values() if file.suffix == ending), path)
            files = {path.name: path}
    with notes(as_json):
        print(
            f"drawn in {path}: {', '.join(drawn if single_file else files)}" if path else f"drawn: {', '.join(drawn)}"
        )
        if path is None:
            print(f"page: {files[figures.PAGE]}")
            print(
                mirror_process.send(ledger, study_home, name, tracking_uri)
                or "the study's MLflow run shows them below plots/."
            )
    if as_json:
        print_json({"study": name, "drawn": drawn, "missing": missing | failed, "files": [*files.values()]})


def _say_failed(kinds: list[str], failed: dict[str, str]) -> list[str]:
    """Prints why plots failed. Returns the plots that were drawn; exits with 1 where there are none."""
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
            metavar="[STUDY]...", help="Names of studies, shown side by side; optional if the home holds one."
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
    """Write one HTML page about a study.

    It shows the answer and how sure it is, curves, importances and costs, and needs no network. The page is stored with
    the study and shown in its MLflow run; a page about several studies is only a file.
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
    ledger, name, study_home = open_study(home, storage, studies[0] if studies else None)
    names = studies or [name]
    with starting(f"reading {', '.join(names)} ...", sys.stderr):
        reports = [read(ledger, study_home, study) for study in names]
        path = page.write(reports, file) if file else publish.leave(ledger, study_home, reports[0])
    with notes(as_json):
        print(f"page: {path}")
        if not file:
            print(mirror_process.send(ledger, study_home, name, tracking_uri) or "the study's MLflow run shows it too.")
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
            help="Method: ped-anova, fanova or mdi.",
            autocompletion=completion.among(completion.EVALUATORS),
        ),
    ] = "ped-anova",
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show how much of the results each parameter explains."""
    from hpo.analysis.models.checkpoints import searched
    from hpo.analysis.plots import figures
    from hpo.analysis.plots import importance as judged
    from hpo.analysis.plots.optuna_study import complete_trials
    from hpo.storage.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    with ledger.read() as connection:
        optuna_study = complete_trials(connection, searched(connection, name), name)
    subject = figures.subject(optuna_study, metric)
    shares = judged.importances(optuna_study, evaluator, subject.loss)
    if as_json:
        print_json(judged.facts(optuna_study, shares, subject.metric, evaluator))
    else:
        print(judged.describe(optuna_study, shares, subject.metric, evaluator))


@app.command()
def forecast(
    study: StudyOption = None,
    trials: Annotated[
        int, typer.Option("--trials", min=1, max=MOST, help="Number of further trials to forecast.")
    ] = HORIZON,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Forecast the gain and the cost of more trials."""
    from hpo.analysis.report.certainty import sure
    from hpo.analysis.results.forecast import describe, facts, required
    from hpo.storage.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    with ledger.read() as connection:
        expected = required(connection, name, trials)
    noise = sure(ledger, name)["noise"].get(expected.metric, {}).get("deviation")
    print_json(facts(expected, noise)) if as_json else print(describe(expected, noise))
