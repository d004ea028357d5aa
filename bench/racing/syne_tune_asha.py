"""Syne Tune's ASHA with its local backend: python -m bench.racing.syne_tune_asha DIR SEED PROCESSES

Its tuner writes to MLflow, so that a trial, which is a process of its own, need not import that; the times are those
at which the trial reported.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param
from syne_tune import StoppingCriterion, Tuner, config_space
from syne_tune.backend import LocalBackend
from syne_tune.optimizer.baselines import ASHA
from syne_tune.tuner_callback import TunerCallback

from bench.racing import loop

NAMES = ("train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy")


def space_of(space: dict[str, Any]) -> dict[str, Any]:
    """Syne Tune's own dimensions. It has no conditions, so the trial leaves out what does not exist."""
    made: dict[str, Any] = {}
    for path, dimension in space.items():
        low, high = dimension.get("low"), dimension.get("high")
        if dimension["type"] == "Choice":
            made[path] = config_space.choice(dimension["options"])
        elif dimension["type"] == "Float":
            made[path] = (config_space.loguniform if dimension["log"] else config_space.uniform)(low, high)
        elif dimension["powers_of_two"]:
            powers = loop.powers(dimension)
            made[path] = config_space.logfinrange(powers[0], powers[-1], len(powers), cast_int=True)
        else:
            made[path] = config_space.randint(low, high)
    return made


def whole(point: dict[str, Any], space: dict[str, Any]) -> dict[str, Any]:
    """A point to try first, with some value for each dimension that does not exist in it."""
    return {path: point.get(path, d["options"][0] if "options" in d else d["low"]) for path, d in space.items()}


class Tracked(TunerCallback):
    """Each trial as a run of MLflow."""

    def __init__(self, directory: Path) -> None:
        mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
        self.experiment = mlflow.set_experiment("race").experiment_id
        self.client, self.runs = mlflow.MlflowClient(), dict[int, str]()

    def on_start_trial(self, trial: Any) -> None:
        run = self.client.create_run(self.experiment).info.run_id
        self.client.log_batch(run, params=[Param(name, str(value)) for name, value in trial.config.items()])
        self.runs[trial.trial_id] = run

    def on_trial_result(self, trial: Any, status: str, result: dict[str, Any], decision: str) -> None:
        at, epoch = round(1000 * result["st_worker_timestamp"]), int(result["epoch"])
        points = [Metric(name, result[name], at, epoch) for name in NAMES if name in result]
        self.client.log_batch(self.runs[trial.trial_id], points)

    def on_trial_complete(self, trial: Any, result: dict[str, Any]) -> None:
        self.client.set_terminated(self.runs[trial.trial_id])


def main() -> None:
    directory, seed, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    logging.getLogger().setLevel(logging.ERROR)
    workload = loop.read(directory)
    loop.prepare(workload, directory)
    fixed = {"directory": str(directory), "seed": seed}
    scheduler = ASHA(
        space_of(workload["space"]) | fixed,
        metric=workload["metric"],
        do_minimize=workload["mode"] == "minimize",
        time_attr="epoch",
        max_t=workload["epochs"],
        random_seed=seed,
        points_to_evaluate=[whole(point, workload["space"]) | fixed for point in workload["enqueue"]] or None,
    )
    Tuner(
        trial_backend=LocalBackend(str(Path(__file__).with_name("syne_tune_trial.py")), pass_args_as_json=True),
        scheduler=scheduler,
        stop_criterion=StoppingCriterion(max_wallclock_time=1e9),
        n_workers=processes,
        sleep_time=0.1,  # seconds between looks at the trials; 5 by default
        print_update_interval=1e9,
        callbacks=[Tracked(directory)],
        save_tuner=False,
    ).run()


if __name__ == "__main__":
    main()
