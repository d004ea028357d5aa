"""Holds the commands for other processes and hosts: worker, node, migrate."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from hpo.cli import completion
from hpo.cli.options import HomeOption
from hpo.cli.service_options import LogFormatOption, MetricsOption, OutageOption, ProbesOption
from hpo.terminal import print

app = typer.Typer()


@app.command()
def worker(
    storage: Annotated[str, typer.Option("--storage", envvar="HPO_STORAGE", help="URL of the ledger's database.")],
    home: HomeOption = ".hpo",
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="The study's name.  [default: all driven studies of the home]",
            autocompletion=completion.studies,
        ),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for the next driver; with --study, until it has ended.")
    ] = False,
    outage_wait: OutageOption = None,
    probes: ProbesOption = None,
    metrics: MetricsOption = None,
    log_format: LogFormatOption = "text",
) -> None:
    """Train a study's trials from another process or host. It must see the home, and stays to the end."""
    from hpo.driver.request import waiting
    from hpo.storage.home import Home
    from hpo.workers.manual_worker import join

    study_home = Home.at(home)
    with waiting(outage_wait), study_home.keeping():
        raise typer.Exit(join(storage, study_home, study, stay=stay, probes=probes, metrics=metrics))


@app.command()
def node(
    rendezvous: Annotated[str, typer.Argument(help="HOST:PORT; no longer used.")] = "",
    storage: Annotated[
        str, typer.Option("--storage", envvar="HPO_STORAGE", help="URL of the ledger's database; no longer used.")
    ] = "",
) -> None:
    """Print the torchrun line that replaces this command."""
    from hpo.workers.nodes import replaced

    raise replaced("hpo node")


@app.command()
def migrate(
    storage: Annotated[str, typer.Option("--storage", envvar="HPO_STORAGE", help="URL of the ledger's database.")],
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", min=0, help="Time for which to wait.")] = 0.0,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; wait until this release can use the ledger, or fail.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Upgrade although processes of an older release cannot go on.")
    ] = False,
) -> None:
    """Create a server's ledger, or upgrade it to this release."""
    from hpo.errors import LedgerInUse, NoLedger, OlderLedger
    from hpo.ledger import Ledger

    deadline, users = time.monotonic() + wait, ""
    while True:
        try:
            ledger = Ledger(storage, create=not check, patience=max(deadline - time.monotonic(), 0.0), evict=force)
            break
        except (NoLedger, OlderLedger, LedgerInUse) as error:  # another process may be about to do it, or to end
            if time.monotonic() >= deadline:
                raise
            if isinstance(error, LedgerInUse) and str(error) != users:
                users = str(error)
                print(f"waiting: {users}")
            time.sleep(min(1.0, wait))
    print(f"this release can use {ledger.shown}.")
    ledger.close()
