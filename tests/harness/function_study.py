"""A training function of numpy alone, a second or two a study: weights and momentum in files, random numbers of its
own, a file handed over; every step leaves a line in $TINY_LOG."""

import json
import os
import time

import numpy as np

from hpo import Choice, Float, study

EPOCHS, STEPS = 4, 5


def log(step):
    if path := os.environ.get("TINY_LOG"):
        with open(path, "a") as file:
            file.write(f"{step}\n")


@study(
    space={"lr": Float(1e-3, 0.3, log=True), "momentum": Choice([0.0, 0.5, 0.9])},
    minimize="val/loss",
    constants={"pause": 0.02},
    num_epochs=EPOCHS,
    strategy={"name": "asha", "min_epochs": 1, "eta": 2},
)
def tiny(trial):
    rng = np.random.default_rng(trial.seed)
    x = rng.normal(size=(40, 3))
    y = x @ np.array([1.0, -2.0, 0.5])
    weights, velocity = np.zeros(3), np.zeros(3)
    if saved := trial.resume():
        with np.load(saved / "state" / "weights.npz") as kept:
            weights, velocity = kept["weights"], kept["velocity"]
        rng.bit_generator.state = json.loads((saved / "rng.json").read_text())
    for epoch in range(trial.epoch + 1, EPOCHS + 1):
        for step in range(STEPS):
            log(step)
            time.sleep(trial.params.pause)
            rows = rng.integers(0, len(x), 8)
            error = x[rows] @ weights - y[rows]
            velocity = trial.params.momentum * velocity + x[rows].T @ error / len(rows)
            weights = weights - trial.params.lr * velocity
        kept = trial.directory / "kept"
        (kept / "state").mkdir(parents=True, exist_ok=True)
        np.savez(kept / "state" / "weights.npz", weights=weights, velocity=velocity)
        (kept / "rng.json").write_text(json.dumps(rng.bit_generator.state))
        trial.save(kept)
        if "TINY_LOG" in os.environ:  # where it is killed
            trial.tag("reached", epoch)
        if trial.report(epoch, {"val/loss": float(np.mean((x @ weights - y) ** 2)), "train/error": abs(error).mean()}):
            return
