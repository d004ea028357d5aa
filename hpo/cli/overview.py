"""Holds what `hpo` and `hpo --help` show first: the commands a newcomer needs, and all of them by heading."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

FIRST = """\
Hyperparameter search and experiment tracking for PyTorch, and for any training
that a Python function or a command can do.

  hpo init my_study                        write my_study.py, ready to run
  hpo run --study my_study.py --trials 20  search
  hpo status                               show how far the search is
  hpo best                                 show the best trial so far
  hpo resume                               go on after Ctrl-C or a crash

`hpo --help` lists all commands, `hpo COMMAND --help` the options of one."""

# Each command stands below one heading, in the order in which `hpo --help` shows them.
HEADINGS = {
    "Search": ("init", "run", "resume", "status", "watch"),
    "Results": (
        "best",
        "show",
        "compare",
        "plot",
        "report",
        "importance",
        "confirm",
        "ablate",
        "tag",
        "serve",
        "ui",
    ),
    "Models and other tools": ("soup", "promote", "export", "import"),
    "Training": ("schedule", "lr-find", "batch-find", "plan", "diagnose"),
    "Upkeep": ("doctor", "verify", "sync", "alert", "gc", "rm"),
    "Several processes and hosts": ("worker", "node", "migrate"),
}


class Group(TyperGroup):
    """Prints its help where no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(self.first_page(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def first_page(self, ctx: Any) -> str:
        return ctx.get_help()


class Overview(Group):
    """Prints the first commands where none is named, and all by heading as its help."""

    def first_page(self, ctx: Any) -> str:
        return FIRST

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for heading, names in HEADINGS.items():
            rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)
