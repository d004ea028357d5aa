"""Commands about the models that trials have trained: soup, export, gc."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import MOST, HomeOption, StorageOption, StudyOption, TrackingOption, size

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

app = typer.Typer()


def _mirror(ledger: Ledger, name: str, home: Home, tracking_uri: str | None) -> None:
    """Send MLflow what has changed."""
    from hpo.tracking import mirror_process

    if missing := mirror_process.send(ledger, home, name, tracking_uri):
        print(missing)


@app.command()
def gc(
    study: StudyOption = None,
    keep_best: Annotated[
        int, typer.Option("--keep-best", min=1, max=MOST, help="Of how many trials, best first, the checkpoints stay.")
    ] = 1,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="10GB", help="Stop once the study's take no more than this.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Drop checkpoints of ended trials, but for the best. In MLflow too."""
    from hpo.storage.gc import collect
    from hpo.storage.lookup import open_study

    bound = size(max_bytes)
    ledger, name, at = open_study(home, storage, study)
    found = collect(ledger, at, name, keep_best, bound, dry_run=dry_run)
    if not dry_run:
        _mirror(ledger, name, at, tracking_uri)
    print(f"{name}: {found.describe(done=not dry_run)}")
    if bound is not None and sum(row["size"] for row in found.left) > bound:
        print(f"That is more than --max-bytes {max_bytes}: all of it is of open trials, of the best, or needed.")


@app.command()
def soup(
    study: StudyOption = None,
    top: Annotated[int, typer.Option("--top", min=2, max=MOST, help="Of how many trials, best first.")] = 5,
    trial: Annotated[
        int | None, typer.Option("--trial", min=0, max=MOST, help="Average this trial's kept checkpoints instead.")
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="DIR", help="Write the better soup as a checkpoint directory.")
    ] = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Average the weights of trials, or of a trial's checkpoints. The mean is judged beside the best one."""
    from hpo.analysis.models import soup as soups
    from hpo.storage.lookup import open_study

    ledger, name, at = open_study(home, storage, study)
    if save:
        soups.check_free(Path(save))
    found = soups.soup(ledger, at, name, top) if trial is None else soups.of_one_trial(ledger, at, name, trial, top)
    print(soups.describe(found))
    if save:
        soups.save(found, Path(save))
        soups.record(ledger, found, Path(save))
        _mirror(ledger, name, at, tracking_uri)
        print(f"the {found.best.name} is written to {save}")


@app.command()
def export(
    number: Annotated[int, typer.Argument(help="The trial's number.", min=0, max=MOST)],
    to: Annotated[str, typer.Option("--to", metavar="FILE", help="The file to write.")],
    format: Annotated[str, typer.Option("--format", help="safetensors, onnx or torch (torch.export).")] = "safetensors",
    study: StudyOption = None,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Write a trial's best model as a file. It is loaded again and the outputs compared."""
    from hpo.analysis.models.export import check_path, describe, export_trial
    from hpo.storage.lookup import open_study

    check_path(Path(to))
    ledger, name, at = open_study(home, storage, study)
    print(describe(export_trial(ledger, at, name, number, format, Path(to))))
