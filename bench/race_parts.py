"""Where the time of a whole study goes: by the clock and by the processor, a line for each kind of process.

    python bench/race_parts.py [--rounds 5] [--trials 40] [--workers 2] [--study mlp] [--peer FILE] [--before CHECKOUT]
                               [--against "RUN OPTIONS"] [-- RUN OPTIONS]

A round runs `hpo run` in a fresh home, random search and nothing pruned, and then what it is to be held against: with
`--peer` the loop that a user would write instead, `python FILE DIR TRIALS WORKERS`; with `--before` the same command of
another checkout; with `--against` the same with further options, such as "-o train.lanes=1". They take turns, so that a
change in the machine's speed meets all, and ratios are of one round each.

Processor time is user and system. The whole is what the system counts for a command and all it has waited for; the
parts are read from /proc every 20 ms while the command runs, so what a process does in its last 20 ms is missing from
them. A process counts as what its command line says: the module that it runs, `driver` for the command itself.

    first claim   seconds from the command until a worker has taken the first trial
    first report  and until the first epoch is in the ledger
    last end      and until the last trial has ended; what follows is the mirror's rest, and leaving
    driving       processor seconds of the command and of the mirror between the first claim and the last end, without
                  their start-up
"""

from __future__ import annotations

import argparse
import os
import shlex
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine

_TICK = os.sysconf("SC_CLK_TCK")
_ROLES = {
    "hpo.workers.worker": "workers",
    "hpo.workers.prepared": "prepared",  # what workers are forked from
    "hpo.tracking.mirror_process": "mirror",
    "hpo.alerts.process": "alerts",
}


def run(command: Sequence[str], checkout: str | None = None) -> tuple[dict[str, float], _Watch]:
    """Seconds of a command by the clock, and processor seconds of it and, by role, of all that it starts; and what was
    read while it ran. `checkout`: where it is from, if not from here."""
    before = os.times()
    started = time.perf_counter()
    environ = {"PYTHONPATH": checkout} if checkout else {}
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=checkout,  # which `-m` looks in first
        env=os.environ | environ,
    )
    watch = _Watch(process.pid)
    _, errors = process.communicate()
    seconds = time.perf_counter() - started
    parts = watch.end()
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {errors}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"clock": seconds, "processor": used} | parts, watch


