"""Ray Tune's ASHA with its own MLflow callback and checkpoints: python -m bench.racing.ray_tune DIR SEED PROCESSES

Actors are reused, so that a trial does not import torch anew, and data goes through a file that each reads once.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.air.integrations.mlflow import MLflowLoggerCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from bench.racing import loop


def space_of(space: dict[str, Any]) -> dict[str, Any]:
    """Ray Tune's own dimensions. It has no conditions, so `loop.active` leaves out what does not exist."""
    made: dict[str, Any] = {}
    for path, dimension in space.items():
        if dimension["type"] == "Choice":
            made[path] = tune.choice(dimension["options"])
        elif dimension["type"] == "Float":
            made[path] = (tune.loguniform if dimension["log"] else tune.uniform)(dimension["low"], dimension["high"])
        elif dimension["powers_of_two"]:
            made[path] = tune.choice(loop.powers(dimension))
        else:
            made[path] = tune.randint(dimension["low"], dimension["high"] + 1)
    return made


def objective(config: dict[str, Any], directory: Path, workload: dict[str, Any], seed: int) -> None:
    here = Path(tune.get_context().get_trial_dir()) / "checkpoint"
    params = loop.active(workload["space"], config)
    for metrics in loop.train(workload, loop.load(directory), params, seed, here):
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(str(here)))


def main() -> None:
    directory, seed, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    workload = loop.read(directory)
    loop.prepare(workload, directory)
    ray.init(
        address="local",
        num_cpus=processes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(directory),  # goes with the directory, since the cluster is killed
    )
    callback = MLflowLoggerCallback(f"sqlite:///{directory / 'mlflow.db'}", experiment_name="race")
    tune.Tuner(
        tune.with_parameters(objective, directory=directory, workload=workload, seed=seed),
        param_space=space_of(workload["space"]),
        tune_config=tune.TuneConfig(
            metric=workload["metric"],
            mode={"maximize": "max", "minimize": "min"}[workload["mode"]],
            num_samples=-1,
            max_concurrent_trials=processes,
            reuse_actors=True,
            search_alg=BasicVariantGenerator(points_to_evaluate=workload["enqueue"] or None, random_state=seed),
            scheduler=ASHAScheduler(max_t=workload["epochs"]),
        ),
        run_config=tune.RunConfig(
            storage_path=str(directory / "ray"),
            callbacks=[callback],
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        ),
    ).fit()


if __name__ == "__main__":
    main()
