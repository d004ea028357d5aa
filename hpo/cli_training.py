"""Commands that look at the training of a study, in this process: nothing is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpo import commandline
from hpo.commandline import ConfigOption, OverrideOption

app = typer.Typer()


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

    found = curve(study, commandline.overrides(config, override), steps_per_epoch)
    if save:
        draw(found, Path(save))
    print(f"{found.settings}: drawn in {save}" if save else describe(found))


@app.command("lr-find")
def lr_find(
    study: Annotated[str, typer.Option("--study", help="A study's name, or FILE.py[:NAME].")],
    override: OverrideOption = None,
    config: ConfigOption = None,
    low: Annotated[float, typer.Option("--low", help="The first learning rate.")] = 1e-7,
    high: Annotated[float, typer.Option("--high", help="The last one.")] = 10.0,
    steps: Annotated[int, typer.Option("--steps", min=20, max=100_000, help="Optimizer steps between them.")] = 100,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE.png", help="Draw a picture too.")] = None,
) -> None:
    """Find a learning rate: train at rates that rise from step to step, and see where the loss falls fastest."""
    from hpo.analysis import lr_find as tests

    found = tests.lr_find(study, commandline.overrides(config, override), low, high, steps)
    print(tests.describe(found))
    if save:
        tests.draw(found, f"{study}: learning-rate range test", Path(save))
        print(f"drawn in {save}")
