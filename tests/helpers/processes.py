"""Tells which processes belong to a run and which module each executes, also where it was forked."""

from __future__ import annotations

import psutil

FORKING = "hpo.workers.prepared"  # whose command line its forks keep, beside a name of their own


def runs(process: psutil.Process, module: str) -> bool:
    """Returns true where it is `python -m module`, or a fork that has the module's name; false once it has ended."""
    try:
        words, name = process.cmdline(), process.name()
    except psutil.NoSuchProcess:
        return False
    if FORKING in words:
        return name == f"hpo-{module.rpartition('.')[2].replace('_', '-')}"
    return module in words


def processes_of(pid: int) -> list[psutil.Process]:
    """Returns the processes that a run has started, and the run's own last.

    The zygotes of tests/helpers/warm.py are left out: users have none, and a run whose zygote is dead cannot start
    another process.
    """
    run = psutil.Process(pid)
    return [*(child for child in run.children(recursive=True) if child.cmdline()[1:2] != ["zygote"]), run]
