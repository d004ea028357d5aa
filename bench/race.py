"""The race: who has found what, so many seconds after the command?

    python bench/race.py --cache FILE [--syne-tune PYTHON] [--text FILE] [--plot FILE.svg]
    python bench/race.py --cache FILE --workloads mlp --seeds 3           a short one

Three studies, `mlp`, `convnet` and `gpt` (on the first 40 kB of --text, else of this project's own pages), are
searched by hpo and by programs that a competent user of Optuna, Ray Tune and Syne Tune would write: bench/racing/.
What is even:

- the clock: it starts with the command, so imports, tables and clusters count; at the budget all processes are
  killed.
- the work: models, data, batches, epochs, losses, optimizers, schedules and clipping are the study's, and validation
  and held-out data are both measured after each epoch. The peers' loop shares no code with hpo's trainer, indexes
  tensors batch by batch and augments whole batches; tests/bench/test_race.py holds it against the trainer.
- the space: the study's, in each tool's own primitives. Ray Tune and Syne Tune have no conditions, so a trial leaves
  out what they draw for a dimension that does not exist. The points that a study tries first all try first.
- the machine: as many training processes each (--processes), of one thread each, and one contender at a time.
- what is kept: a checkpoint of model and optimizer after each epoch, and MLflow on SQLite. The time of a value is the
  one at which the tool recorded it, in hpo's ledger or in MLflow's database, which are read after the kill.
- the search: hpo's defaults, in an empty home and in one that holds one finished study of the workload under another
  seed, which it learns from; Optuna's TPE with MedianPruner, and with HyperbandPruner(max_resource=epochs); ASHA with
  random search as Ray Tune and Syne Tune give it, up to the study's epochs.

A contender's value is the best of any epoch of any trial so far, and the held-out value is that epoch's. Trials that
have reported an epoch count as trials. Optuna's journal file and forked processes, fused optimizers, Ray's reused
actors and ten looks a second by Syne Tune's tuner are choices in the peers' favour. Syne Tune's local backend starts
a process for each trial.

Syne Tune needs an environment of its own, whose interpreter is --syne-tune: `python -m venv DIR && DIR/bin/pip
install syne-tune==0.16.0 torch==2.13.0 scikit-learn mlflow`.

Every cell (workload, contender, seed, budget, processes) that has ended is a line of --cache and is not run again;
delete the lines of what has changed. A contender that ends by itself is not scored: its log is shown, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from bench.racing import show
from bench.racing.contenders import Command, contenders, race
from bench.racing.events import events, improvements
from bench.racing.workloads import STUDIES, workload

SECONDS = {"mlp": 40.0, "convnet": 55.0, "gpt": 70.0}  # all of it, with 5 seeds: 70 minutes


@dataclass(frozen=True)
class Cell:
    workload: str
    contender: str
    seed: int
    budget: float
    processes: int


KEY = ("workload", "contender", "seed", "budget", "processes")


def known(path: Path) -> dict[Cell, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Cell(**{name: row[name] for name in KEY}): row for row in rows}


def run(cell: Cell, command: Command, text: Path | None) -> dict[str, Any] | str:
    """The row of a cell, or what its contender said where it ended by itself."""
    with tempfile.TemporaryDirectory(prefix="race-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch)
        given = workload(cell.workload, text, directory)
        (directory / "workload.json").write_text(json.dumps(given))
        load = os.getloadavg()[0]
        started, code = race(command(directory, given, cell.seed, cell.processes), directory, cell.budget)
        said = (directory / "log.txt").read_text(errors="replace").strip()
        if code is not None:
            return f"it ended by itself with {code}:\n{said[-2000:]}"
        found = events(directory, given, started, cell.budget)
        if not found:
            print(f"  {cell.contender} reported no epoch within {cell.budget:g} s; its log ends: {said[-300:]!r}")
        return {
            **{name: getattr(cell, name) for name in KEY},
            **{name: given[name] for name in ("metric", "mode")},
            "curve": improvements(found, given["mode"]),
            "trials": len({event.trial for event in found}),
            "epochs": len(found),
            "load": round(load, 2),
            "machine": machine(),
        }


def fill(cells: list[Cell], commands: Mapping[str, Command], rows: dict[Cell, dict[str, Any]], given: Any) -> int:
    """Run what is not known, and add it to `rows` and to the cache; how many contenders ended by themselves."""
    failed = 0
    for number, cell in enumerate(missing := [cell for cell in cells if cell not in rows], start=1):
        print(f"{number}/{len(missing)} {cell.workload}, {cell.contender}, seed {cell.seed}", flush=True)
        row = run(cell, commands[cell.contender], given.text)
        if isinstance(row, str):
            print(f"  not scored: {row}", flush=True)
            failed += 1
            continue
        rows[cell] = row
        with given.cache.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    return failed


def budgets(text: str) -> dict[str, float]:
    """Seconds for all workloads, or some of them: 60, or mlp=40,gpt=70."""
    try:
        pairs = dict(pair.split("=") for pair in text.split(",")) if "=" in text else dict.fromkeys(STUDIES, text)
        seconds = {name: float(value) for name, value in pairs.items()}
        if not seconds.keys() <= set(STUDIES) or min(seconds.values()) <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds, or such as mlp=40,gpt=70") from None
    return SECONDS | seconds


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="of the cells that have ended, JSON lines")
    parser.add_argument("--workloads", default=",".join(STUDIES))
    parser.add_argument("--contenders", help="some of them, separated by ;")
    parser.add_argument("--seeds", type=int, default=5, help="so many from 0")
    parser.add_argument("--budget", type=budgets, default=SECONDS, help="seconds, or mlp=40,gpt=70")
    parser.add_argument("--processes", type=int, default=2, help="training processes of each")
    parser.add_argument("--text", type=Path, help="what the gpt reads")
    parser.add_argument("--syne-tune", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the figure, .svg or .png")
    given = parser.parse_args()
    given.workloads = given.workloads.split(",")
    if unknown := [name for name in given.workloads if name not in STUDIES]:
        parser.error(f"--workloads {unknown[0]!r}: give some of {', '.join(STUDIES)}")
    given.commands = contenders(given.syne_tune)
    given.contenders = given.contenders.split(";") if given.contenders else list(given.commands)
    if unknown := [name for name in given.contenders if name not in given.commands]:
        parser.error(
            f"--contenders {unknown[0]!r}: give some of {'; '.join(given.commands)}; Syne Tune's needs --syne-tune"
        )
    if given.text and not given.text.is_file():
        parser.error(f"--text {given.text} is not there: give a file of text, or leave it out")
    return given


def main() -> None:
    given = parsed()
    print(machine())
    rows = known(given.cache)
    cells = [
        Cell(name, contender, seed, given.budget[name], given.processes)
        for seed in range(given.seeds)
        for name in given.workloads
        for contender in given.contenders
    ]
    failed = fill(cells, given.commands, rows, given)
    shown = [rows[cell] for cell in cells if cell in rows]
    raced = [name for name in given.workloads if any(row["workload"] == name for row in shown)]
    for name in raced:
        print("\n" + show.table(shown, name))
    if given.plot and raced:
        show.plot(shown, raced, given.plot)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