class _Watch:
    """Reads in a thread what the processes below `root` have used, until it ends."""

    def __init__(self, root: int) -> None:
        self._root, self._ended = root, threading.Event()
        self._used: dict[int, tuple[str, float]] = {}
        self._read: list[tuple[float, str, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, float]:
        """Role -> processor seconds."""
        self._ended.set()
        self._thread.join()
        found: dict[str, float] = {}
        for role, seconds in self._used.values():
            found[role] = found.get(role, 0.0) + seconds
        return found

    def between(self, role: str, begin: float, end: float) -> float:
        """Processor seconds of the one process of a role between two times, in seconds since 1970."""
        own = [(at, seconds) for at, known, seconds in self._read if known == role]
        first, last = (max((s for at, s in own if at <= when), default=0.0) for when in (begin, end))
        return last - first

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            for pid in _below(self._root):
                if (seconds := _used(pid)) is not None:
                    role = "driver" if pid == self._root else _role(pid)
                    self._used[pid] = (role or self._used.get(pid, ("others",))[0], seconds)
                    self._read.append((time.time(), *self._used[pid]))


def _role(pid: int) -> str:
    """Returns what a process counts as; "" where that cannot be told any more. A fork has its module's name."""
    try:
        if (name := Path(f"/proc/{pid}/comm").read_text().strip()).startswith("hpo-"):
            return _ROLES.get(f"hpo.workers.{name.removeprefix('hpo-')}", "others")
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    module = words[words.index("-m") + 1] if "-m" in words else ""
    return _ROLES.get(module, "others" if words != [""] else "")


def _below(root: int) -> Iterator[int]:
    """The process and all that it and its threads have started."""
    yield root
    try:
        tasks = list(Path(f"/proc/{root}/task").iterdir())
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:
        return
    for pid in children:
        yield from _below(pid)


def _used(pid: int) -> float | None:
    """User and system seconds of a process, without its children's (man proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICK


def ours(
    options: argparse.Namespace, home: Path, more: Sequence[str] = (), checkout: str | None = None
) -> dict[str, float]:
    """A study of `hpo run` in a fresh home."""
    what = ["--study", options.study, "--trials", options.trials, "--workers", options.workers]
    search = ["--sampler", "random", "--strategy", "none"]
    began = time.time()
    command = [sys.executable, "-m", "hpo", "run", *map(str, what), *search, "--home", str(home), *options.more, *more]
    figures, watch = run(command, checkout)
    with closing(sqlite3.connect(home / "ledger.db")) as ledger:
        for name, query in (
            ("first claim", "SELECT min(started_at) FROM attempts"),
            ("first report", "SELECT min(at) FROM reports"),
            ("last end", "SELECT max(ended_at) FROM trials"),
        ):
            figures[name] = ledger.execute(query).fetchone()[0] - began
    span = began + figures["first claim"], began + figures["last end"]
    return figures | {f"{role}, driving": watch.between(role, *span) for role in ("driver", "mirror")}


def peer(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """The same by the loop in `--peer`."""
    return run([sys.executable, options.peer, str(directory), str(options.trials), str(options.workers)])[0]


def others(options: argparse.Namespace) -> dict[str, Callable[[Path], dict[str, float]]]:
    """What is to be held against the study, by name."""
    found: dict[str, Callable[[Path], dict[str, float]]] = {}
    if options.peer:
        found["peer"] = lambda place: peer(options, place)
    if options.before:
        found["before"] = lambda place: ours(options, place, checkout=str(options.before.resolve()))
    if options.against:
        found["against"] = lambda place: ours(options, place, shlex.split(options.against))
    return found


def named(name: str, contestant: Callable[[Path], dict[str, float]]) -> Callable[[Path], dict[str, float]]:
    return lambda place: {f"{name}, {figure}": value for figure, value in contestant(place).items()}


def measure(
    rounds: int, scratch: Path, contestants: Sequence[Callable[[Path], dict[str, float]]]
) -> list[dict[str, float]]:
    """The figures of each round; every second round begins with the last contestant."""
    found = []
    for number in range(rounds):
        turns = list(enumerate(contestants))[:: -1 if number % 2 else 1]
        found.append({})
        for which, contestant in turns:
            found[-1] |= contestant(scratch / f"{number}-{which}")
        print(f"round {number + 1}:", ", ".join(f"{k} {v:.2f}" for k, v in found[-1].items()), flush=True)
    return found


def show(rounds: Sequence[dict[str, float]]) -> None:
    """Medians and ranges over the rounds, and ratios within each."""
    names = list(dict.fromkeys(name for one in rounds for name in one))
    for name in names:
        values = [one.get(name, 0.0) for one in rounds]
        print(f"{name:28} {statistics.median(values):8.2f} s  ({min(values):.2f} to {max(values):.2f})")
    parts = ("driver", "driver, driving", *_ROLES.values(), "mirror, driving", "others")
    whose = ("", *(f"{other}, " for other in ("peer", "before", "against") if f"{other}, clock" in names))
    ratios = {f"{who}{name} / processor": (who + name, f"{who}processor") for who in whose for name in parts}
    for other in whose[1:]:
        compared = [name for name in ("clock", "processor", *parts) if other + name in names]
        ratios |= {f"{name} / {other.rstrip(', ')}": (name, other + name) for name in compared}
    for name, (part, whole) in ratios.items():
        if part not in names or not all(one.get(whole) for one in rounds):
            continue
        values = [one.get(part, 0.0) / one[whole] for one in rounds]
        print(f"{name:28} {statistics.median(values):8.3f}    ({min(values):.3f} to {max(values):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--study", default="mlp")
    parser.add_argument("--peer", help="a script that does the same without hpo")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit, which does the same")
    parser.add_argument("--against", help="further options of `hpo run`, with which it does the same")
    parser.add_argument("more", nargs="*", help="further options of `hpo run`, after --")
    options = parser.parse_args()
    print(machine())
    against = [named(name, contestant) for name, contestant in others(options).items()]
    contestants: list[Callable[[Path], dict[str, float]]] = [lambda place: ours(options, place), *against]
    with tempfile.TemporaryDirectory() as scratch:
        show(measure(options.rounds, Path(scratch), contestants))


if __name__ == "__main__":
    main()
