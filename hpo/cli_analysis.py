"""Commands that say what a study has found out: its plots, and what of its parameters matters."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.commandline import HomeOption, JsonOption, StorageOption, StudyOption, TrackingOption

if TYPE_CHECKING:
    import optuna

    from hpo.home import Home
    from hpo.ledger import Ledger

app = typer.Typer()
MetricOption = Annotated[
    str | None, typer.Option("--metric", help="Which of several objectives.  [default: the first]")
]


def _opened(home: str, storage: str | None, study: str | None) -> tuple[Ledger, str, Home, optuna.Study]:
    from hpo.analysis.optuna import to_optuna
    from hpo.lookup import open_study
    from hpo.trained import declared

    ledger, name, at = open_study(home, storage, study)
    with ledger.read() as connection:
        declaration = declared(connection, name)
    return ledger, name, at, to_optuna(declaration, at, name, ledger.url)


@app.command()
def plot(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help="history, curves, importances, slice, contour, rank, parallel, edf, timeline, pareto; by default all.",
        ),
    ] = None,
    study: StudyOption = None,
    metric: MetricOption = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="DIR", help="Write the files there, and leave MLflow as it is.")
    ] = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Draw a study: PNG files, and all on one page. They are left with the study and shown in its MLflow run."""
    from hpo import handover, mirror
    from hpo.analysis import plots
    from hpo.ledger import reads

    wanted = plots.chosen(kinds or ())
    ledger, name, at, found = _opened(home, storage, study)
    of = plots.subject(found, metric)
    missing = {kind: why for kind in wanted if (why := plots.lacking(kind, of))}
    for kind, why in missing.items():
        if kinds or kind != "pareto":
            print(f"no {kind}: {why}.", file=sys.stderr)
    drawn = [kind for kind in wanted if kind not in missing]
    if not drawn:
        raise typer.Exit(1)
    if save:
        print(f"drawn in {save}: {', '.join(plots.draw(of, drawn, Path(save)))}")
        return
    with tempfile.TemporaryDirectory() as directory:
        files = plots.draw(of, drawn, Path(directory))
        with ledger.read() as connection:
            study_id = reads.study_row(connection, name)["id"]
        handover.leave(ledger, at.files(name, None), study_id, {f"plots/{file}": files[file] for file in files})
    with ledger.read() as connection:
        where = at.files(name, None) / handover.of_study(connection, study_id)[f"plots/{plots.PAGE}"]
    print(f"drawn: {', '.join(drawn)}\npage: {where}")
    print(mirror.send(ledger, at, name, tracking_uri) or "the study's MLflow run shows them below plots/.")


@app.command()
def importance(
    study: StudyOption = None,
    metric: MetricOption = None,
    evaluator: Annotated[str, typer.Option("--evaluator", help="ped-anova, fanova or mdi.")] = "ped-anova",
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """How much of the difference between the trials each parameter explains."""
    from hpo.analysis import importance as judged
    from hpo.analysis import plots

    *_, found = _opened(home, storage, study)
    of = plots.subject(found, metric)
    shares = judged.importances(found, evaluator, of.loss)
    print((judged.to_json if as_json else judged.describe)(found, shares, of.metric, evaluator))
