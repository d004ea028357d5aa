"""Commands that look and change nothing: watch, doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli.options import INTERRUPTED, HomeOption, StorageOption, StudyOption

app = typer.Typer()


@app.command()
def watch(
    study: StudyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show it as it stands, and end.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show a study that another process runs, until it ends. Ctrl-C ends the show alone."""
    from rich.console import Console

    from hpo.cli import onlooker
    from hpo.storage.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    console = Console()
    try:
        state = (onlooker.once if once else onlooker.follow)(ledger, name, console)
    except KeyboardInterrupt:
        console.print("the study goes on without being watched.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        ledger.close()
    raise typer.Exit(1 if state == "stopped" else 0)
