"""What a trial costs apart from its training: ours against the loop people write by hand and against Ray Tune.

    python bench/overhead.py [--trials 40] [--rounds 5] [--run-trials 300] [--ray-trials 10]
    python bench/overhead.py --doors [--trials 40] [--rounds 5]

Wall clock, a study that trains nothing (bench/noop.py): 10 reports of 3 metrics a trial. path, drained, peer and mlflow
take turns, so that a change in the machine's speed meets all of them, and their databases exist before anything is
timed; run and ray follow, since their start-up is spread over more trials.

    path     ours, a trial's own path: ask, claim, reports, tell, on SQLite with synchronous FULL; random sampler
    drained  ours, path and then its draining to MLflow (SQLite) in the same process, one after the other: what the
             work costs where one processor does all of it, without the mirror's start-up
    run      ours as it is used, `hpo run --executor inline` without its screen: the mirror is a process beside the
             driver that has drained and left at the end, a metrics.json for every trial; all start-up is counted,
             over --run-trials trials
    peer     Optuna, RDB on SQLite, TPE; MLflow on SQLite, one log_metrics and one report per step
    mlflow   MLflow's client alone: create_run, one log_batch, set_terminated
    ray      Ray Tune with MLflow's callback, where ray is installed (the extra `ray`)

With --doors only the paths of a task and of a function (bench/noop_function.py), which take turns; `saved` with a
checkpoint of 4 KiB at each report, a tensor of the task's, a file of the function's.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from bench.noop import REPORTS, metrics

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

STUDY = str(Path(__file__).with_name("noop.py"))


def ours(directory: Path) -> Callable[[int], dict[str, float]]:
    """Seconds for so many trials: the trials' own path, and that and the mirror's draining, one after the other."""
    from hpo.clock import SystemClock
    from hpo.ledger import leases
    from hpo.ledger.process_id import Process
    from hpo.tracking.mirror import GRACE, LEASE_TIMEOUT, Mirror
    from hpo.tracking.mlflow.sqlite import open_mlflow

    home, ledger, drive = _study(directory)
    tracker, clock = open_mlflow(home.tracking_uri, home.artifacts), SystemClock()
    drive(1)
    lease = leases.acquire(ledger, "mirror:1", "noop", Process.current(), clock, LEASE_TIMEOUT)
    mirror = Mirror(ledger, tracker, "noop", home, lease, clock)

    def run(trials: int) -> dict[str, float]:
        path = drive(trials)
        started = time.perf_counter()
        left = mirror.follow(lambda: True, GRACE, clock.sleep).behind
        assert left == 0, f"MLflow is behind by {left}"
        return {"path": path, "drained": path + time.perf_counter() - started}

    return run


def product(directory: Path) -> Callable[[int], dict[str, float]]:
    """Seconds of `hpo run --executor inline` for so many trials, from the declaration to a mirror that has drained."""
    from hpo.driver.request import request_of
    from hpo.driver.run import run as search
    from hpo.storage.home import Home

    home, done = Home(directory), 0

    def run(trials: int) -> dict[str, float]:
        nonlocal done
        done += trials
        started = time.perf_counter()
        request = request_of(home, reference=STUDY, trials=done, executor="inline")
        result = search(request, lambda *_: lambda notice: None)
        assert result.state == "complete" and result.behind == 0, result
        return {"run": time.perf_counter() - started}

    return run


def door(name: str, directory: Path, reference: str, **overrides: bool) -> Callable[[int], dict[str, float]]:
    """Seconds and processor seconds for so many trials' own path, by one of the doors through which a study comes."""
    _, _, drive = _study(directory, reference, overrides)

    def run(trials: int) -> dict[str, float]:
        began = time.process_time()
        seconds = drive(trials)
        return {name: seconds, f"{name}, processor": time.process_time() - began}

    return run


def doors(here: Path, rounds: int, trials: int) -> None:
    """Prints what a trial of a task costs, what one of a function does, and their ratio, round by round."""
    function = str(Path(__file__).with_name("noop_function.py"))
    contestants = [
        door("path", here / "task", STUDY),
        door("function", here / "function", function),
        door("path, saved", here / "task-saved", STUDY, saves=True, bare=False),
        door("function, saved", here / "function-saved", function, saves=True),
    ]
    figures = measure(contestants, rounds, trials)
    show(figures)
    for kind in ("", ", saved", ", processor", ", saved, processor"):
        ratios = [f / p for f, p in zip(figures[f"function{kind}"], figures[f"path{kind}"], strict=True)]
        print(f"function / path{kind}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def _study(
    directory: Path, reference: str = STUDY, overrides: Mapping[str, bool] | None = None
) -> tuple[Home, Ledger, Callable[[int], float]]:
    """A home for the study that trains nothing, and how to drive so many more trials of it: the seconds it took."""
    from hpo.driver.loop import Driver
    from hpo.driver.request import DriverOptions, request_of
    from hpo.driver.resolve import declare
    from hpo.ledger import Ledger
    from hpo.storage.home import Home
    from hpo.workers.executors.inline import Inline

    home = Home(directory).create()
    ledger = Ledger(home.storage)
    done = 0

    def drive(trials: int) -> float:
        nonlocal done
        done += trials
        resolved = declare(request_of(home, reference=reference, overrides=overrides or {}), ledger, workers=1)
        driver = Driver(ledger, resolved, DriverOptions(home, ledger.url, home.tracking_uri, trials=done), Inline())
        driver.acquire()
        started = time.perf_counter()
        driver.run()
        seconds = time.perf_counter() - started
        driver.release()
        return seconds

    return home, ledger, drive


