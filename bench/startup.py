"""How long after `hpo run` the first optimizer step of its first trial is taken, and what memory a worker has.

    python bench/startup.py [--pairs 5] [--workers 2] [--before DIR]
    python bench/startup.py --memory

By turns in pairs: `python -c "import torch, optuna, mlflow"`, and `hpo run` of mlp in a new home until its first step
(`bench/first_step_task.py`), with --before also that of another checkout of this repository. By the clock, and in
processor seconds of all processes of the command from its beginning to its end. --memory says what the imports of a
worker take, each in a process of its own after those before it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine

ROOT = Path(__file__).parent.parent
SAYS = "HPO_BENCH_FIRST_STEP"
IMPORTS = "import torch, optuna, mlflow"
PARTS = {  # each with those before it
    "Python": "pass",
    "numpy": "import numpy",
    "torch": "import torch",
    "SQLAlchemy": "import sqlalchemy.dialects.sqlite",
    "the platform": "import hpo.workers.worker, hpo.workers.lanes",
    "the study and its data": "from studies.mlp.task import digits; digits(0)",
}


def processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imports() -> dict[str, float]:
    began, used = time.monotonic(), processor()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, capture_output=True)
    return {"seconds": time.monotonic() - began, "processor": processor() - used}


def run(tree: Path, workers: int) -> dict[str, float]:
    """Seconds to the first step, processor seconds of the whole command, and the largest of its workers' memory."""
    with tempfile.TemporaryDirectory() as directory:
        says = Path(directory, "says")
        says.mkdir()
        environ = os.environ | {SAYS: str(says), "PYTHONPATH": str(tree)}
        study = str(ROOT / "bench" / "first_step.py")
        command = ["run", "--study", study, "--trials", str(workers), "--workers", str(workers)]
        command += ["--home", str(Path(directory, "home")), "-o", "train.num_epochs=2"]
        began, used = time.monotonic(), processor()
        subprocess.run([sys.executable, "-P", "-m", "hpo", *command], env=environ, check=True, capture_output=True)
        told = [json.loads(file.read_text()) for file in says.iterdir()]
        found = {"seconds": min(one["at"] for one in told) - began, "processor": processor() - used}
        return found | {key: max(one[key] for one in told) for key in ("rss", "pss", "own", "peak")}


def show(name: str, values: list[float], unit: str) -> None:
    print(f"{name}: {statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})")


def compare(pairs: int, workers: int, before: Path | None) -> None:
    trees = {"hpo run": ROOT} | ({f"hpo run of {before}": before} if before else {})
    floors, runs = [], {name: list[Mapping[str, float]]() for name in trees}
    for _ in range(pairs):
        floors.append(imports())
        for name, tree in trees.items():
            runs[name].append(run(tree, workers))
        print(f"pair {len(floors)}:", json.dumps([floors[-1], *(found[-1] for found in runs.values())]), flush=True)
    for what in ("seconds", "processor"):
        show(f"{IMPORTS}, {what}", [one[what] for one in floors], "")
        for name, found in runs.items():
            show(f"{name}, {what}", [one[what] for one in found], "")
            ratios = [one[what] / floor[what] for one, floor in zip(found, floors, strict=True)]
            show(f"{name} / imports, {what}", ratios, "")
    for what in ("rss", "pss", "own", "peak"):
        for name, found in runs.items():
            show(f"{name}, a worker's {what} at its first step", [one[what] for one in found], " MiB")
    if before:
        for what in ("seconds", "processor", "pss", "peak"):
            new, old = (runs[name] for name in trees)
            show(f"after / before, {what}", [a[what] / b[what] for a, b in zip(new, old, strict=True)], "")


def memory() -> None:
    lines, last = [], 0.0
    for name, code in PARTS.items():
        lines.append(code)
        program = "\n".join([*lines, "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"])
        ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
        size = int(ran.stdout) / 1024
        print(f"{name}: {size - last:.0f} MiB, {size:.0f} together")
        last = size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    print(machine())
    memory() if given.memory else compare(given.pairs, given.workers, given.before)


if __name__ == "__main__":
    main()
