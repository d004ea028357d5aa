"""What a trial costs apart from its training: ours against the loop people write by hand and against Ray Tune.

    python bench/overhead.py [--trials 100] [--ray-trials 10]

One run, wall clock, a study that trains nothing (bench/noop.py): 10 reports of 3 metrics a trial. The contestants take
turns, so that a change in the machine's speed meets all of them.

    path     ours, a trial's own path: ask, claim, reports, tell, on SQLite with synchronous FULL; random sampler
    drained  ours, from the start of the study until its mirror has drained to MLflow (SQLite), start-up apart
    peer     Optuna, RDB on SQLite, TPE; MLflow on SQLite, one log_metrics and one report per step
    mlflow   MLflow's client alone: create_run, one log_batch, set_terminated
    ray      Ray Tune with MLflow's callback, where ray is installed (the extra `ray`)
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
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from bench.noop import REPORTS, metrics

STUDY = str(Path(__file__).with_name("noop.py"))


def ours(directory: Path) -> Callable[[int], dict[str, float]]:
    """Seconds for so many trials: the trials' own path, and that and the mirror's draining, one after the other."""
    from hpo import mirror
    from hpo.driver import Driver, Options
    from hpo.executors.inline import Inline
    from hpo.home import Home
    from hpo.ledger import Ledger
    from hpo.run import Request, declare
    from hpo.tracking.mlflow import MlflowTracker

    home = Home(directory).create()
    ledger = Ledger(home.storage)
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    done = 0

    def run(trials: int) -> dict[str, float]:
        nonlocal done
        done += trials
        study, spec = declare(Request(home, reference=STUDY), ledger, workers=1)
        driver = Driver(ledger, study, spec, Options(home, ledger.url, home.tracking_uri, trials=done), Inline())
        driver.acquire()
        started = time.perf_counter()
        driver.run()
        path = time.perf_counter() - started
        driver.release()
        started = time.perf_counter()
        left = mirror.drain(ledger, tracker, "noop", home).behind
        assert left == 0, f"MLflow is behind by {left}"
        return {"path": path, "drained": path + time.perf_counter() - started}

    return run


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


def show(figures: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, values in figures.items():
        print(f"{name:20} {medians[name]:9.1f} ms a trial  ({min(values):.1f} to {max(values):.1f})")
    for part, other, allowed in (("path", "peer", 8), ("drained", "peer", 3), ("drained", "ray", 40)):
        if other in medians:
            ratio = medians[other] / medians[part]
            print(f"{other} / {part}: {ratio:.1f} (asked for: at least {allowed})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="trials a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray-trials", type=int, default=10, help="trials of Ray Tune's only round")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        figures = measure(
            [ours(here / "home"), peer(here / "peer"), mlflow_alone(here / "mlflow")], given.rounds, given.trials
        )
        if importlib.util.find_spec("ray") is None:
            print("Ray Tune is not measured: pip install 'hpo[ray]'.")
        else:
            figures |= measure([ray_tune(here / "ray", False)], 1, given.ray_trials)
            figures |= measure([ray_tune(here / "reused", True)], 1, given.ray_trials)
    show(figures)


if __name__ == "__main__":
    main()
