"""Holds the commands that read what other tools wrote: import optuna, mlflow, wandb, ray, csv, and import-config."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpo.cli.driving import starting
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import HomeOption, JsonOption, StorageOption, TrackingOption
from hpo.cli.overview import Group
from hpo.cli.targets import ForceOption, target, to_option
from hpo.errors import UserError
from hpo.terminal import print

app = typer.Typer()
imports = typer.Typer(
    help="Import a study of another tool. Its trials can be compared, plotted, exported and used for a warm start.",
    cls=Group,
    rich_markup_mode=None,
)
app.add_typer(imports, name="import")

MetricOption = Annotated[
    list[str] | None, typer.Option("--metric", help="Metric that judges the trials; once for each objective.")
]
DirectionOption = Annotated[
    list[str] | None,
    typer.Option("--direction", help="minimize or maximize the metric; once for each.  [default: minimize]"),
]
ParamOption = Annotated[
    list[str] | None, typer.Option("--param", help="A column that is a parameter.  [default: guessed, and printed]")
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="Rename a parameter or metric, for example to the name in your study."
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the study in this home.  [default: the tool's name]")
]


def _bring(
    tool: str,
    source: str,
    study: str | None,
    metric: list[str] | None,
    direction: list[str] | None,
    rename: list[str] | None,
    name: str | None,
    at: tuple[str, str | None, str | None],
    as_json: bool,
    params: list[str] | None = None,
) -> None:
    """Imports a study, prints a summary, and sends the study to MLflow."""
    from hpo.interchange.sources import Request, bring
    from hpo.storage.home import Home
    from hpo.tracking import mirror_process

    home, storage, tracking_uri = Home.at(at[0]), *at[1:]
    names = dict(map(_renaming, rename or ()))
    request = Request(tool, source, study, metric or (), direction or (), params or (), names, name)
    with starting(f"reading {tool} ...", sys.stderr):
        ledger, imported = bring(request, home, storage, tracking_uri)
    with notes(as_json):
        print(imported.describe())
        print(mirror_process.send(ledger, home, imported.name, tracking_uri) or "MLflow shows it too.")
    if as_json:
        print_json(imported)


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise UserError(f"--rename {text}: write OLD=NEW, for example --rename lr=train.optim.lr.")
    return old, new


@imports.command("optuna")
def optuna_(
    url: Annotated[str, typer.Argument(metavar="URL", help="sqlite:///PATH, another database, or a journal's path.")],
    study: Annotated[
        str | None, typer.Option("--study", help="Optuna's name of the study, if there are several.")
    ] = None,
    metric: MetricOption = None,
    rename: RenameOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Import a study from an Optuna storage."""
    _bring("optuna", url, study, metric, None, rename, name, (home, storage, tracking_uri), as_json)


@imports.command("mlflow")
def mlflow_(
    uri: Annotated[str, typer.Argument(metavar="URI", help="http(s)://HOST, sqlite:///PATH or a directory of runs.")],
    experiment: Annotated[
        str | None, typer.Option("--experiment", help="Name of the experiment, if there are several.")
    ] = None,
    metric: MetricOption = None,
    direction: DirectionOption = None,
    rename: RenameOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Import the runs of an MLflow experiment."""
    _bring("mlflow", uri, experiment, metric, direction, rename, name, (home, storage, tracking_uri), as_json)


@imports.command("wandb")
def wandb_(
    path: Annotated[
        str, typer.Argument(metavar="DIR|CSV", help="The directory wandb/ with offline runs, or a CSV file.")
    ],
    project: Annotated[str | None, typer.Option("--project", help="Name of the project, if there are several.")] = None,
    metric: MetricOption = None,
    direction: DirectionOption = None,
    param: ParamOption = None,
    rename: RenameOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Import Weights & Biases runs: an offline directory or an exported table."""
    _bring("wandb", path, project, metric, direction, rename, name, (home, storage, tracking_uri), as_json, param)


@imports.command("ray")
def ray_(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a Ray Tune experiment.")],
    metric: MetricOption = None,
    direction: DirectionOption = None,
    rename: RenameOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Import the results of a Ray Tune experiment. Ray is not needed."""
    _bring("ray", directory, None, metric, direction, rename, name, (home, storage, tracking_uri), as_json)


@imports.command("csv")
def csv_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="CSV, Parquet or JSON Lines file with a row for each trial.")
    ],
    param: ParamOption = None,
    metric: MetricOption = None,
    direction: DirectionOption = None,
    rename: RenameOption = None,
    name: NameOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Import a table with one trial per row."""
    _bring("csv", file, None, metric, direction, rename, name, (home, storage, tracking_uri), as_json, param)


@app.command("import-config")
def import_config(
    file: Annotated[str, typer.Argument(help="A JSON of DeepSpeed, or a YAML of Accelerate.")],
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Number of processes, where the file does not say it.")
    ] = None,
    to: Annotated[str | None, to_option("FILE.yaml", "Write a file for `hpo run --config`.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read a launcher's settings as those of the trainer."""
    import yaml

    from hpo.interchange.launchers import read

    path = target(to, endings=(".yaml", ".yml"), force=force)
    converted = read(file, ranks)
    config = {"train": converted.train()}
    if as_json:
        print_json({"config": config, "left_out": converted.left_out, "file": path and str(path)})
    text = yaml.safe_dump(config, sort_keys=False)
    if path is not None:
        path.write_text(text, encoding="utf-8")
    with notes(as_json):
        if path is None and not as_json:
            print(text, end="")
        if converted.left_out:
            print(f"# left out, since it changes no result: {', '.join(converted.left_out)}")
        if path is not None:
            print(f"wrote {path}: `hpo run --study NAME --config {path}` uses it.")
