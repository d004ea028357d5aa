"""How a study of many trials weighs on its driver: what a trial costs when there are few and many, how busy it is.

python bench/scale.py [--trials 10000] [--measured 100] [--pages 20000] [--idle 8] [--workers 64] [--seconds 30]
                      [--strategies none ...]

growth   processor time a trial, of the driver's own loop, of what `hpo run` does at its ticks (view, metrics.json)
         and of the worker's path, in a study that has few trials and in one that has --trials: real ones of
         bench/noop.py, the first of them multiplied in the ledger; of a population, whose trials go on from each
         other's checkpoints, all real. Of --measured trials the first quarter is not counted, nor are the sampler's
         asks.
waiting  processor time of a decision of a promoting strategy, and of a look for who goes on, where most trials wait
reports  processor time a second of a driver whose study --workers threads of another process train by the worker's
         own code, each reporting once a second
idle     transactions a second on a PostgreSQL of its own, of one such worker and --idle others without a trial
status   seconds of `hpo status`, start-up included, on the large study
pages    seconds and memory of `hpo report`, `importance` and `verify`, and of a server until its page is whole, on a
         study of --pages trials by bench/many_trials.py; start-up included
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.growth import growth, waiting
from bench.machine import machine
from bench.reporting import idle, reports

STRATEGIES = ["none", "median", "percentile", "wilcoxon", "halving", "asha", "hyperband"]
STRATEGIES += ["asha-promote", "hyperband-promote", "pasha", "bohb", "freeze-thaw", "pbt", "pb2"]


def status(root: Path) -> None:
    command = [sys.executable, "-m", "hpo", "status", "--home", str(root)]
    took, busy = [], []
    for _ in range(5):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(time.monotonic() - start)
        busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"status  {min(took):.2f} to {max(took):.2f} s, of a processor {min(busy):.2f} to {max(busy):.2f} s")


def pages(root: Path, trials: int) -> None:
    """Print what the commands that read a whole study take."""
    from bench import many_trials
    from hpo.storage.home import Home
    from hpo.storage.metrics_json import Results

    home = Home(root)
    ledger = many_trials.write(home, trials, workers=16)
    Results(ledger, "many", home).write()
    ledger.close()
    page = ["report", "--to", str(root / "page.html"), "--force"]
    for words in (page, ["importance"], ["verify"]):
        measured(words[0], [sys.executable, "-m", "hpo", *words, "--home", str(root)])
    measured("serve", [sys.executable, __file__, "--follow", str(root)])


def peak_memory(pid: int) -> float:
    """Returns the megabytes that a process has had at most since it began its program; `ru_maxrss` would count those of
    this process too, whose memory a child shares until then."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return max((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), default=0.0)


def measured(name: str, command: list[str]) -> None:
    """Print the seconds, of the clock and of a processor, and the memory of a command."""
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    memory = 0.0
    while True:
        ended, code, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        memory = max(memory, peak_memory(process.pid))
        time.sleep(0.02)
    process.returncode = os.waitstatus_to_exitcode(code)
    took = time.monotonic() - start
    failed = f", exit code {process.returncode}" if process.returncode else ""
    busy = usage.ru_utime + usage.ru_stime
    print(f"pages   {name:10} {took:.2f} s, of a processor {busy:.2f} s, {memory:.0f} MB{failed}")


def follow(root: Path) -> None:
    """Read a study as `hpo serve` does until its report has all parts."""
    from hpo.analysis.serve.live_study import LiveStudy
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

    home = Home(root)
    live = LiveStudy(Ledger(home.storage, create=False), home, "many")
    while not (live.known and live.known.whole):
        live.look()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10000)
    parser.add_argument("--measured", type=int, default=200)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--pages", type=int, default=20000)
    parser.add_argument("--idle", type=int, default=8)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.follow:
        follow(Path(given.follow))
        return
    print(machine())
    with tempfile.TemporaryDirectory() as directory:
        for strategy in given.strategies:
            growth(Path(directory), strategy, given.trials, given.measured)
            waiting(Path(directory), strategy)
        if given.strategies:
            status(Path(directory) / f"{given.strategies[0]}-large")
        if given.pages:
            pages(Path(directory) / "pages", given.pages)
        if given.idle:
            idle(Path(directory), given.idle, given.seconds)
        if given.workers:
            reports(Path(directory), given.workers, given.seconds)


if __name__ == "__main__":
    main()