def peer(directory: Path) -> Callable[[int], dict[str, float]]:
    """Optuna and MLflow as their tutorials put them together, both on SQLite."""
    import mlflow
    import optuna

    directory.mkdir()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
    mlflow.create_experiment("peer", artifact_location=(directory / "artifacts").as_uri())
    mlflow.set_experiment("peer")
    study = optuna.create_study(
        storage=f"sqlite:///{directory / 'optuna.db'}", sampler=optuna.samplers.TPESampler(seed=0)
    )

    def objective(trial: optuna.Trial) -> float:
        x, y = trial.suggest_float("x", 0.0, 1.0), trial.suggest_float("y", 1e-3, 1.0, log=True)
        reported: dict[str, float] = {}
        with mlflow.start_run():
            mlflow.log_params({"x": x, "y": y})
            for step in range(1, REPORTS + 1):
                reported = metrics(x, y, step)
                mlflow.log_metrics(reported, step=step)
                trial.report(reported["val/loss"], step)
                if trial.should_prune():
                    raise optuna.TrialPruned
        return reported["val/loss"]

    def run(trials: int) -> dict[str, float]:
        started = time.perf_counter()
        study.optimize(objective, n_trials=trials)
        return {"peer": time.perf_counter() - started}

    return run


def mlflow_alone(directory: Path) -> Callable[[int], dict[str, float]]:
    """MLflow's client with everything of a trial in one batch: the floor of any mirror."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    directory.mkdir()
    client = MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
    experiment = client.create_experiment("floor", artifact_location=(directory / "artifacts").as_uri())

    def run(trials: int) -> dict[str, float]:
        started = time.perf_counter()
        for _ in range(trials):
            run_id = client.create_run(experiment).info.run_id
            points = [
                Metric(key, value, step, step)
                for step in range(1, REPORTS + 1)
                for key, value in metrics(0.1, 0.2, step).items()
            ]
            client.log_batch(run_id, points, [Param("x", "0.1"), Param("y", "0.2")])
            client.set_terminated(run_id)
        return {"mlflow": time.perf_counter() - started}

    return run


def ray_tune(directory: Path, reuse_actors: bool) -> Callable[[int], dict[str, float]]:
    """Ray Tune, one trial at a time, with its own MLflow callback."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray import tune  # pyright: ignore[reportMissingImports]
    from ray.air.integrations.mlflow import MLflowLoggerCallback  # pyright: ignore[reportMissingImports]

    directory.mkdir()
    if not ray.is_initialized():
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    name = "ray, actors reused" if reuse_actors else "ray"

    def objective(config: dict[str, float]) -> None:
        from ray import tune  # pyright: ignore[reportMissingImports]

        for step in range(1, REPORTS + 1):
            x, y = config["x"], config["y"]
            tune.report({"val/loss": (x - 0.3) ** 2 + 1 / step, "train/loss": y / step, "train/lr": 0.1})

    def run(trials: int) -> dict[str, float]:
        callback = MLflowLoggerCallback(f"sqlite:///{directory / 'mlflow.db'}", experiment_name="ray")
        tuner = tune.Tuner(
            objective,
            param_space={"x": tune.uniform(0.0, 1.0), "y": tune.loguniform(1e-3, 1.0)},
            tune_config=tune.TuneConfig(
                metric="val/loss", mode="min", num_samples=trials, max_concurrent_trials=1, reuse_actors=reuse_actors
            ),
            run_config=tune.RunConfig(storage_path=str(directory), callbacks=[callback], verbose=0),
        )
        started = time.perf_counter()
        tuner.fit()
        return {name: time.perf_counter() - started}

    return run


def measure(contestants: list[Callable[[int], dict[str, float]]], rounds: int, trials: int) -> dict[str, list[float]]:
    """Name -> milliseconds a trial, one figure per round; the contestants take turns, after a warm-up of each."""
    figures: dict[str, list[float]] = {}
    for contestant in contestants:
        contestant(2)
    for _ in range(rounds):
        for contestant in contestants:
            for name, seconds in contestant(trials).items():
                figures.setdefault(name, []).append(seconds / trials * 1e3)
    return figures


_ASKED = (("path", "peer", 8), ("drained", "peer", 3), ("run", "peer", 3), ("drained", "ray", 40), ("run", "ray", 40))


def show(figures: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, values in figures.items():
        print(f"{name:20} {medians[name]:9.1f} ms a trial  ({min(values):.1f} to {max(values):.1f})")
    for part, other, allowed in _ASKED:
        if {part, other} <= medians.keys():
            ratio = medians[other] / medians[part]
            print(f"{other} / {part}: {ratio:.1f} (asked for: at least {allowed})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="trials a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run-trials", type=int, default=300, help="trials of each run with its mirror beside it")
    parser.add_argument("--doors", action="store_true", help="only the paths of a task and of a function")
    parser.add_argument("--ray-trials", type=int, default=10, help="trials of Ray Tune's only round")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        if given.doors:
            doors(here, given.rounds, given.trials)
            return
        figures = measure(
            [ours(here / "home"), peer(here / "peer"), mlflow_alone(here / "mlflow")], given.rounds, given.trials
        )
        figures |= measure([product(here / "product")], 3, given.run_trials)
        if importlib.util.find_spec("ray") is None:
            print("Ray Tune is not measured: pip install 'hpo[ray]'.")
        else:
            figures |= measure([ray_tune(here / "ray", False)], 1, given.ray_trials)
            figures |= measure([ray_tune(here / "reused", True)], 1, given.ray_trials)
    show(figures)


if __name__ == "__main__":
    main()
