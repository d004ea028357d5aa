"""A hand-written loop with Optuna, MLflow and checkpoints: processes that share a study in a journal file.

python -m bench.racing.optuna_loop DIR SEED PROCESSES median|hyperband

The libraries are imported once, and the processes are forked from the one that has them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import mlflow
import optuna
from optuna.storages.journal import JournalFileBackend

from bench.racing import loop
from trainer.runtime.lifeline import die_with

PRUNERS = {
    "median": lambda epochs: optuna.pruners.MedianPruner(),
    "hyperband": lambda epochs: optuna.pruners.HyperbandPruner(max_resource=epochs),
}


def suggest(trial: optuna.Trial, space: dict[str, Any]) -> dict[str, Any]:
    """The dimensions that exist, given those before them."""
    params: dict[str, Any] = {}
    for path, dimension in space.items():
        if any(params.get(parent) not in allowed for parent, allowed in dimension["when"].items()):
            continue
        if dimension["type"] == "Choice":
            params[path] = trial.suggest_categorical(path, dimension["options"])
        elif dimension["type"] == "Float":
            params[path] = trial.suggest_float(path, dimension["low"], dimension["high"], log=dimension["log"])
        elif dimension["powers_of_two"]:
            powers = loop.powers(dimension)
            exponent = trial.suggest_int(f"log2 {path}", powers[0].bit_length() - 1, powers[-1].bit_length() - 1)
            params[path] = 2**exponent
        else:
            params[path] = trial.suggest_int(path, dimension["low"], dimension["high"])
    return params


def first_point(point: dict[str, Any], space: dict[str, Any]) -> dict[str, Any]:
    """A point to try first, with powers of two as the exponents that Optuna searches."""
    exponents = {path for path in point if space[path].get("powers_of_two")}
    plain = {path: value for path, value in point.items() if path not in exponents}
    return plain | {f"log2 {path}": point[path].bit_length() - 1 for path in exponents}


def study_of(directory: Path, workload: dict[str, Any], seed: int, pruner: str) -> optuna.Study:
    return optuna.create_study(
        study_name="race",
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(directory / "optuna.log"))),
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=PRUNERS[pruner](workload["epochs"]),
        direction=workload["mode"],
        load_if_exists=True,
    )


def track(directory: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
    mlflow.set_experiment("race")


def work(directory: Path, seed: int, pruner: str) -> None:
    """One process: trials until it is killed, or the process that forked it."""
    die_with(os.getppid())
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    workload, data = loop.read(directory), loop.load(directory)
    track(directory)

    def objective(trial: optuna.Trial) -> float:
        params = suggest(trial, workload["space"])
        values = []
        with mlflow.start_run():
            mlflow.log_params(params)
            checkpoints = directory / "checkpoints" / str(trial.number)
            for epoch, metrics in enumerate(loop.train(workload, data, params, trial.number, checkpoints), start=1):
                mlflow.log_metrics(metrics, step=epoch)
                values.append(metrics[workload["metric"]])
                trial.report(values[-1], epoch)
                if trial.should_prune():
                    mlflow.set_tag("pruned", "true")
                    break
        if len(values) < workload["epochs"]:
            raise optuna.TrialPruned
        return values[-1]

    study_of(directory, workload, seed, pruner).optimize(objective)


def main() -> None:
    directory, seed, processes, pruner = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    context = multiprocessing.get_context("fork")
    tables = context.Process(target=track, args=(directory,))  # MLflow's cannot be made by several at once
    tables.start()
    workload = loop.read(directory)
    loop.prepare(workload, directory)
    study = study_of(directory, workload, seed, pruner)
    for point in workload["enqueue"]:
        study.enqueue_trial(first_point(point, workload["space"]))
    tables.join()
    workers = [context.Process(target=work, args=(directory, 1000 * seed + k, pruner)) for k in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(os.EX_SOFTWARE)  # they never end by themselves


if __name__ == "__main__":
    main()
