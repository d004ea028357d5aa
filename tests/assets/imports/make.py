"""Writes what the readers of tests/hpo/interchange read, by the releases that are named in the files' names.

    python tests/assets/imports/make.py optuna|mlflow|ray|wandb

Each is run by a Python that has the release in question; what it wrote lies beside this file, compressed, and
`unpacked` gives it to a test. Older releases of Optuna were installed in an environment of their own, 2.10.1 with
SQLAlchemy 1.4. A new release adds a file and leaves the older ones.
"""

from __future__ import annotations

import lzma
import os
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SECONDS = 1_700_000_000  # since the epoch, when MLflow's runs began


def unpacked(name: str, to: Path) -> Path:
    """The asset as it was written: a file, or the directory of an archive."""
    if name.endswith(".tar.xz"):
        with tarfile.open(HERE / name) as archive:
            archive.extractall(to, filter="data")
        return to / name.removesuffix(".tar.xz")
    target = to / name.removesuffix(".xz")
    target.write_bytes(lzma.decompress((HERE / name).read_bytes()))
    return target


def _packed(source: Path, name: str) -> None:
    if source.is_dir():
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(source, name)
    else:
        (HERE / f"{name}.xz").write_bytes(lzma.compress(source.read_bytes(), preset=9))


def optuna_(directory: Path) -> None:
    """Twelve trials that end in every way, a conditional parameter, and choices that are no text."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.RandomSampler(seed=0)
    url = f"sqlite:///{directory / 'study.db'}"
    study = optuna.create_study(storage=url, study_name="digits sweep", direction="maximize", sampler=sampler)
    study.set_user_attr("team", "vision")
    study.enqueue_trial({"lr": 0.01})
    study.optimize(_objective, n_trials=12, catch=(ValueError,))
    study.enqueue_trial({"lr": 0.02})
    study.ask()
    _packed(directory / "study.db", f"optuna-{optuna.__version__}.db")


def _objective(trial) -> float:
    import optuna

    float_, log = trial.suggest_float, {"log": True}
    lr = float_("lr", 1e-5, 1e-1, **log)
    float_("dropout", 0.0, 0.5, step=0.1)
    layers = trial.suggest_int("layers", 1, 4)
    if trial.suggest_categorical("optimizer", ["sgd", "adam", None, 3, True]) == "sgd":
        trial.suggest_float("momentum", 0.0, 1.0)
    trial.set_user_attr("note", {"seen": [trial.number, None]})
    if trial.number == 4:
        raise ValueError("this one fails")
    for epoch in range(1, 4):
        odd = trial.number == 6 and epoch == 2 and not optuna.__version__.startswith("2.")  # which keeps no NaN
        trial.report(float("nan") if odd else layers + lr * epoch, epoch)
        if trial.number in (5, 9) and epoch == 2:
            raise optuna.TrialPruned
    return float("inf") if trial.number == 7 else layers + lr * (2 if trial.number == 8 else 3)


def mlflow_(directory: Path) -> None:
    """Four runs of one experiment, one of them not ended; in a database and in a directory."""
    os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    import mlflow

    for uri, place in ((f"sqlite:///{directory / 'mlflow.db'}", "mlflow.db"), (str(directory / "mlruns"), "mlruns")):
        client = mlflow.MlflowClient(uri)
        experiment = client.create_experiment("digits sweep", artifact_location=f"/artifacts/{place}")
        for number, (lr, optimizer) in enumerate([(0.1, "adam"), (0.01, "sgd"), (0.5, "adam"), (0.2, "adam")]):
            begun = 1000 * (SECONDS + number)
            run = client.create_run(experiment, begun, {"team": "vision"}, f"run-{number}").info.run_id
            params = {"lr": lr, "optimizer": optimizer, "layers": 2, "amp": True}
            for name, value in params.items():
                client.log_param(run, name, value)
            for step in range(3):
                odd = number == 1 and step == 1
                at = begun + 10 * step
                client.log_metric(run, "val/loss", lr * (step + 1), at, step)
                client.log_metric(run, "train/loss", float("nan") if odd else lr, at, step)
                client.log_metric(run, "seen", step + 1.0, at)
            if number < 3:
                client.set_terminated(run, "FAILED" if number == 2 else "FINISHED", begun + 500)
    _packed(directory / "mlflow.db", f"mlflow-{mlflow.__version__}.db")
    _packed(directory / "mlruns", f"mlflow-{mlflow.__version__}-mlruns")


def ray_(directory: Path) -> None:
    """Three trials that end and one that fails; the last of them is stopped by its metric after one iteration."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import tune

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def train(config) -> None:
        for epoch in range(1, 4):
            if config["optimizer"] == "bad":
                raise ValueError("this optimizer diverges")
            loss = config["lr"] * epoch + (9.0 if config["optimizer"] == "late" else 0.0)
            tune.report({"val_loss": loss, "nested": {"accuracy": 0.5}})

    space = {"lr": 0.1, "optimizer": tune.grid_search(["adam", "sgd", "bad", "late"]), "model": {"layers": 2}}
    run = tune.RunConfig(storage_path=str(directory), name="sweep", verbose=0, stop=lambda _, one: one["val_loss"] > 9)
    tune.Tuner(train, param_space=space, run_config=run).fit()
    for kind in ("**/*.pkl", "**/events.out.*", "**/progress.csv", "basic-variant-*", ".validate*"):
        for file in (directory / "sweep").glob(kind):
            file.unlink()
    _packed(directory / "sweep", f"ray-{ray.__version__}")


def wandb_(directory: Path) -> None:
    """Three offline runs, the last of them with an exit code."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(directory), "WANDB_SILENT": "true"}
    import wandb

    settings = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off", save_code=False)
    for number, (lr, optimizer) in enumerate([(0.1, "adam"), (0.01, "sgd"), (0.5, "adam")]):
        config = {"lr": lr, "optimizer": optimizer, "model": {"layers": 2}}
        run = wandb.init(project="digits", name=f"run-{number}", config=config, tags=["first"], settings=settings)
        for epoch in range(3):
            run.log({"val/loss": lr * (epoch + 1), "epoch": epoch, "odd": float("nan") if epoch == 1 else 1.0})
        run.finish(exit_code=int(number == 2))
    for file in (directory / "wandb").rglob("*"):
        if file.is_file() and file.suffix != ".wandb":
            file.unlink()
    _packed(directory / "wandb", f"wandb-{wandb.__version__}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        {"optuna": optuna_, "mlflow": mlflow_, "ray": ray_, "wandb": wandb_}[sys.argv[1]](Path(scratch))
