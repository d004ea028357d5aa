"""Holds the commands for trained models and for files of a study: gc, soup, promote, export."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli import completion
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import MOST, HomeOption, JsonOption, OwnerOption, StorageOption, StudyOption, TrackingOption
from hpo.cli.targets import ForceOption, SaveOption, target, to_option
from hpo.errors import UserError
from hpo.storage.target import check_free
from hpo.terminal import print

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

app = typer.Typer()


def _mirror(ledger: Ledger, name: str, home: Home, tracking_uri: str | None) -> None:
    """Sends changes to MLflow."""
    from hpo.tracking import mirror_process

    if missing := mirror_process.send(ledger, home, name, tracking_uri):
        print(missing)


@app.command()
def gc(
    study: StudyOption = None,
    keep_best: Annotated[
        int, typer.Option("--keep-best", min=1, max=MOST, help="Keep the checkpoints of this many best trials.")
    ] = 1,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="10GB", help="Drop only until the study's checkpoints fit into this size."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be dropped; drop nothing.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Drop checkpoints of ended trials except the best. In MLflow too."""
    from hpo.declaration.budget import parse_size
    from hpo.storage.gc import collect
    from hpo.storage.lookup import open_study

    bound = parse_size(max_bytes) if max_bytes else None
    ledger, name, study_home = open_study(home, storage, study)
    collection = collect(ledger, study_home, name, keep_best, bound, dry_run=dry_run)
    if not dry_run:
        with notes(as_json):
            _mirror(ledger, name, study_home, tracking_uri)
    if as_json:
        print_json({"study": name, "dry_run": dry_run, **collection.facts()})
        return
    print(f"{name}: {collection.describe(done=not dry_run)}")
    if bound is not None and sum(row.size for row in collection.left) > bound:
        print(f"That is more than --max-bytes {max_bytes}: all of it is of open trials, of the best, or needed.")


@app.command()
def soup(
    study: StudyOption = None,
    top: Annotated[int, typer.Option("--top", min=2, max=MOST, help="Average this many of the best trials.")] = 5,
    trial: Annotated[
        int | None,
        typer.Option(
            "--trial",
            min=0,
            max=MOST,
            help="Average this trial's kept checkpoints instead.",
            autocompletion=completion.trials,
        ),
    ] = None,
    to: Annotated[str | None, to_option("DIRECTORY", "Write the better soup as a checkpoint directory.")] = None,
    force: ForceOption = False,
    save: SaveOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Average the weights of trials, or of a trial's checkpoints. The averages are compared with the best model."""
    from hpo.analysis.models import soup as soups
    from hpo.storage.lookup import open_study

    path = target(to, save, directory=True, force=force)
    if path is not None:
        soups.check_free(path, replace=force)
    ledger, name, study_home = open_study(home, storage, study)
    tried = (
        soups.soup(ledger, study_home, name, top)
        if trial is None
        else soups.of_one_trial(ledger, study_home, name, trial, top)
    )
    with notes(as_json):
        print(soups.describe(tried))
        if path is not None:
            soups.save(tried, path, replace=force)
            soups.record(ledger, tried, path)
            _mirror(ledger, name, study_home, tracking_uri)
            print(f"the {tried.best.name} is written to {path}")
    if as_json:
        print_json({**tried.facts(), "saved": path})


@app.command()
def promote(
    number: Annotated[
        int | None,
        typer.Argument(
            help="Number of the trial.  [default: the best]", min=0, max=MOST, autocompletion=completion.trials
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the registered model.  [default: the study's name]")
    ] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", help="Alias that points to the version.  [default: champion]")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo the last promotion.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")] = False,
    as_owner: OwnerOption = False,
    study: StudyOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Register a trial's checkpoint as a model version in MLflow. mlflow.pyfunc.load_model opens it."""
    from hpo.analysis.models import promote as promotions
    from hpo.ledger import audit, queries
    from hpo.storage.lookup import open_study

    ledger, study_name, study_home = open_study(home, storage, study)
    if not dry_run:
        ledger.look(lambda c: audit.check_owner(c, queries.study_row(c, study_name), as_owner=as_owner))
    if undo:
        done = promotions.undo(ledger, study_home, study_name, number, name, alias, tracking_uri, dry_run=dry_run)
    else:
        done = promotions.promote(
            ledger,
            study_home,
            study_name,
            number,
            name or study_name,
            alias or "champion",
            tracking_uri,
            dry_run=dry_run,
        )
    with notes(as_json):
        if not dry_run:
            _mirror(ledger, study_name, study_home, tracking_uri)
    if as_json:
        print_json({"study": study_name, "undone": undo, "dry_run": dry_run, **asdict(done), "uri": done.uri})
        return
    print(promotions.describe(done, undone=undo, dry_run=dry_run))


@app.command()
def export(
    to: Annotated[
        str, to_option("FILE|URL", "The file or, of huggingface, the directory to write, or an Optuna storage's URL.")
    ],
    number: Annotated[
        int | None,
        typer.Argument(
            help="The trial whose model to write.  [default: the whole study]",
            min=0,
            max=MOST,
            autocompletion=completion.trials,
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Of a model: safetensors, onnx, torch (torch.export, .pt2) or, of a language model, gguf or "
            "huggingface (a directory). Of a study: csv, parquet, json or optuna.  [default: by the file's ending]",
            autocompletion=completion.among(completion.FORMATS),
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="int8|nf4",
            help="Write a model's linear layers in 8 or 4 bits, as safetensors, and its metrics before and after.",
            autocompletion=completion.among(completion.QUANTIZED),
        ),
    ] = None,
    force: ForceOption = False,
    study: StudyOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the study in an Optuna storage.  [default: as here]")
    ] = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Write a study's trials, or a trial's best model, to a file. The file of a model is checked by its outputs."""
    from hpo.storage.lookup import open_study

    if number is None:
        from hpo.interchange import export as exports

        if quantize is not None:
            raise UserError(f"--quantize {quantize}: only a trial's model has weights: give the trial's number too.")
        wanted = exports.format_of(to, format)
        exports.check(to, wanted, name, force=force)
        if "://" not in to:
            check_free(to, force=force or wanted == "optuna")
        ledger, study_name, study_home = open_study(home, storage, study)
        summary = exports.export_study(ledger, study_home, study_name, to, wanted, name)
        print_json({"study": study_name, "to": to, "format": wanted}) if as_json else print(summary)
        return
    from hpo.analysis.models.export import check, describe, export_trial

    if name is not None:
        raise UserError(f"--name {name}: a model has no name of its study: leave it out, or the trial's number.")
    wanted = check(to, format, quantize, force=force)
    ledger, study_name, study_home = open_study(home, storage, study)
    done = export_trial(ledger, study_home, study_name, number, wanted, to, quantize)
    print_json(done) if as_json else print(describe(done))
