"""Commands for other processes and hosts: worker, node, migrate."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli import completion
from hpo.cli.options import HomeOption
from hpo.terminal import print

app = typer.Typer()


@app.command()
def worker(
    storage: Annotated[str, typer.Option("--storage", envvar="HPO_STORAGE", help="The ledger's URL.")],
    home: HomeOption = ".hpo",
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="The study's name; by default all of the home's that are driven.",
            autocompletion=completion.studies,
        ),
    ] = None,
) -> None:
    """Train trials of a running study from another process or host. It sees the home and stays to the end."""
    from hpo.storage.home import Home
    from hpo.workers.joined import join

    at = Home.at(home)
    with at.keeping():
        raise typer.Exit(join(storage, at, study))


@app.command()
def node(
    rendezvous: Annotated[str, typer.Argument(help="HOST:PORT, the HPO_RENDEZVOUS of the first node.")],
    storage: Annotated[str, typer.Option("--storage", envvar="HPO_STORAGE", help="The ledger's URL.")],
) -> None:
    """Train this host's share of the ranks of another host's trials."""
    from hpo.workers.ranks import serve

    serve(rendezvous, storage)


@app.command()
def migrate(
    storage: Annotated[str, typer.Option("--storage", envvar="HPO_STORAGE", help="The ledger's URL.")],
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long a server may take to answer.")
    ] = 0.0,
) -> None:
    """Make a server's ledger, or bring it to this release."""
    from hpo.ledger import Ledger

    ledger = Ledger(storage, patience=wait)
    print(f"{ledger.shown} is a ledger of this release.")
    ledger.close()
