"""Lays out the help: the commands a newcomer needs, all commands by heading, and the options of a run by heading."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from hpo.terminal import print

FIRST = """\
Hyperparameter search and experiment tracking for PyTorch, and for any training
that a Python function or a command can do.

  hpo init my_study                        write my_study.py, ready to run
  hpo run --study my_study.py --trials 20  search
  hpo status                               show how far the search is
  hpo best                                 show the best trial so far
  hpo resume                               go on after Ctrl-C or a crash

`hpo --help` lists all commands, `hpo COMMAND --help` the options of one."""

# heading -> its commands; both in the order in which `hpo --help` shows them.
HEADINGS = {
    "Search": ("init", "run", "resume", "status", "watch"),
    "Results": (
        "best",
        "show",
        "compare",
        "plot",
        "report",
        "importance",
        "forecast",
        "confirm",
        "ablate",
        "extend",
        "tag",
        "serve",
        "ui",
    ),
    "Models and other tools": ("soup", "promote", "export", "import", "import-config"),
    "Training": ("schedule", "lr-find", "batch-find", "plan", "diagnose"),
    "Upkeep": ("doctor", "verify", "sync", "backup", "repair", "alert", "gc", "rm", "log", "quota"),
    "Several processes and hosts": ("worker", "node", "migrate"),
}

# heading -> the parameters of `run` and `resume` below it; both in the order of their help.
OPTIONS = {
    "Study": ("declaration", "study", "name", "overrides", "config", "tags", "allow_drift"),
    "Budget": ("trials", "epochs", "time", "target", "patience", "stop_when"),
    "Search": (
        "sampler",
        "strategy",
        "finish",
        "confirm",
        "order",
        "window",
        "seed",
        "tier",
        "enqueue",
        "learn_from",
        "warm_start",
    ),
    "Placement": ("executor", "workers", "cpus_per_worker", "gpus_per_worker", "scheduler"),
    "Storage": ("home", "storage", "checkpoints", "max_bytes", "outage_wait"),
    "Notifications": ("tracking_uri", "trackers", "alerts"),
    "Output": ("log_format", "as_json", "help"),
}


class ByHeading(TyperCommand):
    """Shows its options below the headings of `OPTIONS`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        for heading, names in OPTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in names if (record := records.get(name))])


class Group(TyperGroup):
    """Prints its help if no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(self.first_page(ctx))
            ctx.exit()
        return super().parse_args(ctx, args)

    def first_page(self, ctx: Any) -> str:
        return ctx.get_help()


class Overview(Group):
    """Prints the first commands if none is named, and all commands by heading as its help."""

    def first_page(self, ctx: Any) -> str:
        return FIRST

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        limit = formatter.width - 6 - width
        for heading, names in HEADINGS.items():
            rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)
